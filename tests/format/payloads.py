"""An independent decoder of payloads, written from docs/codecs.md alone (§ are its sections)."""

import math

import centres
import chains
import numpy as np
import replays
import steps
from chains import check, hash128
from symbols import Bytes, means, symbols

FLOATS = {"f64": "<u8", "f32": "<u4", "c64": "<u4", "c128": "<u8"} | dict.fromkeys(
    ("f16", "bf16", "c32"), "<u2"
)


# § 1. Groups.
ROLES = {"exp_avg_sq": ("f32",), "exp_avg": ("f32",), "master": ("f32",)}
ROLES |= {"weight": ("f32", "bf16", "f16")}
REFERENCES = {4: ["exp_avg_sq"], 5: ["master"], 10: ["exp_avg_sq"], 12: ["exp_avg_sq"]}
REFERENCES |= {14: ["master", "weight"], 15: ["exp_avg"], 9: ["exp_avg"], 16: ["exp_avg_sq"]}
MODES = {"raw": {0}, "lossless": {*range(8), 9, 16}, "excp": {*range(8), 13, 14, 15}}
MODES |= {"compact": {*range(8), 8, 10, 11, 12, 17}}


def check_codecs(header):
    seen = []
    for codec in header["codecs"]:
        keys = {"name"} if codec["name"] == "raw" else {"name", "groups"}
        check(codec.keys() == keys, "keys of a codec")
        groups = codec.get("groups", [])
        check(isinstance(groups, list), "groups")
        for group in groups:
            check(
                isinstance(group, dict) and len(group) > 1 and set(group) <= set(ROLES), "a group"
            )
            numbers = list(group.values())
            check(all(type(n) is int and 0 <= n < len(header["tensors"]) for n in numbers), "group")
            members = {role: header["tensors"][n] for role, n in group.items()}
            check(all(t["dtype"] in ROLES[role] for role, t in members.items()), "dtype in a group")
            check(len({tuple(t["shape"]) for t in members.values()}) == 1, "shapes of a group")
            seen += numbers
    check(len(set(seen)) == len(seen), "a tensor in two groups")


def renumbered(codecs, kept):
    """The codecs of a footer, which has these tensors of MANIFEST's."""
    anew, found = {number: place for place, number in enumerate(kept)}, []
    for codec in codecs:
        groups = [{r: anew[n] for r, n in g.items() if n in anew} for g in codec.get("groups", [])]
        own = {"groups": [group for group in groups if len(group) > 1]}
        found.append(codec | (own if "groups" in codec else {}))
    return found


def check_sizes(codec, chunks, sizes):
    for (_, length, _, mode), size in zip(chunks, sizes, strict=True):
        known = mode in MODES[codec] and (mode == 0 or length < size)
        check(known and (length == 0) == (mode == 5), "payload bytes or mode of a chunk")
        check(mode != 0 or length == size, "payload bytes of a chunk")


def references(header, shards, chunks):
    """The chunk that each chunk of a file refers to."""
    place, found = {}, {}
    for codec in header["codecs"]:
        for number, group in enumerate(codec.get("groups", [])):
            place |= {id(header["tensors"][n]): (number, role) for role, n in group.items()}
    members = {(*place.get(id(s.tensor), (-1, "")), repr(s.box)): s for s in shards}
    for shard in shards:
        for number in range(shard.first_chunk, shard.first_chunk + shard.chunks):
            roles = REFERENCES.get(chunks[number][3])
            if roles is not None:
                group = place.get(id(shard.tensor), (-1, ""))[0]
                others = [members.get((group, role, repr(shard.box))) for role in roles]
                other = next(filter(None, others), None)
                check(other is not None, "what a chunk refers to is not in its file")
                found[number] = other.first_chunk + number - shard.first_chunk
    ranges = []
    for number, other in found.items():
        further = found.get(found.get(found.get(other)))
        check(further is None and chunks[other][1] > 0, "a chunk that is referred to")
        if chunks[number][1] > 0:
            ends = [(c[2], c[2] + c[1]) for c in (chunks[number], chunks[other])]
            ranges.append([min(ends)[0], max(end for _, end in ends)])
    merged = []
    for low, high in sorted(ranges):
        if merged and low < merged[-1][1]:
            merged[-1][1] = max(high, merged[-1][1])
        else:
            merged.append([low, high])
    check(all(high - low <= 15 << 20 for low, high in merged), "a reference is far away")
    return found


# § 3. Planes.
def rotate_right(words):
    return words >> 1 | words << (8 * words.itemsize - 1)


