"""An independent decoder of modes 13 to 15, written from docs/codecs.md alone, § 9."""

import numpy as np
from chains import check
from symbols import Bytes, symbols


def decode(mode, payload, count, base=None, weight=None, exp_avg=None, other_base=None):
    """The f32 elements of a chunk, as bits; what it refers to is given as bits too."""
    source = Bytes(payload)
    (k,) = source.take(1)
    check(k <= 15, "the number of centres")
    centres = source.numbers("<f4", k)
    check(np.isfinite(centres).all(), "a centre")
    if mode == 13:
        found = symbols(source, count)
    else:
        check(mode in (14, 15), "mode")
        likely = weight != other_base if mode == 14 else (exp_avg & 0x7FFFFFFF) != 0
        found = np.zeros(count, np.uint8)
        found[likely] = symbols(source, int(likely.sum()))
        found[~likely] = symbols(source, int((~likely).sum()))
    check(source.at == len(payload) and (found <= k).all(), "bytes are left, or a symbol")
    chosen = np.concatenate([np.zeros(1, "<f4"), centres])[found]
    if mode != 13:
        return chosen.view("<u4")
    with np.errstate(over="ignore", invalid="ignore"):
        moved = (base.view("<f4") + chosen).view("<u4")
    return np.where(found == 0, base, moved)
