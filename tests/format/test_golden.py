"""Golden files load for ever, in both readers, and are written again bit for bit."""

import json
import re
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch

import holdfast
from holdfast import errors
from holdfast.engine.check import read_manifest
from holdfast.format.names import display_names
from holdfast.format.values import encode_path
from holdfast.layout import Path
from holdfast.state.tensors import DTYPE_NAMES
from holdfast.stores.url import open_store
from unit.test_round_trip import bits_of, exactly

from . import reader
from .forge import Forgery
from .make_golden import (
    ALL_CASES,
    CASES,
    ERROR_CASES,
    ERRORS,
    GOLDEN,
    LOSSY_CASES,
    directory_of,
    write,
    write_error,
)
from .simulated_ranks import Piece

NewPath = Callable[[], FilePath]
READER_ERRORS = {"CorruptError": reader.Corrupt, "VersionError": reader.Newer}
TOTAL_BYTES_MAX = 260_000


def text_of(path: Path) -> str:
    """A path as the other reader has it."""
    return json.dumps(encode_path(path), ensure_ascii=False, separators=(",", ":"))


def contents_of(name: str) -> tuple[dict[Path, torch.Tensor], dict[Path, Any]]:
    """What a case puts into its checkpoint: whole tensors, ties included, and values."""
    case = CASES[name]()
    tensors: dict[Path, torch.Tensor] = {}
    values: dict[Path, Any] = {}
    for state in case.states:
        for path, value in state.items():
            if isinstance(value, Piece):
                whole = tensors.setdefault(path, torch.empty(value.shape, dtype=value.data.dtype))
                sides = zip(value.offset, value.data.shape, strict=True)
                whole[tuple(slice(a, a + n) for a, n in sides)] = value.data
            elif isinstance(value, torch.Tensor):
                tensors[path] = value
            else:
                values[path] = value
    return tensors | {path: tensors[target] for path, target in case.ties.items()}, values


def files_of(path: FilePath) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def test_every_golden_directory_has_a_case_and_all_are_small() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(ALL_CASES)
    assert {path.name for path in ERRORS.iterdir()} == set(map(directory_of, ERROR_CASES))
    sizes = [len(content) for place in (GOLDEN, ERRORS) for content in files_of(place).values()]
    assert sum(sizes) <= TOTAL_BYTES_MAX


@pytest.mark.parametrize("name", CASES)
def test_both_readers_find_in_a_golden_file_what_was_put_in(name: str) -> None:
    tensors, values = contents_of(name)
    found = reader.read(GOLDEN / name)
    by_reader = dict(found["tensors"])
    by_reader |= {path: by_reader[target] for path, target in found["ties"].items()}
    expected = {
        text_of(path): (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), bits_of(tensor))
        for path, tensor in tensors.items()
    }
    assert by_reader == expected
    assert exactly(found["objects"]) == exactly({text_of(p): v for p, v in values.items()})

    checkpoint = holdfast.open(GOLDEN / name)
    assert checkpoint.verify() == []
    by_holdfast = []
    for each in checkpoint.names():
        tensor = checkpoint.tensor(each)
        by_holdfast.append((checkpoint.info(each).dtype, tuple(tensor.shape), bits_of(tensor)))
    assert sorted(by_holdfast) == sorted(expected.values())
    names = display_names([*tensors, *values])
    objects = {names[path]: value for path, value in values.items()}
    assert exactly(checkpoint.objects()) == exactly(objects)


def zeroed(value: Any) -> Any:
    """The same containers, every tensor in them zero, every value None."""
    if isinstance(value, torch.Tensor):
        zeros = torch.zeros(value.numel() * value.element_size(), dtype=torch.uint8)
        return zeros.view(value.dtype).view(value.shape)
    if isinstance(value, dict):
        return {key: zeroed(item) for key, item in value.items()}
    return type(value)(map(zeroed, value)) if isinstance(value, (list, tuple)) else None


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"objects"}))
def test_a_golden_file_loads_into_a_state(name: str) -> None:
    tensors, _ = contents_of(name)
    into = zeroed(holdfast.open(GOLDEN / name).state())
    report = holdfast.load(GOLDEN / name, into=into)
    assert report.tensors == len(tensors)
    for path, tensor in tensors.items():
        found = into
        for key in path:
            found = found[key]
        assert bits_of(found) == bits_of(tensor)


@pytest.mark.parametrize("name", LOSSY_CASES)
def test_both_readers_find_the_same_in_a_golden_file_with_loss(name: str) -> None:
    """What its digests promise, which the other reader compares and a deep check does too."""
    found = reader.read(GOLDEN / name)["tensors"]
    checkpoint = holdfast.open(GOLDEN / name)
    assert checkpoint.verify(deep=True) == []
    tensors = [checkpoint.tensor(each) for each in checkpoint.names()]
    assert sorted(bits_of(tensor) for tensor in tensors) == sorted(
        part[2] for part in found.values()
    )
    assert any(checkpoint.info(each).loss for each in checkpoint.names())


@pytest.mark.parametrize("name", ALL_CASES)
def test_a_golden_file_is_written_again_bit_for_bit(name: str, new_path: NewPath) -> None:
    path = new_path()
    write(name, ALL_CASES[name](), path)
    if files_of(path) != files_of(GOLDEN / name):
        # Another zlib may pack a header into other bytes: it is the text that has to be the same.
        golden = new_path()
        Forgery.read(path).write(path / "plain")
        Forgery.read(GOLDEN / name).write(golden)
        assert files_of(path / "plain") == files_of(golden)


@pytest.mark.parametrize("name", ERROR_CASES)
def test_a_golden_error_fails_in_both_readers(name: str, new_path: NewPath) -> None:
    place = ERRORS / directory_of(name)
    expected = json.loads((place / "expected.json").read_text())
    kind = getattr(errors, expected["error"])
    with pytest.raises(kind) as caught:
        damage = holdfast.open(place / "checkpoint").verify()
        raise errors.CorruptError("; ".join(fault.what for fault in damage))
    assert re.search(expected["text"], str(caught.value))
    with pytest.raises(READER_ERRORS[expected["error"]]):
        reader.read(place / "checkpoint")
    write_error(name, path := new_path())
    assert files_of(path) == files_of(place)


def test_golden_files_cover_what_the_format_has() -> None:
    checkpoints = {name: holdfast.open(GOLDEN / name) for name in CASES}
    manifests = [read_manifest(open_store(GOLDEN / name)) for name in ALL_CASES]
    modes = {mode for each in manifests for mode in each.table.chunk_size_mode >> 24}
    assert modes == set(range(18))
    dtypes = {c.info(name).dtype for c in checkpoints.values() for name in c.names()}
    assert dtypes == set(DTYPE_NAMES.values())
    assert len(checkpoints["boxes"].file_names) == 4 == checkpoints["boxes"].world_size
    assert len(checkpoints["boxes"].info("wide").shards) == 3
    assert checkpoints["boxes"].mesh == {"shape": [2, 2], "names": ["dp", "tp"]}
    assert checkpoints["boxes"].step == 1200
    assert len(checkpoints["files"].file_names) == 3 > checkpoints["files"].world_size
    assert checkpoints["ties"].info("copies.1").tied_to == "model.embedding.weight"
    assert checkpoints["aligned"].info("large").size_bytes == 1 << 16
    assert checkpoints["empty"].names() == [] == list(checkpoints["empty"].file_names)
    assert checkpoints["empty-tensors"].info("flat").shards == ()
    assert checkpoints["objects"].metrics["best"] == float("inf")
