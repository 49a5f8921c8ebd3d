"""What can be read as a checkpoint: safetensors and ours, any box, and what is refused."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import holdfast
from holdfast.convert.kinds import KINDS, open_source
from holdfast.convert.source import Part, Source, runs_of
from holdfast.errors import (
    CorruptError,
    HoldfastError,
    NotCommittedError,
    OptionError,
    StoreError,
    VersionError,
)
from holdfast.layout import Box, Tensor, whole
from holdfast.state.tensors import TORCH_DTYPES

Shapes = dict[str, list[int]]


def read(source: Source, tensor: Tensor, box: Box | None = None) -> torch.Tensor:
    """Read a box of a tensor."""
    box = box or whole(tensor.shape)
    result = torch.empty(box.shape, dtype=TORCH_DTYPES[tensor.dtype])
    if result.numel():
        source.read(tensor, box, memory_of(result))
    return result


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, writable."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two are equal to the bit, NaN too."""
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


STATE = {
    "embed.weight": torch.randn(7, 5, 3),
    "layers.0.weight": torch.randn(64, 33).to(torch.bfloat16),
    "layers.0.scale": torch.randn(16, 8).to(torch.float8_e4m3fn),
    "steps": torch.tensor(7),
    "none": torch.empty(0, 4),
    "mask": torch.rand(5, 5) > 0.5,
}


@pytest.fixture(params=["holdfast", "lossless", "file", "shards"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    """The same state in every form."""
    kind = request.param
    if kind in ("holdfast", "lossless"):
        holdfast.save(STATE, tmp_path / "a", codec="raw" if kind == "holdfast" else kind)
        return open_source(tmp_path / "a")
    if kind == "file":
        safetensors.torch.save_file(STATE, tmp_path / "a.safetensors")
        return open_source(tmp_path / "a.safetensors")
    names = sorted(STATE)
    weights = {}
    for number, part in enumerate((names[:2], names[2:])):
        file = f"model-{number}.safetensors"
        safetensors.torch.save_file({name: STATE[name] for name in part}, tmp_path / file)
        weights |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    return open_source(tmp_path)


def test_every_tensor_is_read_to_the_bit(source: Source) -> None:
    with source:
        assert {name for name in source.names().values()} == set(STATE)
        for tensor in source.tensors:
            (name,) = tensor.path
            assert same(read(source, tensor), STATE[str(name)])


def test_any_box_is_read(source: Source) -> None:
    chance = random.Random(5)
    with source:
        for tensor in source.tensors:
            for _ in range(20):
                offset = tuple(chance.randrange(n) if n else 0 for n in tensor.shape)
                pairs = zip(offset, tensor.shape, strict=True)
                shape = tuple(chance.randint(1, n - a) if n else 0 for a, n in pairs)
                box = Box(offset, shape)
                expected = STATE[str(tensor.path[0])][box.slices()]
                assert same(read(source, tensor, box), expected), (tensor, box)


def test_many_boxes_are_read_at_once(source: Source) -> None:
    with source:
        found = {t.path: torch.empty(t.shape, dtype=TORCH_DTYPES[t.dtype]) for t in source.tensors}
        source.read_all(
            [
                Part(tensor, whole(tensor.shape), memory_of(found[tensor.path]))
                for tensor in source.tensors
                if tensor.size_bytes
            ]
        )
        for (name,), value in found.items():
            assert same(value, STATE[str(name)])


def test_of_a_run_the_newest_step_is_opened(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.full((3,), float(step))})
    with open_source(tmp_path / "run") as source:
        assert source.location.endswith("step-00000002")


def test_of_a_directory_of_deepspeed_the_latest_tag_is_opened(tmp_path: Path) -> None:
    for step in (2, 10):
        holdfast.save({"w": torch.full((1,), float(step))}, tmp_path / f"global_step{step}")
    (tmp_path / "latest").write_text("global_step10\n")
    source = open_source(tmp_path)
    assert source.kind == "holdfast" and read(source, source.tensors[0]).item() == 10
    for elsewhere in (f"../{tmp_path.name}/global_step2", ".", "..", "nothing", ""):
        (tmp_path / "latest").write_text(elsewhere)
        with pytest.raises(HoldfastError):
            open_source(tmp_path)


def test_a_directory_of_checkpoints_names_the_one_that_was_saved_last(tmp_path: Path) -> None:
    for step in (8, 10):
        place = tmp_path / f"checkpoint-{step}"
        holdfast.save({"w": torch.ones(1)}, place)
        os.utime(place / "MANIFEST", (step, step))
    expected = f"holds 2 checkpoints: checkpoint-10, checkpoint-8. Name one.*{place}, which was"
    with pytest.raises(NotCommittedError, match=expected):
        open_source(tmp_path)


def test_ties_and_values_of_ours_are_there(tmp_path: Path) -> None:
    weight = torch.randn(3)
    state = {"model": {"a": weight, "b": weight}, "step": 3, "list": [1, {"x": torch.ones(2)}]}
    holdfast.save(state, tmp_path / "a")
    with open_source(tmp_path / "a") as source:
        assert source.ties == {("model", "b"): ("model", "a")}
        assert source.values == {("step",): 3, ("list", ("list", 0)): 1}
        assert set(source.names().values()) >= {"model.a", "model.b", "list.1.x", "step"}


def test_the_format_in_the_metadata_is_no_tie(tmp_path: Path) -> None:
    place = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"pt": torch.ones(3)}, place, metadata={"format": "pt"})
    with open_source(tmp_path / "a.safetensors") as source:
        assert source.ties == {}


