"""try_codecs: what it says of a checkpoint is what a save then stores."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.codecs import Compact, Delta, Excp
from holdfast.errors import CorruptError, NotCommittedError, OptionError
from holdfast.options import Options

from .test_chains import at, manifest, stepped
from .test_lossless import trained

NewPath = Callable[[], Path]
OPTIONS = Options(chunk_elements=5000)
CODECS: tuple[Any, ...] = ("lossless", Delta(every=2), Excp(every=2), Compact("high", every=2))


def payload_bytes(path: Path) -> int:
    return int((manifest(path).table.chunk_size_mode & 0xFFFFFF).sum())


@pytest.fixture
def pair(new_path: NewPath) -> tuple[Any, Path]:
    """A state, and a raw run that has it as its second step."""
    root, states = new_path(), [trained(3)]
    states.append(stepped(states[0], 1))
    for step, state in enumerate(states):
        holdfast.save(state, at(root, step), step=step, options=OPTIONS)
    return states, root


def test_sizes_and_losses_are_those_of_a_save(pair: Any, new_path: NewPath) -> None:
    states, root = pair
    found = holdfast.try_codecs(at(root, 1), codecs=CODECS)
    assert found.base == "step-00000000"
    assert [trial.codec for trial in found.trials] == ["lossless", "lossless", "excp", "compact"]
    for codec, trial in zip(CODECS, found.trials, strict=True):
        run = new_path()
        for step, state in enumerate(states):
            holdfast.save(state, at(run, step), codec=codec, options=OPTIONS)
        assert trial.stored_bytes == payload_bytes(at(run, 1))
        assert trial.size_bytes == found.size_bytes == sum(s for s, _ in trial.roles.values())
        assert trial.encode_s > 0 and trial.decode_s > 0
        losses = manifest(at(run, 1)).table.header.losses
        assert trial.squared_error == pytest.approx(sum(loss.squared_error for loss in losses))
        assert trial.energy == pytest.approx(sum(loss.energy for loss in losses))


def test_without_a_base_there_are_no_links(pair: Any) -> None:
    _, root = pair
    found = holdfast.try_codecs(at(root, 0))
    assert [trial.codec for trial in found.trials] == ["lossless"] and found.base == ""
    named = holdfast.try_codecs(at(root, 0), at(root, 1), codecs=["delta"])
    assert named.base == "step-00000001" and named.trials[0].stored_bytes


def test_a_sample_is_spread_and_cut(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, root = pair
    whole = holdfast.try_codecs(at(root, 1), codecs=["delta"]).trials[0]
    sizes = []
    for share in (0.5, 0.1, 0.0001):
        most = int(share * whole.size_bytes) + 1
        (trial,) = holdfast.try_codecs(at(root, 1), codecs=["delta"], sample_bytes=most).trials
        assert 0 < trial.size_bytes < whole.size_bytes
        sizes.append(trial.size_bytes)
    assert all(a > b for a, b in itertools.pairwise(sizes))
    monkeypatch.setattr("holdfast.chains.trial.UNIT_BYTES", 10_000)
    (trial,) = holdfast.try_codecs(at(root, 1), codecs=["delta"]).trials
    assert 0 < trial.size_bytes < whole.size_bytes


def test_what_cannot_be_tried_is_told(pair: Any, new_path: NewPath) -> None:
    _, root = pair
    with pytest.raises(OptionError, match="sample_bytes is 0"):
        holdfast.try_codecs(at(root, 1), sample_bytes=0)
    with pytest.raises(OptionError, match="codec is 'zip'"):
        holdfast.try_codecs(at(root, 1), codecs=["zip"])
    with pytest.raises(OptionError, match=r"base is .* itself"):
        holdfast.try_codecs(at(root, 1), at(root, 1))
    with pytest.raises(NotCommittedError):
        holdfast.try_codecs(at(root, 1), new_path())
    data = next(p for p in (at(root, 0) / "data").rglob("*") if p.is_file())
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptError, match="step-00000000"):
        holdfast.try_codecs(at(root, 1))
