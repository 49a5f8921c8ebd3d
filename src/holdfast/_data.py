"""Where the data is: which samples have been read, by which reader, on any number of readers.

Knows no files: what a reader saves has its own number in it, so a checkpoint holds that of all.
The rule that deals samples to readers is `_order`'s; docs/data.md tells what follows from it.
"""

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from ._order import END, EVERYTHING, I64, Ranges, dealt, left_over, merged, nth, shuffled
from ._random import checked_place, place_of_group
from .errors import MismatchError, OptionError, StateError

_BLOCK = 256  # samples whose place is computed at once: 0.2 ms


@dataclass(slots=True)
class _Reader:
    """What one reader has done: a data-parallel rank, or one of its loader's workers.

    Attributes:
        taken: items it took of those it was dealt.
        held: what it took of those and has not given out.
        turn: which worker of its rank reads it next: batches come from one after the other.
    """

    taken: int = 0
    held: list[Any] = field(default_factory=list)
    turn: int = 0


class DataState:
    """Which samples have been read, saved and restored on any number of readers.

    The samples of all epochs are one endless stream of positions: position p is sample p % size of
    the order of epoch p // size. It is dealt to the readers in turn, so that each position goes to
    one reader, and each sample once to every epoch. A reader is a data-parallel rank; where the
    workers of a loader read an `IterableDataset`, each of them. Restored by as many readers as
    saved it, each goes on with its own part, bit for bit. Restored by another number, what was not
    taken is dealt anew, and what was `held` is handed on: nothing is lost, nothing comes twice.

    With a dataset that is indexed::

        data = holdfast.DataState(len(dataset), seed=1)
        loader = StatefulDataLoader(dataset, 8, sampler=data.sampler(), num_workers=2)
        state = {"model": model, "data": data}
        for batch in data.read(loader):  # counts what comes out, not what is fetched ahead
            ...

    A loader of your own takes samples from `indices`, and keeps what it has taken and not given out
    in `held`. So does an `IterableDataset`, whose ``state_dict()`` has to return this one's.

    Args:
        size: samples in an epoch.
        seed: of the order, another one in each epoch; a restored one counts instead.
        shuffle: False reads every epoch from 0 to size - 1; a restored one counts instead.
        epochs: after so many there are no more samples. None: there is no end, and all ranks get
            equally many batches.
        rank, world_size: of the data-parallel ranks; default: of the default process group. Ranks
            that read the same data (tensor parallel ones) give the same rank.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Begin with the first sample of the first epoch.

        Raises:
            OptionError: an argument that cannot be.
        """
        for name, value in (("size", size), ("epochs", epochs)):
            if value is not None and (type(value) is not int or not 0 < value < END):
                raise OptionError(f"{name} is {value!r}; expected an integer above 0")
        if type(seed) is not int:
            raise OptionError(f"seed is {seed!r}; expected an integer")
        self._place = checked_place(rank, world_size)
        self._size, self._seed, self._shuffle = size, seed, bool(shuffle)
        self._stop = END if epochs is None else min(epochs * size, END)
        self._left, self._skipped = EVERYTHING, Ranges()
        self._dealt_to: tuple[int, int] | None = None  # (ranks, workers of each)
        self._readers: dict[int, _Reader] = {}  # of all, until this one begins; then its own count
        self._begun = False
        self._run: object = None  # of a loop over samples; another ends it
        self._ahead: deque[int] = deque()  # how far a sampler is with each sample it gave out
        self._workers: DataLoader[Any] | None = None  # those who count, where not this process does
        self._batches = 0  # that came from them

    @property
    def position(self) -> int:
        """The first position that some reader has not come to, if all are as far as this rank."""
        self._update()
        readers = self._mine()
        everyone = len(self._readers)
        return nth(self._left, min(reader.taken for reader in readers.values()) * everyone)

    @property
    def epoch(self) -> int:
        """The epoch of `position`, from 0."""
        return self.position // self._size

    @property
    def held(self) -> list[Any]:
        """What this reader took and has not given out: a list to change, of tensors or values.

        When the number of readers changes, its items are handed on one by one.
        """
        return self._own().held

    @held.setter
    def held(self, items: list[Any]) -> None:
        self._own().held = items

    def sampler(self) -> Sampler[int]:
        """Return what a `DataLoader` takes as ``sampler``: the samples of this rank, in order.

        It may be asked ahead; only `read` counts.
        """
        return _Ahead(self)

    def indices(self) -> Iterator[int]:
        """Yield this reader's samples, each counted as taken when it is yielded.

        Raises:
            StateError: the state was restored, or another loop begun, while this one goes on.
        """
        run = self._begin()
        reader = self._own()
        for taken, sample in self._coming(reader.taken):
            self._check(run)
            reader.taken, self._begun = taken, True
            yield sample

    def read(self, loader: "DataLoader[Any]") -> Iterator[Any]:
        """Yield the batches of a loader; what has been yielded counts as read.

        To begin draws nothing from torch's global generator, so that a resumed run draws the same
        numbers as one that was never stopped.

        Args:
            loader: of an indexed dataset, with ``sampler=data.sampler()``; or of an
                `IterableDataset` that reads `indices`, a `StatefulDataLoader` if it has workers.

        Raises:
            OptionError: what this loader reads cannot be counted.
            StateError: the state was restored, or another loop begun, while this one goes on.
        """
        streams = isinstance(loader.dataset, IterableDataset)
        _check_loader(loader, self, streams=streams)
        workers = loader.num_workers if streams else 0
        self._settle(self._whose()[1], max(1, workers))
        run = self._begin()
        with torch.random.fork_rng(devices=[]):
            batches = iter(loader)
        if streams and not workers:  # `indices` counts, in this process
            yield from batches
            return
        if workers:
            self._workers, self._batches = loader, 0
        for batch in batches:
            self._begun = True
            if workers:
                self._batches += 1
            else:
                self._count(loader.batch_size or 1)
            yield batch
            self._check(run)

    def skip(self, start: int, stop: int) -> None:
        """Leave out the samples at positions start ≤ p < stop, wherever they are not yet taken.

        All ranks call it alike. It holds for loops that are begun afterwards, and is saved.

        Raises:
            OptionError: these are no positions.
        """
        if type(start) is not int or type(stop) is not int or not 0 <= start <= stop < END:
            raise OptionError(f"skip from {start!r} to {stop!r}; expected 0 <= start <= stop")
        self._update()
        self._skipped = merged([*self._skipped, (start, stop)])
        self._run = None

    def state_dict(self) -> dict[str, Any]:
        """Return what all readers have in common, and the parts of this rank's, by their number."""
        self._update()
        readers = self._mine()
        ranks, workers = self._dealt_to or (1, 1)
        return {
            "size": self._size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "left": [list(each) for each in self._left],
            "skipped": [list(each) for each in self._skipped],
            "ranks": ranks,
            "workers": workers,
            "readers": {
                # Copied: the list is going to change, and a loader's worker compares with it.
                str(n): {"taken": r.taken, "turn": r.turn, "held": copy.deepcopy(r.held)}
                for n, r in readers.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the readers of a checkpoint were.

        Args:
            state: what `state_dict` returned, with the parts of all readers.

        Raises:
            MismatchError: it is of another number of samples, or parts are missing.
        """
        if state["size"] != self._size:
            raise MismatchError(
                f"the checkpoint's data has {state['size']} samples, and here it has {self._size}: "
                "their order is another. Give the same data; or begin anew, by leaving the "
                "DataState out of what is restored"
            )
        ranks, workers, readers = state["ranks"], state["workers"], state["readers"]
        lacking = [n for n in range(ranks * workers) if str(n) not in readers]
        if lacking:
            raise MismatchError(
                f"the checkpoint's data was read by {ranks} ranks with {workers} readers each, and "
                f"the parts of {lacking} are missing. Did all ranks have the DataState in their "
                "state when it was saved?"
            )
        self._seed, self._shuffle = state["seed"], state["shuffle"]
        self._left = tuple((start, stop) for start, stop in state["left"])
        self._skipped = tuple((start, stop) for start, stop in state["skipped"])
        self._dealt_to = ranks, workers
        parts = {n: readers[str(n)] for n in range(ranks * workers)}
        self._readers = {
            n: _Reader(part["taken"], list(part["held"]), part["turn"]) for n, part in parts.items()
        }
        self._begun, self._run, self._workers = False, None, None

    def _whose(self) -> tuple[int, int]:
        """Return (rank, number of ranks); a worker has them from the process that started it."""
        if self._place is None:
            if get_worker_info() is not None:
                raise StateError(
                    "a worker of a loader reads a DataState that does not know its rank; iterate "
                    "the loader by data.read(loader)"
                )
            self._place = place_of_group()
        return self._place

    def _number(self) -> int:
        """Return the number of the reader that this process is."""
        (rank, ranks), worker = self._whose(), get_worker_info()
        if worker is None:
            self._settle(ranks, 1)
            return rank
        self._settle(ranks, worker.num_workers)
        mine = range(rank * worker.num_workers, (rank + 1) * worker.num_workers)
        return next(n for n in mine if self._readers[n].turn == worker.id)

    def _own(self) -> _Reader:
        """Return the reader that this process is."""
        number = self._number()  # which may deal anew
        return self._readers[number]

    def _mine(self) -> dict[int, _Reader]:
        """Return the readers of this rank, or in a worker the one that it is."""
        rank, ranks = self._whose()
        if get_worker_info() is not None or self._dealt_to is None or self._dealt_to[0] != ranks:
            number = self._number()
            return {number: self._readers[number]}
        workers = self._dealt_to[1]
        return {n: self._readers[n] for n in range(rank * workers, (rank + 1) * workers)}

    def _settle(self, ranks: int, workers: int) -> None:
        """Deal what is left to so many readers, unless it is."""
        if self._dealt_to == (ranks, workers):
            return
        if self._begun:
            raise StateError(
                f"this DataState is read by {self._dealt_to} ranks and workers, and now by "
                f"{(ranks, workers)}; that can change only between a checkpoint and its restore"
            )
        before = [self._readers[n] for n in range(len(self._readers))]
        held = [item for reader in before for item in reader.held]
        if before:
            self._left = left_over(self._left, [reader.taken for reader in before])
        everyone = ranks * workers
        self._dealt_to = ranks, workers
        self._readers = {n: _Reader(0, held[n::everyone], n % workers) for n in range(everyone)}

    def _begin(self) -> object:
        """Begin a loop over samples, which ends the one before."""
        self._update()
        self._workers = None
        self._run = object()
        return self._run

    def _check(self, run: object) -> None:
        if run is not self._run:
            raise StateError(
                "the DataState was restored, told to skip, or read by another loop while this one "
                "goes on; end this one, and begin anew with read() or indices()"
            )

    def _coming(self, taken: int) -> Iterator[tuple[int, int]]:
        """Yield (items taken with it, sample) for what this reader has before it."""
        number, everyone = self._number(), len(self._readers)
        positions = dealt(self._left, number + taken * everyone, everyone)
        while True:
            block = np.fromiter(islice(positions, _BLOCK), np.int64)
            samples = self._samples_at(block).tolist()
            for position, sample in zip(block.tolist(), samples, strict=True):
                if position >= self._stop:
                    return
                taken += 1
                if not any(start <= position < stop for start, stop in self._skipped):
                    yield taken, sample

    def _samples_at(self, positions: I64) -> I64:
        epochs, places = np.divmod(positions, self._size)
        if self._shuffle:
            for epoch in np.unique(epochs).tolist():
                here = epochs == epoch
                places[here] = shuffled(places[here], self._size, self._seed, epoch)
        return places

    def _sample_ahead(self) -> Iterator[int]:
        """Yield this rank's samples to a loader, which will give them out in this order."""
        ahead = self._ahead = deque()
        for taken, sample in self._coming(self._own().taken):
            ahead.append(taken)
            yield sample

    def _count(self, samples: int) -> None:
        """Count a batch that the loader has given out."""
        reader = self._own()
        for _ in range(min(samples, len(self._ahead))):
            reader.taken = self._ahead.popleft()

    def _update(self) -> None:
        """Learn from the loader how far its workers were with the last batch that it gave out."""
        if self._workers is None:
            return
        found = list(_parts_in(self._workers.state_dict()))  # type: ignore[attr-defined]
        workers = self._workers.num_workers
        if len(found) != workers:
            raise StateError(
                f"the loader has {workers} workers, and the state of {len(found)} comes back; its "
                "dataset's state_dict() has to return that of the DataState"
            )
        for part in found:
            for number, reader in part["readers"].items():
                turn = (reader["turn"] - self._batches) % workers
                self._readers[int(number)] = _Reader(reader["taken"], list(reader["held"]), turn)


class _Ahead(Sampler[int]):
    """What a loader draws samples from. No `state_dict` of its own: `DataState.read` counts."""

    def __init__(self, data: DataState) -> None:
        self.data = data

    def __iter__(self) -> Iterator[int]:
        return self.data._sample_ahead()


def _parts_in(state: object) -> Iterator[dict[str, Any]]:
    """Find what `DataState.state_dict` returned in the state of a loader."""
    if not isinstance(state, dict):
        return
    if {"readers", "left", "ranks"} <= state.keys():
        yield state
        return
    for value in state.values():
        yield from _parts_in(value)


def _check_loader(loader: "DataLoader[Any]", data: DataState, *, streams: bool) -> None:
    """Check that what a loader reads can be counted.

    Raises:
        OptionError: it cannot; the text says what to give it.
    """
    fault = ""
    if not getattr(loader, "in_order", True):
        fault = "gives batches out of order; leave in_order as it is"
    elif not streams:
        sampler = loader.sampler
        if not isinstance(sampler, _Ahead) or sampler.data is not data:
            fault = "takes its samples from elsewhere; give it sampler=data.sampler()"
    elif loader.num_workers:
        if not hasattr(loader, "state_dict") or not hasattr(loader.dataset, "state_dict"):
            fault = (
                "does not tell how far its workers are; use torchdata's StatefulDataLoader, and "
                "give the dataset a state_dict() that returns that of the DataState"
            )
        elif loader.persistent_workers or getattr(loader, "snapshot_every_n_steps", 1) != 1:
            fault = (
                "tells how far its workers are only now and then; leave persistent_workers and "
                "snapshot_every_n_steps as they are"
            )
    if fault:
        raise OptionError(f"the {type(loader).__name__} {fault}")
