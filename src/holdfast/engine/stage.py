"""Tensor → bytes in the pool: chunk by chunk and hashed as they arrive, or all of them at once.

Knows elements and memory; no names, no files.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch

from .._core import copy_and_hash_chunk, copy_if_there, copy_pieces, hash_chunk
from ..errors import StateError
from ..format.names import dotted
from ..layout import Box, Chunk, Path, Shard, boxes_of_range, chunks_of, size_of
from ..worker import Latch
from .place import copy_elements
from .samples import Piece, Samples, columns
from .workspace import bytes_at

Part = tuple[torch.Tensor, Box]  # the elements of a box
Sources = Mapping[Path, Sequence[Part]]  # what this rank holds of each tensor


@dataclass(frozen=True, slots=True)
class Staged:
    """A chunk in host memory that nothing else changes.

    Attributes:
        checksum: XXH3-64 of the bytes, seeded for the place of the chunk in its file.
        digest: XXH3-128 of the bytes.
    """

    address: int
    size_bytes: int
    checksum: int
    digest: bytes


def stage(source: torch.Tensor, box: Box, chunk: Chunk, address: int, seed: int) -> Staged:
    """Copy one chunk's elements to host memory in row-major order.

    The hashes are those of the copied bytes: a source that changes meanwhile gives a checkpoint
    that is whole, if not the one that was meant.

    Args:
        source: what this rank holds: the elements of ``box``, in any strides, on any device.
        address: of ``chunk.size_bytes``.
    """
    start, is_copied = gather(source, box, chunk, lambda _: address)
    if is_copied:
        return seal(address, chunk.size_bytes, seed)
    checksum, digest = copy_and_hash_chunk(address, start, chunk.size_bytes, seed)
    return Staged(address, chunk.size_bytes, checksum, digest)


def gather(
    source: torch.Tensor, box: Box, chunk: Chunk, take: Callable[[int], int]
) -> tuple[int, bool]:
    """Find, or make, a chunk's elements in host memory in row-major order.

    Args:
        source, box: as `stage` takes them.
        take: returns memory for so many bytes, which they are copied to if they lie otherwise.

    Returns:
        (their address, whether they were copied: nothing else changes them).
    """
    held = elements_of(chunk.shard, source, box)
    if held.is_cpu and is_row_major(held):
        return held.data_ptr() + chunk.first * held.element_size(), False
    address = take(chunk.size_bytes)
    copy_chunk(held, chunk, bytes_at(address, chunk.size_bytes))
    return address, True


def whole_of(source: torch.Tensor, box: Box, chunks: Sequence[Chunk]) -> torch.Tensor:
    """Return all elements of a shard behind each other in host memory; copied where they are not.

    Args:
        source, box: as `stage` takes them.
        chunks: all of the shard.
    """
    held = elements_of(chunks[0].shard, source, box)
    if held.device.type == "cpu" and is_row_major(held):
        return held
    memory = torch.empty(chunks[0].shard.size_bytes, dtype=torch.uint8, device="cpu")
    at = 0
    for chunk in chunks:
        copy_chunk(held, chunk, memory[at : at + chunk.size_bytes])
        at += chunk.size_bytes
    return memory


def elements_of(shard: Shard, source: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the elements of a shard among those of ``box``."""
    if shard.box == box:
        return source
    inner = shard.box.relative_to(box.offset)
    return source[inner.slices()] if inner.shape != tuple(source.shape) else source


def part_with(sources: Sources, shard: Shard) -> Part:
    """Return that part of what is held of a tensor which has the elements of a shard."""
    parts = sources[shard.tensor.path]
    if len(parts) == 1:
        return parts[0]
    return next(part for part in parts if part[1].intersect(shard.box))


def seal(address: int, size_bytes: int, seed: int) -> Staged:
    """Hash a chunk that stands in its place already."""
    checksum, digest = hash_chunk(address, size_bytes, seed)
    return Staged(address, size_bytes, checksum, digest)


@dataclass(frozen=True, slots=True)
class Held:
    """Elements to be staged: a shard's, and where in the pool each of its chunks is to stand.

    Attributes:
        elements: those of the shard, in any strides, on any device.
        version: torch's count of the changes in place to ``elements`` when the save was asked for.
        nbytes: of the memory that ``elements`` are in, at that time.
    """

    shard: Shard
    elements: torch.Tensor
    chunks: tuple[Chunk, ...]
    offsets: tuple[int, ...]
    version: int | None
    nbytes: int


