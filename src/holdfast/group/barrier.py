"""Ranks that meet through a key-value store: for threads in the background, with a deadline.

Collectives belong to the main thread: one in the background could meet another of training's on
the same group, and hang both. Here every rank puts its message down (arrive), the coordinator picks
all up and puts the answer down, and the others pick that up (depart). Where there are many ranks,
the first of every `FAN` picks up those of the others, and the coordinator what these have. Every
wait ends at the deadline. Values go in parts, the first last: where that is, all are. Knows bytes,
not what they mean.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

from ..errors import PeerError
from .base import COORDINATOR, Group, gather_columns, gather_max, lost_peer

CLOCK_SLACK_S = 0.05  # a wait may end so much before its time
DEPART_GRACE_S = 2.0  # the coordinator's last word, of the deadline too, has so long to arrive
WAIT_S_MAX = 2e6  # poll, which torch waits with, counts milliseconds in 31 bits
FAN = 64  # picking up takes some 0.1 ms a rank
PART_BYTES = 4 << 20  # torch's store hangs up on whoever sends more than 8 MiB at once
_ANSWER, _FAILURE = b"+", b"!"


class KeyValueStore(Protocol):
    """What is needed of torch.distributed's stores."""

    def set(self, key: str, value: Any, /) -> Any:
        """Put a value down."""

    def get(self, key: str, /) -> bytes:
        """Pick a value up."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait until all keys are there."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys are there."""

    def add(self, key: str, amount: int, /) -> int:
        """Count."""

    def delete_key(self, key: str, /) -> bool:
        """Remove a key."""


