"""Archives of torch.save that lie: cut, changed, overlapping, swollen, or leading elsewhere."""

import contextlib
import io
import os
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.convert.kinds import open_source
from holdfast.convert.torch_file import GROWTH_MAX
from holdfast.errors import CorruptError, HoldfastError, OptionError
from holdfast.layout import whole

NewPath = Callable[[], Path]
STATE = {"w": torch.arange(300, dtype=torch.int32), "v": torch.ones(7), "step": 3, "t": "text"}


def contents(file: str) -> tuple[Any, ...]:
    """All that a file holds, read."""
    with open_source(file) as source:
        found = []
        for tensor in source.tensors:
            memory = bytearray(tensor.size_bytes)
            source.read(tensor, whole(tensor.shape), memoryview(memory))
            found.append((tensor, bytes(memory)))
        return found, dict(source.values), dict(source.ties)


def honest() -> bytes:
    buffer = io.BytesIO()
    torch.save(STATE, buffer)
    return buffer.getvalue()


@pytest.mark.timeout(300)
def test_a_changed_file_is_an_error_or_the_same(new_path: NewPath) -> None:
    file, data, chance = Path(f"{new_path()}.pt"), honest(), random.Random(11)
    file.write_bytes(data)
    expected = contents(str(file))
    refused = 0
    for number in range(4000):
        changed = bytearray(data)
        # The directory at the end is small, and is where most lies are.
        first = len(data) - 1500 if number % 2 else 0
        for _ in range(chance.choice((1, 1, 3))):
            changed[chance.randrange(first, len(data))] ^= 1 << chance.randrange(8)
        file.write_bytes(changed)
        try:
            assert contents(str(file)) == expected
        except HoldfastError:
            refused += 1
    assert refused > 2000


def test_each_cut_is_an_error(new_path: NewPath) -> None:
    file, data = Path(f"{new_path()}.pt"), honest()
    for length in [*range(0, len(data), 37), *range(len(data) - 200, len(data))]:
        file.write_bytes(data[:length])
        with pytest.raises((CorruptError, OptionError)):
            open_source(file)


@dataclass
class Member:
    """One record of an archive, each field as it is to be written."""

    name: str
    data: bytes
    method: int = 0
    flags: int = 0
    crc: int | None = None
    size: int | None = None
    local_name: str | None = None
    local_size: int | None = None
    offset: int | None = None  # of its header, as the directory has it

    def header(self) -> bytes:
        crc = zlib.crc32(self.data) if self.crc is None else self.crc
        size = len(self.data) if self.local_size is None else self.local_size
        name = (self.name if self.local_name is None else self.local_name).encode()
        fields = (b"PK\x03\x04", 20, self.flags, self.method, 0, 0, crc, size, size, len(name), 0)
        return struct.pack("<4s5H3I2H", *fields) + name

    def entry(self, offset: int) -> bytes:
        crc = zlib.crc32(self.data) if self.crc is None else self.crc
        size = len(self.data) if self.size is None else self.size
        name, at = self.name.encode(), offset if self.offset is None else self.offset
        head = (b"PK\x01\x02", 20, 20, self.flags, self.method, 0, 0, crc, size, size, len(name))
        return struct.pack("<4s6H3I5H2I", *head, 0, 0, 0, 0, 0, at) + name


def archive(*members: Member, count: int | None = None, start: int | None = None) -> bytes:
    data, directory = b"", b""
    for member in members:
        directory += member.entry(len(data))
        data += member.header() + member.data
    entries = len(members) if count is None else count
    place = len(data) if start is None else start
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, entries, entries, len(directory), place, 0)
    return data + directory + end


