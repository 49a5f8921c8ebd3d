"""An independent reader and checker of holdfast checkpoints, written from docs/format.md alone.

It follows the order of that page (§ are its sections) and always makes the full check of §7.
"""

import json
import math
import re
import struct
import sys
from collections import namedtuple
from itertools import accumulate, islice
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest as hash64

sys.path.append(str(Path(__file__).parent))  # so that payloads is found from everywhere

import chains
import further
import payloads
from chains import Corrupt, check, hash128
from values import Newer, decode, fits


class NotACheckpoint(Exception): ...  # There is no MANIFEST.


# § 1. A checkpoint is a directory.
MARKER = b"# holdfast checkpoint: see MANIFEST. Read it with holdfast, not with torch alone.\n"


def check_names(root, save_id, named):
    for of_dcp in (entry for entry in root.iterdir() if entry.name.endswith(".distcp")):
        check(False, f"{of_dcp.name!r} is of a checkpoint of PyTorch DCP")
    if (marker := root / ".metadata").is_symlink() or marker.exists():
        check(marker.is_file() and not marker.is_symlink(), ".metadata is no regular file")
        check(marker.read_bytes() == MARKER, ".metadata is not the marker")
    found, dead, ours = set(), rf"data/(?!{save_id}/)[^/]+/", ("MANIFEST", "SIGNATURE", "data")
    entries = [entry for entry in root.iterdir() if entry.name in ours]
    for entry in entries:  # The list grows by what is in its directories.
        name, link = entry.relative_to(root).as_posix(), entry.is_symlink()
        if entry.is_dir() and not link:
            known = name in ("data", f"data/{save_id}")
            check(known or re.match(dead, name + "/"), f"{name!r} is an unknown directory")
            entries.extend(entry.iterdir() if known else ())
        else:
            found |= {name} if entry.is_file() and not link else {f"{name} (no regular file)"}
    check(found == named, f"missing or unknown files: {sorted(found ^ named)}")


# § 2. Dtypes.
NAMES = {
    1: "bool u8 i8 f4_e2m1fn_x2 f8_e4m3fn f8_e5m2 f8_e4m3fnuz f8_e5m2fnuz f8_e8m0fnu",
    2: "u16 i16 f16 bf16",
    4: "u32 i32 f32 c32",
    8: "u64 i64 f64 c64",
    16: "c128",
}
DTYPE_BYTES = {name: size for size, names in NAMES.items() for name in names.split()}

# § 3. Tensors, shards, chunks. A box is a slice for each dimension.
Shard = namedtuple("Shard", "tensor first_chunk chunks digest box")


def dense_tensor(tensor, shards):
    shape, element_bytes = tensor["shape"], DTYPE_BYTES[tensor["dtype"]]
    volume = sum(len(content) for _, content in shards)
    check(volume == math.prod(shape) * element_bytes, "the shards do not cover the tensor")
    if volume == 0:
        return tensor["dtype"], tuple(shape), b""
    # What is allocated is as large as what was read. Plain bytes keep every bit pattern.
    dense, covered = np.zeros(shape, f"V{element_bytes}"), np.zeros(shape, bool)
    for shard, content in shards:
        check(not covered[shard.box].any(), "two shards of a tensor overlap")
        covered[shard.box] = True
        dense[shard.box] = np.frombuffer(content, dense.dtype).reshape(dense[shard.box].shape)
    return tensor["dtype"], tuple(shape), dense.tobytes()


# § 4. Data file.
MAGIC = b"\x89HF%b\r\n\x1a\n"
File = namedtuple("File", "bytes footer_checksum rank number chunk_rows shards chunks")


def read_data_file(path, header, file, base):
    """Check every byte of the file; give pairs of its shards and their bytes."""
    check(96 <= path.stat().st_size == file.bytes <= 2**38, "bytes of a data file")
    content, save_id = path.read_bytes(), bytes.fromhex(header["save_id"])
    # No field of the header is free, MANIFEST gives them all.
    fields = struct.pack("<8s4I16s16x", MAGIC % b"D", 1, file.rank, file.number, 0, save_id)
    check(content[:64] == fields + struct.pack("<Q", hash64(fields)), "header of a data file")
    footer_start, *rest = struct.unpack("<3Q8s", content[-32:])
    expected = [file.bytes - 32 - footer_start, file.footer_checksum, MAGIC % b"E"]
    check(rest == expected and footer_start >= 64 and footer_start % 64 == 0, "trailer")
    footer, seed = content[footer_start:-32], save_id + struct.pack("<II", file.rank, file.number)
    check(hash64(footer, hash64(seed + b"\xff" * 8)) == file.footer_checksum, "footer checksum")
    try:
        footer_header, footer_files = read_table(footer, MAGIC % b"F")
    except Newer as error:
        raise Corrupt(f"footer: {error}") from None
    check(footer_files == [file._replace(bytes=0, footer_checksum=0)], "rows of footer")
    own = {id(shard.tensor) for shard in file.shards}
    kept = [index for index, tensor in enumerate(header["tensors"]) if id(tensor) in own]
    tensors, ties = [header["tensors"][index] for index in kept], header["ties"]
    ties = [tie | {"tensor": kept.index(tie["tensor"])} for tie in ties if tie["tensor"] in kept]
    changed = chains.without_losses(header) | {"tensors": tensors, "ties": ties, "objects": []}
    changed["codecs"] = payloads.renumbered(header["codecs"], kept)
    check(footer_header == changed, "JSON headers of footer and MANIFEST")
    stored, end, chunks = {}, 64, enumerate(file.chunks)
    for number, (checksum, length, start, mode) in sorted(chunks, key=lambda pair: pair[1][2]):
        if length == 0:
            check(start == 0, "an empty payload has a place")
            start = end
        check(end <= start <= footer_start - length, "a payload overlaps or is out of place")
        check(length < 65536 or mode or start % 4096 == 0, "a payload is not aligned")
        check(content.count(0, end, start) == start - end < 4096, "a gap is long or not zero")
        end = start + length
        payload = stored[number] = content[start:end]
        check(hash64(payload, hash64(seed + struct.pack("<Q", number))) == checksum, "checksum")
    check(content.count(0, end, footer_start) == footer_start - end < 4096, "the last gap")
    for shard, pieces in payloads.decode_file(header, file, stored, DTYPE_BYTES, base):
        check(hash128(b"".join(map(hash128, pieces))) == shard.digest, "shard digest")
        yield shard, b"".join(pieces)


