"""Stands between a client and its server, and loses replies: the request is done, its answer gone.

Reads as much of RPC as that takes: where a record ends, and which reply is to which call. Knows no
checkpoint.
"""

import contextlib
import json
import os
import select
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

CALL, REPLY = 0, 1
LAST_FRAGMENT = 1 << 31
LINK, RENAME = (15, 11), (14, 29)  # procedures of version 3, operations of version 4
HEADER_BYTES, NAME_BYTES = 28, 256
VERSION_3 = 3


@dataclass(slots=True)
class Orders:
    """Which reply is to be lost next.

    Attributes:
        kind: "link" or "rename", "any", or empty: none.
        name: that the request has to have in it.
        skip: of such requests, so many get their replies.
        restart: whether the server is started anew before the client can ask again.
    """

    kind: str = ""
    name: str = ""
    skip: int = 0
    restart: bool = False


@dataclass(slots=True)
class _Way:
    """One of the two directions of a connection: bytes that are no whole record yet."""

    buffer: bytearray = field(default_factory=bytearray)

    def records(self, data: bytes) -> list[bytes]:
        """Add bytes; return the records that are whole by now, each with its marks."""
        self.buffer += data
        whole, start, at = [], 0, 0
        while at + 4 <= len(self.buffer):
            (mark,) = struct.unpack_from(">I", self.buffer, at)
            at += 4 + (mark & ~LAST_FRAGMENT)
            if at > len(self.buffer):
                break
            if mark & LAST_FRAGMENT:
                whole.append(bytes(self.buffer[start:at]))
                start = at
        del self.buffer[:start]
        return whole


class Proxy:
    """A process that passes on what comes to a port; `lose` and `state` talk to it."""

    def __init__(self, address: tuple[str, int], server: int, restart: Callable[[], None]) -> None:
        """Begin to listen; ``restart`` starts the server anew."""
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener = socket.create_server(address)
        self._child = os.fork()
        if self._child == 0:
            self._ours.close()
            with contextlib.suppress(KeyboardInterrupt):
                _Serving(listener, server, theirs, restart).serve()
            os._exit(0)
        theirs.close()
        listener.close()

    def lose(self, orders: Orders) -> None:
        """Lose the reply to the next request that fits; count anew."""
        self._ask(json.dumps(asdict(orders)))

    def state(self) -> tuple[int, int]:
        """Return how many requests there were since the last `lose`, and how many lost replies."""
        requests, lost = self._ask("?").split()
        return int(requests), int(lost)

    def close(self) -> None:
        """End the process."""
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)

    def _ask(self, text: str) -> str:
        self._ours.send(text.encode())
        return self._ours.recv(1 << 12).decode()


class _Serving:
    def __init__(
        self, listener: socket.socket, server: int, control: socket.socket, restart: Any
    ) -> None:
        self._listener, self._server, self._control = listener, server, control
        self._restart, self._orders = restart, Orders()
        self._requests = self._lost = 0
        self._victim = b""
        self._peers: dict[socket.socket, tuple[socket.socket, bool, _Way]] = {}

    def serve(self) -> None:
        """Pass on until killed."""
        while True:
            ready, _, _ = select.select([self._listener, self._control, *self._peers], [], [])
            for source in ready:
                if source is self._listener:
                    self._accept()
                elif source is self._control:
                    self._obey()
                elif source in self._peers:
                    self._pass_on(source)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self._server))
        except OSError:  # it is being started anew
            client.close()
            return
        self._peers[client] = (server, True, _Way())
        self._peers[server] = (client, False, _Way())

    def _obey(self) -> None:
        text = self._control.recv(1 << 12).decode()
        if not text:
            os._exit(0)
        if text != "?":
            self._orders = Orders(**json.loads(text))
            self._requests = self._lost = 0
            self._victim = b""
        self._control.send(f"{self._requests} {self._lost}".encode())

    def _pass_on(self, source: socket.socket) -> None:
        target, is_request, way = self._peers[source]
        try:
            data = source.recv(1 << 20)
            for record in way.records(data):
                if self._is_lost(record, is_request):
                    self._lost += 1
                    if self._orders.restart:
                        self._restart()
                    self._orders = Orders()
                    data = b""
                    break
                target.sendall(record)
        except OSError:
            data = b""
        if not data:
            for end in (source, target):
                self._peers.pop(end, None)
                end.close()

    def _is_lost(self, record: bytes, is_request: bool) -> bool:
        xid, kind = record[4:8], struct.unpack_from(">I", record, 8)[0]
        if is_request and kind == CALL:
            self._requests += 1
            if not self._victim and self._fits(record):
                if self._orders.skip:
                    self._orders.skip -= 1
                else:
                    self._victim = xid
        elif not is_request and kind == REPLY and self._victim == xid:
            self._victim = b""
            return True
        return False

    def _fits(self, record: bytes) -> bool:
        orders = self._orders
        if orders.kind in ("", "any"):
            return bool(orders.kind)
        version, procedure = struct.unpack_from(">II", record, 20)
        in_version_3, in_compound = {"link": LINK, "rename": RENAME}[orders.kind]
        if version == VERSION_3:
            return procedure == in_version_3 and orders.name.encode() in record
        return any(orders.name in names for names in _operands(record, in_compound))


def _operands(record: bytes, operation: int) -> Iterator[str]:
    """Yield what follows the number of an operation in a COMPOUND, where it may be names."""
    for at in range(HEADER_BYTES, len(record) - 8, 4):
        number, size = struct.unpack_from(">II", record, at)
        name = record[at + 8 : at + 8 + size]
        if number == operation and 0 < size == len(name) < NAME_BYTES and name.isascii():
            following = record[at + 8 + size : at + 8 + size + NAME_BYTES]
            yield f"{name.decode()} {following.decode('ascii', 'replace')}"
