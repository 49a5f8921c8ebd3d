"""Messages of all ranks by way of the coordinator: each sends it one, and gets one back.

Of n ranks that takes 2 (n - 1) messages, where a ring takes n (n - 1), each of which wakes threads
up. What is too long for this goes around the ring: then the coordinator would be the narrow place.
Knows bytes and who sends them; no torch, and not what they mean.
"""

import struct
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from ..errors import HoldfastError, PeerError
from .barrier import join_parts, split_parts
from .base import COORDINATOR

Wait = Callable[[], None]
Start = Callable[[memoryview, int], Wait]  # begins to send to a rank, or to receive from it
Ring = Callable[[bytes, int], list[bytes]]  # gathers what has so many bytes at most on all ranks

HEAD_BYTES = 4096  # of a message that goes by itself: what is longer follows in a second one
TOLD_BYTES_MAX = 16 << 20  # that the coordinator sends at once; a ring takes as long for more
_HEAD = struct.Struct("<BQ")  # what it is, bytes in all; the first of these follow
_ROOM = HEAD_BYTES - _HEAD.size
_ALL, _ONE, _SUM = 1, 2, 3  # what ranks ask for: the answers of all, for the coordinator, sums
# What they are told: the answer, to use the ring, a failure, to send what did not go by itself.
_TOLD, _LONG, _LOST, _MORE = 16, 17, 18, 19


