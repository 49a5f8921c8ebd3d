"""One stream of samples, dealt to readers: what is left, and what each of them has taken.

Knows no processes and no loaders; `permutation` is its arithmetic.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from ..errors import MismatchError, StateError
from .permutation import EVERYTHING, Ranges, dealt, left_over, merged, nth, shuffled

_BLOCK = 256  # samples whose place is computed at once: 0.2 ms


@dataclass(slots=True)
class Reader:
    """What one reader has done: a data-parallel rank, or one of its loader's workers.

    Attributes:
        taken: items it took of those it was dealt.
        held: what it took of those and has not given out.
        turn: which worker of its rank reads it next: batches come from one after the other.
    """

    taken: int = 0
    held: list[Any] = field(default_factory=list)
    turn: int = 0


class Deal:
    """The samples of all epochs, dealt to readers.

    Attributes:
        size: samples in an epoch.
        stop: the position at which the stream ends.
        ranks, workers: to whom it is dealt: so many readers of each of so many ranks; 0 when it is
            dealt to nobody yet.
        readers: by number; of all while nobody ``begun``, then each process knows its own.
    """

    def __init__(self, size: int, seed: int, shuffle: bool, stop: int) -> None:
        self.size, self.stop = size, stop
        self.ranks = self.workers = 0
        self.readers: dict[int, Reader] = {}
        self.begun = False
        self._seed, self._shuffle = seed, shuffle
        self._left: Ranges = EVERYTHING
        self._skipped: Ranges = ()

    def settle(self, ranks: int, workers: int) -> None:
        """Deal what is left to so many readers, unless it is.

        Raises:
            StateError: some of it was taken since that was agreed.
        """
        if (self.ranks, self.workers) == (ranks, workers):
            return
        if self.begun:
            raise StateError(
                f"{self.ranks} ranks with {self.workers} readers each began to read this data, and "
                f"now {ranks} ranks with {workers} do. To change these numbers, save a checkpoint, "
                "and restore it with the new ones"
            )
        before = [self.readers[n] for n in range(len(self.readers))]
        held = [item for reader in before for item in reader.held]
        if before:
            self._left = left_over(self._left, [reader.taken for reader in before])
        self.ranks, self.workers = ranks, workers
        everyone = ranks * workers
        self.readers = {n: Reader(0, held[n::everyone], n % workers) for n in range(everyone)}

    def numbers(self, rank: int) -> range:
        """Return the numbers of a rank's readers."""
        return range(rank * self.workers, (rank + 1) * self.workers)

    def position(self, numbers: Iterable[int]) -> int:
        """Return the first position that is not taken if nobody is behind these readers."""
        rounds = min(self.readers[n].taken for n in numbers)
        return nth(self._left, rounds * len(self.readers))

    def coming(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield (items taken with it, sample) for what a reader has before it."""
        everyone, taken = len(self.readers), self.readers[number].taken
        positions = dealt(self._left, number + taken * everyone, everyone)
        while True:
            block = np.fromiter(islice(positions, _BLOCK), np.int64)
            samples = shuffled(block, self.size, self._seed) if self._shuffle else block % self.size
            for position, sample in zip(block.tolist(), samples.tolist(), strict=True):
                if position >= self.stop:
                    return
                taken += 1
                if not any(start <= position < stop for start, stop in self._skipped):
                    yield taken, sample

    def skip(self, start: int, stop: int) -> None:
        """Leave out what of these positions is not taken."""
        self._skipped = merged([*self._skipped, (start, stop)])

    def dump(self, numbers: Iterable[int]) -> dict[str, Any]:
        """Return what all readers have in common, and these readers' parts by number."""
        return {
            "size": self.size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "left": [list(each) for each in self._left],
            "skipped": [list(each) for each in self._skipped],
            "ranks": self.ranks,
            "workers": self.workers,
            "readers": {str(n): _part(self.readers[n]) for n in numbers},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what all readers dumped.

        Raises:
            MismatchError: it is of another number of samples, or parts are missing.
        """
        if state["size"] != self.size:
            raise MismatchError(
                f"the checkpoint's data has {state['size']} samples, and this data has "
                f"{self.size}, so their orders differ. Use the same data; or start over, by "
                "restoring without the DataState"
            )
        ranks, workers, readers = state["ranks"], state["workers"], state["readers"]
        lacking = [n for n in range(ranks * workers) if str(n) not in readers]
        if lacking:
            raise MismatchError(
                f"the checkpoint's data was read by {ranks} ranks with {workers} readers each, and "
                f"the parts of {lacking} are missing. Save with the DataState in the state of all "
                "ranks; or restore without it"
            )
        self._seed, self._shuffle = state["seed"], state["shuffle"]
        self._left = tuple((start, stop) for start, stop in state["left"])
        self._skipped = tuple((start, stop) for start, stop in state["skipped"])
        self.ranks, self.workers, self.begun = ranks, workers, False
        self.readers = {n: _reader(readers[str(n)]) for n in range(ranks * workers)}

    def learn(self, state: Mapping[str, Any], batches: int) -> None:
        """Take over what a worker dumped, when its rank had given out so many batches of all."""
        for number, part in state["readers"].items():
            reader = self.readers[int(number)] = _reader(part)
            reader.turn = (reader.turn - batches) % self.workers


def _part(reader: Reader) -> dict[str, Any]:
    # Copied: the list is going to change, and a loader's worker compares it with the next.
    return {"taken": reader.taken, "turn": reader.turn, "held": copy.deepcopy(reader.held)}


def _reader(part: Mapping[str, Any]) -> Reader:
    return Reader(part["taken"], list(part["held"]), part["turn"])
