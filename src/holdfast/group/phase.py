"""Which group a call means, and how its ranks go on, or fail, together.

Knows bytes, not what they mean.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, cast

from ..errors import HoldfastError, OptionError, PeerError
from .base import Group, SingleGroup, all_sum, gather_max

_GOOD, _BAD = b"+", b"-"


def find_group(group: object, *, writing: bool = False) -> Group:
    """Return the given group, the default process group where there is one, or a group of one.

    ``"alone"`` is this process by itself, whatever process group there is.

    Args:
        group: a process group of torch.distributed, a `Group`, ``"alone"`` or None.
        writing: refuse to go alone where a launcher says that there are others.

    Raises:
        OptionError: ``group`` is neither a process group nor a holdfast group, or cannot be used.
    """
    if group == "alone":
        return SingleGroup()
    dist: Any = sys.modules.get("torch.distributed")  # nobody has a process group without it
    if dist is not None and dist.is_available():
        is_torch = dist.is_initialized() if group is None else isinstance(group, dist.ProcessGroup)
        if is_torch:
            from .torch import TorchGroup

            return TorchGroup(cast(Any, group))
    if group is None:
        if writing and "WORLD_SIZE" in os.environ:
            _check_alone()
        return SingleGroup()
    if not hasattr(group, "all_gather"):
        kind = type(group).__name__
        raise OptionError(
            f"group is a {kind}; expected a process group of torch.distributed, 'alone' (this "
            "process by itself), or None (the default process group)"
        )
    return group  # type: ignore[return-value]


def _check_alone() -> None:
    """Check that no launcher (torchrun) started this process as one of several."""
    size = os.environ["WORLD_SIZE"]
    if size.isdecimal() and int(size) > 1 and (rank := os.environ.get("RANK", "")).isdecimal():
        raise OptionError(
            f"this is rank {rank} of {size} (RANK and WORLD_SIZE in the environment), but there is "
            "no process group, so each rank would save to the same path alone. Call "
            'torch.distributed.init_process_group first, or give group="alone" and another path '
            "to each rank"
        )


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
        met: when all had come, by `time.perf_counter`; 0: there is nobody else.
    """

    def __init__(self, group: Group, *, gather: bool = False) -> None:
        self._group = group
        self._gather = gather
        self.answer = b""
        self.answers: list[bytes] = []
        self.promised = False
        self.others: HoldfastError | None = None
        self.waited_s = self.met = 0.0

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
        self.met = time.perf_counter()
        self.waited_s += self.met - started
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
        self.met = time.perf_counter()
        self.waited_s += self.met - started
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
