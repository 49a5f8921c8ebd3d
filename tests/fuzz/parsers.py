"""What is not a payload, by both readers: one must not take what the other refuses.

Inputs are made so that most changes of them get behind the counts and checksums, which no chance
would get right. Each function gives what is wrong, as an `AssertionError`; any other error than
those of the readers is wrong too.
"""

import json
import re
import shutil
import struct
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import holdfast
from format import chains, reader
from format.forge import FOOTER_MAGIC, H128_BYTES, MANIFEST_MAGIC, Forgery, hash128
from holdfast.errors import CorruptError, HoldfastError, VersionError
from holdfast.format.header import decode_header
from holdfast.format.manifest import decode_manifest
from holdfast.format.table import decode_table
from holdfast.format.tiling import check_tiling

GOLDEN = Path(__file__).parents[1] / "format" / "golden" / "v1"
COUNTS_BYTES = 5  # how a table begins: whether it is MANIFEST's, and F, S, C, B
EMPTY = b'{"save_id":"00000000000000000000000000000000","step":null,"world_size":1,"mesh":null,'
EMPTY += b'"metrics":{},"written_by":"","chunk_elements":1,"features":[],"codecs":[],"tensors":[],'
EMPTY += b'"ties":[],"objects":[]}'
REFUSALS = (reader.Corrupt, reader.Newer)
# What the second reader leaves to Python's own checks.
UNCHECKED = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)
UNCHECKED += (struct.error, RecursionError, StopIteration)


TAG = re.compile(rb'"(\$[a-z0-9_]{1,40})":')
TAGS = {tag.encode() for tag in reader.further.TAGS}
TAGS |= {b"$int", b"$float", b"$bytes", b"$complex", b"$tuple", b"$dict"}


def verdict(error: Exception | None) -> str:
    """Return what a reader says: "good", "corrupt" or "newer"."""
    if error is None:
        return "good"
    return "newer" if isinstance(error, (VersionError, reader.Newer)) else "corrupt"


def header(data: bytes) -> None:
    """A JSON header, its values included: both readers must say the same."""
    data += b" " * (-len(data) % 8)
    ours = theirs = None
    try:
        decode_header(data)
    except HoldfastError as error:
        ours = error
    try:
        reader.read_objects(reader.read_header(data))
    except (*REFUSALS, *UNCHECKED) as error:
        theirs = error
    if ours and theirs and {*TAG.findall(data)} - TAGS:
        return  # with another fault beside an unknown tag, either may be found first
    assert verdict(ours) == verdict(theirs), f"{ours!r}, the other reader: {theirs!r}"


def value(data: bytes) -> None:
    """A value of an object, in a header that has nothing else: both readers must say the same.

    Whichever tags it has: of a header that names the feature `values`, and of one that does not.
    """
    head, _, tail = EMPTY.partition(b'"objects":[')
    text = head + b'"objects":[{"path":["v"],"value":' + data + b"}" + tail
    header(text)
    header(text.replace(b'"features":[]', b'"features":[{"name":"values","since":"0.1.0"}]', 1))


def table(data: bytes) -> None:
    """A table: what is taken must be taken by the second reader, which checks less of it here."""
    magic, content = table_of(data)
    error: Exception | None = None
    try:
        if magic == MANIFEST_MAGIC:
            check_tiling(decode_manifest(content, "it"))
        else:
            decode_table(magic, content)
    except HoldfastError as refused:
        error = refused
    if error is None and magic == MANIFEST_MAGIC:
        reader.read_table(content, magic)


def table_of(data: bytes) -> tuple[bytes, bytes]:
    """Put a table together: the counts of rows, the JSON text up to a byte 0, the columns."""
    flags, *counts = data[:COUNTS_BYTES].ljust(COUNTS_BYTES, b"\0")
    text, _, columns = data[COUNTS_BYTES:].partition(b"\0")
    text += b" " * (-len(text) % 8)
    sizes = (28, 32, 16, 8)
    need = sum(size * count for size, count in zip(sizes, counts, strict=True))
    body = text + columns[:need].ljust(need, b"\0")
    magic = FOOTER_MAGIC if flags & 1 else MANIFEST_MAGIC
    total = 72 + len(body) + H128_BYTES
    content = struct.pack("<8s2I7Q", magic, 1, 0, total, len(text), *counts, 0) + body
    return magic, content + hash128(content)


def table_input(content: bytes) -> bytes | None:
    """Return the input that makes a table, where it is not too large for one."""
    magic, *_, size, files, shards, chunks, boxes, packed = struct.unpack_from("<8s2I7Q", content)
    counts = (files, shards, chunks, boxes)
    body = content[72:-H128_BYTES]
    body = chains.unpack(body, packed, len(body)) if packed == 0 else body
    if packed or max(counts) > 255:
        return None
    head = bytes([magic == FOOTER_MAGIC, *counts])
    return head + body[:size].rstrip() + b"\0" + body[size:]


