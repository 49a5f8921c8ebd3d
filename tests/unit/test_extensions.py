"""What somebody adds from outside: a codec is one file and one call, a retention policy a function.

The codec is `reversed_bytes`: every verb takes what it has stored as it takes any other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from format.simulated_ranks import ThreadGroup, run_ranks
from holdfast import Keep
from holdfast.engine import registry
from holdfast.errors import CorruptError, OptionError, VersionError
from holdfast.format import spec
from holdfast.options import Options

from . import reversed_bytes
from .reversed_bytes import Reversed
from .training import same

NewPath = Callable[[], Path]
NAMED = {"reversed": Reversed(), "reversed:fast": Reversed(level=1)}
STATE: dict[str, Any] = {
    "rows": torch.arange(6000).reshape(60, 100),
    "half": torch.linspace(-1, 1, 5000).to(torch.bfloat16),
    "noise": torch.randint(0, 255, (3000,), dtype=torch.uint8, generator=torch.Generator()),
    "flag": torch.tensor(True),
    "none": torch.empty(0, 3),
    "optimizer": {"half": {name: torch.ones(5000) for name in ("exp_avg", "exp_avg_sq")}},
    "epoch": 3,
}
SMALL = Options(chunk_elements=1024)


@pytest.fixture
def known() -> Iterator[None]:
    """Register the codec for one test."""
    tables: list[dict[Any, Any]] = [spec.MODES, registry.DECODE, registry._MAKE, registry.CODECS]
    before = [dict(table) for table in tables]
    registry.register(Reversed, reversed_bytes.decode, NAMED, reversed_bytes.MODES)
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def modes_of(path: Path) -> set[int]:
    manifest = holdfast.open(path)._manifest
    return {int(mode) >> 24 for mode in manifest.table.chunk_size_mode}


def blank() -> dict[str, Any]:
    optimizer = {"half": {name: torch.zeros(5000) for name in ("exp_avg", "exp_avg_sq")}}
    tensors = {n: torch.zeros_like(v) for n, v in STATE.items() if isinstance(v, torch.Tensor)}
    return tensors | {"optimizer": optimizer, "epoch": 0}


@pytest.mark.parametrize("codec", ["reversed", "reversed:fast", Reversed(level=9)])
@pytest.mark.usefixtures("known")
def test_a_codec_from_outside_saves_and_every_verb_reads_it(new_path: NewPath, codec: Any) -> None:
    run, into = new_path(), blank()
    path = run / "step-00000001"
    holdfast.save(STATE, path, step=1, codec=codec, options=SMALL)
    assert modes_of(path) == {0, reversed_bytes.DEFLATED}
    holdfast.load(path, into=into)
    assert same(into, STATE)
    checkpoint = holdfast.open(path)
    assert checkpoint.codecs == ("reversed",)
    assert same(checkpoint.tensor("rows", ((10, 3), (25, 40))), STATE["rows"][10:35, 3:43])
    assert holdfast.verify(path, deep=True).damage == ()
    assert holdfast.scrub(run).damage == []


@pytest.mark.parametrize("stage", ["eager", "lazy"])
@pytest.mark.usefixtures("known")
def test_a_codec_from_outside_saves_in_the_background(new_path: NewPath, stage: Any) -> None:
    path, into = new_path(), blank()
    holdfast.save_async(STATE, path, codec="reversed", stage=stage, options=SMALL).result()
    holdfast.load(path, into=into)
    assert same(into, STATE)


@pytest.mark.usefixtures("known")
def test_a_codec_from_outside_is_loaded_on_another_number_of_ranks(new_path: NewPath) -> None:
    path, rows = new_path(), STATE["rows"]

    def part(rank: int, ranks: int, values: torch.Tensor) -> holdfast.Shard:
        step = len(rows) // ranks
        local = values[rank * step : (rank + 1) * step].clone()
        return holdfast.Shard(local, tuple(rows.shape), offset=(rank * step, 0))

    def save(group: ThreadGroup) -> None:
        state = {"rows": part(group.rank, 2, rows)}
        holdfast.save(state, path, codec="reversed", options=SMALL, group=group)

    def load(group: ThreadGroup) -> torch.Tensor:
        into = {"rows": part(group.rank, 3, torch.zeros_like(rows))}
        holdfast.load(path, into=into, group=group)
        return into["rows"].data

    run_ranks(2, save)
    assert len(holdfast.open(path).file_names) == 2
    assert same(torch.cat(run_ranks(3, load)), rows)


@pytest.mark.usefixtures("known")
def test_a_checkpoint_is_written_again_under_a_codec_from_outside(new_path: NewPath) -> None:
    plain, packed, again = new_path(), new_path(), new_path()
    holdfast.save(STATE, plain, options=SMALL)
    holdfast.recompress(plain, packed, codec="reversed")
    holdfast.recompress(packed, again, codec="raw")
    assert modes_of(packed) == {0, reversed_bytes.DEFLATED} and modes_of(again) == {0}
    assert [holdfast.open(at).tensor("rows").tolist() for at in (packed, again)] == [
        STATE["rows"].tolist()
    ] * 2
    (tried,) = holdfast.try_codecs(plain, codecs=["reversed"]).trials
    assert tried.stored_bytes < tried.size_bytes


@pytest.mark.usefixtures("known")
def test_a_payload_that_no_codec_from_outside_writes_is_refused(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, into = new_path(), blank()
    holdfast.save(STATE, path, codec="reversed", options=SMALL)
    monkeypatch.setitem(registry.DECODE, "reversed", lambda *_: False)
    with pytest.raises(CorruptError, match="mode 200 of reversed, and cannot be decoded"):
        holdfast.load(path, into=into)


def test_a_reader_without_the_codec_says_newer_and_not_damaged(
    new_path: NewPath, request: pytest.FixtureRequest
) -> None:
    path = new_path()
    request.getfixturevalue("known")
    holdfast.save(STATE, path, codec="reversed", options=SMALL)
    del spec.MODES["reversed"]
    for read in (holdfast.open, holdfast.verify, lambda at: holdfast.load(at, into=blank())):
        with pytest.raises(VersionError, match=r"uses the codec 'reversed'.*upgrade holdfast"):
            read(path)


def test_a_codec_takes_no_mode_of_another() -> None:
    before = dict(registry.DECODE), dict(spec.MODES)
    for mode, refers in ((2, ("master",)), (0, ()), (256, ())):
        with pytest.raises(OptionError, match=f"mode {mode} of the codec reversed is taken"):
            registry.register(Reversed, reversed_bytes.decode, NAMED, {mode: refers})
    assert before == (registry.DECODE, spec.MODES)
    with pytest.raises(OptionError, match="expected one of raw, lossless, delta,"):
        registry.find_codec("reversed")


def powers_of_two(steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
    return {step for step in steps if step & (step - 1) == 0}


POWERS = Keep((powers_of_two,), "powers of two")


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (POWERS, [1, 2, 4, 8, 11]),
        (POWERS | Keep.every(5), [1, 2, 4, 5, 8, 10, 11]),
        (Keep.latest(2) | POWERS, [1, 2, 4, 8, 10, 11]),
    ],
    ids=repr,
)
def test_a_policy_from_outside_keeps_what_it_says(
    new_path: NewPath, keep: Keep, kept: list[int]
) -> None:
    run = new_path()
    with holdfast.Checkpointer(run, every=1, keep=keep) as checkpointer:
        for step in range(1, 12):
            checkpointer.save(step, {"w": torch.full((3,), float(step))})
        checkpointer.wait()
        assert checkpointer.steps() == kept


def test_a_policy_from_outside_judges_by_metrics_and_shows_itself() -> None:
    def falling(steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        return {step for step in steps if metrics[step]["loss"] < 1}

    keep = Keep((falling,), "loss below 1", frozenset({"loss"}))
    assert keep.kept([1, 2, 3], {1: {"loss": 0.5}, 2: {"loss": 2.0}, 3: {"loss": 3.0}}) == {1, 3}
    assert keep.metrics == {"loss"} and not keep.keeps_all
    assert repr(keep | Keep.latest(1)) == "loss below 1 | Keep.latest(1)"
