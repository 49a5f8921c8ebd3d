"""A zip archive whose members are stored as they are, laid out before a byte of them is read.

Checksums of tensors stand behind them (data descriptors) and in the directory at the end, as both
are known only then. Pure; see APPNOTE.TXT of PKWARE, sections 4.3 and 4.5.3 (ZIP64).
"""

import struct
from dataclasses import replace
from zlib import crc32

from ..errors import OptionError
from .emit import Content, Late, Piece

ALIGN_BYTES = 64  # of every member's bytes: tensors can be mapped into memory
_LOCAL, _CENTRAL, _END = 0x04034B50, 0x02014B50, 0x06054B50
_DESCRIPTOR, _END64, _LOCATOR = 0x08074B50, 0x06064B50, 0x07064B50
_VERSION, _DATE = 45, 1 << 5 | 1  # the format's version; 1980-01-01: no archive tells when
_FLAGS_KNOWN, _FLAGS_LATE = 1 << 11, 1 << 11 | 1 << 3  # names in UTF-8; a descriptor follows
_PADDING_ID = 0x4246  # "FB", as torch pads
_ZIP64_ID = 1
_MAX32, _MAX16 = (1 << 32) - 1, (1 << 16) - 1


class _Member:
    """What the directory says of one."""

    def __init__(self, name: bytes, offset: int, size: int, flags: int) -> None:
        self.name, self.offset, self.size, self.flags, self.crc = name, offset, size, flags, 0

    def see(self, data: "bytes | memoryview") -> None:
        """Take up bytes."""
        self.crc = crc32(data, self.crc)

    @property
    def is_large(self) -> bool:
        """Whether 32 bits cannot hold its size."""
        return self.size > _MAX32 - 1

    def descriptor(self) -> bytes:
        """Return what follows its bytes."""
        form = "<IIQQ" if self.is_large else "<IIII"
        return struct.pack(form, _DESCRIPTOR, self.crc, self.size, self.size)

    def entry(self) -> bytes:
        """Return its entry of the directory."""
        extra, sizes, offset = b"", self.size, self.offset
        if self.is_large or self.offset > _MAX32 - 1:
            extra = struct.pack("<HHQQQ", _ZIP64_ID, 24, self.size, self.size, self.offset)
            sizes = offset = _MAX32
        head = (_CENTRAL, _VERSION, _VERSION, self.flags, 0, 0, _DATE, self.crc, sizes, sizes)
        tail = (len(self.name), len(extra), 0, 0, 0, 0, offset)
        return struct.pack("<IHHHHHHIIIHHHHHII", *head, *tail) + self.name + extra


class Archive:
    """An archive that is put together member by member; `finish` returns what the file holds."""

    def __init__(self) -> None:
        self._contents: list[Content] = []
        self._members: list[_Member] = []
        self._position = 0

    def add(self, name: str, data: bytes, piece: Piece | None = None) -> None:
        """Add a member: some bytes, and the elements of a piece behind them."""
        size = len(data) + (piece.size_bytes if piece else 0)
        flags = _FLAGS_LATE if piece else _FLAGS_KNOWN
        raw = name.encode()
        if len(raw) > _MAX16:
            raise OptionError(
                f"a zip archive cannot hold the name {name!r:.80}, of {len(raw):,} bytes; expected "
                f"at most {_MAX16:,}. Rename that tensor, or exclude it"
            )
        member = _Member(raw, self._position, size, flags)
        member.see(data)
        self._put(_local_header(member, self._position + len(data)))
        if data:
            self._put(data)
        if piece is not None:
            self._put(replace(piece, see=member.see))
            self._put(Late(24 if member.is_large else 16, member.descriptor))
        self._members.append(member)

    def finish(self) -> list[Content]:
        """Return the contents of the file, the directory last."""
        members, start = self._members, self._position
        size = sum(len(member.entry()) for member in members)
        count, end = len(members), start + size
        is_large = count >= _MAX16 or size > _MAX32 - 1 or start > _MAX32 - 1
        tail = b""
        if is_large:
            form = "<IQHHIIQQQQ"
            tail = struct.pack(
                form, _END64, 44, _VERSION, _VERSION, 0, 0, count, count, size, start
            )
            tail += struct.pack("<IIQI", _LOCATOR, 0, end, 1)
            count, size, start = _MAX16, _MAX32, _MAX32
        tail += struct.pack("<IHHHHIIH", _END, 0, 0, count, count, size, start, 0)

        def directory() -> bytes:
            return b"".join(member.entry() for member in members) + tail

        return [*self._contents, Late(end - self._position + len(tail), directory)]

    def _put(self, content: Content) -> None:
        self._contents.append(content)
        size = len(content) if isinstance(content, bytes) else content.size_bytes
        self._position += size


def _local_header(member: _Member, position: int) -> bytes:
    """Return what stands before a member's bytes, so that its elements lie aligned.

    Args:
        position: of these in the file, if they stood right here.
    """
    extra, sizes = b"", member.size
    if member.is_large:
        extra, sizes = struct.pack("<HHQQ", _ZIP64_ID, 16, member.size, member.size), _MAX32
    rest = -(position + 30 + len(member.name) + len(extra) + 4) % ALIGN_BYTES
    extra += struct.pack("<HH", _PADDING_ID, rest) + b"Z" * rest
    crc = 0 if member.flags == _FLAGS_LATE else member.crc
    fields = (_LOCAL, _VERSION, member.flags, 0, 0, _DATE, crc, sizes, sizes)
    head = struct.pack("<IHHHHHIIIHH", *fields, len(member.name), len(extra))
    return head + member.name + extra