def test_shared_tensors_that_safetensors_names_are_ties(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    safetensors.torch.save_model(model, str(tmp_path / "a.safetensors"))
    with open_source(tmp_path / "a.safetensors") as source:
        assert source.ties == {("1.weight",): ("0.weight",)}


def test_runs_of_a_box() -> None:
    assert list(runs_of((4, 6), Box((1, 0), (2, 6)))) == [(6, 12)]
    assert list(runs_of((4, 6), Box((1, 2), (2, 3)))) == [(8, 3), (14, 3)]
    assert list(runs_of((), Box((), ()))) == [(0, 1)]
    assert list(runs_of((3, 0), Box((0, 0), (3, 0)))) == []
    assert list(runs_of((2, 2, 2), Box((0, 1, 0), (2, 1, 2)))) == [(2, 2), (6, 2)]


def header_file(path: Path, header: Any, data: bytes = b"") -> Path:
    """Write a file with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: Any, *place: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(place)}


LIES: dict[str, tuple[Any, bytes, type[HoldfastError], str]] = {
    "no JSON": (b"{", b"", CorruptError, "no JSON"),
    "not UTF-8": (b"\xff\xfe", b"", CorruptError, "no JSON"),
    "nested deeply": (b"[" * 100_000, b"", CorruptError, "no JSON"),
    "a list": ([], b"", CorruptError, "expected an object"),
    "a name twice": (b'{"a": 1, "a": 2}', b"", CorruptError, "twice"),
    "a huge number": (b'{"a": {"shape": [' + b"9" * 9999 + b"]}}", b"", CorruptError, "no JSON"),
    "a shape that is no list": ({"a": entry("F32", 4, 0, 4)}, b"1234", CorruptError, "shape"),
    "a negative shape": ({"a": entry("F32", [-1], 0, 4)}, b"1234", CorruptError, "shape"),
    "a shape of booleans": ({"a": entry("F32", [True], 0, 4)}, b"1234", CorruptError, "shape"),
    "an unknown dtype": ({"a": entry("F7", [1], 0, 4)}, b"1234", VersionError, "'F7'"),
    "a dtype that is a list": ({"a": entry([], [1], 0, 4)}, b"1234", VersionError, "dtype"),  # type: ignore[arg-type]
    "bytes that do not fit": ({"a": entry("F32", [2], 0, 4)}, b"1234", CorruptError, "8"),
    "a shape that overflows": (
        {"a": entry("F32", [1 << 62, 1 << 62], 0, 0)},
        b"",
        CorruptError,
        "expected",
    ),
    "many dimensions": ({"a": entry("F32", [1] * 100, 0, 4)}, b"1234", CorruptError, "dimensions"),
    "a gap": ({"a": entry("U8", [1], 1, 2)}, b"12", CorruptError, "gap"),
    "an overlap": (
        {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)},
        b"123",
        CorruptError,
        "overlaps",
    ),
    "a file that was cut": ({"a": entry("U8", [9], 0, 9)}, b"123", CorruptError, "cut"),
    "bytes behind the last": ({"a": entry("U8", [1], 0, 1)}, b"123", CorruptError, "bytes"),
    "half a byte": ({"a": entry("F4", [3], 0, 1)}, b"1", CorruptError, "4 bits"),
}


@pytest.mark.parametrize("what", LIES)
def test_a_lying_header_is_refused(what: str, tmp_path: Path) -> None:
    header, data, kind, text = LIES[what]
    path = header_file(tmp_path / "a.safetensors", header, data)
    with pytest.raises(kind, match=text):
        open_source(path)


def test_a_header_longer_than_the_file_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CorruptError, match=f"{1 << 62} bytes"):
        open_source(path)


@pytest.mark.parametrize("file", ["../a.safetensors", "/etc/passwd", "..", "", 7, "b.bin", "a\0"])
def test_an_index_may_name_only_files_beside_it(file: Any, tmp_path: Path) -> None:
    safetensors.torch.save_file(STATE, tmp_path / "a.safetensors")
    inner = tmp_path / "model"
    inner.mkdir()
    index = {"weight_map": {"embed.weight": file}}
    (inner / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptError, match="expected the name of a file"):
        open_source(inner)


def test_an_index_that_names_what_is_missing_is_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(CorruptError, match=r"two\.safetensors, which is missing"):
        open_source(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(CorruptError, match="b is in one"):
        open_source(tmp_path)
    index.write_text(json.dumps({"metadata": {}}))
    with pytest.raises(CorruptError, match="weight_map"):
        open_source(tmp_path)


def make_unknown(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def make_pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def make_directory(path: Path) -> Path:
    path.mkdir()
    return path


def make_run(path: Path) -> Path:
    for step in (2, 9):
        (path / f"step-{step:08d}").mkdir(parents=True)
    return path


UNKNOWN: dict[str, tuple[Callable[[Path], Path], str, type[HoldfastError], str]] = {
    "nothing": (lambda path: path, "a", NotCommittedError, "nothing at"),
    "an unknown suffix": (make_unknown, "a.xyz", OptionError, "safetensors: a file"),
    "a run without a step": (make_run, "a", NotCommittedError, "no committed step in"),
    "an empty directory": (make_directory, "a", NotCommittedError, "holds no checkpoint"),
    "an empty file": (make_unknown, "a.safetensors", CorruptError, "0 bytes"),
    "a pipe": (make_pipe, "a.safetensors", StoreError, "no regular file"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_no_checkpoint_is_refused(what: str, tmp_path: Path) -> None:
    make, name, kind, text = UNKNOWN[what]
    with pytest.raises(kind, match=text):
        open_source(make(tmp_path / name))


def test_an_unknown_kind_lists_all(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=", ".join(kind.name for kind in KINDS)):
        open_source(tmp_path, "zip")


def test_the_kind_can_be_named(tmp_path: Path) -> None:
    safetensors.torch.save_file(STATE, tmp_path / "a.bin")
    with open_source(tmp_path / "a.bin", "safetensors") as source:
        assert source.kind == "safetensors"


def test_a_file_that_was_cut_after_it_was_opened_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(STATE, path)
    with open_source(path) as source:
        os.truncate(path, os.path.getsize(path) - 1)
        with pytest.raises(CorruptError, match="cut or changed"):
            for tensor in source.tensors:
                read(source, tensor)


def test_damage_of_ours_is_found_when_it_is_read(tmp_path: Path) -> None:
    holdfast.save(STATE, tmp_path / "a")
    file = next((tmp_path / "a").rglob("*.hf"))
    data = bytearray(file.read_bytes())
    data[data.find(STATE["embed.weight"].numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
    with open_source(tmp_path / "a") as source, pytest.raises(CorruptError, match="checksum"):
        for tensor in source.tensors:
            read(source, tensor)
