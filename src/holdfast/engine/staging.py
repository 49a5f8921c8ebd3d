"""A rank's share → the pool: some of it at once, the rest while the computation goes on.

What lies row-major in host memory is copied by one call, however many tensors it is. Knows elements
and memory; no files.
"""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from .._core import chunk_seeds, copy_and_hash_if_there, copy_if_there, copy_pieces
from ..boxes import I64, U64
from ..errors import StateError
from ..format.data_file import seed_head
from ..format.names import dotted
from ..layout import Path
from ..plan.shard_table import ShardTable
from ..state.tensors import LocalTensor
from ..worker import Latch
from .device_copies import DeviceCopies
from .file_plan import Hashes, Images, WriterPlan
from .origin import LiveTensors
from .place import copy_elements, is_lazy, is_row_major
from .samples import Samples
from .stage import copy_chunk

TIMES_LONGER = 2  # a copy that hashes takes, at most


class StagingPlan:
    """Shards to be staged, and where in the pool each of their chunks is to stand.

    Attributes:
        live: where they are.
        offsets: of every chunk in the pool.
        memory: the pool.
        rows: of every chunk among all that are to be staged.
        turned: shards in host memory whose chunks have to be gathered.
        devices: shards elsewhere.
        runs: where in the pool each shard is to stand; -1: its chunks do not follow each other.
    """

    def __init__(self, live: LiveTensors, offsets: U64, memory: torch.Tensor, rows: I64) -> None:
        self.live, self.offsets, self.memory, self.rows = live, offsets, memory, rows
        others = np.flatnonzero(live.address == 0).tolist()
        self.turned = [number for number in others if live.elements[number].is_cpu]
        self.devices = [number for number in others if not live.elements[number].is_cpu]
        self.runs = self._find_runs() if self.devices else ()

    def _find_runs(self) -> Sequence[int]:
        chunks = self.live.chunks
        start = (self.offsets - chunks.start_bytes).astype(np.int64)  # wraps round as it was
        first = np.append(start, -1)[chunks.first[:-1]]
        strays = np.bincount(chunks.shard[start != first[chunks.shard]], minlength=len(first))
        found: list[int] = np.where((strays == 0) & (chunks.counts > 0), first, -1).tolist()
        return found

    @property
    def targets(self) -> U64:
        """The address of every chunk in the pool."""
        return self.offsets + np.uint64(self.memory.data_ptr())

    def straight(self) -> tuple[U64, U64, U64]:
        """Return targets, sources and sizes of the chunks that lie as they are to stand."""
        sources = self.live.addresses(0, len(self.offsets))
        rows = sources != 0
        return self.targets[rows], sources[rows], self.live.chunks.sizes[rows]

    def gather(self, shard: int, *, non_blocking: bool = False) -> None:
        """Copy a shard that lies otherwise, or elsewhere."""
        elements, first = self.live.elements[shard], int(self.live.chunks.first[shard])
        if shard < len(self.runs) and self.runs[shard] >= 0 and is_row_major(elements):
            target = self.memory[self.runs[shard] :][: elements.nbytes].view(elements.dtype)
            copy_elements(elements.view(-1), target, non_blocking=non_blocking)
            return
        for place, chunk in enumerate(self.live.chunks_in(shard), first):
            at = int(self.offsets[place])
            target = self.memory[at : at + chunk.size_bytes]
            copy_chunk(elements, chunk, target, non_blocking=non_blocking)


def hold(
    plan: WriterPlan,
    shards: ShardTable,
    leaves: Mapping[Path, LocalTensor],
    images: Images,
    memory: torch.Tensor,
    later: AbstractSet[Path],
) -> tuple[StagingPlan, StagingPlan | None]:
    """Split the shards: those that are copied now, and those that are copied later, if any.

    Args:
        leaves: what this rank holds of each tensor.
        images: where in the pool all chunks are to stand.
        memory: the pool.
        later: tensors that are not copied now.
    """
    chunk_elements, offsets = plan.header.chunk_elements, images.offsets
    if not later:
        live, rows = LiveTensors(shards, leaves, chunk_elements), np.arange(len(offsets))
        return StagingPlan(live, offsets, memory, rows), None
    paths = [tensor.path in later for tensor in shards.tensors]
    is_later = np.array(paths, np.bool_)[shards.tensor]
    of = is_later[images.chunks.shard]
    rows, others = np.flatnonzero(~of), np.flatnonzero(of)
    now = LiveTensors(shards[~is_later], leaves, chunk_elements)
    rest = LiveTensors(shards[is_later], leaves, chunk_elements)
    return (
        StagingPlan(now, offsets[rows], memory, rows),
        StagingPlan(rest, offsets[others], memory, others),
    )