def hold(
    shards: Sequence[Shard], sources: Sources, offsets: Sequence[int], chunk: int
) -> list[Held]:
    """Pair every shard with its elements and the places of its chunks, without a copy.

    Args:
        offsets: of all chunks, in the order of shards and chunks.
        chunk: elements of a chunk.
    """
    result, first = [], 0
    for shard in shards:
        held = elements_of(shard, *part_with(sources, shard))
        chunks = tuple(chunks_of(shard, chunk))
        places = tuple(offsets[first : first + len(chunks)])
        first += len(chunks)
        version = None if held.is_inference() else held._version
        nbytes = held.untyped_storage().nbytes()
        result.append(Held(shard, held, chunks, places, version, nbytes))
    return result


class Staging:
    """The copies of one save: some made at once, the rest while the computation goes on.

    Every element is copied before `before_step` returns, or its device is told to copy it before
    it changes it; whatever was changed earlier makes `finish` or `close` fail.

    Attributes:
        copied_bytes: when it was made; all of them when `finish` has returned.
    """

    def __init__(
        self, held: Sequence[Held], later: AbstractSet[Path], memory: torch.Tensor
    ) -> None:
        """Copy what is not for later; start the copies from devices.

        Args:
            later: tensors that nothing but an optimizer's step changes.
        """
        self._memory = memory
        now = [item for item in held if item.shard.tensor.path not in later]
        rest = [item for item in held if item.shard.tensor.path in later]
        devices = DeviceCopies([item for item in now if not _on_host(item)], memory)
        try:
            copy_from_host([item for item in now if _on_host(item)], memory, _threads())
        finally:
            devices.wait()
        self.copied_bytes = size_of(item.shard for item in now)
        self._rest = rest
        self._sampled = [item for item in rest if _on_host(item)]
        self._samples = Samples([item.elements for item in self._sampled])
        self._copies = DeviceCopies([item for item in rest if not _on_host(item)], memory)
        self._host_done = Latch()
        self._lock = threading.Lock()
        self._fault: StateError | None = None

    def before_step(self) -> None:
        """Wait for what is copied by the host; let devices step after their copies."""
        self._host_done.wait()
        self._judge(last=True)
        self._copies.order()

    def finish(self) -> None:
        """Copy the rest, in the background.

        Raises:
            StateError: something was changed, or its memory freed, before it was copied.
        """
        try:
            if held := [item for item in self._rest if _on_host(item)]:
                copy_held(held, self._memory)
        finally:
            self._host_done.set()
            self._copies.wait()
        self._judge(last=False)
        if self._fault is not None:
            raise self._fault
        self._compare()

    def close(self) -> None:
        """Let go of the sources, a while after `finish`.

        Raises:
            StateError: something was being changed while it was copied.
        """
        self._judge(last=True)
        if self._fault is not None:
            raise self._fault

    def _compare(self) -> None:
        """Check that the copies are of the moment when the save was asked for, as far as seen."""
        pieces = [_pieces(item, self._memory.data_ptr()) for item in self._sampled]
        for i in self._samples.differing(pieces):
            if not _is_lazy(self._sampled[i].elements):
                raise _changed(self._sampled[i])
        self._sampled = []

    def _judge(self, *, last: bool) -> None:
        """Check what has been copied, unless it was judged for the last time already.

        Torch counts a change in place when it is over: a copy made meanwhile looks good at first.
        Before a step the thread that trains is in the middle of nothing.
        """
        with self._lock:
            try:
                for item in self._rest:
                    _check_unchanged(item)
            except StateError as error:
                self._fault = error
            if last:
                self._rest = []


def _on_host(item: Held) -> bool:
    return item.elements.is_cpu


def _threads() -> int:
    """As many as torch computes with; more than 8 do not copy faster."""
    return min(torch.get_num_threads(), 8)


def copy_held(held: Sequence[Held], memory: torch.Tensor) -> None:
    """Copy elements in host memory while the computation goes on.

    Raises:
        StateError: some were changed, or their memory was freed, before they were copied.
    """
    for item in held:
        _check_unchanged(item)
    plain = [item for item in held if is_row_major(item.elements)]
    pieces = [_pieces(item, memory.data_ptr()) for item in plain]
    owners = [item for item, own in zip(plain, pieces, strict=True) for _ in own]
    missing = copy_if_there(*columns(pieces), _threads())
    if missing < len(owners):
        _check_unchanged(owners[missing], there=False)
    for item in held:
        if not is_row_major(item.elements):
            _check_unchanged(item)
            _copy_chunks(item, memory, non_blocking=False)
    for item in held:
        _check_unchanged(item)


