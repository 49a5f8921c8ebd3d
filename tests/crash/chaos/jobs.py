"""Jobs: ranks in processes, seen from outside. Starts them, hears them, strikes them, ends them."""

import ctypes
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from forked_ranks import fork, join, reap, strike

from holdfast.testing import Fault

from .ranks import Event, Plan, Prepare, Teller, be_rank

BEGUN_S = 60.0  # until what is waited for before a strike, on the slowest machine
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks meet: at a store that rank 0 serves, at this address."""

    host: str
    port: int
    interface: str

    @staticmethod
    def here() -> "Meeting":
        """Find a free port of this machine."""
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            return Meeting("127.0.0.1", int(found.getsockname()[1]), "lo")


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how a job runs.

    Attributes:
        prepare: called in each rank before it meets the others.
        attach: called in this process with the ranks' processes, before they meet.
        faults: of the disk of each rank, beside those of the plan.
    """

    world_size: int
    root: Path
    meeting: Meeting | None = None
    prepare: tuple[Prepare, ...] = ()
    attach: Callable[[dict[int, int]], None] = lambda children: None
    faults: dict[int, tuple[Fault, ...]] = field(default_factory=dict)


class Job:
    """A job that runs from here on."""

    def __init__(self, number: int, plan: Plan, setting: Setting) -> None:
        self.number, self.plan, self.setting = number, plan, setting
        self.events: list[Event] = []
        self.ended: dict[int, int] = {}
        self.struck: set[int] = set()  # ranks that need not live, or not in time
        self.struck_at = 0.0
        self._reading, writing = os.pipe()
        self._rest = b""
        self._is_open = True
        at, opening = os.pipe()
        prepared, telling = os.pipe()
        meeting = setting.meeting or Meeting.here()

        def rank_main(rank: int) -> None:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            for descriptor in (self._reading, opening, prepared):
                os.close(descriptor)
            for prepare in setting.prepare:
                prepare(rank)
            os.write(telling, b"p")
            os.read(at, 1)  # ends when the places of all are made
            os.environ["GLOO_SOCKET_IFNAME"] = meeting.interface
            join(
                f"job-{number}",
                meeting.port,
                rank,
                setting.world_size,
                plan.collective_s,
                host=meeting.host,
                serves=rank == 0,
            )
            teller = Teller(number, rank, writing)
            be_rank(plan, number, rank, setting.root, teller, setting.faults.get(rank, ()))

        self.children = {rank: fork(rank_main, rank) for rank in range(setting.world_size)}
        for descriptor in (writing, at, telling):
            os.close(descriptor)
        heard = 0
        while heard < setting.world_size and (part := os.read(prepared, 64)):
            heard += len(part)
        setting.attach(self.children)
        os.close(prepared)
        os.close(opening)

    def hear(self, enough: Callable[[], object], within_s: float = BEGUN_S) -> bool:
        """Listen until there is enough; return whether there is before the time or all are gone."""
        until = time.monotonic() + within_s
        while not enough():
            left_s = until - time.monotonic()
            if left_s <= 0 or not self._is_open:
                return False
            if select.select([self._reading], [], [], min(left_s, 0.05))[0]:
                part = os.read(self._reading, 1 << 16)
                self._is_open = bool(part)
                *lines, self._rest = (self._rest + part).split(b"\n")
                self.events += [Event(**json.loads(line)) for line in lines]
        return True

    def seen(self, what: str, step: int | None = None, ranks: Iterable[int] = ()) -> bool:
        """Return whether ranks, all by default, have told something (of a step)."""
        found = {e.rank for e in self.events if e.what == what and step in (None, e.step)}
        return found >= set(ranks or self.children)

    def has_saved(self, saves: int) -> bool:
        """Return whether all ranks have told of so many saves."""
        told = [e.rank for e in self.events if e.what == "saved"]
        return all(told.count(rank) >= saves for rank in self.children)

    def is_in_background(self) -> bool:
        """Return whether all ranks wait for the same save in the background, not for their first.

        On a machine that is too slow for the deadline some saves are never in that of all.
        """
        newest = {e.rank: (e.what, e.step) for e in self.events}
        what, step = newest.get(0, ("", 0))
        is_common = set(newest.values()) == {(what, step)} and len(newest) == len(self.children)
        return is_common and what == "waits" and step >= 2

    def strike(self, ranks: Iterable[int], number: int) -> None:
        """Send ranks a signal; what is told from now on is measured from here."""
        chosen = set(ranks) - self.ended.keys()
        self.struck |= chosen
        self.struck_at = self.struck_at or time.monotonic()
        strike(self.children, chosen, number)

    def thaw(self) -> None:
        """Let all ranks go on that were stopped."""
        strike(self.children, self.children.keys() - self.ended.keys(), signal.SIGCONT)

    def is_told(self, rank: int) -> bool:
        """Return whether a rank has told an outcome since the strike, or is over."""
        outcomes = ("told", "saved", "over")
        return any(
            e.rank == rank and e.what in outcomes and e.at > self.struck_at for e in self.events
        )

    def hear_survivors(self, within_s: float) -> None:
        """Listen until every rank that was not struck has told how the struck save ended."""
        survivors = self.children.keys() - self.struck
        self.hear(lambda: all(map(self.is_told, survivors)), within_s)

    def end(self, within_s: float) -> list[int]:
        """Wait for all ranks to end; return those that had to be killed after so long."""
        until = time.monotonic() + within_s
        self.hear(lambda: False, within_s)
        living = {rank: c for rank, c in self.children.items() if rank not in self.ended}
        ended, late = reap(living, max(1.0, until - time.monotonic()))
        self.ended |= ended
        self.hear(lambda: False, 1.0)
        return late

    def close(self) -> None:
        """Kill what still lives, and let go of the pipe."""
        living = {rank: c for rank, c in self.children.items() if rank not in self.ended}
        strike(living, living, signal.SIGCONT)
        strike(living, living, signal.SIGKILL)
        self.ended |= reap(living, 60.0)[0]
        os.close(self._reading)
