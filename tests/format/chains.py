"""What only some checkpoints have, for the independent reader: packed tables, bases, losses.

Written from docs/format.md §6 alone.
"""

import json
import math
import re
import struct
import zlib
from pathlib import Path

import numpy as np
from xxhash import xxh3_128_intdigest


def hash128(content):
    return xxh3_128_intdigest(content).to_bytes(16, "little")


class Corrupt(Exception): ...  # A rule of a page is broken.


def check(condition, rule):
    if not condition:
        raise Corrupt(rule)


KNOWN = {"features": ("base", "losses", "values"), "codecs": ("raw", "lossless", "compact", "excp")}


def unpack(content, packed, size):
    if not packed:
        return content
    check(len(content) % 8 == 0 and size <= 2**30, "bytes of a packed table")
    check(len(content) < size <= 64 * len(content), "bytes of a packed table")
    stream = zlib.decompressobj()
    try:
        body = stream.decompress(content, size + 1)
    except zlib.error as error:
        raise Corrupt(f"packed table: {error}") from None
    rest = stream.unused_data
    check(stream.eof and len(body) == size and rest == bytes(len(rest) % 8), "packed table")
    return body


def check_further(header):
    check_base(header)
    check_losses(header)


def schema(header):
    """What the JSON header has besides."""
    loss = {"tensor": int} | dict.fromkeys(("squared_error", "largest_error", "energy"), float)
    known = {"base": {"name": str, "digest": str, "links": int}, "losses": [loss]}
    names = [feature["name"] for feature in header["features"]]
    check(len(set(names)) == len(names), "a feature stands twice")
    return {name: known[name] for name in names if name != "values"}


def check_losses(header):
    losses = header.get("losses", [{"tensor": -1}])
    last = -1
    for loss in losses if "losses" in header else ():
        numbers = [loss[key] for key in ("squared_error", "largest_error", "energy")]
        check(last < loss["tensor"] < len(header["tensors"]), "the tensor of a loss")
        check(all(0 <= number < math.inf for number in numbers), "a loss")
        last = loss["tensor"]
    check(losses, "no losses")


def without_losses(header):
    features = [
        feature for feature in header["features"] if feature["name"] not in ("losses", "values")
    ]
    return {key: header[key] for key in header if key != "losses"} | {"features": features}


def check_base(header):
    if "base" in header:
        name, digest, links = (header["base"][key] for key in ("name", "digest", "links"))
        good = 1 <= len(name.encode()) <= 255 and name not in (".", "..")
        check(good and not set("/\0") & set(name), "name of the base")
        check(re.fullmatch("[0-9a-f]{32}", digest) and 1 <= links <= 64, "digest or links")


def content_digest(header, files):
    index = {id(tensor): number for number, tensor in enumerate(header["tensors"])}
    shards = [shard for file in files for shard in file.shards]
    sides = [n for s in shards for n in (*(side.start for side in s.box), *lengths(s.box))]
    named = [[tensor[key] for key in ("path", "dtype", "shape")] for tensor in header["tensors"]]
    parts = [b"".join(shard.digest for shard in shards), struct.pack(f"<{len(sides)}q", *sides)]
    parts += [struct.pack(f"<{len(shards)}I", *(index[id(shard.tensor)] for shard in shards))]
    parts += [json.dumps(named, ensure_ascii=False, separators=(",", ":")).encode()]
    return hash128(b"".join(parts)).hex()


def signed(path, files):
    """The name of a SIGNATURE that is there, its bytes checked: §8, but for who has signed it."""
    place = Path(path, "SIGNATURE")
    if not (place.exists() or place.is_symlink()):
        return set()
    check(place.is_file() and not place.is_symlink(), "SIGNATURE is no file")
    rows = sum(len(file.chunks) for file in files)
    check(place.stat().st_size == 80 + 32 * rows + 32 + 64 + 16 <= 2**30, "bytes of SIGNATURE")
    content = place.read_bytes()
    check(content[:16] == b"\x89HFS\r\n\x1a\n" + struct.pack("<2I", 1, 0), "head of SIGNATURE")
    check(hash128(content[:-16]) == content[-16:], "H128 of SIGNATURE")
    return {"SIGNATURE"}


def lengths(box):
    return [side.stop - side.start for side in box]


def read_base(path, header, read, links):
    """The tensors of the base, by the JSON text of their paths; ``read`` gives a checkpoint."""
    if "base" not in header:
        return {}
    check(header["base"]["links"] < links, "links of a chain")
    base, place = header["base"], Path(path).absolute().parent / header["base"]["name"]
    check((place / "MANIFEST").exists(), "the base is missing")
    found = read(place, base["links"])
    check(found["digest"] == base["digest"], "the base holds something else")
    return found["tensors"]


def elements_of_base(base, shard, first, size):
    """What the base has in the place of a chunk."""
    tensor = shard.tensor
    path = json.dumps(tensor["path"], ensure_ascii=False, separators=(",", ":"))
    check(path in base, "a tensor is not in the base")
    dtype, shape, dense = base[path]
    check((dtype, list(shape)) == (tensor["dtype"], tensor["shape"]), "dtype or shape of the base")
    item = len(dense) // math.prod(shape)
    values = np.frombuffer(dense, f"V{item}").reshape(shape)[shard.box]
    return values.tobytes()[first * item :][:size]
