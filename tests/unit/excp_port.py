"""The public algorithm of ExCP in numpy, apart from the codec: compress_pythia.py, as it is told.

https://github.com/Gaffey/ExCP compresses one parameter at a time: prune the residual by a multiple
of its median, the moments by a multiple of their mean; k-means of what is left, as faiss does it
(256 points a centre, 25 rounds, points for a beginning); two indices a byte.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
CENTRES = 15


def mean(values: Floats) -> np.float32:
    """Return the mean, rounded once."""
    return np.float32(values.mean(dtype=np.float64))


def lower_median(values: Floats) -> np.float32:
    """Return what torch.median returns."""
    return np.float32(np.partition(values, (len(values) - 1) // 2)[(len(values) - 1) // 2])


def prune(
    weight: Floats,
    base: Floats,
    exp_avg: Floats,
    exp_avg_sq: Floats,
    alpha: float = 5e-5,
    beta: float = 2.0,
    cap: float | None = 2.5,
    by_element: bool = False,
) -> tuple[Floats, Floats, Floats]:
    """Return the residual and both moments, with zeros for what is not kept."""
    residual = weight - base
    squares = exp_avg_sq if by_element else mean(exp_avg_sq)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.float32(alpha) / np.sqrt(squares)
        limited = factor if cap is None else np.where(factor < cap, factor, np.float32(cap))
        threshold = limited * lower_median(np.abs(residual))
    residual = np.where(np.abs(residual) > threshold, residual, np.float32(0))
    kept = np.abs(exp_avg) > np.float32(beta) * mean(np.abs(exp_avg))
    kept &= residual != 0
    zero = np.float32(0)
    return residual, np.where(kept, exp_avg, zero), np.where(kept, exp_avg_sq, zero)


def nearest(values: Floats, centres: Floats) -> NDArray[np.int64]:
    """Return which of ascending centres is nearest to each value; of two, the lower."""
    wide = centres.astype(np.float64)
    return np.searchsorted((wide[:-1] + wide[1:]) / 2, values.astype(np.float64), side="left")


def k_means(values: Floats, seed: int) -> Floats:
    """Return 15 centres, ascending, of a sample of the values."""
    random = np.random.default_rng(seed)
    sample = random.permutation(values)[: 256 * CENTRES].astype(np.float64)
    centres = np.sort(random.choice(sample, CENTRES, replace=False))
    for _ in range(25):
        groups = np.searchsorted((centres[:-1] + centres[1:]) / 2, sample, side="left")
        counts = np.bincount(groups, minlength=CENTRES)
        sums = np.bincount(groups, sample, minlength=CENTRES)
        centres = np.where(counts > 0, sums / np.maximum(counts, 1), centres)
        for empty in np.flatnonzero(counts == 0):  # faiss splits a large one
            largest = int(np.argmax(counts))
            centres[empty], counts[empty] = centres[largest] * (1 + 1 / 1024), counts[largest] // 2
            centres[largest] *= 1 - 1 / 1024
            counts[largest] -= counts[empty]
        centres = np.sort(centres)
    return centres.astype(np.float32)


def cost(values: Floats, centres: Floats) -> float:
    """Return the sum of squares about the nearest centres."""
    wide = values.astype(np.float64)
    return float(np.square(wide - centres.astype(np.float64)[nearest(values, centres)]).sum())


def packed(values: Floats, seed: int) -> bytes:
    """Return what the public code stores of one pruned tensor."""
    found = values[values != 0]
    if len(found) <= CENTRES:
        return values.tobytes()
    centres = k_means(found, seed)
    indices = np.zeros(len(values) + len(values) % 2, np.uint8)
    indices[: len(values)][values != 0] = nearest(found, centres) + 1
    pairs = indices[::2] << 4 | indices[1::2]
    return centres.astype(np.float16).tobytes() + pairs.tobytes()
