"""Lies in the columns of a MANIFEST: rows that name what is not there, or name it twice."""

import struct

from format.forge import Forgery

from .lies import HUGE, column, lie

column("ranks out of order", "file.rank", 0, 1, "files are not in order")
column("a rank that is not below world_size", "file.rank", 1, 2, "rank")
column("a file of more chunks than there are", "file.chunks", 0, 4, "not hold as many chunks")
column("a file of 2^32 - 1 chunks", "file.chunks", 1, 2**32 - 1, "not hold as many chunks")
column("a file of more than 256 GiB", "file.bytes", 0, 2**38 + 1, "a file passes 256 GiB")
column("a file of 2^64 - 1 bytes", "file.bytes", 0, 2**64 - 1, "a file passes 256 GiB")
column("a file shorter than its payloads", "file.bytes", 0, 200, "a payload leaves its file")
column("a file of no bytes", "file.bytes", 0, 0, "a payload leaves its file")
column("a file longer than it is", "file.bytes", 0, 4096, "has 916 bytes, MANIFEST says 4096")
column("another footer checksum", "file.footer_checksum", 0, 5, "another footer checksum than")
column("another shard digest", "shard.digest", 0, bytes(16), "differ in shard_digest")
column("another chunk checksum", "chunk.checksum", 3, 5, "MANIFEST says 0000000000000005|differ")
column("a shard of no tensor", "shard.tensor", 0, 3, "a shard names no tensor")
column("a shard of tensor 2^32 - 1", "shard.tensor", 0, 2**32 - 1, "a shard names no tensor")
column("a shard of another tensor", "shard.tensor", 2, 1, "boxes do not fit its shards")
column("a shard of no file", "shard.file", 2, 2, "a shard names no file")
column("a shard of an earlier file", "shard.file", 2, 0, "do not follow each other")
column("a shard whose rows leave a hole", "shard.first_chunk", 1, 3, "do not follow each other")
column("a shard whose rows overlap", "shard.first_chunk", 1, 1, "do not follow each other")
column("a shard at row 2^32 - 1", "shard.first_chunk", 2, 2**32 - 1, "do not follow each other")
column("a shard of no chunks", "shard.chunks", 2, 0, "do not follow each other")
column("a shard of 2^32 - 1 chunks", "shard.chunks", 2, 2**32 - 1, "do not follow each other")
column("a box at a negative place", "shard.box", 0, -1, "leaves the tensor")
column("a box of no elements", "shard.box", 2, 0, "leaves the tensor")
column("a box of negative elements", "shard.box", 2, -2, "leaves the tensor")
column("a box that leaves its tensor", "shard.box", 0, 2, "leaves the tensor")
column("a box that ends past 2^63", "shard.box", 2, HUGE, "leaves the tensor")
column("a box that overlaps another", "shard.box", 6, 1, r"overlap")
column("boxes that leave a hole", "shard.box", 9, 3, "cover 11 of 12|another size or mode")
column("a payload of another mode", "chunk.size_mode", 0, 16 | 1 << 24, "another size or mode")
column("a payload too short", "chunk.size_mode", 0, 15, "another size or mode")
column("a payload of no bytes", "chunk.size_mode", 0, 0, "an empty payload has an offset")
column("a payload of 16 MiB", "chunk.size_mode", 2, 2**24 - 1, "large payload is not aligned")
column("a payload in the header", "chunk.offset", 0, 0, "payloads overlap")
column("a payload on another", "chunk.offset", 1, 1, "payloads overlap")
column("a payload past its file", "chunk.offset", 2, 40, "a payload leaves its file")
column("a payload at 256 GiB", "chunk.offset", 2, 2**32 - 1, "a gap is too long")


@lie("two files of one rank and number", "files are not in order")
def _(forgery: Forgery) -> None:
    forgery.columns["file.rank"] = [0, 0]


@lie("a file that no row names", "not hold as many chunks|do not follow|no file|missing")
def _(forgery: Forgery) -> None:
    for name, rows in forgery.columns.items():
        if name.startswith("file."):
            rows.append({"file.rank": 1, "file.number": 1, "file.bytes": 500}.get(name, 0))


@lie("a shard too many", "boxes do not fit|do not follow")
def _(forgery: Forgery) -> None:
    for name in ("digest", "tensor", "file", "first_chunk", "chunks"):
        forgery.columns[f"shard.{name}"].append(forgery.columns[f"shard.{name}"][-1])


@lie("a chunk too many", "not hold as many chunks")
def _(forgery: Forgery) -> None:
    for name in ("checksum", "size_mode", "offset"):
        forgery.columns[f"chunk.{name}"].append(1)


@lie("a box number too many", "boxes do not fit its shards")
def _(forgery: Forgery) -> None:
    forgery.columns["shard.box"].append(1)


@lie("a box number too few", "boxes do not fit its shards")
def _(forgery: Forgery) -> None:
    forgery.columns["shard.box"].pop()


@lie("no rows at all", "cover 0 of 12 elements")
def _(forgery: Forgery) -> None:
    for rows in forgery.columns.values():
        rows.clear()


@lie("a shard of a tensor without elements", "leaves the tensor|boxes do not fit")
def _(forgery: Forgery) -> None:
    forgery.columns["shard.tensor"][2] = 2
    forgery.kept.add("shard.tensor")


@lie("the same box twice, and another missing", "overlap")
def _(forgery: Forgery) -> None:
    forgery.columns["shard.box"][6] = 0


@lie("chunks longer than the header says", "has 2 chunks|another size or mode|has 1 chunks")
def _(forgery: Forgery) -> None:
    for table in (forgery.manifest, *(file.footer for file in forgery.files)):
        table.header["chunk_elements"] = 8


@lie("a gap of 4,096 bytes, in both tables", "a gap is too long")
def _(forgery: Forgery) -> None:
    file = forgery.files[0]
    file.body = file.body[:128] + bytes(4096) + file.body[128:]
    for table in (forgery.manifest, file.footer):
        table.columns["chunk.offset"][2] += 64


@lie("payloads in another order than their bytes", "checksum .* MANIFEST says")
def _(forgery: Forgery) -> None:
    # Right in every table, but the checksums are those of the old places.
    rows = forgery.columns["chunk.offset"]
    rows[0], rows[1] = rows[1], rows[0]
    forgery.files[0].footer.columns["chunk.offset"][:2] = rows[:2]
    forgery.kept.add("chunk.checksum")
    forgery.footer_kept.add("chunk.checksum")


@lie("a bit that is not zero in a gap", "padding before it, from byte 80, is not zero")
def _(forgery: Forgery) -> None:
    forgery.set_body(0, 80, struct.pack("<B", 4))


@lie("a bit that is not zero before the footer", "padding before its footer, from byte 198")
def _(forgery: Forgery) -> None:
    forgery.set_body(0, 255, b"\x80")


@lie("2^40 elements in one chunk", "a shard of w has 2 chunks")
def _(forgery: Forgery) -> None:
    forgery.header["tensors"][0]["shape"] = [3, 2**40]
    forgery.columns["shard.box"][3] = forgery.columns["shard.box"][9] = 2**40