class StoreGroup:
    """See `holdfast.group.base.Group`. For one thread and one save."""

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        world_size: int,
        deadline: float,
        server: object = None,
    ) -> None:
        """Prepare; nothing is sent yet.

        Args:
            store: of this save alone; calls on it block this thread only.
            deadline: a time of `time.monotonic`.
            server: what answers those calls, where that is in this process: it lives as long.
        """
        self._store, self._server = store, server
        self._deadline = deadline
        self._round = 0
        self.rank = rank
        self.world_size = world_size

    def all_gather(self, data: bytes) -> list[bytes]:
        """Give every rank the bytes of all, in rank order."""
        self._round += 1
        found = self._collect(data)
        if found is None:
            return self._depart()
        self._answer(found)
        return found

    def gather(self, data: bytes) -> list[bytes] | None:
        """Give the coordinator the bytes of all; the others get None."""
        self._round += 1
        return self._collect(data)

    def announce(self, data: bytes) -> bytes:
        """Give every rank the coordinator's bytes, which waits for none of them to come.

        But it gives them time to pick these up: when it ends, the store may end with it.
        """
        self._round += 1
        over = f"{self._round}/over"
        if self.rank != COORDINATOR:
            return self._depart(over)[COORDINATOR]
        self._answer([data])
        with suppress(PeerError, RuntimeError):  # they have been told
            if self.world_size > 1 and self._wait([over], time.monotonic() + DEPART_GRACE_S):
                self._store.delete_key(over)
        return data

    def connect(self) -> Callable[[str, float], Group]:
        """Return `background`: it is connected."""
        return self.background

    def background(self, name: str, deadline: float) -> Group:
        """Return itself: it is in the background already."""
        return self

    def start_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Wait for all ranks: whoever is in the background may."""
        return gather_max(self, values)

    def all_sum(self, values: Sequence[int]) -> list[int]:
        """Wait for all ranks: whoever is in the background may."""
        return [sum(column) for column in gather_columns(self, values)]

    def _answer(self, found: list[bytes]) -> None:
        with _contact():
            self._put(self._answer_key(self._round), _ANSWER + join_parts(found))

    def _collect(self, data: bytes) -> list[bytes] | None:
        """Arrive; the coordinator picks up what all ranks put down."""
        if self.rank != COORDINATOR:
            with _contact():
                self._put(self._key(self.rank), data)
            if self.rank % FAN == 0:
                self._lead(data)
            return None
        leaders = range(FAN, self.world_size, FAN)
        keys = [*map(self._key, self._followers()), *map(self._joined_key, leaders)]
        if not self._wait(keys, self._deadline):
            raise self._give_up()
        found = self._take(keys)
        followers = len(found) - len(leaders)
        return [
            data,
            *found[:followers],
            *(part for all_ in found[followers:] for part in split_parts(all_)),
        ]

    def _lead(self, data: bytes) -> None:
        """Pick up what the next ranks put down; put it down as one."""
        keys = [*map(self._key, self._followers())]
        if not self._wait(keys, self._deadline):
            return  # the coordinator sees who is missing
        found = [data, *self._take(keys)]
        with _contact():
            self._put(self._joined_key(self.rank), join_parts(found))
            self._delete(self._key(self.rank), data)

    def _followers(self) -> range:
        return range(self.rank + 1, min(self.rank + FAN, self.world_size))

    def _take(self, keys: list[str]) -> list[bytes]:
        with _contact():
            found = [self._get(key) for key in keys]
            for key, data in zip(keys, found, strict=True):
                self._delete(key, data)
        return found

    def _give_up(self) -> PeerError:
        """Say who has not arrived, to everyone who waits or is going to."""
        with _contact():
            missing = [rank for rank in range(1, self.world_size) if not self._has_arrived(rank)]
            named = ", ".join(map(str, missing[:8])) + " …" * (len(missing) > 8)
            text = f"rank {named} did not answer before the save's deadline; see whether it died"
            first = missing[0] if missing else -1
            for number in (self._round, self._round + 1):
                message = f"{first} {text}".encode()
                self._put(self._answer_key(number), _FAILURE + message)
        return PeerError(text, rank=first, cause=text)

    def _has_arrived(self, rank: int) -> bool:
        leader = rank // FAN * FAN
        keys = [self._key(rank), *([self._joined_key(leader)] if leader != COORDINATOR else [])]
        return any(self._store.check([key]) for key in keys)

    def _depart(self, over: str | None = None) -> list[bytes]:
        """Pick up the coordinator's answer; the last to do so sets the key ``over``."""
        key = self._answer_key(self._round)
        if not self._wait([key], self._deadline + DEPART_GRACE_S):
            text = "rank 0 did not answer before the save's deadline; see whether it died"
            raise PeerError(text, rank=-1, cause=text)  # no rank told of a failure
        with _contact():
            answer = self._get(key)
        with suppress(RuntimeError):  # the store may be gone: the answer is here
            if self._store.add(f"{key}/read", 1) == self.world_size - 1:  # the last one tidies up
                self._delete(key, answer)
                self._store.delete_key(f"{key}/read")
                if over is not None:
                    self._store.set(over, b"")
        if answer[:1] == _FAILURE:
            rank, _, text = answer[1:].decode(errors="replace").partition(" ")
            raise PeerError(text, rank=int(rank), cause=text)
        return split_parts(answer[1:])

    def _put(self, key: str, data: bytes) -> None:
        keys = _part_keys(key, len(data))
        for number in reversed(range(len(keys))):
            part = data[number * PART_BYTES : (number + 1) * PART_BYTES]
            head = b"" if number else len(data).to_bytes(8, "little")
            self._store.set(keys[number], head + part)

    def _get(self, key: str) -> bytes:
        first = self._store.get(key)
        keys = _part_keys(key, int.from_bytes(first[:8], "little"))
        return b"".join([first[8:], *map(self._store.get, keys[1:])])

    def _delete(self, key: str, data: bytes) -> None:
        for part_key in _part_keys(key, len(data)):
            self._store.delete_key(part_key)

    def _wait(self, keys: list[str], until: float) -> bool:
        """Wait until all keys are there; return False when it is too late.

        Raises:
            PeerError: contact with the store was lost.
        """
        seconds = min(max(0.001, until - time.monotonic()), WAIT_S_MAX)
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError as error:  # torch's DistStoreError, for a timeout and for a lost store
            if time.monotonic() < until - CLOCK_SLACK_S:
                raise lost_peer(error) from error
            return False
        return True

    def _key(self, rank: int) -> str:
        return f"{self._round}/{rank}"

    def _joined_key(self, leader: int) -> str:
        return f"{self._round}/{leader}+"

    def _answer_key(self, number: int) -> str:
        return f"{number}/all"


@contextmanager
def _contact() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise lost_peer(error) from error


def _part_keys(key: str, size: int) -> list[str]:
    return [key, *(f"{key}/{number}" for number in range(1, -(-size // PART_BYTES)))]


def join_parts(parts: list[bytes]) -> bytes:
    """Write the bytes of several as one."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def split_parts(data: bytes) -> list[bytes]:
    """Undo `join_parts`."""
    parts, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        parts.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    return parts
