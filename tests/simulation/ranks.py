"""What ranks meet through, and what they ask the clock and threads, all by the scheduler.

Promises what torch's key-value store does: the server is a part of the first rank, and answers
nobody while that is frozen; who is cut off, or outlives it, loses contact. Collectives of the main
thread are the same meetings with the time limit of a process group.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty
from types import SimpleNamespace
from typing import Any, Protocol

from holdfast.errors import PeerError
from holdfast.group.barrier import StoreGroup
from holdfast.group.base import COORDINATOR, Group, gather_columns, gather_max

from .actors import NEVER, Actor, Process, Scheduler

COLLECTIVE_S = 600.0  # that a process group waits for a rank


class Meeting:
    """The key-value store of one job; see `holdfast.group.barrier.KeyValueStore`."""

    def __init__(self, scheduler: Scheduler, processes: list[Process]) -> None:
        self._scheduler, self._server, self.processes = scheduler, processes[0], processes
        self._values: dict[str, bytes] = {}
        self.rounds: dict[int, dict[int, bytes]] = {}  # of the main threads' meetings

    def set(self, key: str, value: bytes) -> None:
        """Put a value down."""
        self._reach("set", key)
        self._values[key] = value
        self._scheduler.wake(self)

    def get(self, key: str) -> bytes:
        """Pick a value up."""
        self._reach("get", key)
        if key not in self._values:
            raise RuntimeError("timeout")
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all keys are there."""
        self._scheduler.step("wait", keys[0] if keys else "")
        seconds, values = timeout.total_seconds(), self._values
        process = self._scheduler.current.process

        def found() -> bool:
            if self._server.dead:
                return True
            far = process.cut_off or self._server.cut_off
            away = process is not self._server and (
                far or self._server.frozen_until > self._scheduler.now
            )
            return not away and all(key in values for key in keys)

        if not self._scheduler.wait(self, seconds, found):
            raise RuntimeError("timeout")
        self._check_server()

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        self._reach("check", keys[0])
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Count."""
        self._reach("add", key)
        count = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(count).encode()
        return count

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        self._reach("delete", key)
        return self._values.pop(key, None) is not None

    def _reach(self, operation: str, key: str) -> None:
        self._scheduler.step(operation, key)
        process, server = self._scheduler.current.process, self._server
        if process is not server:
            if process.cut_off or server.cut_off:
                self._scheduler.pause(COLLECTIVE_S)
                raise RuntimeError("connection timed out")
            while server.frozen_until > self._scheduler.now and not server.dead:
                self._scheduler.pause(server.frozen_until - self._scheduler.now)
        self._check_server()

    def _check_server(self) -> None:
        if self._server.dead:
            raise RuntimeError("connection reset by peer")


class Below:
    """A part of a meeting, for one save."""

    def __init__(self, meeting: Meeting, name: str) -> None:
        self._meeting, self._name = meeting, name

    def set(self, key: str, value: bytes) -> None:
        """Put a value down."""
        self._meeting.set(self._name + key, value)

    def get(self, key: str) -> bytes:
        """Pick a value up."""
        return self._meeting.get(self._name + key)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all keys are there."""
        self._meeting.wait([self._name + key for key in keys], timeout)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return self._meeting.check([self._name + key for key in keys])

    def add(self, key: str, amount: int) -> int:
        """Count."""
        return self._meeting.add(self._name + key, amount)

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        return self._meeting.delete_key(self._name + key)