def copy_now(held: StagingPlan) -> None:
    """Copy all of it; where that fails, nothing writes into the pool afterwards."""
    devices = DeviceCopies(held) if held.devices else None
    try:
        copy_from_host(held)
    finally:
        if devices:
            devices.wait()


def copy_from_host(held: StagingPlan) -> None:
    """Copy elements in host memory into the pool, unhashed; returns when that is done."""
    copy_pieces(*held.straight(), _threads())
    for shard in held.turned:
        held.gather(shard)


class LazyCopies:
    """Copies that are made while the computation goes on.

    Every element is copied before `before_step` returns, or its device is told to copy it before
    it changes it; whatever was changed earlier makes `finish` or `close` fail.

    Attributes:
        has_time: of all: whether the last copy had ended long before anything waited for it. Then
            the next one hashes what it copies.
    """

    has_time = False

    def __init__(self, held: StagingPlan) -> None:
        """Record versions and samples; start the copies from devices.

        Args:
            held: tensors that nothing but an optimizer's step changes.
        """
        self._held = held
        self._unchanged: Unchanged | None = Unchanged(held.live.shards, held.live.elements)
        self._sampled = Sampled(held)
        self._devices = DeviceCopies(held, samples=True) if held.devices else None
        self._host_done, self._hurry = Latch(), np.array([not LazyCopies.has_time], np.uint8)
        self._began = self._took_s = 0.0
        self._waited_for = math.inf  # when something first waited for it
        self._lock = threading.Lock()
        self._fault: StateError | None = None

    def before_step(self) -> None:
        """Wait for what is copied by the host; let devices step after their copies."""
        self.hurry()
        self._host_done.wait()
        self._judge(last=True)
        if self._devices:
            self._devices.order()

    def hurry(self) -> None:
        """Copy the rest as fast as it goes: somebody waits."""
        self._hurry[0] = 1
        self._waited_for = min(self._waited_for, time.perf_counter())

    def finish(self, plan: WriterPlan, images: Images) -> Images:
        """Copy what is in host memory, in the background; wait for the copies from devices.

        Returns:
            ``images``; under raw with the hashes of what was copied without hurry.

        Raises:
            StateError: something was changed, or its memory freed, before it was copied.
        """
        held, unchanged = self._held, self._unchanged
        del self._held
        self._began = time.perf_counter()
        try:
            if unchanged is not None:
                images = copy_held(held, unchanged, plan, images, self._hurry)
        finally:
            self._took_s = time.perf_counter() - self._began
            self._host_done.set()
            if self._devices:
                self._devices.wait()
        self._judge(last=False)
        if self._fault is not None:
            raise self._fault
        self._sampled.compare()
        if self._devices and (differing := self._devices.differing()) is not None:
            raise changed(held.live.shards, differing)
        return images

    def close(self) -> None:
        """Let go of the sources, a while after `finish`.

        Raises:
            StateError: something was being changed while it was copied.
        """
        self._judge(last=True)
        if self._fault is not None:
            raise self._fault
        LazyCopies.has_time = self._waited_for - self._began > TIMES_LONGER * self._took_s

    def _judge(self, *, last: bool) -> None:
        """Check what has been copied, unless it was judged for the last time already.

        Torch counts a change in place when it is over: a copy made meanwhile looks good at first.
        Before a step the thread that trains is in the middle of nothing.
        """
        with self._lock:
            try:
                if self._unchanged is not None:
                    self._unchanged.check()
            except StateError as error:
                self._fault = error
            if last:
                self._unchanged = None