def planes(source, dtype, size, item):
    kind = FLOATS.get(dtype, f"<u{item}")
    item = np.dtype(kind).itemsize
    parts = [symbols(source, size // item) for _ in range(item)]
    words = np.ascontiguousarray(np.stack(parts, axis=1)).view(kind)[:, 0]
    return (rotate_right(words) if dtype in FLOATS else words).tobytes()


# § 4. Grid.
def eighths(heads, places, count):
    sums, counts = (
        np.bincount(places, heads, count).astype(np.int64),
        np.bincount(places, None, count),
    )
    return np.where(counts, (16 * sums + counts) // np.maximum(2 * counts, 1), 0)


def contexts_of(second_moments, row, column):
    heads = second_moments >> 21
    rows, columns = (column + np.arange(len(heads))) // row, (column + np.arange(len(heads))) % row
    of_rows = eighths(heads, rows, rows[-1] + 1) - eighths(heads, 0 * rows, 1)[0]
    p = (of_rows[rows] + eighths(heads, columns, row)[columns] + 4) // 8
    return np.clip((heads.astype(np.int64) - p + 8) // 2, 0, 7)


def grid(source, count, row, column, second_moments):
    (flag,) = source.take(1)
    check(flag < 2 and row >= 16 and column + count > 3 * row, "a grid")
    contexts = None if second_moments is None else contexts_of(second_moments, row, column)
    at = column + np.arange(count)
    of_rows, of_columns = means(source, at[-1] // row + 1), means(source, row)
    low, high = symbols(source, count).astype(np.int64), symbols(source, count).astype(np.int64)
    if flag:
        rest = symbols(source, count).astype(np.int64)
    else:
        bits = np.unpackbits(source.numbers("u1", -(-count // 8) * 5), bitorder="little")
        rest = (bits.reshape(-1, 5) << np.arange(5)).sum(axis=1)[:count]
    found = symbols(source, count, contexts, 1 if contexts is None else 8).astype(np.int64)
    heads = found - 128 + (of_rows[at // row] + of_columns[at % row] + 4) // 8
    heads[found == 0] = source.numbers("<u2", int((found == 0).sum()))
    words = heads << (24 if flag else 21) | rest << 16 | high << 8 | low
    words = (words % (1 << 32)).astype("<u4")
    return (rotate_right(words) if flag else words).tobytes()


# § 5. Rounded.
def rounded(masters):
    words = masters.astype(np.int64)
    even = (words + 0x7FFF + (words >> 16 & 1)) >> 16
    return np.where(words % (1 << 31) > 0x7F800000, 0x7FC0, even).astype("<u2").tobytes()


# § 6. Difference.
def places(words):
    sign = words >> (8 * words.itemsize - 1)
    return words ^ np.where(
        sign, ~words.dtype.type(0), words.dtype.type(1 << 8 * words.itemsize - 1)
    )


def difference(source, dtype, base):
    words = np.frombuffer(base, FLOATS[dtype])
    bits = 8 * words.itemsize
    check(bits in (16, 32), "a difference of another dtype")
    (top,) = source.take(1)
    contexts = np.clip(top - (words >> (bits - 9) & 255).astype(np.int64), 0, 15)
    steps = symbols(source, len(words), contexts, 16).astype(np.int64)
    check(np.all(steps <= 4 * bits - 4), "a symbol of a difference")
    halves = (steps + 1) // 2 // 2
    counts = np.where(halves >= 1, halves - 1, 0)
    least = np.where(
        halves >= 1, 2 + (steps + 1) // 2 % 2 << np.maximum(halves - 1, 0), (steps + 1) // 2
    )
    total = int(counts.sum())
    stream = np.unpackbits(source.numbers("u1", -(-total // 8)), bitorder="little").astype(np.int64)
    check(not stream[total:].any(), "bits behind the last")
    owner = np.repeat(np.arange(len(words)), counts)
    place_in = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    np.add.at(least, owner, stream[:total] << place_in)
    moved = places(words).astype(np.int64) + np.where(steps % 2, least, -least)
    found = (moved % (1 << bits)).astype(words.dtype)
    sign = found >> (bits - 1)
    flip = np.where(sign, words.dtype.type(1 << bits - 1), ~words.dtype.type(0))
    return (found ^ flip).tobytes()


# § 8. Rounding.
def rounding(source, base):
    words = np.frombuffer(base, "<u4")
    below = rounded(words)
    found = np.frombuffer(difference(source, "bf16", below), "<u2")
    check(source.at == len(source.content), "bytes are left of a payload")
    wide = found.astype("<u4") << 16
    return np.where(found == np.frombuffer(below, "<u2"), words, wide).astype("<u4").tobytes()


# § 7. Unchanged.
def unchanged(source, base):
    digest = hash128(base)
    check(source.take(16) == digest, "the base is not what the chunk was")
    return base


def decode(mode, payload, dtype, size, item, row, column, reference, base, further):
    """The bytes of the elements of a chunk.

    ``reference`` has those of the chunk it refers to, ``base`` those of the base, of either;
    ``further`` those of the base of what mode 9 refers to, or of what that of mode 16 refers to.
    """
    if mode in (9, 16):
        check(dtype == "f32" and len(payload) < size, "a replay of another dtype, or its bytes")
        words = [np.frombuffer(content, "<u4") for content in (base, reference, further)]
        below, *others = words if mode == 9 else [words[0], words[2], words[1]]
        return replays.decode(mode, payload, size // 4, below, *others).tobytes()
    if mode == 17:
        check(dtype == "f32" and len(payload) < size, "a rounding of another dtype, or its bytes")
        return rounding(Bytes(payload), base)
    if mode > 12:
        check(dtype == "f32" and len(payload) < size, "centres of another dtype, or their bytes")
        known = [reference if mode > 13 else b"", base if mode < 15 else b""]
        other, below = (np.frombuffer(content, "<u4") for content in known)
        return centres.decode(mode, payload, size // 4, below, other, other, below).tobytes()
    words = np.frombuffer(reference or b"", "<u4")
    if mode in (8, 10, 11, 12):
        check(len(payload) < size, "bytes of a payload")
        below = np.frombuffer(base or b"", FLOATS.get(dtype, "u1"))
        return steps.decode(mode, payload, dtype, size // item, column, below, words).tobytes()
    source = Bytes(payload)
    check(len(payload) < size and (mode == 5) == (len(payload) == 0), "bytes of a payload")
    if mode == 1:
        found = source.take(item) * (size // item)
    elif mode == 2:
        found = planes(source, dtype, size, item)
    elif mode in (3, 4):
        check(dtype == "f32", "a grid of another dtype")
        found = grid(source, size // 4, row, column, words if mode == 4 else None)
    elif mode == 5:
        check(dtype == "bf16", "a rounding of another dtype")
        found = rounded(words)
    else:
        check(mode == 7 or dtype in FLOATS, "a difference of another dtype")
        found = difference(source, dtype, base) if mode == 6 else unchanged(source, base)
    check(source.at == len(payload) and len(found) == size, "bytes are left of a payload")
    return found


def decode_file(header, file, stored, item_bytes, base):
    """Pairs of a shard and the elements of its chunks; ``stored`` has the payloads of the file."""
    needed, known = references(header, file.shards, file.chunks), {}

    def referred(number):
        owner = next(s for s in file.shards if 0 <= number - s.first_chunk < s.chunks)
        return owner, known.get(number) or elements(owner, number)

    def elements(shard, number):
        mode, dtype = file.chunks[number][3], shard.tensor["dtype"]
        if mode == 0:
            return stored[number]
        reference, below, owner, further = None, shard, shard, None
        if number in needed:
            owner, reference = referred(needed[number])
            below = owner if mode == 14 else shard
        sides = chains.lengths(shard.box)
        item, row, most = item_bytes[dtype], math.prod(sides[1:]), header["chunk_elements"]
        most = (most + 1) // 2 if item == 16 else most
        first = (number - shard.first_chunk) * most
        size = min(most, math.prod(sides) - first) * item
        under = None
        if mode in (6, 7, 9, 11, 12, 13, 14, 16, 17):
            check("base" in header, "there is no base")
            under = chains.elements_of_base(base, below, first, size)
        if mode == 9:
            check(file.chunks[needed[number]][3] in (6, 7), "the mode of a first moment")
            further = chains.elements_of_base(base, owner, first, size)
        if mode == 16:
            check(file.chunks[needed[number]][3] == 9, "the mode of a second moment")
            _, further = referred(needed[needed[number]])
        near = (reference, under, further)
        return decode(mode, stored[number], dtype, size, item, row, first % row, *near)

    for shard in file.shards:
        numbers = range(shard.first_chunk, shard.first_chunk + shard.chunks)
        known |= {number: elements(shard, number) for number in numbers}
        yield shard, [known[number] for number in numbers]
