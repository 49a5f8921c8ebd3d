"""The order in which samples are read, dealt out to readers: arithmetic of positions. Pure.

A *position* counts samples over all epochs: with ``size`` samples to an epoch, position p is the
sample at place p % size in the order of epoch p // size. What has not been taken is a list of
*ranges*, ascending half-open (start, stop), of which the last has no end. Of S readers, reader s
takes items s, s + S, s + 2 S, … of what the ranges hold.
"""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Ranges = tuple[tuple[int, int], ...]

END = 1 << 52  # stands for no end; every position is below it
EVERYTHING: Ranges = ((0, END),)
_ROUNDS = 6
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of splitmix64


def shuffled(positions: I64, size: int, seed: int) -> I64:
    """Return the samples at these positions, where every epoch has an order of its own.

    That is a permutation of range(size) which is computed for each place alone: a Feistel network
    over the next power of 4, entered again until it lands below ``size`` (Black and Rogaway,
    Ciphers with Arbitrary Finite Domains, 2002). It takes no memory, and depends on no library's
    generator: what is saved today continues in the same order for ever.
    """
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    epochs, which = np.unique(positions // size, return_inverse=True)
    keys = np.array([_keys(seed, epoch) for epoch in epochs.tolist()], np.uint64)[which]
    result = (positions % size).astype(np.uint64)
    again = np.arange(len(result))
    while len(again):
        result[again] = _feistel(result[again], bits, keys[again])
        again = again[result[again] >= size]
    return result.astype(np.int64)


def _keys(seed: int, epoch: int) -> U64:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, "<u8")


def _feistel(values: U64, bits: int, keys: U64) -> U64:
    half, mask = np.uint64(bits), np.uint64((1 << bits) - 1)
    left, right = values >> half, values & mask
    for key in keys.T:
        mixed = right + key
        for multiplier in _MULTIPLIERS:
            mixed = (mixed ^ (mixed >> np.uint64(29))) * multiplier
        left, right = right, left ^ (mixed >> np.uint64(64 - bits))
    return left << half | right


def nth(ranges: Ranges, n: int) -> int:
    """Return item ``n`` of what the ranges hold."""
    for start, stop in ranges:
        if n < stop - start:
            return start + n
        n -= stop - start
    return END


def dealt(ranges: Ranges, first: int, stride: int) -> Iterator[int]:
    """Yield items first, first + stride, … of what the ranges hold, which has no end."""
    for start, stop in ranges:
        position = start + first
        while position < stop:
            yield position
            position += stride
        first = position - stop


def left_over(ranges: Ranges, taken: Sequence[int]) -> Ranges:
    """Return what is left when reader s of len(taken) has taken its first taken[s] items.

    In step, readers leave one range; what one is ahead of the others is cut out of it.
    """
    readers, counts = len(taken), np.array(taken, np.int64)
    rounds, ahead = int(counts.min()), int(counts.max() - counts.min())
    ranges = _without_first(ranges, rounds * readers)
    # Row by row the rounds that some readers have made and others not.
    free = (np.arange(ahead)[:, None] >= counts[None, :] - rounds).reshape(-1)
    edges = np.flatnonzero(np.diff(free.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    found = [r for a, b in edges.tolist() for r in _slice(ranges, a, b)]
    return merged([*found, *_without_first(ranges, ahead * readers)])


def _slice(ranges: Ranges, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of items first ≤ n < last."""
    for start, stop in ranges:
        low, high = start + max(first, 0), min(start + last, stop)
        if low < high:
            yield low, high
        first, last = first - (stop - start), last - (stop - start)
        if last <= 0:
            return


def _without_first(ranges: Ranges, n: int) -> Ranges:
    return tuple(_slice(ranges, n, END))


def merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Return the same positions as ascending ranges that do not touch."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        elif start < stop:
            result.append((start, stop))
    return tuple(result)
