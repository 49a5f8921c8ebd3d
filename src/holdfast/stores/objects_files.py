"""Objects that are open: uploads in parts, and ranged reads. Knows no checkpoints.

An upload is seen by nobody before `sync` has ended; one that is closed without is aborted. A client
has threads of its own, which send parts while more come.
"""

import contextlib
import errno
from collections import deque
from collections.abc import Iterator
from copy import copy
from typing import Any, NamedTuple

from ..errors import StoreError
from .objects_client import api, head, put, repeated
from .objects_errors import contended, errors_of
from .objects_settings import Traffic
from .remote_files import HELD_BYTES, Written, short_read

PIECE_BYTES = 256 << 10  # of what is read: smaller ones are joined
PARTS_MAX = 9000  # S3 takes 10,000
ATTEMPTS = 100  # of what others change meanwhile


class Upload(Written):
    """One new object. Memory goes out from where it is, in whole parts: it is not copied."""

    keeps_memory = True

    def __init__(self, client: Any, key: str, where: str, traffic: Traffic) -> None:
        super().__init__(where)
        self.gives_back = type(client).__name__ != "MemoryStore"  # where it is the object
        self._client, self._key, self._traffic = client, key, traffic
        self._part_bytes = traffic.part_bytes
        self._rest: deque[memoryview] = deque()  # not handed to the client yet
        self._rest_bytes = self._sent = 0
        self._writer: Any = None
        self._is_over = False
        self._failure: StoreError | None = None  # of the first call that failed

    def expect(self, size: int) -> None:
        """Choose parts for so many bytes."""
        self._part_bytes = max(self._traffic.part_bytes, -(-size // PARTS_MAX))

    def write(self, data: memoryview, offset: int) -> None:
        """Add bytes, which stay as they are until nothing refers to ``data`` any more."""
        if offset != self._sent + self._rest_bytes:
            raise StoreError(
                f"write {self._where} at {offset}: expected {self._sent + self._rest_bytes}"
            )
        self._rest.append(data)
        self._rest_bytes += len(data)
        # A whole part is sent at once. Of a part that is begun the client would keep the memory
        # until the next one comes.
        self._hand_over((self._rest_bytes - HELD_BYTES) // self._part_bytes * self._part_bytes)

    def retained(self) -> int:
        """Count the writes of which something is not handed to the client yet."""
        return len({id(piece.obj) for piece in self._rest if not isinstance(piece.obj, bytes)})

    def settle(self) -> None:
        """Copy that, so that its memory is free."""
        self._rest = deque(
            piece if isinstance(piece.obj, bytes) else memoryview(bytes(piece))
            for piece in self._rest
        )

    def truncate(self, size: int) -> None:
        """Say where the end is."""
        if not 0 <= size - self._sent <= self._rest_bytes:
            raise StoreError(f"cut {self._where} at {size}: {self._sent} bytes have been sent")
        while (kept := size - self._sent - self._rest_bytes) < 0:
            piece = self._rest.pop()
            self._rest_bytes -= len(piece)
            if len(piece) + kept > 0:
                self._rest.append(piece[:kept])
                self._rest_bytes += len(piece) + kept

    def finish(self) -> None:
        """Make it an object; return when it is durable."""
        with self._first_failure(), errors_of("write", self._where):
            if self._writer is None:
                pieces = [*self._rest]  # not joined
                try:
                    put(self._client, self._key, pieces or b"")
                finally:
                    pieces.clear()  # what refers to an error refers to the call, and to its memory
            else:
                self._hand_over(self._rest_bytes)
                self._writer.close()
        self._is_over = True

    def close(self) -> None:
        """Abort it, unless it is finished."""
        self._rest.clear()
        if self._writer is not None and not self._is_over:
            self._is_over = True
            with contextlib.suppress(Exception):
                self._writer.__exit__(InterruptedError, InterruptedError(), None)

    def _hand_over(self, size: int) -> None:
        """Give the client the next bytes, which it sends while more come."""
        while size > 0:
            piece = self._rest.popleft()
            if len(piece) > size:
                self._rest.appendleft(piece[size:])
                piece = piece[:size]
            self._rest_bytes -= len(piece)
            self._sent += len(piece)
            size -= len(piece)
            if len(piece):
                self._send(piece)

    def _send(self, data: memoryview) -> None:
        with self._first_failure(), errors_of("write", self._where):
            if self._writer is None:
                self._writer = api().open_writer(
                    self._client,
                    self._key,
                    buffer_size=self._part_bytes,
                    max_concurrency=self._parts_in_flight(),
                )
                self._writer.__enter__()
            self._writer.write(data)

    def _parts_in_flight(self) -> int:
        """Return how many parts there is memory for: of a failure, a client tells with the last."""
        return max(1, min(self._traffic.parts_in_flight, self.memory_bytes // self._part_bytes))

    @contextlib.contextmanager
    def _first_failure(self) -> Iterator[None]:
        """Raise what has failed first, again: what a client says after that is of no use."""
        if self._failure is not None:
            raise _again(self._failure)
        try:
            yield
        except StoreError as error:
            self._failure = _again(error)
            raise


def _again(error: StoreError) -> StoreError:
    """Return the same error, without its own frames: they refer to memory."""
    made = copy(error)
    made.__cause__ = error.__cause__
    return made


class Opened(NamedTuple):
    """One object that is read."""

    client: Any
    key: str
    where: str
    size: int

    def read(self, size: int, offset: int) -> Any:
        """Return bytes of it, as a buffer; fewer only at its end."""
        size = max(0, min(size, self.size - offset))
        if not size:
            return b""
        with errors_of("read", self.where):
            found = repeated(
                lambda: api().get_range(self.client, self.key, start=offset, length=size)
            )
        if len(found) != size:
            raise short_read(self.where, size, offset, len(found))
        return found

    def pieces(self, size: int, offset: int) -> Iterator[Any]:
        """Yield the same as they come, before the last one is there."""
        size = max(0, min(size, self.size - offset))
        if not size:
            return
        count, stream = 0, None

        def next_piece() -> Any:
            nonlocal stream
            if stream is None:  # at first, and where it broke off
                rest = {"range": (offset + count, offset + size)}
                found = api().get(self.client, self.key, options=rest)
                stream = iter(found.stream(min_chunk_size=PIECE_BYTES))
            try:
                return next(stream, None)
            except Exception:
                stream = None
                raise

        with errors_of("read", self.where):
            while count < size and (piece := repeated(next_piece)) is not None:
                count += len(piece)
                if count > size:
                    break
                yield piece
        if count != size:
            raise short_read(self.where, size, offset, count)


def first_bytes(client: Any, key: str, where: str, size: int) -> bytes:
    """Return the first bytes of an object; none, where there is none."""
    for _ in range(ATTEMPTS):
        try:
            with errors_of("read", where):
                size = min(size, head(client, key)["size"])
            return bytes(Opened(client, key, where, size).read(size, 0))
        except StoreError as error:
            if error.errno == errno.ENOENT:
                return b""
            if error.errno != errno.EIO:  # a shorter one has been put in its place
                raise
    raise contended("read", where)
