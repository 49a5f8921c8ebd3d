"""Files of torch.save as sources: the elements, names and values that torch.load would give."""

import io
import json
import os
import subprocess
import sys
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.convert import pieces
from holdfast.convert.kinds import open_source
from holdfast.convert.source import Source
from holdfast.errors import CorruptError, NotCommittedError, OptionError, StateError
from holdfast.layout import Box, Tensor, whole
from holdfast.state.tensors import DTYPE_NAMES, TORCH_DTYPES

NewPath = Callable[[], Path]


def read_box(source: Source, tensor: Tensor, box: Box) -> torch.Tensor:
    found = torch.empty(box.shape, dtype=TORCH_DTYPES[tensor.dtype])
    if found.numel():
        source.read(tensor, box, found.reshape(-1).view(torch.uint8).numpy().data)
    return found


def all_of(source: Source) -> dict[Any, torch.Tensor]:
    found = {t.path: read_box(source, t, whole(t.shape)) for t in source.tensors}
    return found | {path: found[owner] for path, owner in source.ties.items()}


def look_up(state: Any, path: Any) -> Any:
    for key in path:
        state = state[key[1] if isinstance(key, tuple) else key]
    return state


def assert_same(source: Source, state: Any) -> None:
    for path, found in all_of(source).items():
        expected = look_up(state, path)
        assert found.dtype == expected.dtype and found.shape == expected.shape, path
        bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (found, expected)]
        assert torch.equal(*bits), path


def training_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "nested": [torch.ones(2), {"x": (1, torch.zeros(1), "y")}],
        "history": [1.5, {"loss": 2}],
        "array": np.arange(3),
        "empty": {},
        "rng": torch.get_rng_state(),
    }


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_training_state_has_the_names_and_elements_of_holdfast_save(
    new_path: NewPath, protocol: int
) -> None:
    file, saved, state = f"{new_path()}.pt", new_path(), training_state()
    torch.save(state, file, pickle_protocol=protocol)
    holdfast.save(state, saved)
    with open_source(file) as source, open_source(saved) as own:
        assert_same(source, state)
        assert source.kind == "torch" and source.tensors == own.tensors
        assert repr(source.values) == repr(own.values)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_is_read(new_path: NewPath) -> None:
    state = {
        name: torch.randint(0, 2, (48,), dtype=torch.uint8).view(dtype)
        for dtype, name in DTYPE_NAMES.items()
    }
    torch.save(state, file := f"{new_path()}.pth")
    with open_source(file) as source:
        assert len(source.tensors) == len(DTYPE_NAMES)
        assert_same(source, state)


def views() -> dict[str, torch.Tensor]:
    base = torch.randn(40, 30, 20)
    return {
        "base": base,
        "twin": base.view(40, 30, 20),
        "turned": base.permute(2, 0, 1),
        "row": base[3],
        "column": base[:, :, 7],
        "stepped": base[5:38:3, 2:29:7, 1::2],
        "wide": base[:1].expand(9, 30, 20),
        "scalar": base[1, 2, 3],
        "none": base[:0],
        "complex": torch.view_as_complex(torch.randn(5, 2)),
    }


