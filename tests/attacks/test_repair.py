"""Footers that lie, of a checkpoint without MANIFEST: repair refuses, or says what is true."""

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import holdfast
from format import reader
from format.forge import Forgery
from holdfast.errors import CorruptError, VersionError

from . import file_lies, header_lies, row_lies, value_lies
from .lies import LIES, OPTIONS

assert file_lies and header_lies and row_lies and value_lies  # they add to LIES

NewPath = Callable[[], Path]
Tell = Callable[[Forgery], None]


def tell(truth: Path, path: Path, lie: Tell) -> None:
    forgery = Forgery.read(truth)
    lie(forgery)
    forgery.write(path)
    (path / "MANIFEST").unlink()
    for file in path.rglob("*"):
        if file.is_file() and not file.is_symlink():
            os.utime(file, (1e9, 1e9))


@lru_cache
def contents_of_truth(truth: Path) -> dict[str, Any]:
    return contents(truth)


def contents(path: Path) -> dict[str, Any]:
    with holdfast.open(path) as checkpoint:
        names = [n for n in checkpoint.names() if checkpoint.info(n).size_bytes]
        return {n: checkpoint.tensor(n).flatten().tolist() for n in names}


@pytest.mark.parametrize("name", LIES)
@pytest.mark.usefixtures("bounded")
def test_what_is_rebuilt_from_lies_is_whole_and_true(
    truth: Path, new_path: NewPath, name: str
) -> None:
    """What MANIFEST lied is not there any more; what footers and files lie is found."""
    path, other = new_path(), new_path()
    tell(truth, path, LIES[name].tell)
    true = contents_of_truth(truth)
    for how in ({"to": other}, {"write": True}):
        place = other if "to" in how else path
        try:
            holdfast.repair(path, options=OPTIONS, **how)  # type: ignore[arg-type]
        except (CorruptError, VersionError):
            assert not (place / "MANIFEST").exists()
            continue
        assert holdfast.verify(place, deep=True, options=OPTIONS).damage == ()
        reader.read(place)
        found = contents(place)
        assert found.keys() <= true.keys() or name.startswith("a footer")
        assert all(found[n] == true[n] for n in found.keys() & true.keys())


def footer(number: int, change: Callable[[dict[str, Any]], object]) -> Tell:
    return lambda forgery: (change(forgery.files[number].footer.header), None)[1]


def two_in_turn(forgery: Forgery) -> None:
    """The first says a before b, the second b before a."""
    first, second = (file.footer for file in forgery.files)
    second.header["tensors"] = first.header["tensors"][::-1]
    second.columns["shard.tensor"] = [1 - t if t < 2 else t for t in second.columns["shard.tensor"]]


FOOTERS: dict[str, tuple[Tell, str]] = {
    "another step": (
        footer(1, lambda h: h.update(step=8)),
        "differ in step, so they are of different saves",
    ),
    "another world": (
        footer(1, lambda h: h.update(world_size=3)),
        "differ in world_size, so they are of different saves",
    ),
    "another dtype": (
        footer(1, lambda h: h["tensors"][0].update(dtype="i32")),
        "with another dtype, shape or codec",
    ),
    "another shape": (
        footer(1, lambda h: h["tensors"][0].update(shape=[4, 4])),
        "with another dtype, shape or codec",
    ),
    "values": (
        footer(0, lambda h: h["objects"].append({"path": ["v"], "value": 1})),
        "has objects or losses",
    ),
    "a tie to something else": (
        footer(1, lambda h: h["ties"].append({"path": ["t", 1], "tensor": 0})),
        "contradict each other on t.1",
    ),
    "a tie that is a tensor": (
        footer(1, lambda h: h["ties"].append({"path": ["b"], "tensor": 0})),
        "contradict each other on b",
    ),
    "two orders": (two_in_turn, "in contradicting orders"),
    "a newer format": (lambda f: f.files[0].footer.preamble.update({1: 2}), "format version 2"),
}


@pytest.mark.parametrize("name", FOOTERS)
@pytest.mark.usefixtures("bounded")
def test_footers_that_do_not_agree_are_refused(truth: Path, new_path: NewPath, name: str) -> None:
    lie, text = FOOTERS[name]
    path = new_path()
    tell(truth, path, lie)
    refusal = ""
    try:
        found = holdfast.repair(path, options=OPTIONS)
    except (CorruptError, VersionError) as error:
        refusal = str(error)
    else:  # that file is left out, and is told
        assert found.refused
        refusal = "; ".join(damage.what for damage in found.damage)
    assert text in refusal
    with pytest.raises((CorruptError, VersionError)):
        holdfast.repair(path, write=True, options=OPTIONS)
    assert not (path / "MANIFEST").exists()


@pytest.mark.usefixtures("bounded")
def test_four_thousand_million_ranks_take_no_memory(truth: Path, new_path: NewPath) -> None:
    path, other = new_path(), new_path()

    def lie(forgery: Forgery) -> None:
        for file in forgery.files:
            file.footer.header["world_size"] = 2**32 - 1

    tell(truth, path, lie)
    found = holdfast.repair(path, to=other, options=OPTIONS)
    assert "ranks 2, 3, 4, 5, 6 …" in "; ".join(found.refused)
    assert contents(other) == contents(truth)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", ["pipe", "link", "device", "directory", "other name", "garbage"])
def test_what_is_no_data_file_is_never_read_as_one(
    truth: Path, new_path: NewPath, what: str
) -> None:
    path = new_path()
    tell(truth, path, lambda forgery: None)
    file = sorted((path / "data").rglob("*.hf"))[1]
    moved = file.rename(path.parent / f"moved-{path.name}")
    if what == "pipe":
        os.mkfifo(file)
    elif what == "link":
        file.symlink_to(moved)
    elif what == "device":
        file.symlink_to("/dev/zero")
    elif what == "directory":
        file.mkdir()
    elif what == "other name":
        file.with_name("00001-00.hf").write_bytes(moved.read_bytes())
    else:
        file.write_bytes(os.urandom(500))
    found = holdfast.repair(path, options=OPTIONS)
    assert "a data file cannot be read" in found.refused and found.whole == ("b",)
    with pytest.raises(CorruptError):
        holdfast.repair(path, write=True, options=OPTIONS)


def test_a_directory_of_saves_that_is_a_link_is_not_followed(
    truth: Path, new_path: NewPath
) -> None:
    path = new_path()
    tell(truth, path, lambda forgery: None)
    elsewhere = (path / "data").rename(path.parent / f"moved-{path.name}")
    (path / "data").symlink_to(elsewhere)
    with pytest.raises(holdfast.errors.NotCommittedError):
        holdfast.repair(path, options=OPTIONS)
