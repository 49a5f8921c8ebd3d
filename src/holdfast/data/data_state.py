"""Where the data is: which samples have been read, by which reader, on any number of readers.

Knows processes and loaders, no files: what a reader saves has its own number in it, so that a
checkpoint holds that of all. How samples are dealt is `dealing`'s; docs/data.md tells what follows.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from ..errors import OptionError, StateError, shown
from .dealing import Deal, Reader
from .permutation import END
from .random_state import checked_place, place_of_group


class DataState:
    """Which samples have been read: saved with the state, restored on any number of readers.

    The samples of all epochs form one endless stream: position p is sample p % size in the order of
    epoch p // size. Positions are dealt to the readers in turn, so each sample is read once in
    every epoch. A reader is a data-parallel rank; if the workers of a loader read an
    `IterableDataset`, each worker is a reader. Restored on the same number of readers, each reader
    continues its own part exactly. On another number, unread samples are dealt again, and samples
    in `held` are handed on: none is lost, none is read twice.

    A loader of your own takes samples from `indices`, and keeps those it has taken and not given
    out in `held`. So does an `IterableDataset`; its ``state_dict()`` must return this one's.

    Args:
        size: number of samples in an epoch.
        seed: seed of the order, which differs in each epoch. A restored seed replaces it.
        shuffle: False reads every epoch from 0 to size - 1. A restored value replaces it.
        epochs: number of epochs. None: no end, and all ranks get equally many batches.
        rank, world_size: data-parallel rank and their number; default: those of the default process
            group. Ranks that read the same data (tensor parallelism) give the same rank.

    Raises:
        OptionError: an invalid argument.

    Example::

        data = holdfast.DataState(len(dataset), seed=1, epochs=1)
        loader = DataLoader(dataset, 8, sampler=data.sampler())
        state = {"model": model, "data": data}
        data.skip(0, 4)  # leave out the first samples, such as a batch that broke the run
        for batch in data.read(loader):  # counts batches given out, not those fetched ahead
            train()
        data.load_state_dict(data.state_dict())  # `holdfast.save` and `load` call both
        rest = list(data.indices())  # for a loader of your own: counts what it yields
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
        """Begin with the first sample of the first epoch."""
        for name, value in (("size", size), ("epochs", epochs)):
            if value is not None and (type(value) is not int or not 0 < value < END):
                raise OptionError(f"{name} is {shown(value)}; expected an integer above 0")
        if type(seed) is not int:
            raise OptionError(f"seed is {shown(seed)}; expected an integer")
        self._place = checked_place(rank, world_size)
        stop = END if epochs is None else min(epochs * size, END)
        self._deal = Deal(size, seed, bool(shuffle), stop)
        self._run: object = None  # of a loop over samples; another ends it
        self._reading = False  # whether that is one of `read`, or in a worker of its loader
        self._ahead: deque[int] = deque()  # how far a sampler was with each sample it gave out
        self._workers: DataLoader[Any] | None = None  # those who count, where not this process does
        self._batches = 0  # that came from them

    @property
    def position(self) -> int:
        """The first position not yet read, if all readers are as far as those of this rank."""
        return self._deal.position(self._mine())

    @property
    def epoch(self) -> int:
        """The epoch of `position`, counted from 0."""
        return self.position // self._deal.size

    @property
    def held(self) -> list[Any]:
        """Samples that this reader has taken and not given out: a list of tensors or values.

        Change it in place. When the number of readers changes, its items are handed on one by one.
        """
        return self._own().held

    @held.setter
    def held(self, items: list[Any]) -> None:
        self._own().held = items

    def sampler(self) -> Sampler[int]:
        """Return the ``sampler`` for a `DataLoader`: the samples of this rank, in order.

        The loader may fetch ahead; only `read` counts samples as read.
        """
        return _Ahead(self)

    def indices(self) -> Iterator[int]:
        """Yield this reader's samples; each counts as read when it is yielded.

        Raises:
            StateError: the state was restored, or another loop began, during this loop.
        """
        reader = self._own()
        run = self._begin()
        for taken, sample in self._deal.coming(self._number()):
            self._check(run)
            reader.taken, self._deal.begun = taken, True
            yield sample

    def read(self, loader: "DataLoader[Any]") -> Iterator[Any]:
        """Yield the batches of a loader; each counts as read when it is yielded.

        It draws nothing from torch's global generator, so a resumed job draws the same random
        numbers as one that was never stopped.

        Args:
            loader: of an indexed dataset, with ``sampler=data.sampler()``; or of an
                `IterableDataset` that reads `indices`, a `StatefulDataLoader` if it has workers.

        Raises:
            OptionError: the samples of this loader cannot be counted; the text says why.
            StateError: the state was restored, or another loop began, during this loop.
        """
        if not isinstance(loader, DataLoader):
            raise OptionError(
                f"the loader is a {type(loader).__name__}; expected a torch.utils.data.DataLoader"
            )
        streams = isinstance(loader.dataset, IterableDataset)
        _check_loader(loader, self, streams=streams)
        workers = loader.num_workers if streams else 0
        self._deal.settle(self._whose()[1], max(1, workers))
        run, self._reading = self._begin(), True
        with torch.random.fork_rng(devices=[]):
            batches = iter(loader)
        if streams and not workers:  # `indices` counts, in this process
            yield from batches
            return
        if workers:
            self._workers, self._batches = loader, 0
        try:
            for batch in batches:
                self._deal.begun = True
                if workers:
                    self._batches += 1
                else:
                    self._count(loader.batch_size or 1)
                yield batch
                self._check(run)
        finally:
            if run is self._run:
                self._begin()  # lets go of the loader

    def skip(self, start: int, stop: int) -> None:
        """Leave out the samples at positions start ≤ p < stop that are not yet read.

        All ranks call it with the same arguments. It holds for later loops, and is saved.

        Args:
            start, stop: positions.

        Raises:
            OptionError: the positions are invalid.
        """
        if type(start) is not int or type(stop) is not int or not 0 <= start <= stop < END:
            raise OptionError(
                f"start is {shown(start)} and stop {shown(stop)}; expected integers, "
                "0 <= start <= stop"
            )
        self._begin()
        self._deal.skip(start, stop)

    def state_dict(self) -> dict[str, Any]:
        """Return the common state of all readers, and the parts of this rank's readers.

        Raises:
            StateError: the workers of a loader do not tell how far they are.
        """
        return self._deal.dump(self._mine())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the readers of a checkpoint were.

        Args:
            state: the result of `state_dict`, with the parts of all readers.

        Raises:
            MismatchError: the number of samples differs, or parts are missing.
        """
        self._deal.load(state)
        self._workers = None
        self._begin()

    def _whose(self) -> tuple[int, int]:
        """Return (rank, number of ranks); a worker has them from the process that started it."""
        if self._place is None:
            self._place = place_of_group()
        return self._place

    def _number(self) -> int:
        """Return the number of the reader that this process is."""
        worker = get_worker_info()
        if worker is None:
            rank, ranks = self._whose()
            self._deal.settle(ranks, 1)
            return rank
        self._check_reading()
        rank, ranks = self._whose()
        self._deal.settle(ranks, worker.num_workers)
        readers = self._deal.readers
        return next(n for n in self._deal.numbers(rank) if readers[n].turn == worker.id)

    def _own(self) -> Reader:
        """Return the reader that this process is."""
        number = self._number()  # which may deal anew
        return self._deal.readers[number]

    def _mine(self) -> list[int]:
        """Return the numbers of this rank's readers, up to date; in a worker, that of its own."""
        self._update()
        if get_worker_info() is not None:
            return [self._number()]
        rank, ranks = self._whose()
        if self._deal.ranks != ranks:
            return [self._number()]
        return list(self._deal.numbers(rank))

    def _begin(self) -> object:
        """Begin a loop over samples, which ends the one before."""
        self._update()
        self._workers = None
        self._reading = get_worker_info() is not None
        self._run = object()
        return self._run

    def _check(self, run: object) -> None:
        if run is not self._run:
            raise StateError(
                "the DataState was restored, skipped ahead, or read by another loop during this "
                "loop. End this loop, and start a new one with read() or indices()"
            )

    def _check_reading(self) -> None:
        if not self._reading:
            raise StateError(
                "a loader asks for samples of a DataState that does not count them; iterate over "
                "data.read(loader) instead of the loader"
            )

    def _sample_ahead(self) -> Iterator[int]:
        """Yield this rank's samples to a loader, which will give them out in this order."""
        self._check_reading()
        ahead = self._ahead = deque()
        for taken, sample in self._deal.coming(self._number()):
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
                f"the loader has {workers} workers, but its state has the DataState of "
                f"{len(found)}; the dataset's state_dict() must return that of the DataState"
            )
        for part in found:
            self._deal.learn(part, self._batches)


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
        fault = "gives batches out of order; create it with in_order=True"
    elif not streams:
        sampler = loader.sampler
        if not isinstance(sampler, _Ahead) or sampler.data is not data:
            fault = "uses another sampler; create it with sampler=data.sampler()"
    elif loader.num_workers:
        if not hasattr(loader, "state_dict") or not hasattr(loader.dataset, "state_dict"):
            fault = (
                "does not report how far its workers are; use torchdata's StatefulDataLoader, and "
                "give the dataset a state_dict() that returns that of the DataState"
            )
        elif loader.persistent_workers or getattr(loader, "snapshot_every_n_steps", 1) != 1:
            fault = (
                "does not report how far its workers are after each batch; create it with "
                "persistent_workers=False and snapshot_every_n_steps=1"
            )
    if fault:
        raise OptionError(f"the {type(loader).__name__} {fault}")
