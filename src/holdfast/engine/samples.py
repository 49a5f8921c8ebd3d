"""Samples of elements when a save is asked for, and of their copy: are both of one moment?

Knows elements and addresses; no names, no files. What the samples are, and how likely a change is
to meet one: docs/saving.md.
"""

import secrets
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from .._core import hash_spread, hash_spread_strided

Words = npt.NDArray[np.uint64]
Piece = tuple[int, int, int]  # target, source, bytes


def columns(pieces: Iterable[Sequence[Piece]]) -> tuple[Words, Words, Words]:
    """Return targets, sources and sizes, as the core takes them."""
    table = np.array([piece for own in pieces for piece in own], np.uint64).reshape(-1, 3).T.copy()
    return table[0], table[1], table[2]


class Samples:
    """Samples of tensors in host memory, as they were when it was made."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hash them, in row-major order, at places that are drawn anew each time.

        So no pattern of changes slips through all saves.

        Args:
            tensors: in any strides. Of what is to be conjugated or negated the samples are those
                of the memory, which no copy has.
        """
        self._seed, count = secrets.randbits(64), len(tensors)
        addresses = np.fromiter((tensor.data_ptr() for tensor in tensors), np.uint64, count)
        sizes = np.fromiter((tensor.nbytes for tensor in tensors), np.uint64, count)
        turned = [i for i, tensor in enumerate(tensors) if not tensor.is_contiguous()]
        sizes[turned] = 0  # nothing of them is read by the first call
        ones = np.ones(count, np.uint64)
        hashes = hash_spread(addresses, sizes, ones, self._seed)
        self._hashes = np.frombuffer(hashes, np.uint64).copy()
        for i in turned:
            held = tensors[i]
            element, shape, steps = held.element_size(), held.shape, held.stride()
            found = hash_spread_strided(held.data_ptr(), element, shape, steps, self._seed)
            self._hashes[i] = found

    def differing(self, copies: Sequence[Sequence[Piece]]) -> list[int]:
        """Return which tensors were not as their copies are, each in pieces."""
        targets, _, sizes = columns(copies)
        counts = np.fromiter(map(len, copies), np.uint64, len(copies))
        found = np.frombuffer(hash_spread(targets, sizes, counts, self._seed), np.uint64)
        return [int(i) for i in np.flatnonzero(found != self._hashes)]
