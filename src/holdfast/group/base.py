"""What a group is. Knows bytes, not what they mean."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeGuard

from ..errors import HoldfastError, PeerError

COORDINATOR = 0


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
