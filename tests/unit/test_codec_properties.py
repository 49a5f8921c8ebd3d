"""Every codec on every dtype, shape and bit pattern: exact where it says so, never an exception.

Hypothesis draws a parameter with its moments, its base, and how it is cut into chunks; both readers
have to give the same bits.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from format import reader
from holdfast.codecs import Compact, Delta, Excp
from holdfast.engine import workspace
from holdfast.engine.basis import forget_bases
from holdfast.options import Options

from .test_chains import at, manifest, stepped
from .test_lossless import bits, trained
from .test_round_trip import DTYPES, filled, shapes, thorough

NewPath = Callable[[], Path]
EXACT: dict[str, Any] = {"lossless": "lossless", "delta": Delta(every=2)}
EXACT["replay"] = Delta(every=2, replay=True)
LOSSY: dict[str, Any] = {
    "excp": Excp(every=2),
    "excp, all of it": Excp(0.0, 0.0, kmeans="optimal", threshold="element", every=2),
    **{quality: Compact(quality, every=2) for quality in ("high", "tiny")},  # type: ignore
    "rel": Compact(rel=0.01, residual=True, every=2),
    "abs": Compact(abs=1e-3, every=2),
    "bits": Compact(bits=3, every=2),
    "bf16_exact": Compact(bf16_exact=True, every=2),
}
CODECS = EXACT | LOSSY
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LARGER = [(3, 300), (260,), (16, 16, 3), (40, 17), (1, 1000), (1000, 1)]

numbers = st.integers(0, 2**31)
kinds = st.sampled_from(["bits", "normal", "rows without any", "constant"])


def drawn(shape: tuple[int, ...], dtype: torch.dtype, kind: str, seed: int) -> torch.Tensor:
    """Elements of any bits, or such as training has."""
    if kind == "bits" or not dtype.is_floating_point or dtype.itemsize < 2:
        return filled(shape, dtype, seed)
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=draw) * 10.0 ** (seed % 12 - 9)
    if kind == "rows without any" and values.ndim:
        values[::2] = 0
    if kind == "constant":
        values = torch.full(shape, float(seed % 7))
    return values.to(dtype)


def state_of(shape: tuple[int, ...], dtype: torch.dtype, drawing: Any) -> dict[str, Any]:
    """A parameter, with a master where it has half precision, its moments, and something else."""
    first, second, weight, other = (
        drawn(shape, torch.float32 if index < 3 else dtype, drawing(kinds), drawing(numbers))
        for index in range(4)
    )
    if drawing(st.booleans()):
        second = second.abs()
    rounded = dtype in FLOATS and drawing(st.booleans())
    return {
        "model": {"w": weight.to(dtype) if rounded else other},
        "master": {"w": weight},
        "optimizer": {"w": {"exp_avg": first, "exp_avg_sq": second}},
        "other": other.clone(),
    }


def moved(state: dict[str, Any], drawing: Any) -> dict[str, Any]:
    """Some steps later: a little of everything, nothing, or all else."""
    how, seed = drawing(st.sampled_from(["a little", "not", "all"])), drawing(numbers)
    if how == "not":
        return state
    draw = torch.Generator().manual_seed(seed)

    def move(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: move(inner) for key, inner in value.items()}
        if how == "all" or value.dtype not in FLOATS:
            return filled(tuple(value.shape), value.dtype, seed)
        noise = 1 + 1e-3 * torch.randn(value.shape, generator=draw)
        return (value.float() * noise).to(value.dtype)

    return {key: move(value) for key, value in state.items()}


@thorough
@given(st.data(), shapes | st.sampled_from(LARGER), st.sampled_from(DTYPES))
def test_what_comes_back(
    new_path: NewPath, data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    forget_bases()
    name = data.draw(st.sampled_from(list(CODECS)), "codec")
    options = Options(chunk_elements=data.draw(st.sampled_from([7, 100, 5000]), "chunk"))
    before = state_of(shape, dtype, data.draw)
    after, root = moved(before, data.draw), new_path()
    for step, state in enumerate((before, after)):
        holdfast.save(state, at(root, step), codec=CODECS[name], options=options)
        if data.draw(st.booleans(), "a new process"):
            forget_bases()
    first, found = (read(at(root, step)) for step in range(2))
    assert bits(first) == bits(before)
    if name in EXACT:
        assert bits(found) == bits(after)
    else:
        # Only what belongs to a second moment may differ; then all of it is of a float dtype.
        assert bits(found["other"]) == bits(after["other"])
        if dtype not in FLOATS:
            assert bits(found["model"]) == bits(after["model"])
    seen = reader.read(at(root, 1))["tensors"]
    for path, tensor in (('["model","w"]', found["model"]["w"]), ('["other"]', found["other"])):
        assert seen[path][2] == bits(tensor)[2]
    for key, tensor in found["optimizer"]["w"].items():
        assert seen[f'["optimizer","w","{key}"]'][2] == bits(tensor)[2]


def read(path: Path) -> Any:
    with holdfast.open(path) as checkpoint:
        assert not checkpoint.verify()
        return checkpoint.state()


@pytest.mark.parametrize("name", CODECS)
def test_the_number_of_threads_changes_no_byte(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found = []
    for count in (1, 2, 7):
        forget_bases()
        monkeypatch.setattr(workspace.Threads, "__init__", _made_with(count))
        root, state = new_path(), trained(3)
        for step in range(2):
            state = stepped(state, step)
            holdfast.save(
                state, at(root, step), codec=CODECS[name], options=Options(chunk_elements=5000)
            )
        table = manifest(at(root, 1)).table
        found.append((payloads(at(root, 1)), table.chunk_size_mode.tolist(), table.header.losses))
    assert found[0] == found[1] == found[2]


def _made_with(count: int) -> Callable[[Any], None]:
    made = workspace.Threads.__init__

    def make(self: Any) -> None:
        made(self)
        self._pool.shutdown()
        self.count = count
        self._pool = workspace.ThreadPoolExecutor(count)

    return make


def payloads(path: Path) -> list[bytes]:
    """The payloads of a checkpoint with one file, in the order of its rows."""
    table = manifest(path).table
    (file,) = (path / "data").rglob("*.hf")
    content = file.read_bytes()
    ranges = zip(
        table.chunk_offset.tolist(), (table.chunk_size_mode & 0xFFFFFF).tolist(), strict=True
    )
    return [content[64 * start : 64 * start + size] for start, size in ranges]