class Directory:
    """A small checkpoint, changed here and there with its checksums made right: both readers."""

    CHANGES_MAX = 4

    def __init__(self, name: str = "boxes") -> None:
        self.root = Path(mkdtemp(prefix="holdfast-fuzz-", dir=_memory()))
        self.source = GOLDEN / name
        self(b"")  # what is imported takes longer than an input may

    def close(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.root, ignore_errors=True)

    def __call__(self, data: bytes) -> None:
        """Change the checkpoint as an input says, seven bytes a change; read it twice."""
        forgery, path = Forgery.read(self.source), self.root / "it"
        shutil.rmtree(path, ignore_errors=True)
        for at in range(0, min(len(data) - 6, 7 * self.CHANGES_MAX), 7):
            change(forgery, *struct.unpack_from("<BBBi", data, at))
        try:
            forgery.write(path)
        except struct.error:
            return  # a number that has no place in its column
        ours, theirs = our_words(path), their_words(path)
        assert ours == theirs, f"{ours}, the other reader: {theirs}"


def change(forgery: Forgery, what: int, which: int, where: int, value: int) -> None:
    """Change a row, a byte or a field; of MANIFEST, of a footer, or of both alike."""
    file = forgery.files[which % len(forgery.files)]
    tables = [[forgery.manifest], [file.footer], [forgery.manifest, file.footer]][what // 8 % 3]
    if what % 8 < 4:
        for one in tables:
            names = [name for name, rows in one.columns.items() if rows]
            name = names[where % len(names)]
            rows = one.columns[name]
            old = rows[which % len(rows)]
            if isinstance(old, bytes):
                rows[which % len(rows)] = struct.pack("<q8x", value)
            else:
                rows[which % len(rows)] = old + value if what % 8 < 2 else value
            if name in ("file.bytes", "file.footer_checksum", "chunk.checksum"):
                forgery.kept.add(name)
    elif what % 8 == 4:
        forgery.set_head(which % len(forgery.files), where % 56, bytes([value & 255]))
    elif what % 8 == 5 and file.body:
        at = 64 + (where << 8 | value & 255) % len(file.body)
        forgery.set_body(which % len(forgery.files), at, bytes([value >> 8 & 255]))
    elif what % 8 == 6:
        file.trailer[where % 4] = [value, value, value, b"\x89HFE\r\n\x1a\n"][where % 4]
        file.trailer = {key: n for key, n in file.trailer.items() if key == 3 or n >= 0}
    else:
        for one in tables:
            if not isinstance(one.header, bytes):
                _change_header(one.header, which, where, value)


def _change_header(values: dict[str, Any], which: int, where: int, value: int) -> None:
    keys = sorted(values)
    key = keys[where % len(keys)]
    if isinstance(values[key], list) and values[key]:
        row = values[key][which % len(values[key])]
        if isinstance(row, dict):
            inner = sorted(row)[value % len(row)]
            row[inner] = [value, str(value), [value], None, 0][which % 5]
            return
    values[key] = [value, str(value), None, [], {}, values[keys[which % len(keys)]]][which % 6]


def our_words(path: Path) -> str:
    """Return what holdfast says of a checkpoint, and the bytes of its tensors."""
    try:
        with holdfast.open(path) as checkpoint:
            if checkpoint.verify(deep=True):
                return "corrupt"
            found = checkpoint.tensors(checkpoint.names())
            return "good " + str(sorted(bytes(t.untyped_storage()).hex() for t in found.values()))
    except (CorruptError, VersionError) as error:
        return verdict(error)


def their_words(path: Path) -> str:
    """Return the same of the second reader."""
    try:
        tensors = reader.read(path)["tensors"]
    except (*REFUSALS, *UNCHECKED) as error:
        return verdict(error)
    return "good " + str(sorted(content.hex() for _, _, content in tensors.values()))


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


OF_TORCH = re.compile(rb'"\$(dtype|device|size)"')  # which the second reader takes for texts


def seeds(target: str) -> list[bytes]:
    """Return the inputs that the golden files give."""
    found = []
    if target == "checkpoint":
        return [bytes(7), bytes(range(21))]
    if target == "value":
        golden = [Forgery.read(GOLDEN / name).header for name in ("objects", "further-values")]
        values = [each["value"] for header in golden for each in header["objects"]]
        texts = [json.dumps(value, separators=(",", ":")).encode() for value in values]
        return [text for text in texts if OF_TORCH.search(text) is None]
    for manifest in sorted(GOLDEN.glob("*/MANIFEST")):
        forgery = Forgery.read(manifest.parent)
        tables = [forgery.manifest, *(file.footer for file in forgery.files)]
        for one in tables:
            one.pack = None
            content = one.encode()
            data = table_input(content)
            if data is None or len(data) > 4096:
                continue
            found.append(data if target == "table" else data[COUNTS_BYTES:].partition(b"\0")[0])
    return sorted(set(found))