class RankGroup:
    """All ranks of a job, for the main thread: what `TorchGroup` is, with a process group's limit.

    When one has failed all later meetings of this rank do, as torch's do. Who has all it waited for
    when a peer dies may fail all the same.
    """

    def __init__(self, scheduler: Scheduler, meeting: Meeting, rank: int, size: int) -> None:
        self._scheduler, self._meeting = scheduler, meeting
        self.rank, self.world_size = rank, size
        self._round = 0
        self._is_broken = False

    def all_gather(self, data: bytes) -> list[bytes]:
        """Give every rank the bytes of all."""
        return self._meet(data, range(self.world_size))

    def gather(self, data: bytes) -> list[bytes] | None:
        """Give the coordinator the bytes of all."""
        found = self._meet(data, range(self.world_size))
        return found if self.rank == COORDINATOR else None

    def announce(self, data: bytes) -> bytes:
        """Give every rank the coordinator's bytes."""
        return self._meet(data, [COORDINATOR])[0]

    def all_sum(self, values: Sequence[int]) -> list[int]:
        """Add each value up over all ranks."""
        return [sum(column) for column in gather_columns(self, values)]

    def start_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Find the largest of each value."""
        return gather_max(self, values)

    def connect(self) -> Callable[[str, float], Group]:
        """Return `background`: it is connected."""
        return self.background

    def background(self, name: str, deadline: float) -> Group:
        """Return the ranks for one save in the background."""
        below = Below(self._meeting, f"{name if name.startswith('up/') else name[-4:]}/")
        return StoreGroup(below, self.rank, self.world_size, deadline)  # type: ignore[arg-type]

    def _meet(self, data: bytes, wanted: Sequence[int]) -> list[bytes]:
        """Put bytes down; wait for those of the ranks that are wanted."""
        scheduler, processes = self._scheduler, self._meeting.processes
        self._round += 1
        scheduler.step("meet", str(self._round))
        told = self._meeting.rounds.setdefault(self._round, {})
        if not (self._is_broken or processes[self.rank].cut_off):
            told[self.rank] = data
            scheduler.wake(self._meeting)

        def lost() -> bool:
            gone = any(processes[rank].dead for rank in wanted)
            return self._is_broken or processes[self.rank].cut_off or gone

        there = lambda: all(rank in told for rank in wanted)  # noqa: E731
        scheduler.wait(self._meeting, COLLECTIVE_S, lambda: there() or lost())
        if not there() or (lost() and scheduler.rng.random() < 0.5):
            self._is_broken = True
            raise PeerError("lost contact with another rank", rank=-1, cause="connection reset")
        return [told[rank] for rank in wanted]


class HasScheduler(Protocol):
    """The world that is played now."""

    scheduler: Scheduler


def clock_of(seat: HasScheduler) -> SimpleNamespace:
    """Make what stands for the module `time`: each process has a clock of its own that is off."""

    def wall_clock() -> float:
        return seat.scheduler.now + 1.7e9 + seat.scheduler.current.process.clock_off_s

    now = lambda: seat.scheduler.now  # noqa: E731
    sleep = lambda seconds: seat.scheduler.pause(seconds)  # noqa: E731
    return SimpleNamespace(monotonic=now, perf_counter=now, time=wall_clock, sleep=sleep)


def threads_of(seat: HasScheduler) -> SimpleNamespace:
    """Make what stands for the module `threading`, and for a queue."""

    class Thread:
        def __init__(self, target: Callable[[], None], name: str = "", daemon: bool = True) -> None:
            self._target = target
            self._actor: Actor | None = None

        def start(self) -> None:
            scheduler = seat.scheduler
            self._actor = scheduler.start(scheduler.current.process, self._target)

        def join(self) -> None:
            scheduler = seat.scheduler
            scheduler.wait("end", NEVER, lambda: self._actor not in scheduler.actors)

    class Event:
        def __init__(self) -> None:
            self._set = False

        def is_set(self) -> bool:
            return self._set

        def set(self) -> None:
            self._set = True
            seat.scheduler.wake(self)

        def wait(self, timeout: float = NEVER) -> bool:
            return seat.scheduler.wait(self, timeout, self.is_set)

    class Lock:
        def __init__(self) -> None:
            self._is_held = False

        def __enter__(self) -> None:
            seat.scheduler.wait(self, NEVER, lambda: not self._is_held)
            self._is_held = True

        def __exit__(self, *how: object) -> None:
            self._is_held = False
            seat.scheduler.wake(self)

    class SimpleQueue:
        def __init__(self) -> None:
            self._items: list[object] = []

        def put(self, item: object) -> None:
            self._items.append(item)
            seat.scheduler.wake(self)

        def get(self, timeout: float | None = None) -> object:
            seconds = NEVER if timeout is None else timeout
            if not seat.scheduler.wait(self, seconds, lambda: bool(self._items)):
                raise Empty
            return self._items.pop(0)

        def get_nowait(self) -> object:
            return self.get(0.0)

    return SimpleNamespace(
        Thread=Thread,
        Event=Event,
        Lock=Lock,
        SimpleQueue=SimpleQueue,
        TIMEOUT_MAX=threading.TIMEOUT_MAX,
        current_thread=lambda: None,
        get_native_id=lambda: 0,
    )


def workers_of(seat: HasScheduler, threads: SimpleNamespace) -> SimpleNamespace:
    """Make what stands for `holdfast.worker`: a body runs in the actor that calls the verb."""

    def start(target: Callable[[Callable[[], bool]], None], name: str) -> Any:
        thread = threads.Thread(lambda: target(lambda: True), name)
        thread.start()
        return thread

    return SimpleNamespace(
        Latch=threads.Event,
        SLICE_S=NEVER,
        call_in_caller=lambda function: function(),
        check=lambda: None,
        place=lambda: (id(seat.scheduler.current.process), 0),
        run=lambda body, **_: body(),
        start=start,
    )
