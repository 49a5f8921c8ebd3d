"""Samples of elements when a save is asked for, and of their copy: are both of one moment?

Knows elements and addresses; no names, no files. What the samples are, and how likely a change is
to meet one: docs/saving.md.
"""

import secrets
from collections.abc import Mapping

import numpy as np
import torch

from .._core import hash_spread, hash_spread_strided
from ..boxes import I64, U64


class Samples:
    """Samples of tensors in host memory, as they were when it was made."""

    def __init__(self, address: U64, sizes: U64, turned: Mapping[int, torch.Tensor]) -> None:
        """Hash them, in row-major order, at places that are drawn anew each time.

        So no pattern of changes slips through all saves.

        Args:
            address, sizes: of the elements of each, row-major; 0 and 0 of those in ``turned``.
            turned: tensors in other strides, by their places.
        """
        self._seed = secrets.randbits(64)
        hashes = hash_spread(address, sizes, np.ones_like(sizes), self._seed)
        self._hashes = np.frombuffer(hashes, np.uint64).copy()
        for place, held in turned.items():
            element, shape, steps = held.element_size(), held.shape, held.stride()
            found = hash_spread_strided(held.data_ptr(), element, shape, steps, self._seed)
            self._hashes[place] = found

    def differing(self, address: U64, sizes: U64, counts: U64) -> I64:
        """Return the places of those that were not as their copies are.

        Args:
            address, sizes: of the pieces of all copies.
            counts: pieces of each copy.
        """
        found = hash_spread(address, sizes, counts, self._seed)
        return np.flatnonzero(np.frombuffer(found, np.uint64) != self._hashes)
