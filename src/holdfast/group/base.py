"""What a group is, which one a call means, and how its ranks fail together.

Knows bytes, not what they mean.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, TypeGuard

from ..errors import HoldfastError, PeerError

COORDINATOR = 0

_GOOD, _BAD = b"+", b"-"


class Group(Protocol):
    """Ranks 0 … world_size - 1; every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int:
        """This process's place in the group."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def all_gather(self, data: bytes) -> list[bytes]:
        """Give every rank the bytes of all, in rank order."""

    def gather(self, data: bytes) -> list[bytes] | None:
        """Give the coordinator the bytes of all; the others get None."""

    def announce(self, data: bytes) -> bytes:
        """Give every rank the coordinator's bytes."""

    def connect(self) -> Callable[[str, float], "Group"]:
        """Return `background` when it can be had: it fails for no rank any more.

        Raises:
            PeerError: this rank cannot reach the others.
        """

    def background(self, name: str, deadline: float) -> "Group":
        """Return the same ranks for one thread in the background, which meet without collectives.

        Args:
            name: new for every use, the same on all ranks.
            deadline: a time of `time.monotonic`, after which every wait ends with a PeerError.
        """

    def start_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Find the largest of each value over all ranks; return at once what waits for them.

        Values fit into 63 bits; all ranks give equally many.
        """

    def all_sum(self, values: Sequence[int]) -> list[int]:
        """Add each value up over all ranks.

        Values are not negative, and neither they nor their sums take more than 63 bits.
        """


class SendingGroup(Group, Protocol):
    """A group whose ranks can send from host memory to host memory."""

    def start_send(self, data: memoryview, rank: int) -> Callable[[], None]:
        """Start to send bytes to one rank; return what waits until they may change.

        What one rank sends to another comes there in order.
        """

    def start_receive(self, data: memoryview, rank: int) -> Callable[[], None]:
        """Start to receive as many bytes from one rank; return what waits until they are there."""


class SingleGroup:
    """A group of one rank."""

    rank = 0
    world_size = 1

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of the only rank."""
        return [data]

    def gather(self, data: bytes) -> list[bytes] | None:
        """Return the bytes of the only rank."""
        return [data]

    def announce(self, data: bytes) -> bytes:
        """Return the bytes of the only rank."""
        return data

    def connect(self) -> Callable[[str, float], Group]:
        """Return `background`: there is nobody to reach."""
        return self.background

    def background(self, name: str, deadline: float) -> Group:
        """Return itself: it waits for nobody."""
        return self

    def start_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Return what returns the values."""
        return lambda: list(values)

    def all_sum(self, values: Sequence[int]) -> list[int]:
        """Return the values."""
        return list(values)


class Phase(AbstractContextManager["Phase"]):
    """One step that all ranks take together, or none: used by every rank, as a context manager.

    Inside the block a rank does its part and sets ``answer``; at its end all answers are exchanged.
    When the block raised on any rank, it raises on all: there its own error, elsewhere a PeerError.

    Attributes:
        answer: this rank's bytes for the others.
        answers: those of all, in rank order, after the block; with ``gather`` only the coordinator
            gets them, and the others an empty list.
        promised: whether this rank may have told the others that its part is done.
        others: what another rank failed with, or that it is lost; after the block.
        waited_s: how long this rank has waited for the others.
    """

    def __init__(self, group: Group, *, gather: bool = False) -> None:
        self._group = group
        self._gather = gather
        self.answer = b""
        self.answers: list[bytes] = []
        self.promised = False
        self.others: HoldfastError | None = None
        self.waited_s = 0.0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Exchange; raise on this rank what another met."""
        self.promised = error is None
        if type(self._group) is SingleGroup:
            self.answers = [self.answer]  # there is nobody to exchange them with
            return
        message = _GOOD + self.answer
        if error is not None:
            # Whatever it is: the peers must learn of a KeyboardInterrupt too, or wait for ever.
            message = _BAD + f"{type(error).__name__}: {error}".encode(errors="replace")
        self.others = self._meet(message)
        if self.others is not None and error is None:
            raise self.others  # else this rank's own error says more

    def _meet(self, message: bytes) -> HoldfastError | None:
        """Exchange; return what another rank met."""
        started = time.perf_counter()
        try:
            verdicts = self._exchange(message)
        except HoldfastError as lost:
            return lost
        self.waited_s += time.perf_counter() - started
        for rank, verdict in enumerate(verdicts):
            if verdict[:1] == _BAD and rank != self._group.rank:
                cause = verdict[1:].decode(errors="replace")
                return PeerError(f"rank {rank} failed: {cause}", rank=rank, cause=cause)
        return None

    def _exchange(self, message: bytes) -> list[bytes]:
        if not self._gather:
            verdicts = self._group.all_gather(message)
            self.answers = [verdict[1:] for verdict in verdicts]
            return verdicts
        gathered = self._group.gather(message)
        self.answers = [data[1:] for data in gathered or ()]
        return self._group.all_gather(message if message[:1] == _BAD else _GOOD)


