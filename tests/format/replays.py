"""Mode 9 and mode 16 for the independent reader: written from docs/codecs.md §10 alone."""

import numpy as np
from chains import check
from symbols import Bytes, symbols


def decode(mode, payload, count, base, exp_avg, other):
    """The f32 elements of a chunk, as bits; what it refers to is given as bits too.

    ``other`` is the base of ``exp_avg`` in mode 9, the second moment in mode 16.
    """
    source = Bytes(payload)
    first, second, third = source.numbers("<f4", 3)
    missed = symbols(source, count).astype(np.int64)
    far = missed == 255
    missed[far] = source.numbers("<u4", int(far.sum()))
    check(np.all(missed[far] >= 255), "an escape that a symbol would have said")
    check(source.at == len(payload), "bytes are left of a payload")
    base, exp_avg, other = (words.view("<f4") for words in (base, exp_avg, other))
    with np.errstate(all="ignore"):
        if mode == 9:
            before = other.astype(np.float64)
            gradient = (before + (exp_avg - before) / np.float64(third)).astype(np.float32)
            found = first * base + second * gradient * gradient
        else:
            found = first * base + second * exp_avg / (np.sqrt(other) + third)
        found[np.isnan(found)] = 0
    bits = found.view("<u4").astype(np.int64)
    places = np.where(bits >> 31, 2**32 - 1 - bits, bits + 2**31)
    places += np.where(missed % 2, -(missed + 1) // 2, missed // 2)
    places %= 2**32
    return np.where(places >> 31, places - 2**31, 2**32 - 1 - places).astype("<u4")
