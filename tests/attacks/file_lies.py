"""Lies in data files: headers, footers and trailers that say another thing than MANIFEST."""

from format.forge import FOOTER_MAGIC, MANIFEST_MAGIC, Forgery

from .lies import footer_column, footer_key, head, lie, trailer

head("a header of another magic", 0, MANIFEST_MAGIC, "header: byte 3 differs")
head("a header of a newer version", 8, b"\x02", "format version 2|header: byte 8 differs")
head("a header of version 0", 8, b"\x00", "header: byte 8 differs")
head("a header of another rank", 12, b"\x01", "header: byte 12 differs")
head("a header of another number", 16, b"\x01", "header: byte 16 differs")
head("a header with something in its zeros", 20, b"\x01", "header: byte 20 differs")
head("a header of another save", 24, b"\xff" * 16, "header: byte 2\\d differs")
head("a header with something at its end", 55, b"\x01", "header: byte 55 differs")


@lie("a header of another checksum", "header: byte 56 differs")
def _(forgery: Forgery) -> None:
    head = forgery.files[0].head
    forgery.files[0].head = head[:56] + bytes([head[56] ^ 1]) + head[57:]


TRAILER = "trailer: footer of .* do not fit a file of 916 bytes"
trailer("a footer that begins elsewhere", 0, lambda offset: offset - 64, TRAILER)
trailer("a footer off the grid", 0, lambda offset: offset + 8, TRAILER)
trailer("a footer at 2^64 - 64", 0, lambda offset: 2**64 - 64, TRAILER)
trailer("a footer of 2^63 bytes", 1, lambda offset: 2**63, TRAILER)
trailer("a footer of another checksum", 2, lambda offset: 5, "another footer checksum than")
trailer("a trailer of another magic", 3, lambda offset: FOOTER_MAGIC, TRAILER)


@lie("a footer that begins and ends elsewhere", "footer begins at 192, its payloads end at 198")
def _(forgery: Forgery) -> None:
    file = forgery.files[0]
    file.trailer |= {0: 192, 1: len(file.footer.encode()) + 64}


@lie("a footer 4 KiB behind its payloads", "footer begins at 4352, its payloads end at 198")
def _(forgery: Forgery) -> None:
    forgery.files[0].body += bytes(4096)


DIFFERS = "its footer and MANIFEST differ in"
footer_column("a footer of another size", "file.bytes", 0, 917, f"{DIFFERS} file_bytes")
footer_column("a footer that checks itself", "file.footer_checksum", 0, 5, "file_footer_checksum")
footer_column("a footer of another rank", "file.rank", 0, 1, f"{DIFFERS} file_rank")
footer_column("a footer of another number", "file.number", 0, 1, f"{DIFFERS} file_number")
footer_column("a footer of other chunk counts", "file.chunks", 0, 2, f"{DIFFERS} file_chunks")
footer_column("a footer of another digest", "shard.digest", 0, bytes(16), "shard_digest")
footer_column("a footer of another box", "shard.box", 2, 1, f"{DIFFERS} shard_box")
footer_column("a footer of another tensor", "shard.tensor", 0, 1, f"{DIFFERS} shard_tensor")
footer_column("a footer of tensor 2^32 - 1", "shard.tensor", 0, 2**32 - 1, "shard_tensor")
footer_column("a footer of another file", "shard.file", 0, 1, f"{DIFFERS} shard_file")
footer_column("a footer of other rows", "shard.first_chunk", 0, 1, f"{DIFFERS} shard_first_chunk")
footer_column("a footer of other row counts", "shard.chunks", 0, 1, f"{DIFFERS} shard_chunks")
footer_column("a footer of other checksums", "chunk.checksum", 0, 5, f"{DIFFERS} chunk_checksum")
footer_column("a footer of another mode", "chunk.size_mode", 0, 1 << 24 | 16, "chunk_size_mode")
footer_column("a footer of other offsets", "chunk.offset", 0, 9, f"{DIFFERS} chunk_offset")

footer_key("a footer of another save", "save_id", "ab" * 16, f"{DIFFERS} save_id")
footer_key("a footer of another step", "step", 8, f"{DIFFERS} step")
footer_key("a footer of another world", "world_size", 3, f"{DIFFERS} world_size")
footer_key("a footer of other metrics", "metrics", {"loss": 1}, f"{DIFFERS} metrics")
footer_key("a footer of other chunks", "chunk_elements", 5, f"{DIFFERS} chunk_elements")
footer_key("a footer of another mesh", "mesh", {"shape": [2], "names": ["dp"]}, f"{DIFFERS} mesh")
footer_key("a footer of no tensors", "tensors", [], r"differ in .*tensors|tie names tensor")
footer_key("a footer of no ties", "ties", [], f"{DIFFERS} ties")
footer_key("a footer of objects", "objects", [{"path": ["v"], "value": 1}], f"{DIFFERS} objects")
footer_key("a footer of an unknown feature", "features", [{"name": "x", "since": "9"}], "feature")
footer_key("a footer of an unknown codec", "codecs", [{"name": "zip"}], "codec 'zip'")
footer_key("a footer with an unknown key", "more", 1, "does not have the keys of version 1")


@lie("a footer of a newer version", "footer is of another version|format version 2")
def _(forgery: Forgery) -> None:
    forgery.files[0].footer.preamble[1] = 2


@lie("a footer that is a MANIFEST", "its magic is 8948464d")
def _(forgery: Forgery) -> None:
    forgery.files[0].footer.magic = MANIFEST_MAGIC


@lie("a footer of more rows than it has", r"preamble does not fit its \d+ bytes")
def _(forgery: Forgery) -> None:
    forgery.files[0].footer.preamble[7] = 2**60 + 3
