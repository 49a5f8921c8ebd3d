"""Checkpoints taken apart, altered and put together again with every checksum right.

Written from docs/format.md alone: what is forged here must not be held up by a checksum, nor by
what our own writer would refuse to write.
"""

import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest as hash64
from xxhash import xxh3_128_intdigest

MANIFEST_MAGIC = b"\x89HFM\r\n\x1a\n"
FOOTER_MAGIC = b"\x89HFF\r\n\x1a\n"
TRAILER_MAGIC = b"\x89HFE\r\n\x1a\n"
HEAD_BYTES, TRAILER_BYTES, PREAMBLE_BYTES, H128_BYTES = 64, 32, 72, 16

# (name, struct letter, which count), in the order of docs/format.md §6.
COLUMNS = (
    ("file.bytes", "Q", "F"),
    ("file.footer_checksum", "Q", "F"),
    ("shard.digest", "16s", "S"),
    ("shard.box", "q", "B"),
    ("chunk.checksum", "Q", "C"),
    *((f"file.{name}", "I", "F") for name in ("rank", "number", "chunks")),
    *((f"shard.{name}", "I", "S") for name in ("tensor", "file", "first_chunk", "chunks")),
    *((f"chunk.{name}", "I", "C") for name in ("size_mode", "offset")),
)


def hash128(content: bytes) -> bytes:
    return xxh3_128_intdigest(content).to_bytes(16, "little")


