"""A proxy before a server of objects, in a process of its own: it harms the requests it is told to.

Each sender has a port of its own. At one more port the driver says what is harmed, in lines of
JSON, and ranks say where counting begins and ends. Knows HTTP/1.1, no checkpoints.

    python -m stores.chaos.proxy SERVER_PORT SENDERS
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

from .harms import Counter, Harm

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
ERRORS = {
    "slow-down": (503, "SlowDown", "Reduce your request rate."),
    "expired": (403, "ExpiredToken", "The provided token has expired."),
    "quota": (507, "QuotaExceeded", "The bucket is full."),
}
PR_SET_PDEATHSIG = 1
LIMIT_BYTES = 1 << 26  # of what is read in one piece


class CutError(Exception):
    """The connection of the sender ends here."""


class Proxy:
    """All that the proxy knows; one for a process."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._counter = Counter()
        self._released = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: set[asyncio.Task[None] | None] = set()
        self.struck: list[str] = []  # what was done, and to what
        self.seen: list[str] = []  # requests that were counted

    def command(self, said: dict[str, Any]) -> dict[str, Any]:
        """Do what the driver or a rank says."""
        what = said["do"]
        if what == "arm":
            self._released.set()  # what was held before
            self._released = asyncio.Event()
            self._counter.arm([Harm(**harm) for harm in said["harms"]])
            self.struck, self.seen = [], []
        elif what == "begin":
            self._counter.begin()
        elif what == "end":
            self._counter.end()
        elif what == "release":
            self._released.set()
        return {
            "struck": self.struck,
            "seen": self.seen,
            "counts": self._counter.counts,
            "pending": len(self._tasks),
        }

    async def serve(self, sender: int, reader: asyncio.StreamReader, writer: Any) -> None:
        """Pass on the requests of one connection."""
        self._serving.add(task := asyncio.current_task())  # else nobody holds it
        with contextlib.suppress(CutError, ConnectionError, asyncio.IncompleteReadError):
            while request := await read_message(reader):
                line = request.split(b"\r\n", 1)[0].decode("latin-1").rsplit(" ", 1)[0]
                number, harm = self._counter.next(sender)
                if number:
                    self.seen.append(f"{sender}:{number} {line}")
                if harm is not None:
                    self.struck.append(f"{harm.action} {sender}:{number} {line}")
                writer.write(await self._answer(request, harm))
                await writer.drain()
                if harm is not None and harm.action == "cut-reply":
                    break
        writer.transport.abort()
        self._serving.discard(task)

    async def _answer(self, request: bytes, harm: Harm | None) -> bytes:
        action = harm.action if harm is not None else ""
        if harm is None:
            return await self._ask(request)
        if action in ERRORS:
            return error_of(*ERRORS[action])
        if action == "delay":
            await asyncio.sleep(harm.seconds)
            return await self._ask(request)
        if action == "cut-request":
            await self._half_ask(request)
        elif action in ("lost", "kill-after"):
            await self._ask(request)
        elif action in ("late", "kill-late"):
            task = asyncio.create_task(self._ask_when(self._released, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif action == "cut-reply":
            answer = await self._ask(request)
            return answer[: len(answer) // 2]
        elif action in ("hold-before", "hold-after"):
            return await self._hold(request, harm)
        for victim in harm.victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        raise CutError

    async def _hold(self, request: bytes, harm: Harm) -> bytes:
        released = self._released
        answer = await self._ask(request) if harm.action == "hold-after" else b""
        for victim in harm.victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGSTOP)
        await released.wait()
        return answer or await self._ask(request)

    async def _ask_when(self, released: asyncio.Event, request: bytes) -> None:
        await released.wait()
        with contextlib.suppress(CutError):
            await self._ask(request)

    async def _ask(self, request: bytes) -> bytes:
        try:
            async with self._server() as (reader, writer):
                writer.write(request)
                await writer.drain()
                answer = await read_message(reader, to=request)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise CutError from error
        if not answer:
            raise CutError
        return answer

    async def _half_ask(self, request: bytes) -> None:
        head = request.index(b"\r\n\r\n") + 4
        half = head + (len(request) - head) // 2 if len(request) > head else head // 2
        with contextlib.suppress(OSError):
            async with self._server() as (_, writer):
                writer.write(request[:half])
                await writer.drain()

    @contextlib.asynccontextmanager
    async def _server(self) -> AsyncIterator[Streams]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=LIMIT_BYTES)
        try:
            yield reader, writer
        finally:
            writer.close()


def error_of(status: int, code: str, text: str) -> bytes:
    """Return an error as S3 writes it."""
    body = f"<Error><Code>{code}</Code><Message>{text}</Message></Error>".encode()
    head = f"HTTP/1.1 {status} No\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


async def read_message(reader: asyncio.StreamReader, to: bytes = b"") -> bytes:
    """Read a request, or the answer ``to`` one; empty: the connection ended before it."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    fields = {}
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        fields[name.strip().lower()] = value.strip()
    status = head[9:12]
    if to.startswith(b"HEAD ") or (to and status in (b"204", b"304")):
        return head
    if to and status == b"100":
        return await read_message(reader, to)
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        return head + await read_chunks(reader)
    if b"content-length" in fields:
        return head + await reader.readexactly(int(fields[b"content-length"]))
    return head + (await reader.read() if to else b"")


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    """Read a body that comes in chunks, as it is."""
    found = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        found += line + await reader.readexactly(size + 2)
        if not size:
            return found


async def main() -> None:
    """Serve until the parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    proxy, senders = Proxy(int(sys.argv[1])), int(sys.argv[2])

    async def control(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(f"{json.dumps(proxy.command(json.loads(line)))}\n".encode())
            await writer.drain()
        writer.close()

    def serve(sender: int) -> Any:
        return lambda reader, writer: proxy.serve(sender, reader, writer)

    handlers = [control, *map(serve, range(senders))]
    servers = [await asyncio.start_server(h, "127.0.0.1", 0, limit=LIMIT_BYTES) for h in handlers]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