def _check_unchanged(item: Held, *, there: bool = True) -> None:
    name = dotted(item.shard.tensor.path)
    if not there or item.elements.untyped_storage().nbytes() < item.nbytes:
        raise StateError(
            f"the memory of {name} was freed (resized) before it was staged; call "
            'wait_staged() before that, or save with stage="eager"'
        )
    if item.version is not None and item.elements._version != item.version:
        raise _changed(item)


def _changed(item: Held) -> StateError:
    return StateError(
        f"{dotted(item.shard.tensor.path)} was changed before it was staged, outside of "
        "optimizer.step: the checkpoint would be of no one moment. Call wait_staged() before that, "
        'or save with stage="eager"'
    )


def copy_from_host(held: Iterable[Held], memory: torch.Tensor, threads: int) -> None:
    """Copy elements in host memory into the pool, unhashed; returns when that is done."""
    pieces = []
    for item in held:
        if is_row_major(item.elements):
            pieces.append(_pieces(item, memory.data_ptr()))
        else:
            _copy_chunks(item, memory, non_blocking=False)
    copy_pieces(*columns(pieces), threads)


class DeviceCopies:
    """Copies from devices into the pool, under way on streams of their own.

    The computation goes on: what it does after `order` comes after the copies.
    """

    def __init__(self, held: Iterable[Held], memory: torch.Tensor) -> None:
        """Start them; where the pool is pinned they overlap with what the device computes."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        try:
            for item in held:
                self._start(item, memory)
        except BaseException:
            self.wait()  # nothing writes into the memory when this has failed
            raise

    def order(self) -> None:
        """Let the current streams go on only after the copies; the host does not wait."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def wait(self) -> None:
        """Wait, on the host, until the bytes are there."""
        for stream in self._streams.values():
            stream.synchronize()

    def _start(self, item: Held, memory: torch.Tensor) -> None:
        device = item.elements.device
        if device.type != "cuda":
            _copy_chunks(item, memory, non_blocking=False)
            return
        with torch.cuda.stream(self._stream(device)):
            _copy_chunks(item, memory, non_blocking=True)

    def _stream(self, device: torch.device) -> "torch.cuda.Stream":
        if device not in self._streams:
            if device not in _side_streams:
                _side_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            _side_streams[device].wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = _side_streams[device]
        return self._streams[device]


_side_streams: dict[torch.device, "torch.cuda.Stream"] = {}


def is_row_major(elements: torch.Tensor) -> bool:
    """Whether the bytes in memory are those of the elements in row-major order."""
    return elements.is_contiguous() and not _is_lazy(elements)


def _is_lazy(elements: torch.Tensor) -> bool:
    """Whether the elements are other than what is in memory (Tensor.conj, Tensor.negative)."""
    return elements.is_conj() or elements.is_neg()


def _pieces(item: Held, base: int) -> list[Piece]:
    """Join chunks that follow each other in the pool as they do in the tensor."""
    pieces: list[Piece] = []
    source = item.elements.data_ptr()
    for chunk, at in zip(item.chunks, item.offsets, strict=True):
        size = chunk.size_bytes
        if pieces and pieces[-1][0] + pieces[-1][2] == base + at:
            target, start, before = pieces[-1]
            pieces[-1] = (target, start, before + size)
        else:
            pieces.append((base + at, source, size))
        source += size
    return pieces


def _copy_chunks(item: Held, memory: torch.Tensor, *, non_blocking: bool) -> None:
    for chunk, at in zip(item.chunks, item.offsets, strict=True):
        target = memory[at : at + chunk.size_bytes]
        copy_chunk(item.elements, chunk, target, non_blocking=non_blocking)


def copy_chunk(
    held: torch.Tensor, chunk: Chunk, target: torch.Tensor, *, non_blocking: bool = False
) -> None:
    """Gather a run of elements, box by box where they do not lie behind each other."""
    values = target.view(held.dtype)
    if is_row_major(held):
        run = held.view(-1)[chunk.first : chunk.first + chunk.elements]
        copy_elements(run, values, non_blocking=non_blocking)
        return
    for before, part in boxes_of_range(chunk.shard.box.shape, chunk.first, chunk.elements):
        run = values[before : before + part.elements].view(part.shape)
        copy_elements(held[part.slices()], run, non_blocking=non_blocking)
