"""Coded symbols, and means, for the independent reader: docs/codecs.md alone, § 2 and 4."""

import struct

import numpy as np
from chains import check


class Bytes:
    def __init__(self, content):
        self.content, self.at = content, 0

    def take(self, count):
        check(self.at + count <= len(self.content), "the payload ends early")
        self.at += count
        return self.content[self.at - count : self.at]

    def numbers(self, dtype, count):
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype)


# § 2. Coded symbols.
def table(source):
    first, last = source.take(2)
    frequencies, symbol = np.zeros(256, np.int64), first
    while symbol <= last:
        (frequency,) = source.take(1)
        if frequency == 0:
            symbol += 1 + source.take(1)[0]
            check(symbol <= last, "zeros at the end of a table")
            continue
        if frequency >= 128:
            frequency = (frequency & 127) << 8 | source.take(1)[0]
            check(frequency >= 128, "a long frequency")
        frequencies[symbol] = frequency
        symbol += 1
    check(frequencies.sum() == 4096 and frequencies[first] > 0, "frequencies")
    return frequencies


def symbols(source, count, contexts=None, kinds=1):
    (form,) = source.take(1)
    if form == 0:
        return source.numbers("u1", count)
    if form == 1:
        check(count > 0, "a repeated symbol of none")
        return np.repeat(source.numbers("u1", 1), count)
    check(form in (2, 3, 4), "form")
    lanes = {2: 1, 3: 8, 4: 64}[form]
    frequencies = np.array([table(source) for _ in range(kinds)])
    starts = (np.cumsum(frequencies, axis=1) - frequencies).tolist()
    owners = [np.repeat(np.arange(256), row).tolist() for row in frequencies]
    frequencies = frequencies.tolist()
    (words,) = struct.unpack("<I", source.take(4))
    states = source.numbers("<u4", lanes).tolist()
    check(all(1 << 15 <= x < 1 << 31 for x in states), "a state")
    words, used = source.numbers("<u2", words).tolist(), 0
    contexts = [0] * count if contexts is None else contexts.tolist()
    found = bytearray(count)
    for place, context in enumerate(contexts):
        x = states[place % lanes]
        r = x % 4096
        symbol = owners[context][r]
        x = frequencies[context][symbol] * (x // 4096) + r - starts[context][symbol]
        if x < 1 << 15:
            check(used < len(words), "too few words")
            x, used = (x << 16) + words[used], used + 1
        states[place % lanes], found[place] = x, symbol
    check(used == len(words) and states == [1 << 15] * lanes, "words or states are left")
    return np.frombuffer(found, np.uint8)


def means(source, count):
    zigzag = symbols(source, count) + 256 * symbols(source, count).astype(np.int64)
    steps = np.where(zigzag % 2, -(zigzag + 1) // 2, zigzag // 2)
    return np.cumsum(steps).astype(np.int16).astype(np.int64)