# § 5. MANIFEST is read at the end of this module, by read(). § 6. Table.
def read_table(content, magic):
    """The JSON header and the files, each with its shards and chunks."""
    check(88 <= len(content) <= 2**30 and content[:8] == magic, "bytes or magic of a table")
    version, zero, size, J, F, S, C, B, P = struct.unpack("<2I7Q", content[8:72])
    if version > 1:
        raise Newer(f"format version {version}")
    N = J + 28 * F + 32 * S + 16 * C + 8 * B
    check((version, zero, J % 8) == (1, 0, 0) and J <= 2**28, "preamble")
    check(len(content) == size == 88 + (P or N), "counts of a table")
    check(hash128(content[:-16]) == content[-16:], "H128 of a table")
    body = chains.unpack(content[72:-16], P, N)
    layout = f"<{2 * F}Q{'16s' * S}{B}q{C}Q{3 * F + 4 * S + 2 * C}I"
    numbers = iter(struct.unpack(layout, body[J:]))
    columns = [list(islice(numbers, n)) for n in (F, F, S, B, C, F, F, F, S, S, S, S, C, C)]
    header, boxes, last_file = read_header(body[:J]), iter(columns[3]), 0
    rows = zip(columns[4], columns[12], columns[13], strict=True)
    chunks = iter([(each, n & 0xFFFFFF, 64 * units, n >> 24) for each, n, units in rows])
    files = [File(*row, [], []) for row in zip(*columns[:2], *columns[5:8], strict=True)]
    for tensor, file, first, count, digest in zip(*columns[8:12], columns[2], strict=True):
        check(last_file <= file < len(files), "shard.file is out of range or order")
        check(tensor < len(header["tensors"]), "shard.tensor is out of range")
        last_file, tensor, file = file, header["tensors"][tensor], files[file]
        shape, element_bytes = tensor["shape"], DTYPE_BYTES[tensor["dtype"]]
        sides = zip(*(list(islice(boxes, len(shape))) for _ in range(2)), shape, strict=False)
        box = tuple(slice(low, low + n) for low, n, end in sides if 0 <= low < low + n <= end)
        check(len(box) == len(shape), "box of a shard")
        elements, most = math.prod(side.stop - side.start for side in box), header["chunk_elements"]
        most = (most + 1) // 2 if element_bytes == 16 else most
        own, expected = list(islice(chunks, count)), -(-elements // most)
        check((first, len(own), count) == (len(file.chunks), expected, expected), "chunk rows")
        sizes = [min(most, elements - at) * element_bytes for at in range(0, elements, most)]
        payloads.check_sizes(header["codecs"][tensor["codec"]]["name"], own, sizes)
        file.chunks.extend(own)
        file.shards.append(Shard(tensor, first, count, digest, box))
    check(next(boxes, None) is next(chunks, None) is None, "box numbers or chunks of no shard")
    check(all(len(file.chunks) == file.chunk_rows for file in files), "chunks of a file")
    return header, files


# § 6. JSON header.
SCHEMA = {"save_id": str, "world_size": int, "written_by": str, "chunk_elements": int}
SCHEMA |= {"features": [{"name": str, "since": str}], "codecs": [dict], "metrics": dict}
SCHEMA |= {"tensors": [{"path": list, "dtype": str, "shape": [int], "codec": int}]}
SCHEMA |= {"ties": [{"path": list, "tensor": int}], "objects": [{"path": list, "value": object}]}
SCHEMA |= {"mesh": object, "step": object}


def unique(pairs):
    check(len(dict(pairs)) == len(pairs), "a key stands twice in a JSON object")
    return dict(pairs)


def read_header(content):
    try:
        text = content.decode()
        check(not text.endswith(" " * 8), "spaces after the JSON header")
        brackets = re.sub(r'"(?:\\.|[^"\\])*"|[^][{}]', "", text)
        nesting = accumulate(1 if bracket in "[{" else -1 for bracket in brackets)
        check(max(nesting, default=0) <= 64, "nesting of the JSON header")
        # Where the text has NaN or Infinity, int() of that raises ValueError.
        header = json.loads(text, object_pairs_hook=unique, parse_constant=int)
        json.dumps(header, ensure_ascii=False).encode()  # Raises on a lone surrogate.
    except ValueError as error:
        raise Corrupt(f"JSON header: {error}") from None
    for name, known in chains.KNOWN.items():
        check(fits(header, dict) and fits(header.get(name), SCHEMA[name]), name)
        check(all(fits(entry.get("name"), str) for entry in header[name]), name)
        if any(entry["name"] not in known for entry in header[name]):
            raise Newer(f"{name}: {header[name]}")
    check(fits(header, SCHEMA | chains.schema(header)), "keys or types of the JSON header")
    chains.check_further(header)
    check(re.fullmatch("[0-9a-f]{32}", header["save_id"]), "save_id")
    check(header["step"] is None or (fits(header["step"], int) and header["step"] >= 0), "step")
    check(1 <= header["world_size"] < 2**32 and (header["step"] or 0) < 2**53, "integers")
    check(1 <= header["chunk_elements"] <= 2**20, "chunk_elements")
    mesh = {"shape": [], "names": []} if header["mesh"] is None else header["mesh"]
    same = fits(mesh, {"shape": [int], "names": [str]}) and len({*map(len, mesh.values())}) == 1
    check(same and all(0 <= n < 2**63 for n in mesh["shape"]), "mesh")
    check({type(n) for n in decode(header["metrics"]).values()} <= {int, float}, "metrics")
    for tensor in header["tensors"]:
        shape, element_bytes = tensor["shape"], DTYPE_BYTES.get(tensor["dtype"], 0)
        check(element_bytes and len(shape) <= 64 and min(shape, default=0) >= 0, "dtype or shape")
        check(math.prod(n or 1 for n in shape) * element_bytes < 2**63, "bytes of a tensor")
        check(0 <= tensor["codec"] < len(header["codecs"]), "codec of a tensor")
    payloads.check_codecs(header)
    check(all(0 <= tie["tensor"] < len(header["tensors"]) for tie in header["ties"]), "ties")
    texts = [path_text(entry) for name in ("tensors", "ties", "objects") for entry in header[name]]
    check(len(set(texts)) == len(texts), "two equal paths")
    return header


def read_objects(header):
    found = {path_text(entry): decode(entry["value"]) for entry in header["objects"]}
    named = "values" in [feature["name"] for feature in header["features"]]
    check(further.is_used(header["objects"]) == named, "the feature values")
    return found


# § 6. Paths.
def path_text(entry):
    key = r'("([^"\\]|\\.)*"|-?[0-9]+|\["(list|tuple)",[0-9]+\])'
    text = json.dumps(entry["path"], ensure_ascii=False, separators=(",", ":"))
    check(re.fullmatch(rf"\[{key}(,{key})*\]", text), "keys of a path")
    check(len(text.encode()) <= 4096 and len(entry["path"]) <= 128, "length of a path")
    check(all(-(2**63) <= k < 2**63 for k in entry["path"] if isinstance(k, int)), "an integer")
    return text


# § 7. What a reader checks.
def read(path, links=65):
    """Check every byte of the checkpoint, and give what it holds by the JSON text of the paths."""
    manifest = Path(path, "MANIFEST")
    if not (manifest.exists() or manifest.is_symlink()):
        raise NotACheckpoint(path)
    check(manifest.is_file() and manifest.stat().st_size <= 2**30, "MANIFEST: no file, or size")
    header, files = read_table(manifest.read_bytes(), MAGIC % b"M")
    numbered = [(file.rank, file.number) for file in files]
    check(sorted(set(numbered)) == numbered, "order of the files")
    check(max(numbered, default=(0,))[0] < header["world_size"], "a rank out of range")
    names = [f"data/{header['save_id']}/{rank:05d}-{number}.hf" for rank, number in numbered]
    check_names(Path(path), header["save_id"], {"MANIFEST", *names} | chains.signed(path, files))
    base = chains.read_base(path, header, read, links)
    shards = {id(tensor): [] for tensor in header["tensors"]}
    for name, file in zip(names, files, strict=True):
        for shard, content in read_data_file(Path(path, name), header, file, base):
            shards[id(shard.tensor)].append((shard, content))
    tensors = {path_text(each): dense_tensor(each, shards[id(each)]) for each in header["tensors"]}
    ties = {path_text(tie): list(tensors)[tie["tensor"]] for tie in header["ties"]}
    found = {"header": header, "tensors": tensors, "ties": ties, "objects": read_objects(header)}
    return found | {"digest": chains.content_digest(header, files)}


def main():
    try:
        print(*map(ascii, read(sys.argv[1])["tensors"]), "ok", sep="\n")
    except (Corrupt, Newer, NotACheckpoint) as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