class Star:
    """One group's messages; every rank calls the same methods in the same order.

    When the coordinator has lost a rank it says so to all others: none waits for one that is dead.
    A send ends when it is received, so a rank that waits for an answer listens before it waits for
    its question to be heard; and it sends more than one message only when asked.
    """

    def __init__(self, rank: int, world_size: int, send: Start, receive: Start, ring: Ring) -> None:
        self._rank, self._send, self._receive, self._ring = rank, send, receive, ring
        self._others = [other for other in range(world_size) if other != COORDINATOR]

    def all_gather(self, data: bytes) -> list[bytes]:
        """Give every rank the bytes of all, in rank order."""
        if self._rank != COORDINATOR:
            kind, answer = self._ask(_ALL, data)
            size_max = int.from_bytes(answer, "little") if kind == _LONG else 0
            return self._ring(data, size_max) if kind == _LONG else split_parts(answer)
        heads = self._hear(_ALL)
        sizes = [len(data), *(size for size, _ in heads)]
        is_long = max(sizes) > _ROOM or sum(sizes) * len(sizes) > TOLD_BYTES_MAX
        if is_long:
            self._tell(_LONG, max(sizes).to_bytes(8, "little"))
            return self._ring(data, max(sizes))
        found = [data, *(part for _, part in heads)]
        self._tell(_TOLD, join_parts(found))
        return found

    def gather(self, data: bytes) -> list[bytes] | None:
        """Give the coordinator the bytes of all; the others get None."""
        if self._rank == COORDINATOR:
            return self._collect(_ONE, data)
        if len(data) <= _ROOM:
            self._send(_head(_ONE, data), COORDINATOR)()
        else:
            self._ask(_ONE, data)
            self._send_rest(data)
        return None

    def announce(self, data: bytes) -> bytes:
        """Give every rank the coordinator's bytes, which waits for none of them to come."""
        if self._rank != COORDINATOR:
            return self._listen()[1]
        self._tell(_TOLD, data)
        return data

    def all_sum(self, values: Sequence[int]) -> list[int]:
        """Add each value up over all ranks."""
        data = np.array(values, "<i8").tobytes()
        if self._rank == COORDINATOR:
            numbers = [np.frombuffer(part, "<i8") for part in self._collect(_SUM, data)]
            answer = np.sum(numbers, axis=0, dtype="<i8").tobytes()
            self._tell(_TOLD, answer)
        else:
            kind, answer = self._ask(_SUM, data)
            if kind == _MORE:
                self._send_rest(data)
                answer = self._listen()[1]
        result: list[int] = np.frombuffer(answer, "<i8").tolist()
        return result

    def _collect(self, kind: int, data: bytes) -> list[bytes]:
        """Receive the bytes of all others, whatever they send first."""
        heads = dict(zip(self._others, self._hear(kind), strict=True))
        rests = {r: bytearray(size - _ROOM) for r, (size, _) in heads.items() if size > _ROOM}
        self._tell(_MORE, b"", list(rests))
        self._meet({rank: memoryview(rest) for rank, rest in rests.items()})
        return [data, *(head + rests.get(rank, b"") for rank, (_, head) in heads.items())]

    def _ask(self, kind: int, data: bytes) -> tuple[int, bytes]:
        """Send the coordinator as many bytes as go by themselves; return what it answers."""
        head = bytearray(HEAD_BYTES)
        heard = self._receive(memoryview(head), COORDINATOR)
        sent = self._send(_head(kind, data), COORDINATOR)
        heard()
        answer = self._told(head)  # one that has lost a rank does not receive what was sent
        sent()
        return answer

    def _send_rest(self, data: bytes) -> None:
        self._send(memoryview(bytearray(data[_ROOM:])), COORDINATOR)()

    def _listen(self) -> tuple[int, bytes]:
        """Receive what the coordinator tells."""
        head = bytearray(HEAD_BYTES)
        self._receive(memoryview(head), COORDINATOR)()
        return self._told(head)

    def _told(self, head: bytearray) -> tuple[int, bytes]:
        """Return what a message of the coordinator says; receive the rest of it.

        Raises:
            PeerError: a rank is lost.
        """
        kind, size = _HEAD.unpack_from(head)
        rest = bytearray(max(0, size - _ROOM))
        if rest:
            self._receive(memoryview(rest), COORDINATOR)()
        data = bytes(head[_HEAD.size : _HEAD.size + min(size, _ROOM)] + rest)
        if kind == _LOST:
            rank, _, text = data.decode(errors="replace").partition(" ")
            raise PeerError(text, rank=int(rank), cause=text)
        return kind, data

    def _hear(self, kind: int) -> list[tuple[int, bytes]]:
        """Receive what all others send: (bytes in all, the first of them), in rank order."""
        heads = {rank: bytearray(HEAD_BYTES) for rank in self._others}
        self._meet({rank: memoryview(head) for rank, head in heads.items()})
        found = []
        for rank, head in heads.items():
            theirs, size = _HEAD.unpack_from(head)
            if theirs != kind:
                raise self._give_up(
                    rank,
                    f"rank {rank} is in another call of holdfast than rank 0. Let all ranks make "
                    "the same calls in the same order, without 'if rank == 0'",
                )
            found.append((size, bytes(head[_HEAD.size : _HEAD.size + min(size, _ROOM)])))
        return found

    def _tell(self, kind: int, data: bytes, ranks: Sequence[int] | None = None) -> None:
        """Send the same to all others, or some; who is lost hears nothing more."""
        head, rest = _head(kind, data), memoryview(bytearray(data[_ROOM:]))
        waits = list[Wait]()
        for rank in self._others if ranks is None else ranks:
            with suppress(HoldfastError):
                waits.append(self._send(head, rank))
                if rest:
                    waits.append(self._send(rest, rank))
        for wait in waits:
            with suppress(HoldfastError):
                wait()

    def _meet(self, data: dict[int, memoryview]) -> None:
        """Receive so many bytes of each of some; say to all when one of them is lost."""
        waits, failures = dict[int, Wait](), dict[int, HoldfastError]()
        for rank, part in data.items():
            try:
                waits[rank] = self._receive(part, rank)
            except HoldfastError as error:
                failures[rank] = error
        for rank, wait in waits.items():
            try:
                wait()
            except HoldfastError as error:
                failures[rank] = error
        for rank, failure in failures.items():
            raise self._give_up(rank, str(failure)) from failure

    def _give_up(self, rank: int, text: str) -> PeerError:
        """Tell all others that a rank is lost; they hear it instead of the next answer."""
        self._tell(_LOST, f"{rank} {text}".encode())
        return PeerError(text, rank=rank, cause=text)


def _head(kind: int, data: bytes) -> memoryview:
    head = bytearray(_HEAD.pack(kind, len(data)) + data[:_ROOM])
    return memoryview(head.ljust(HEAD_BYTES, b"\0"))
