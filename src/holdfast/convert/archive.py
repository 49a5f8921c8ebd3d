"""Zip archives as torch.save writes them: where each record lies in a file. Unpacks nothing.

The central directory is not believed: each record has a header of its own, which must agree, and no
two records may share bytes. What is compressed or encrypted is refused, so a record is never larger
than the file. `Crcs` checks the CRC-32 of a record before its bytes are used.
"""

import struct
import threading
import zlib
from typing import NamedTuple

from ..errors import CorruptError, OptionError
from .files import Files

MAGIC = b"PK\x03\x04"
DIRECTORY_BYTES_MAX = 32 << 20  # of names, places and sizes: some 300,000 records
BUFFER_BYTES = 4 << 20
_END = struct.Struct("<4s4H2IH")
_END64_PLACE = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_HEADER = struct.Struct("<4s5H3I2H")
_FIELD = struct.Struct("<2H")
_U16, _U32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED, _SIZES_FOLLOW = 1, 8  # flags


class Record(NamedTuple):
    """The bytes of one record: where they lie in the file, and their CRC-32."""

    offset: int
    size_bytes: int
    crc: int


class Region(NamedTuple):
    """A part of a file that is an archive by itself; ``where`` is for people."""

    files: Files
    path: str
    offset: int
    size_bytes: int
    where: str

    def read(self, offset: int, size: int) -> bytes:
        """Read bytes at an offset within the region.

        Raises:
            CorruptError: they are not within it.
        """
        if offset < 0 or offset + size > self.size_bytes:
            raise CorruptError(f"{self.where} is damaged: it refers to bytes outside it")
        data = bytearray(size)
        self.files.read(self.path, self.offset + offset, memoryview(data))
        return bytes(data)


def read_archive(region: Region) -> dict[str, Record]:
    """Return the records of an archive by name.

    Raises:
        CorruptError: it is no archive, or fails a check.
        OptionError: a record is compressed or encrypted.
        StoreError: it cannot be read.
    """
    start, count, end = _find_directory(region)
    if end - start > DIRECTORY_BYTES_MAX:
        raise CorruptError(
            f"{region.where} has a directory of {end - start:,} bytes; expected at most "
            f"{DIRECTORY_BYTES_MAX:,}"
        )
    data = region.read(start, end - start)
    found: dict[str, Record] = {}
    spans: list[tuple[int, int, str]] = []
    at = 0
    for _ in range(count):
        name, header, record, at = _read_entry(region, data, at)
        if name in found:
            raise _damaged(region, f"{name:.80} is in it twice")
        found[name] = record._replace(offset=_data_offset(region, name, header, record))
        spans.append((header, found[name].offset - region.offset + record.size_bytes, name))
    if at != len(data):
        raise _damaged(region, "its directory is longer than its entries")
    _check_apart(region, spans, start)
    return found


def _damaged(region: Region, what: str) -> CorruptError:
    return CorruptError(f"{region.where} is damaged: {what}")


def _find_directory(region: Region) -> tuple[int, int, int]:
    """Return where the directory begins, how many entries it has, and where it ends."""
    end = region.size_bytes - _END.size
    if end < 0 or region.read(0, 4) not in (MAGIC, b"PK\x05\x06"):
        raise CorruptError(f"{region.where} is no archive of torch.save")
    tag, disk, first, here, count, size, start, comment = _END.unpack(region.read(end, _END.size))
    if tag != b"PK\x05\x06" or comment:
        raise _damaged(
            region, "it does not end with its directory. It was cut, or is still being written"
        )
    place = end - _END64_PLACE.size
    if place >= 0:
        tag, _, end64, _ = _END64_PLACE.unpack(region.read(place, _END64_PLACE.size))
        if tag == b"PK\x06\x07":
            fields = _END64.unpack(region.read(end64, _END64.size))
            tag, _, _, _, disk, first, here, count, size, start = fields
            if tag != b"PK\x06\x06" or end64 + _END64.size != place:
                raise _damaged(region, "its end is not where it says")
            end = end64
    if (disk, first) != (0, 0) or here != count or start + size != end:
        raise _damaged(region, "its directory is not where it says")
    return start, count, end


def _read_entry(region: Region, data: bytes, at: int) -> tuple[str, int, Record, int]:
    """Read an entry of the directory: its name, where its header is, its record, the next entry."""
    if at + _ENTRY.size > len(data):
        raise _damaged(region, "its directory ends too early")
    entry = _ENTRY.unpack_from(data, at)
    tag, _, _, flags, method, _, _, crc, packed, size, names, extras, comments, disk = entry[:14]
    header, at = entry[16], at + _ENTRY.size
    end = at + names + extras + comments
    if tag != b"PK\x01\x02" or end > len(data):
        raise _damaged(region, "its directory ends too early")
    name = _name(region, data[at : at + names])
    wide = _wide(data[at + names : at + names + extras])
    values = []
    for value in (size, packed, header):
        if value == _U32:
            if not wide:
                raise _damaged(region, f"{name:.80} has no size")
            value = wide.pop(0)
        values.append(value)
    size, packed, header = values
    if flags & _ENCRYPTED or method or size != packed:
        raise OptionError(
            f"{region.where} holds {name:.80} compressed or encrypted; expected plain bytes, as "
            "torch.save writes them. Load it with torch.load, and save it again"
        )
    if disk not in (0, _U16):
        raise _damaged(region, f"{name:.80} is in another file")
    return name, header, Record(0, size, crc), end