@pytest.mark.parametrize("span", [1, 1 << 10, 1 << 22])
def test_views_are_read_by_their_strides(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch, span: int
) -> None:
    monkeypatch.setattr(pieces, "SPAN_BYTES_MIN", span // 16)
    monkeypatch.setattr(pieces, "SPAN_BYTES_MAX", span)
    state, chance = views(), np.random.default_rng(3)
    torch.save(state, file := f"{new_path()}.pt")
    with open_source(file) as source:
        assert source.ties == {("twin",): ("base",)}
        assert_same(source, state)
        for tensor in source.tensors:
            for _ in range(5 if all(tensor.shape) else 0):
                start = [int(chance.integers(n)) for n in tensor.shape]
                ends = zip(start, tensor.shape, strict=True)
                box = Box(tuple(start), tuple(int(chance.integers(1, n - a + 1)) for a, n in ends))
                expected = state[str(tensor.path[0])][box.slices()]
                assert torch.equal(read_box(source, tensor, box), expected)


PROGRAM = """
import resource, sys
from holdfast.convert.kinds import open_source
from holdfast.layout import Box
source = open_source(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for tensor in source.tensors:
    rows, columns = tensor.shape
    memory = memoryview(bytearray(columns * 4 * 64))
    for row in range(0, rows, 64):
        source.read(tensor, Box((row, 0), (64, columns)), memory)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_file(new_path: NewPath) -> None:
    base = torch.zeros(4096, 4096)  # 64 MiB
    torch.save({"base": base, "turned": base.t()}, file := f"{new_path()}.pt")
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, file]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 24 << 10, "KiB"


def test_many_records_are_read(new_path: NewPath) -> None:
    state = {f"w{n}": torch.full((1,), float(n)) for n in range(70_000)}  # more than 16 bits count
    torch.save(state, file := f"{new_path()}.pt")
    with open_source(file) as source:
        assert len(source.tensors) == 70_000
        for number in (0, 65_535, 65_536, 69_999):
            assert read_box(source, source.tensors[number], Box((0,), (1,))).item() == number


def test_a_directory_of_shards_with_an_index_is_one_source(new_path: NewPath) -> None:
    directory, state = new_path(), {f"w{n}": torch.randn(n + 1) for n in range(4)}
    directory.mkdir()
    files = {"w0": "a.bin", "w1": "a.bin", "w2": "b.bin", "w3": "b.bin"}
    for file in ("a.bin", "b.bin"):
        torch.save({k: v for k, v in state.items() if files[k] == file}, directory / file)
    index = directory / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    with open_source(directory) as source:
        assert_same(source, state)
    index.write_text(json.dumps({"weight_map": files | {"w9": "b.bin"}}))
    with pytest.raises(CorruptError, match=r"w9 is in b\.bin, which has no such tensor"):
        open_source(directory)
    (directory / "b.bin").unlink()
    with pytest.raises(CorruptError, match=r"3 tensors are in b\.bin, which is missing"):
        open_source(directory)


@pytest.mark.parametrize("place", ["../a.bin", "/etc/a.bin", "a\0.bin", "a.txt", 3, None])
def test_an_index_that_leads_out_is_refused(new_path: NewPath, place: Any) -> None:
    directory = new_path()
    directory.mkdir()
    torch.save({"w": torch.ones(1)}, directory.parent / "a.bin")
    index = directory / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"w": place}}))
    with pytest.raises(CorruptError, match="expected the name of a file"):
        open_source(directory)


TWICE = '{"weight_map": {"w": "a.bin", "w": "b.bin"}}'


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', "[" * 100_000, "\xff", TWICE]
)
def test_an_index_that_is_none_is_refused(new_path: NewPath, text: str) -> None:
    directory = new_path()
    directory.mkdir()
    (directory / "pytorch_model.bin.index.json").write_text(text, "latin-1")
    with pytest.raises(CorruptError, match=r"index\.json"):
        open_source(directory)


def test_two_indexes_are_refused(new_path: NewPath) -> None:
    directory = new_path()
    directory.mkdir()
    for name in ("a", "b"):
        (directory / f"{name}.bin.index.json").write_text("{}")
    with pytest.raises(NotCommittedError, match="2 files"):
        open_source(directory)


class Custom:
    pass


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"a": {"b": Custom()}, "w": torch.ones(1)}, r"a\.b \(.*test_torch_file\.Custom\)"),
        ({"f": os.system}, r"f \(posix\.system\)"),
        ({"l": [1, {"x": Custom()}]}, r"l \(.*Custom\)"),
        ({"args": Namespace(lr=0.1, f=print)}, r"args\.f \(builtins\.print\)"),
        ({"args": Namespace(w=torch.ones(1))}, r"args\.w \(a tensor\)"),
        ({"s": torch.eye(2).to_sparse()}, r"s \(torch\._utils\._rebuild_sparse_tensor\)"),
        ({"c": torch.ones(1, dtype=torch.complex64).conj()}, r"c \(torch.*_rebuild_tensor_v2\)"),
        ({"m": torch.nn.Linear(2, 2)}, r"m \(torch\.nn\.modules\.linear\.Linear\)"),
    ],
    ids=[
        "object",
        "function",
        "object in a list",
        "in a namespace",
        "tensor",
        "sparse",
        "conjugated",
        "module",
    ],
)
def test_what_is_no_plain_data_is_refused_by_name(
    new_path: NewPath, state: Any, named: str
) -> None:
    torch.save(state, file := f"{new_path()}.pt")
    with pytest.raises(StateError, match=f"{named}.*Nothing of them was run"):
        open_source(file)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.ones(2), "one tensor"),
        ([torch.ones(2)], "a list"),
        (Custom(), "inert"),
        ({(1, 2): torch.ones(1)}, r"the key \(1, 2\)"),
    ],
)
def test_a_file_that_is_no_state_is_refused(new_path: NewPath, value: Any, what: str) -> None:
    torch.save(value, file := f"{new_path()}.pt")
    with pytest.raises(StateError, match=what):
        open_source(file)


def test_other_formats_are_refused_with_what_to_do(new_path: NewPath) -> None:
    state = {"w": torch.ones(2)}
    legacy, script, pickled = (f"{new_path()}.pt" for _ in range(3))
    torch.save(state, legacy, _use_new_zipfile_serialization=False)
    with pytest.raises(OptionError, match=r"before torch 1\.6.*size in memory"):
        open_source(legacy)
    with zipfile.ZipFile(script, "w") as parts:
        parts.writestr("a/data.pkl", b"\x80\x02}.")
        parts.writestr("a/constants.pkl", b"")
    with pytest.raises(OptionError, match="TorchScript"):
        open_source(script)
    Path(pickled).write_bytes(b"\x80\x04}.")
    with pytest.raises(CorruptError, match=r"is no file of torch\.save"):
        open_source(pickled)


def test_a_flipped_bit_is_found_when_it_is_read(new_path: NewPath) -> None:
    state = {"w": torch.zeros(1000), "v": torch.ones(1000)}
    torch.save(state, file := f"{new_path()}.pt")
    data = bytearray(Path(file).read_bytes())
    data[data.index(bytes(4000)) + 2000] ^= 1
    Path(file).write_bytes(data)
    with open_source(file) as source:
        w, v = source.tensors
        assert torch.equal(read_box(source, v, whole(v.shape)), state["v"])
        for box in (whole(w.shape), Box((0,), (10,))):  # also where the bit is not in the box
            with pytest.raises(CorruptError, match=r"w in .* is damaged: its CRC-32"):
                read_box(source, w, box)


def test_an_archive_that_python_wrote_is_read(new_path: NewPath) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(5)}, buffer)
    file = f"{new_path()}.pt"
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            with new.open(name, "w", force_zip64=True) as part:
                part.write(old.read(name))
    with open_source(file) as source:
        assert_same(source, {"w": torch.arange(5)})


def rewritten(state: Any, method: int, file: str) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(file, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))


def test_a_compressed_archive_is_refused(new_path: NewPath) -> None:
    file = f"{new_path()}.pt"
    rewritten({"w": torch.zeros(1 << 22)}, zipfile.ZIP_DEFLATED, file)
    assert os.path.getsize(file) < 1 << 17
    with pytest.raises(OptionError, match="compressed or encrypted"):
        open_source(file)