def copy_held(
    held: StagingPlan,
    unchanged: "Unchanged",
    plan: WriterPlan,
    images: Images,
    hurry: npt.NDArray[np.uint8],
) -> Images:
    """Copy elements in host memory while the computation goes on.

    Under raw hashes are taken at once, unless there is no time: later, the elements would come from
    memory again.

    Raises:
        StateError: some were changed, or their memory was freed, before they were copied.
    """
    unchanged.check()
    held.live.look_again()
    pieces, of = held.straight(), held.live.chunks.shard
    straight = np.flatnonzero(held.live.address[of])
    if images.files:
        rows, seeds = held.rows[straight], np.empty(len(images.offsets), np.uint64)
        for number, file in enumerate(images.files, plan.first_number):
            chunk_seeds(seed_head(plan.header.save_id, plan.rank, number), seeds[file])
        count = len(rows)
        found = (
            np.empty(count, np.uint64),
            np.empty((count, 2), np.uint64),
            np.empty(count, np.uint8),
        )
        room = held.memory[slice(*images.footers)]  # nothing else is there yet
        of_room = room.data_ptr(), room.nbytes
        missing = copy_and_hash_if_there(*pieces, _threads(), seeds[rows], *found, *of_room, hurry)
        images = replace(images, hashes=Hashes(rows, *found))
    else:
        missing = copy_if_there(*pieces, _threads())
    if missing < len(pieces[0]):
        unchanged.check()
        raise unchanged.freed(int(of[straight][missing]))
    for shard in held.turned:
        unchanged.check_one(shard)
        held.gather(shard)
    return images


class Unchanged:
    """Tensors, and what torch knew of them at one moment: counts of changes, bytes of memory."""

    def __init__(self, shards: ShardTable, elements: Sequence[torch.Tensor]) -> None:
        """Look at them now."""
        self._shards, self._elements = shards, elements
        self._found = self._look()

    def check(self) -> None:
        """Check that they are as they were.

        Raises:
            StateError: one was changed, or its memory freed, since then.
        """
        if self._look() != self._found:
            for number in range(len(self._elements)):
                self.check_one(number)

    def check_one(self, number: int) -> None:
        """Check that one is as it was, as `check` does."""
        data, (version, room) = self._elements[number], self._found[number]
        if data.untyped_storage().nbytes() < room:
            raise self.freed(number)
        if data._version != version:
            raise changed(self._shards, number)

    def freed(self, number: int) -> StateError:
        """Return the error for a tensor whose memory was freed."""
        return StateError(
            f"the memory of {_name(self._shards, number)} was freed before it was copied: it was "
            "resized, or its mapped file was cut. Call wait_staged() before that, or save with "
            'stage="eager"'
        )

    def _look(self) -> list[tuple[int, int]]:
        return [(data._version, data.untyped_storage().nbytes()) for data in self._elements]


def changed(shards: ShardTable, number: int) -> StateError:
    """Return the error for a tensor that changed after the call."""
    return StateError(
        f"{_name(shards, number)} was changed before it was copied, outside of optimizer.step(): "
        "the checkpoint would mix two steps. Call wait_staged() before the change, or save with "
        'stage="eager"'
    )


def _name(shards: ShardTable, number: int) -> str:
    return dotted(shards.tensors[int(shards.tensor[number])].path)


class Sampled:
    """Shards in host memory, and samples of them at the call. It holds none of their tensors.

    What is to be conjugated or negated is left out: no copy has what is in its memory.
    """

    def __init__(self, held: StagingPlan) -> None:
        live, chunks = held.live, held.live.chunks
        turned = [n for n in held.turned if not is_lazy(live.elements[n])]
        is_in = live.address != 0
        is_in[turned] = True
        self._shards, self._numbers = live.shards, np.flatnonzero(is_in)
        rows = is_in[chunks.shard]
        self._copies = held.targets[rows], chunks.sizes[rows], chunks.counts[is_in]
        bytes_of = (live.shards.boxes.elements * live.shards.item_bytes).astype(np.uint64)
        bytes_of[turned] = 0
        others = {int(self._numbers.searchsorted(n)): live.elements[n] for n in turned}
        self._samples = Samples(live.address[is_in], bytes_of[is_in], others)

    def compare(self) -> None:
        """Check that the copies are of the moment of the call, as far as seen.

        Raises:
            StateError: a tensor was changed before it was copied.
        """
        differing = self._samples.differing(*self._copies)
        if len(differing):
            raise changed(self._shards, int(self._numbers[differing[0]]))


def _threads() -> int:
    """As many as torch computes with; more than 8 do not copy faster."""
    return min(torch.get_num_threads(), 8)