class Outcome(Phase):
    """The last phase, in which the coordinator alone has a part: it tells all how that ended.

    Where ranks meet through a store none has to come: one that died after the phase before changes
    nothing.
    """

    def _exchange(self, message: bytes) -> list[bytes]:
        verdict = self._group.announce(message)
        self.answers = [verdict[1:]]
        return [verdict]


class BriefPhase(Phase):
    """A phase in which a few numbers may do: answers are exchanged where they do not settle it.

    Attributes:
        numbers: this rank's, not negative, added up over all ranks; none: there is no other rank
            to agree with; None: it has to hear all answers. Set it, and ``tell``, in the block.
        tell: makes the answer, if it is asked for.
        sums: when these settled it; else None.
    """

    def __init__(self, group: Group, count: int, settled: Callable[[Sequence[int]], bool]) -> None:
        """Prepare.

        Args:
            count: of numbers, on every rank.
            settled: whether sums do; pure, so that all ranks find the same.
        """
        super().__init__(group)
        self._count, self._settled = count, settled
        self.numbers: Sequence[int] | None = None
        self.tell: Callable[[], bytes] = bytes
        self.sums: list[int] | None = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Add up; exchange answers when some rank failed, asked for them, or the sums do."""
        brief = self.numbers is not None and error is None
        if brief and not self.numbers:
            self.sums = []
            return
        numbers = self.numbers if brief and self.numbers else [0] * self._count
        started = time.perf_counter()
        try:
            asked, *sums = all_sum(self._group, [int(not brief), *numbers])
        except HoldfastError:
            if error is None:
                raise
            return  # this rank's own error says more than the loss of the others
        self.waited_s += time.perf_counter() - started
        if not asked and self._settled(sums):
            self.sums = sums
            return
        try:
            self.answer = self.tell() if error is None else b""
        except BaseException as failure:
            super().__exit__(type(failure), failure, failure.__traceback__)
            raise
        super().__exit__(kind, error, trace)


class Poll:
    """What ranks ask for in one turn, told to all of them in the next: nobody waits for anybody.

    All ranks take their turns together.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._read: Callable[[], list[int]] | None = None

    def turn(self, wishes: Sequence[int]) -> list[int]:
        """Ask for numbers; return the largest of each that a rank asked for in the turn before.

        A rank alone is told at once. What is told now is not asked for again in this turn.

        Raises:
            PeerError: a rank was lost.
        """
        if self._group.world_size == 1:
            return list(wishes)
        told = self._read() if self._read is not None else [0] * len(wishes)
        asked = [0 if found else wish for wish, found in zip(wishes, told, strict=True)]
        if hasattr(self._group, "start_max"):
            self._read = self._group.start_max(asked)
        else:
            self._read = gather_max(self._group, asked)
        return told

    def close(self) -> None:
        """Take the last turn's answer from the wire.

        Raises:
            PeerError: a rank was lost.
        """
        read, self._read = self._read, None
        if read is not None:
            read()


def gather_max(group: Group, values: Sequence[int]) -> Callable[[], list[int]]:
    """Do as `Group.start_max`, but wait for all ranks here."""
    largest = [max(column) for column in gather_columns(group, values)]
    return lambda: largest


def all_sum(group: Group, values: Sequence[int]) -> list[int]:
    """Do as `Group.all_sum`, for a group that has no such method too."""
    if hasattr(group, "all_sum"):
        return group.all_sum(values)
    return [sum(column) for column in gather_columns(group, values)]


def sends(group: Group) -> TypeGuard[SendingGroup]:
    """Return whether its ranks can send to each other; the same on all."""
    return bool(getattr(group, "sends", False))


def gather_columns(group: Group, values: Sequence[int]) -> list[tuple[int, ...]]:
    """Return, for each value, those of all ranks."""
    mine = b"".join(value.to_bytes(8, "little") for value in values)
    rows = [
        [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
        for data in group.all_gather(mine)
    ]
    return list(zip(*rows, strict=True))


def lost_peer(error: Exception) -> HoldfastError:
    """Turn the failure of a collective into the error that callers expect."""
    cause = f"{type(error).__name__}: {error}"
    return PeerError(
        "lost contact with another rank. See whether one died, and let all ranks make this call, "
        f"without 'if rank == 0'. {cause}",
        rank=-1,
        cause=cause,
    )
