"""An independent decoder of the modes of compact, written from docs/codecs.md alone (§ 8)."""

import struct

import numpy as np
from chains import check
from symbols import Bytes, means, symbols

POWERS = "1 0x1.172b84p0 0x1.306fe0p0 0x1.4bfdaep0 0x1.6a09e6p0 0x1.8ace54p0 0x1.ae89fap0"
POWERS = np.array([float.fromhex(p) for p in (POWERS + " 0x1.d5818ep0").split()], "f4")
RADIUS = {10: 100, 11: 0, 12: 8}


class View:
    def __init__(self, source, count, column):
        (self.width,) = struct.unpack("<I", source.take(4))
        check(self.width <= count, "width of a view")
        if self.width == 0:
            self.width, column = count, 0
        at = column % self.width + np.arange(count)
        self.rows, self.columns = at // self.width, at % self.width
        self.row_count = int(self.rows[-1]) + 1


def squares(source, count, column):
    view = View(source, count, column)
    unit, rest, floor = struct.unpack("<BBH", source.take(4))
    check(unit <= 7 and rest <= 7 and 8 <= floor <= 2031, "unit, rest or floor")
    flags = symbols(source, view.row_count)
    check(flags.max() <= 1, "a flag of a row")
    of_rows, of_columns = means(source, view.row_count), means(source, view.width)
    logs = (of_rows[view.rows] + of_columns[view.columns]) << unit
    if rest:
        logs = logs + ((symbols(source, count).astype(np.int64) - 128) << rest)
    logs = np.clip(logs, floor, 2031)
    part = logs % 8
    bits = (logs << 20) - 45000 * part * (8 - part)
    return np.where(flags[view.rows] == 1, 0, bits).astype("<u4")


def mean(total, count):
    return (16 * total + count) // (2 * np.maximum(count, 1))


def classes(view, second_moments, radius):
    logs = second_moments.astype(np.int64) >> 20
    some = np.bincount(view.rows, second_moments != 0, view.row_count) > 0
    kept = some[view.rows]

    def means_by(place, size):
        totals = np.bincount(place[kept], logs[kept], size).astype(np.int64)
        counts = np.bincount(place[kept], minlength=size)
        return mean(totals, counts), counts

    overall = mean(logs[kept].sum(), kept.sum()) if kept.any() else 0
    of_rows, _ = means_by(view.rows, view.row_count)
    of_columns, counts = means_by(view.columns, view.width)
    of_columns = np.where(counts > 0, of_columns, overall)
    found = (of_rows[view.rows] + of_columns[view.columns] - 2 * overall + 16) // 32
    return np.where(kept, np.clip(found, -radius, radius), -radius)


def centres(source):
    form, count = source.take(2)
    check(form < 2 and count <= 126, "form or number of centres")
    if form == 0:
        found = source.numbers("<f4", count)
    else:
        (step,) = source.numbers("<f4", 1)
        check(2.0**-100 <= step <= 2.0**100, "a step")
        found = np.arange(1, count + 1, dtype="f4") * step
    check(np.all((found >= 2.0**-100) & (found <= 2.0**100)), "a centre")
    return found.astype("f4")


def scaled(values, eighths):
    whole, part = divmod(eighths, 8)
    return np.ldexp((values * POWERS[part]).astype("f4"), whole).astype("f4")


def contexts_of(source, view, places):
    (limits,) = source.take(1)
    check(limits <= 7, "limits")
    limits = np.frombuffer(source.take(limits), "u1").astype(np.int64)
    (groups,) = source.take(1)
    kinds = (len(limits) + 1) * groups
    check(1 <= groups <= 8 and kinds <= 16, "groups of rows")
    if kinds == 1:
        return None, 1
    check(view is not None, "contexts without classes")
    contexts = (places[:, None] >= limits[None, :]).sum(axis=1)
    if groups > 1:
        of_rows = symbols(source, view.row_count).astype(np.int64)
        check(of_rows.max() < groups, "a group of a row")
        contexts += of_rows[view.rows] * (len(limits) + 1)
    return contexts, kinds


def steps(source, mode, count, column, base, second_moments):
    """Floats; ``base`` has floats too, ``second_moments`` bits."""
    radius = RADIUS[mode]
    c, view = np.zeros(count, np.int64), None
    if mode != 11:
        view = View(source, count, column)
        c = classes(view, second_moments, radius)
    levels = centres(source)
    contexts, kinds = contexts_of(source, view, c + radius)
    found = symbols(source, count, contexts, kinds)
    found = found.astype(np.int64)
    escaped = (found == 253) & (len(levels) == 126)
    check(np.all(escaped | (found <= 2 * len(levels))), "a symbol")
    table = np.zeros((2 * radius + 1, 254), "f4")
    for place in range(2 * radius + 1):
        scale = {10: 2, 11: 0, 12: -1}[mode] * (place - radius)
        row = scaled(levels, scale)
        table[place, 1 : 2 * len(levels) : 2] = row
        table[place, 2 : 2 * len(levels) + 1 : 2] = -row
    step = table[c + radius, found]
    made = step if mode == 10 else (base + step).astype("f4")
    made[escaped] = source.numbers("<f4", int(escaped.sum()))
    return made


def rounded(values, dtype):
    if dtype == "f32":
        return values.view("<u4")
    if dtype == "f16":
        with np.errstate(over="ignore"):
            halves = values.astype("<f2").view("<u2")
        return np.where(np.isnan(values), 0x7E00, halves).astype("<u2")
    words = values.view("<u4").astype(np.int64)
    even = (words + 0x7FFF + (words >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, even).astype("<u2")


def widened(words, dtype):
    if dtype == "f16":
        return words.view("<f2").astype("<f4")
    return (words.astype("<u4") << 16).view("<f4") if dtype == "bf16" else words.view("<f4")


def decode(mode, payload, dtype, count, column, base=None, second_moments=None):
    """The words of a chunk's elements; those of the base, of the same dtype, are given."""
    base = None if base is None else widened(base, dtype)
    check(mode in (8, 10, 11, 12) and count > 0, "mode")
    check(dtype == "f32" or (mode in (11, 12) and dtype in ("bf16", "f16")), "dtype")
    source = Bytes(payload)
    if mode == 8:
        found = squares(source, count, column)
    else:
        found = rounded(steps(source, mode, count, column, base, second_moments), dtype)
    check(source.at == len(payload), "bytes are left of a payload")
    return found
