"""Little servers for what real ones do seldom: they answer as a test says, or pass requests on."""

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Request(NamedTuple):
    """One that came in."""

    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes


class Reply(NamedTuple):
    """What is sent back."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = {}  # noqa: RUF012


def error(status: int, code: str, message: str = "so says a double") -> Reply:
    """Return an error as S3, Azure and GCS write them."""
    text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Reply(status, text.encode(), {"Content-Type": "application/xml"})


@contextlib.contextmanager
def answering(answer: Callable[[Request], Reply]) -> Iterator[str]:
    """Run a server that answers so; give its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16

        def any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            reply = answer(Request(self.command, self.path, headers, body))
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            if reply.status != 204 and "Content-Length" not in reply.headers:
                self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(reply.body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = any

        def log_message(self, *said: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def before(port: int, decide: Callable[[Request], Reply | None]) -> Iterator[str]:
    """Run a server before a real one; give its URL.

    Args:
        decide: what to answer; None: what the real one does.
    """

    def answer(request: Request) -> Reply:
        decided = decide(request)
        return passed_on(port, request) if decided is None else decided

    with answering(answer) as url:
        yield url


def passed_on(port: int, request: Request) -> Reply:
    """Return the answer of a real server."""
    real = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(real):
        real.request(request.method, request.path, request.body, request.headers)
        found = real.getresponse()
        drop = ("connection", "transfer-encoding", "server", "date")
        headers = {name: value for name, value in found.getheaders() if name.lower() not in drop}
        return Reply(found.status, found.read(), headers)
