"""Ranks of torch.distributed. Bytes travel as uint8 tensors: no pickle."""

import contextlib
import functools
import logging
import struct
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from .. import threads
from ..errors import OptionError, PeerError
from .barrier import StoreGroup
from .base import COORDINATOR, Group, lost_peer
from .star import Star

logger = logging.getLogger("holdfast")

_CPU_BACKENDS = ("gloo", "mpi")  # where they are not given as device:backend
ANSWER_S = 10.0  # a store answers within milliseconds, unless its host is frozen

GroupLike = dist.ProcessGroup | Group | Literal["alone"] | None  # what a verb takes
Made = TypeVar("Made")

_last: list[Any] = []  # the work of the last collective


def _wait(work: Any) -> None:
    """Wait for a collective, and keep its work until the next one, or the end of the process.

    Who lets go of it last frees its tensors, which takes the interpreter's lock. gloo's own thread
    does so a little later: it would abort a process whose interpreter has ended meanwhile.
    """
    _last[:] = [work]
    work.wait()


class TorchGroup:
    """See `holdfast.group.base.Group`; the coordinator is rank 0 of the process group."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._group = process_group
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        # Planning goes over the CPU where the group can (gloo); NCCL alone needs device memory.
        backends = str(dist.get_backend_config(process_group))
        on_cpu = "cpu:" in backends or backends in _CPU_BACKENDS
        if not on_cpu and not torch.cuda.is_available():
            raise OptionError(
                f"the process group has backends for {backends} and none for the CPU, and there is "
                "no CUDA device; create it by init_process_group('cpu:gloo,cuda:nccl')"
            )
        self._device = "cpu" if on_cpu else "cuda"  # no call of torch, which a mode would see
        self._stream: torch.cuda.Stream | None = None
        send, receive = (partial(self._begin, call, _TOLD_TAG) for call in (dist.isend, dist.irecv))
        star = Star(self.rank, self.world_size, send, receive, self._ring)
        self._star = star if on_cpu else None

    def all_gather(self, data: bytes) -> list[bytes]:
        """Give every rank the bytes of all, in rank order."""
        if self._star:
            return self._star.all_gather(data)
        try:
            sizes = self._sizes(data)
        except RuntimeError as error:
            raise lost_peer(error) from error
        return self._ring(data, max(sizes))

    def gather(self, data: bytes) -> list[bytes] | None:
        """Give the coordinator the bytes of all; the others get None."""
        if self._star:
            return self._star.gather(data)
        here = self.rank == COORDINATOR
        try:
            sizes = self._sizes(data)
            parts = [self._empty(max(sizes)) for _ in sizes] if here else None
            padded = self._padded(data, max(sizes))
            _wait(
                dist.gather(padded, parts, group=self._group, group_dst=COORDINATOR, async_op=True)
            )
        except RuntimeError as error:
            raise lost_peer(error) from error
        if parts is None:
            return None
        return [_bytes(part, size) for part, size in zip(parts, sizes, strict=True)]

    @property
    def sends(self) -> bool:
        """Whether the process group has a backend for the CPU."""
        on_cpu = self._device == "cpu"
        if not on_cpu:
            _log_once(
                "the process group has no backend for the CPU, so each rank reads all that it "
                "needs; ranks share what they read after init_process_group('cpu:gloo,cuda:nccl')"
            )
        return on_cpu

    def start_send(self, data: memoryview, rank: int) -> Callable[[], None]:
        """Start a point-to-point send."""
        return self._begin(dist.isend, _TAG, data, rank)

    def start_receive(self, data: memoryview, rank: int) -> Callable[[], None]:
        """Start a point-to-point receive."""
        return self._begin(dist.irecv, _TAG, data, rank)

    def announce(self, data: bytes) -> bytes:
        """Give every rank the coordinator's bytes."""
        return self._star.announce(data) if self._star else self.all_gather(data)[COORDINATOR]

    def connect(self) -> Callable[[str, float], Group]:
        """Reach the store that the process group was made with."""
        group = self._group or dist.distributed_c10d._get_default_group()
        connection, server = _connection(group), _store_of(group)

        def background(name: str, deadline: float) -> Group:
            prefixed = PrefixStore(f"holdfast/{name}", connection)
            return StoreGroup(prefixed, self.rank, self.world_size, deadline, server)

        return background

    def background(self, name: str, deadline: float) -> Group:
        """Return the same ranks over the store that the process group was made with."""
        return self.connect()(name, deadline)

    def start_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start an all_reduce of a few integers."""
        try:
            with self._beside_training():
                numbers = torch.tensor(values, dtype=torch.int64, device=self._device)
                work = dist.all_reduce(numbers, dist.ReduceOp.MAX, self._group, async_op=True)
        except RuntimeError as error:
            raise lost_peer(error) from error

        def read() -> list[int]:
            try:
                with self._beside_training():
                    _wait(work)
                    result: list[int] = numbers.tolist()
            except RuntimeError as error:
                raise lost_peer(error) from error
            return result

        return read

    def all_sum(self, values: Sequence[int]) -> list[int]:
        """Add each value up over all ranks."""
        if self._star:
            return self._star.all_sum(values)
        try:
            with self._beside_training():
                numbers = torch.tensor(values, dtype=torch.int64, device=self._device)
                _wait(dist.all_reduce(numbers, dist.ReduceOp.SUM, self._group, async_op=True))
                result: list[int] = numbers.tolist()
        except RuntimeError as error:
            raise lost_peer(error) from error
        return result

    def _begin(self, begin: Any, tag: int, data: memoryview, rank: int) -> Callable[[], None]:
        """Start a transfer with another rank; return what waits for its end."""
        end = "group_dst" if begin is dist.isend else "group_src"
        try:
            part = torch.frombuffer(data, dtype=torch.uint8)
            work = begin(part, group=self._group, tag=tag, **{end: rank})
        except RuntimeError as error:
            raise lost_peer(error) from error

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise lost_peer(error) from error

        return wait

    def _ring(self, data: bytes, size_max: int) -> list[bytes]:
        """Gather, on every rank, what has so many bytes at most on all."""
        size = _SIZE.size + size_max
        try:
            parts = [self._empty(size) for _ in range(self.world_size)]
            padded = self._padded(_SIZE.pack(len(data)) + data, size)
            _wait(dist.all_gather(parts, padded, group=self._group, async_op=True))
        except RuntimeError as error:
            raise lost_peer(error) from error
        found = [_bytes(part, size) for part in parts]
        return [part[_SIZE.size :][: _SIZE.unpack_from(part)[0]] for part in found]

    def _beside_training(self) -> contextlib.AbstractContextManager[object]:
        """Wait for nothing that training has queued on a CUDA device."""
        if self._device != "cuda":
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)

    def _sizes(self, data: bytes) -> list[int]:
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device=self._device)
        mine = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        parts = [sizes[i : i + 1] for i in range(self.world_size)]
        _wait(dist.all_gather(parts, mine, group=self._group, async_op=True))
        result: list[int] = sizes.tolist()
        return result

    def _empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _padded(self, data: bytes, size: int) -> torch.Tensor:
        padded = torch.zeros(size, dtype=torch.uint8, device="cpu")
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return padded.to(self._device)


_TAG = 0x686F6C64  # of transfers between two ranks, so that they meet none of training's
_TOLD_TAG = _TAG + 1  # of the star's
_SIZE = struct.Struct("<Q")

_connections: "weakref.WeakKeyDictionary[dist.ProcessGroup, Any]" = weakref.WeakKeyDictionary()


def _connection(group: dist.ProcessGroup) -> Any:
    """Return a connection of our own to the group's store; the same for every save.

    A thread that waits on the group's own would hold up all others. One save is in flight at a
    time, so ours serves one thread; where that hangs, or the connection was lost, there is another.

    Raises:
        PeerError: the store cannot be reached, or does not answer.
    """
    kept = _connections.get(group)
    if kept is not None:
        with contextlib.suppress(PeerError):
            _in_time(lambda: kept.check(["holdfast"]))
            return kept
    made = _connections[group] = _in_time(_store_of(group).clone)
    return made


def _store_of(group: dist.ProcessGroup) -> Any:
    return dist.distributed_c10d._get_process_group_store(group)


def _in_time(call: Callable[[], Made]) -> Made:
    """Return what a call to a store does; give it up where that takes too long.

    Torch itself waits for ever for the answer of a host that is frozen.
    """
    answer: Future[Made] = Future()

    def run(may_begin: threads.MayBegin) -> None:
        try:
            if may_begin():
                answer.set_result(call())
        except RuntimeError as error:
            answer.set_exception(error)

    try:
        if threads.start(run, "holdfast-call") is None:
            cause = "no thread can be started to ask the ranks' store"
            raise PeerError(cause, rank=-1, cause=cause)
        return answer.result(ANSWER_S)
    except RuntimeError as error:
        raise lost_peer(error) from error
    except TimeoutError as error:
        cause = "the ranks' store does not answer. Is torchrun stopped, or the host of rank 0?"
        raise PeerError(cause, rank=-1, cause=cause) from error


@functools.cache
def _log_once(text: str) -> None:
    logger.info(text)


def _bytes(part: torch.Tensor, size: int) -> bytes:
    return part[:size].cpu().numpy().tobytes()
