"""Every lie is refused, by its own error, in little time and memory; by the other reader too."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from format import reader
from format.forge import Forgery
from holdfast.errors import CorruptError, HoldfastError, VersionError

from . import file_lies, header_lies, row_lies, value_lies
from .header_lies import stream_of
from .lies import LIES, OPTIONS, Lie, target

assert file_lies and header_lies and row_lies and value_lies  # they add to LIES

NewPath = Callable[[], Path]


def errors_of(path: Path) -> list[HoldfastError]:
    """The error of a full load, and that of opening, or else what verify says."""
    found: list[HoldfastError] = []
    with pytest.raises((CorruptError, VersionError)) as caught:
        holdfast.load(path, into=target(), options=OPTIONS)
    found.append(caught.value)
    try:
        damage = holdfast.open(path, options=OPTIONS).verify()
    except (CorruptError, VersionError) as error:
        found.append(error)
    else:
        assert damage, "verify finds nothing"
        found += [CorruptError(fault.what) for fault in damage[:1]]
    return found


def test_the_truth_is_accepted_however_it_is_put_together(truth: Path, new_path: NewPath) -> None:
    path = new_path()
    Forgery.read(truth).write(path)
    for file in truth.rglob("*"):
        if file.is_file():
            assert (path / file.relative_to(truth)).read_bytes() == file.read_bytes()
    filled = target()
    holdfast.load(path, into=filled, options=OPTIONS)
    assert filled["w"].flatten().tolist() == list(range(12))
    assert holdfast.open(path).verify() == []
    assert len(reader.read(path)["tensors"]) == 3


def test_a_packed_table_is_accepted_under_any_codec(truth: Path, new_path: NewPath) -> None:
    forgery, path = Forgery.read(truth), new_path()
    for table in (forgery.manifest, *(file.footer for file in forgery.files)):
        table.pack = stream_of
    forgery.write(path)
    assert holdfast.open(path).verify() == []
    assert len(reader.read(path)["tensors"]) == 3


@pytest.mark.parametrize("name", LIES)
@pytest.mark.usefixtures("bounded")
def test_a_lie_is_refused(truth: Path, new_path: NewPath, name: str) -> None:
    lie: Lie = LIES[name]
    path = new_path()
    forgery = Forgery.read(truth)
    lie.tell(forgery)
    forgery.write(path)
    for error in errors_of(path):
        assert re.search(lie.text, str(error)), error
    (first, *_) = errors_of(path)
    assert type(first).__name__ == lie.error
    assert len(str(first)) < 2000, "the text repeats what it was given"
    with pytest.raises((reader.Corrupt, reader.Newer)) as caught:
        reader.read(path)
    newer = lie.error == "VersionError"
    assert caught.type is (reader.Newer if newer else reader.Corrupt)


def test_there_are_lies_of_every_kind() -> None:
    assert len(LIES) > 150