def pickle_of(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with zipfile.ZipFile(buffer) as parts:
        return parts.read("archive/data.pkl")


W = torch.arange(4, dtype=torch.int64)
PICKLE = Member("a/data.pkl", pickle_of({"w": W}))
DATA = Member("a/data/0", W.numpy().tobytes())
TWO = Member("a/data.pkl", pickle_of({"w": W, "v": W + 1}))


def changed(member: Member, **fields: Any) -> Member:
    return Member(**{**vars(member), **fields})


def lies() -> Iterator[tuple[str, bytes]]:
    yield "no pickle", archive(DATA)
    yield "no record", archive(PICKLE)
    yield "another size", archive(PICKLE, changed(DATA, data=bytes(31)))
    yield "a wrong CRC of the pickle", archive(changed(PICKLE, crc=1), DATA)
    yield "a size beyond the file", archive(PICKLE, changed(DATA, size=1 << 30, local_size=1 << 30))
    yield "two sizes", archive(PICKLE, changed(DATA, local_size=31))
    yield "a wide size that there is not", archive(PICKLE, changed(DATA, size=0xFFFFFFFF))
    yield "two names", archive(PICKLE, changed(DATA, local_name="a/data/1"))
    yield "a name twice", archive(PICKLE, DATA, DATA)
    yield "two folders", archive(PICKLE, DATA, Member("b/x", b""))
    yield "a name that leads out", archive(PICKLE, DATA, Member("../../etc/passwd", b"x"))
    yield "an absolute name", archive(PICKLE, DATA, Member("/etc/passwd", b"x"))
    yield "a pickle further down", archive(changed(PICKLE, name="a/b/data.pkl"), DATA)
    yield "a header in another", archive(PICKLE, DATA, changed(DATA, name="a/x", offset=0))
    inner = Member("a/data/1", W.numpy().tobytes())
    outer = Member("a/data/0", (inner.header() + inner.data)[:32])
    yield (
        "records that share bytes",
        archive(
            TWO,
            changed(outer, data=inner.header() + inner.data),
            changed(inner, offset=len(TWO.header() + TWO.data) + len(outer.header())),
        ),
    )
    yield "a header in the directory", archive(PICKLE, changed(DATA, offset=1 << 20))
    yield "more entries", archive(PICKLE, DATA, count=3)
    yield "fewer entries", archive(PICKLE, DATA, count=1)
    yield "a directory elsewhere", archive(PICKLE, DATA, start=4)
    yield "a comment", archive(PICKLE, DATA)[:-2] + b"\x03\x00abc"
    yield "something behind", archive(PICKLE, DATA) + b"x"
    yield "something before", b"x" + archive(PICKLE, DATA)
    yield "an empty archive", archive()
    far = struct.pack("<4sIQI", b"PK\x06\x07", 0, 1 << 63, 1)
    yield "a wide end that is far away", archive(PICKLE, DATA)[:-22] + far + bytes(22)
    wide = (b"PK\x06\x06", 44, 45, 45, 0, 0, 1 << 60, 1 << 60, 1 << 60, 0)
    end = archive(PICKLE, DATA)
    yield (
        "a wide directory of many entries",
        (
            end[:-22]
            + struct.pack("<4sQ2H2I4Q", *wide)
            + struct.pack("<4sIQI", b"PK\x06\x07", 0, len(end) - 22, 1)
            + end[-22:]
        ),
    )


LIES = dict(lies())


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_a_typed_error(name: str, new_path: NewPath, bounded: None) -> None:
    file = Path(f"{new_path()}.pt")
    file.write_bytes(LIES[name])
    with pytest.raises(CorruptError, match=str(file)):
        contents(str(file))


def test_the_truth_is_read(new_path: NewPath) -> None:
    file = Path(f"{new_path()}.pt")
    file.write_bytes(archive(PICKLE, DATA))
    ((tensor, data),) = contents(str(file))[0]
    assert tensor.shape == (4,) and data == DATA.data


@pytest.mark.parametrize("method", [8, 12, 14, 99])
def test_what_is_compressed_is_refused_before_it_is_read(new_path: NewPath, method: int) -> None:
    file = Path(f"{new_path()}.pt")
    file.write_bytes(archive(PICKLE, changed(DATA, method=method)))
    with pytest.raises(OptionError, match="compressed or encrypted"):
        open_source(file)
    file.write_bytes(archive(PICKLE, changed(DATA, flags=1)))
    with pytest.raises(OptionError, match="compressed or encrypted"):
        open_source(file)


def test_a_bomb_of_zeros_in_a_pickle_is_refused(new_path: NewPath, bounded: None) -> None:
    file = Path(f"{new_path()}.pt")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as parts:
        parts.writestr("a/data.pkl", bytes(1 << 20))
    with pytest.raises(OptionError, match="compressed"):
        open_source(file)


def test_views_that_repeat_elements_without_end_are_refused(new_path: NewPath) -> None:
    file = Path(f"{new_path()}.pt")
    base = torch.zeros(1 << 20, dtype=torch.uint8)
    most = (64 << 20 >> 20) + GROWTH_MAX
    torch.save({"w": base.expand(most, -1)}, file)
    open_source(file).close()
    torch.save({"w": base.expand(most + 1, -1)}, file)
    with pytest.raises(CorruptError, match="repeat"):
        open_source(file)
    torch.save({f"w{n}": base[: 1 << 19].expand(128, -1) for n in range(5)}, file)
    open_source(file).close()  # one view, with five names
    torch.save({"w": torch.zeros(1).expand(1 << 40)}, file)
    with pytest.raises(CorruptError, match="repeat"):
        open_source(file)


def test_a_sparse_giant_takes_no_memory(new_path: NewPath, bounded: None) -> None:
    file = Path(f"{new_path()}.pt")
    with open(file, "wb") as out:
        out.write(archive(PICKLE, DATA)[:-22])
        out.truncate(1 << 40)
    with pytest.raises(CorruptError, match="does not end with its directory"):
        open_source(file)


@pytest.mark.parametrize("kind", ["fifo", "directory", "missing"])
def test_what_is_no_file_is_a_typed_error(new_path: NewPath, kind: str) -> None:
    file = Path(f"{new_path()}.pt")
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    with pytest.raises(HoldfastError), contextlib.closing(open_source(file)):
        pass