def _name(region: Region, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise _damaged(region, f"the name {raw[:80]!r} is no text") from None


def _wide(extra: bytes) -> list[int]:
    """Return the 64-bit numbers of an extra field, in their order: size, packed size, place."""
    at = 0
    while at + _FIELD.size <= len(extra):
        kind, size = _FIELD.unpack_from(extra, at)
        at += _FIELD.size
        if kind == 1 and at + size <= len(extra):
            return list(struct.unpack_from(f"<{size // 8}Q", extra, at))
        at += size
    return []


def _data_offset(region: Region, name: str, header: int, record: Record) -> int:
    """Return where a record's bytes begin in the file, by its own header."""
    fields = _HEADER.unpack(region.read(header, _HEADER.size))
    tag, _, flags, method, _, _, crc, packed, size, names, extras = fields
    raw = region.read(header + _HEADER.size, names + extras)
    agrees = tag == MAGIC and not method and not flags & _ENCRYPTED and raw[:names] == name.encode()
    if agrees and not flags & _SIZES_FOLLOW:
        sizes = [_wide(raw[names:])[:1] if value == _U32 else [value] for value in (size, packed)]
        agrees = crc == record.crc and sizes == [[record.size_bytes]] * 2
    start: int = header + _HEADER.size + names + extras
    if not agrees or start + record.size_bytes > region.size_bytes:
        raise _damaged(region, f"the header of {name:.80} does not agree with the directory")
    return region.offset + start


def _check_apart(region: Region, spans: list[tuple[int, int, str]], end: int) -> None:
    """Check that no two records share bytes, and that none reaches into the directory."""
    spans.sort()
    for (_, stop, name), (begin, _, other) in zip(
        spans, [*spans[1:], (end, 0, "the directory")], strict=True
    ):
        if stop > begin:
            raise _damaged(region, f"{name:.80} and {other:.80} share bytes")


def region_of(files: Files, path: str) -> Region:
    """Return a whole file.

    Raises:
        StoreError: it cannot be opened, or is no regular file.
    """
    return Region(files, path, 0, files.size(path), path)


def record_bytes(region: Region, record: Record, bytes_max: int) -> bytes:
    """Return the bytes of a small record, checked.

    Raises:
        CorruptError: there are too many, or their CRC is wrong.
    """
    if record.size_bytes > bytes_max:
        raise CorruptError(
            f"{region.where} has a record of {record.size_bytes:,} bytes beside its tensors; "
            f"expected at most {bytes_max:,}. Save large bytes and arrays as tensors"
        )
    data = region.read(record.offset - region.offset, record.size_bytes)
    compare_crc(zlib.crc32(data), record, region.where)
    return data


class Crcs:
    """Which records have been checked. Thread-safe; each record is read for it once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[tuple[str, int], threading.Lock] = {}
        self._good: set[tuple[str, int]] = set()

    def check(self, files: Files, path: str, record: Record, where: str) -> None:
        """Check a record, unless that has been done.

        Raises:
            CorruptError: its CRC is wrong.
        """
        key = (path, record.offset)
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key in self._good:
                return
            crc, done = 0, 0
            buffer = memoryview(bytearray(min(BUFFER_BYTES, record.size_bytes)))
            while done < record.size_bytes:
                part = buffer[: record.size_bytes - done]
                files.read(path, record.offset + done, part)
                crc = zlib.crc32(part, crc)
                done += len(part)
            compare_crc(crc, record, where)
            self._good.add(key)

    def check_bytes(
        self, path: str, record: Record, data: "bytes | memoryview", where: str
    ) -> None:
        """Check all bytes of a record that have been read already.

        Raises:
            CorruptError: their CRC is wrong.
        """
        compare_crc(zlib.crc32(data), record, where)
        self._good.add((path, record.offset))


def compare_crc(crc: int, record: Record, where: str) -> None:
    """Check a CRC that was found against that of the directory.

    Raises:
        CorruptError: it is another.
    """
    if crc != record.crc:
        raise CorruptError(
            f"{where} is damaged: its CRC-32 is {crc:08x}, expected {record.crc:08x} (or it was "
            "saved without, under torch.serialization.set_crc32_options(False)). Use another copy"
        )
