"""Writes the progress file of a run once a second, for `holdfast watch`. Knows no tensors.

A thread of its own does it: neither training nor a save ever waits for that file.
"""

import contextlib
import fcntl
import logging
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from .. import threads, worker
from ..format.progress import (
    FILE_BYTES_MAX,
    SLOT_BYTES,
    RankProgress,
    decode_slots,
    encode_slot,
    progress_name,
)
from ..processes import pid_space

if TYPE_CHECKING:
    from ..engine.ledger import Ledger
    from ..group.base import Group
    from .schedule import Schedule

logger = logging.getLogger("holdfast")

TICK_S = 1.0  # a job that ends before the first one leaves no trace
END_S = 1.0  # for the thread to remove what it wrote
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class ProgressFile:
    """What a rank says of itself. Others set the attributes; its own thread reads them.

    Attributes:
        step: of training.
        save: step and ledger of the save in flight, or of the last one.
        has_begun: whether `begin` was called.
    """

    def __init__(self, root: str, ranks: "Group", schedule: "Schedule") -> None:
        host = os.uname().nodename
        local = os.environ.get("LOCAL_RANK", "")
        is_known = local.isdecimal() and int(local) < FILE_BYTES_MAX // SLOT_BYTES
        self._place = f"{root}/{progress_name(host, None if is_known else ranks.rank)}"
        self._offset = int(local) * SLOT_BYTES if is_known else 0
        self._schedule = schedule
        who = RankProgress(host=host, pid=os.getpid(), pid_space=pid_space())
        self._said = replace(who, rank=ranks.rank, world_size=ranks.world_size)
        self.step = -1
        self.save: tuple[int, Ledger] | None = None
        self.has_begun = "://" in root  # in an object store each write would be paid for
        self._fd = -1
        self._asks: SimpleQueue[None] = SimpleQueue()
        self._ended = worker.Latch()
        self._ended.set()

    def begin(self) -> None:
        """Start the thread."""
        self.has_begun, self._ended = True, worker.Latch()
        if worker.start(self._work, "holdfast-progress") is None:
            self._ended.set()
            return
        _open.add(self)

    def committed(self, step: int, took_s: float, stall_s: float) -> None:
        """Note that a save is durable."""
        said = replace(self._said, committed_step=step, took_s=took_s, stall_s=stall_s)
        self._said = replace(said, committed_s=time.time())

    def failed(self, step: int, error: BaseException) -> None:
        """Note that a save failed."""
        text = f"{type(error).__name__}: {error}"
        self._said = replace(self._said, failed_step=step, failed_s=time.time(), failed=text)

    def end(self) -> None:
        """Let the thread end, and remove what it wrote."""
        self._asks.put(None)

    def close(self) -> None:
        """Do as `end`, and wait for it, but no longer than `END_S`."""
        self.end()
        self._ended.wait(END_S)

    def _work(self, may_begin: threads.MayBegin) -> None:
        if not may_begin():
            return
        while True:
            try:
                self._asks.get(timeout=TICK_S)
                break
            except Empty:
                self._try(self._write)
        self._try(self._remove)
        self._ended.set()

    def _try(self, do: Callable[[], object]) -> None:
        try:
            do()
        except Exception as error:  # whatever it is: nothing depends on it
            logger.debug("%s is not written: %s: %s", self._place, type(error).__name__, error)

    def _write(self) -> None:
        if self._fd >= 0 and os.fstat(self._fd).st_nlink == 0:  # a neighbour has removed it
            self._close()
        if self._fd < 0:
            try:
                self._fd = _out_of_standard_places(os.open(self._place, _FLAGS, 0o644))
            except FileNotFoundError:  # there is no run before its first save
                return
        os.pwrite(self._fd, encode_slot(self._now()), self._offset)

    def _now(self) -> RankProgress:
        due_step, due_s = self._schedule.next_due(self.step)
        said = replace(
            self._said, time_s=time.time(), step=self.step, due_step=due_step, due_s=due_s
        )
        if self.save is None:
            return said
        step, ledger = self.save
        found = ledger.progress()
        return replace(
            said,
            save_step=step,
            state=found.state,
            began_s=said.time_s - (time.perf_counter() - ledger.started),
            staged_bytes=found.staged_bytes,
            written_bytes=found.written_bytes,
            total_bytes=found.total_bytes,
        )

    def _remove(self) -> None:
        """Clear this rank's slot; remove the file with the last one."""
        if self._fd < 0:
            return
        os.pwrite(self._fd, bytes(SLOT_BYTES), self._offset)
        if not any(decode_slots(os.pread(self._fd, FILE_BYTES_MAX, 0))):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._place)
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)


def _out_of_standard_places(descriptor: int) -> int:
    """Move a descriptor that others take for stdin, stdout or stderr, where those were closed."""
    if descriptor > 2:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


_open: "weakref.WeakSet[ProgressFile]" = weakref.WeakSet()


def _end_all() -> None:
    """Leave nothing behind when Python ends."""
    every = list(_open)
    for one in every:
        one.end()
    until = time.monotonic() + END_S
    for one in every:
        one._ended.wait(max(0.0, until - time.monotonic()))


os.register_at_fork(after_in_child=_open.clear)
worker.before_python_ends(_end_all)