@dataclass
class Table:
    """A table of §6.

    Attributes:
        header: the JSON header; as bytes, it is written as it is.
        columns: rows by column name.
        preamble: fields to write instead of the right ones, by number: 0 magic … 9 bytes packed.
        pack: makes of a body what is stored in its place.
    """

    magic: bytes
    header: Any
    columns: dict[str, list[Any]]
    preamble: dict[int, Any] = field(default_factory=dict)
    pack: Callable[[bytes], bytes] | None = None

    @staticmethod
    def parse(content: bytes) -> "Table":
        magic, _, _, _, size, *numbers, packed = struct.unpack_from("<8s2I7Q", content)
        counts = dict(zip("FSCB", numbers, strict=True))
        body = content[PREAMBLE_BYTES:-H128_BYTES]
        if packed:
            body = zlib.decompressobj().decompress(body)
        at, columns = size, {}
        for name, letter, count in COLUMNS:
            one = struct.calcsize("<" + letter)
            rows = struct.iter_unpack("<" + letter, body[at : at + counts[count] * one])
            columns[name] = [row for (row,) in rows]
            at += counts[count] * one
        return Table(magic, json.loads(body[:size]), columns)

    def encode(self) -> bytes:
        text = self.header
        if not isinstance(text, bytes):
            text = json.dumps(text, ensure_ascii=False, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
        body = text + b"".join(
            struct.pack("<" + letter, row)
            for name, letter, _ in COLUMNS
            for row in self.columns[name]
        )
        lengths = {count: len(self.columns[name]) for name, _, count in COLUMNS}
        packed = 0
        if self.pack:
            body = self.pack(body)
            packed = len(body)
        total = PREAMBLE_BYTES + len(body) + H128_BYTES
        fields = [self.magic, 1, 0, total, len(text), *(lengths[c] for c in "FSCB"), packed]
        for index, value in self.preamble.items():
            fields[index] = value
        content = struct.pack("<8s2I7Q", *fields) + body
        return content + hash128(content)


@dataclass
class DataFile:
    """One data file: its first 64 bytes, all up to the footer, the footer; offsets as in the file.

    Attributes:
        trailer: fields to write instead of the right ones: 0 footer offset … 3 magic.
    """

    name: str
    rank: int
    number: int
    head: bytes
    body: bytes
    footer: Table
    trailer: dict[int, Any] = field(default_factory=dict)


@dataclass
class Forgery:
    """A checkpoint in parts; `write` puts it together.

    Attributes:
        kept: columns of the MANIFEST that `write` leaves as they are. The others that depend on
            the data files (file.bytes, file.footer_checksum, chunk.checksum) are made right.
        footer_kept: the same for footers (chunk.checksum alone).
    """

    manifest: Table
    files: list[DataFile]
    kept: set[str] = field(default_factory=set)
    footer_kept: set[str] = field(default_factory=set)
    tail: bytes = b""

    @staticmethod
    def read(path: Path) -> "Forgery":
        manifest = Table.parse((path / "MANIFEST").read_bytes())
        save_id, files = manifest.header["save_id"], []
        for rank, number in zip(
            manifest.columns["file.rank"], manifest.columns["file.number"], strict=True
        ):
            name = f"data/{save_id}/{rank:05d}-{number}.hf"
            content = (path / name).read_bytes()
            (offset,) = struct.unpack_from("<Q", content, len(content) - TRAILER_BYTES)
            footer = Table.parse(content[offset:-TRAILER_BYTES])
            head, body = content[:HEAD_BYTES], content[HEAD_BYTES:offset]
            files.append(DataFile(name, rank, number, head, body, footer))
        return Forgery(manifest, files)

    @property
    def header(self) -> Any:
        return self.manifest.header

    @property
    def columns(self) -> dict[str, list[Any]]:
        return self.manifest.columns

    def set_head(self, file: int, offset: int, value: bytes) -> None:
        """Overwrite bytes of a file's header and make its checksum right."""
        head = bytearray(self.files[file].head)
        head[offset : offset + len(value)] = value
        self.files[file].head = bytes(head[:56]) + struct.pack("<Q", hash64(bytes(head[:56])))

    def set_body(self, file: int, offset: int, value: bytes) -> None:
        """Overwrite bytes of a file, counted from its start, between header and footer."""
        body, at = bytearray(self.files[file].body), offset - HEAD_BYTES
        body[at : at + len(value)] = value
        self.files[file].body = bytes(body)

    def write(self, path: Path) -> None:
        path.mkdir(parents=True)
        first_row = 0
        for index, file in enumerate(self.files):
            self._seal_chunks(file, first_row)
            first_row += len(file.footer.columns["chunk.offset"])
            content = self._content(index, file)
            (path / file.name).parent.mkdir(parents=True, exist_ok=True)
            (path / file.name).write_bytes(content)
        (path / "MANIFEST").write_bytes(self.manifest.encode() + self.tail)

    def _seal_chunks(self, file: DataFile, first_row: int) -> None:
        content, rows = file.head + file.body, file.footer.columns
        for number, (size_mode, units) in enumerate(
            zip(rows["chunk.size_mode"], rows["chunk.offset"], strict=True)
        ):
            payload = content[64 * units : 64 * units + (size_mode & 0xFFFFFF)]
            checksum = hash64(payload, self._seed(file, number))
            if "chunk.checksum" not in self.footer_kept:
                rows["chunk.checksum"][number] = checksum
            if "chunk.checksum" not in self.kept and first_row + number < len(
                self.columns["chunk.checksum"]
            ):
                self.columns["chunk.checksum"][first_row + number] = checksum

    def _content(self, index: int, file: DataFile) -> bytes:
        offset = HEAD_BYTES + len(file.body)
        size = offset + len(file.footer.encode()) + TRAILER_BYTES
        footer = file.footer.encode()
        checksum = hash64(footer, self._seed(file, 2**64 - 1))
        fields = [offset, len(footer), checksum, TRAILER_MAGIC]
        for place, value in file.trailer.items():
            fields[place] = value
        for name, value in (("file.bytes", size), ("file.footer_checksum", checksum)):
            if name not in self.kept and index < len(self.columns[name]):
                self.columns[name][index] = value
        return file.head + file.body + footer + struct.pack("<3Q8s", *fields)

    def _seed(self, file: DataFile, chunk: int) -> int:
        save_id = bytes.fromhex(file.name.split("/")[1])
        return hash64(save_id + struct.pack("<IIQ", file.rank, file.number, chunk))
