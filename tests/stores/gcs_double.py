"""A double of Google Cloud Storage, written for these tests: no code of Google's is in it.

It answers the requests of its XML API that obstore makes for ``gs://``, as Google documents them:
PUT, GET, HEAD and DELETE of an object, ranges, generations and ``x-goog-if-generation-match``,
uploads in parts, and listings by prefix and delimiter. Objects stay in memory. It holds no class,
no lock, no right and no second version of an object.

python gcs_double.py PORT
"""

import hashlib
import itertools
import re
import ssl
import sys
import threading
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

TOKEN = "token-of-the-double"  # what a request has to bear
PAGE_KEYS = 1000
ERRORS = {
    "InvalidPart": 400,
    "InvalidArgument": 400,
    "AuthenticationRequired": 401,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NoSuchUpload": 404,
    "MethodNotAllowed": 405,
    "PreconditionFailed": 412,
    "InvalidRange": 416,
}


class GcsError(Exception):
    """What is answered as an error; its text is the code."""


class Content(NamedTuple):
    """One object."""

    data: bytes
    generation: int
    made_s: float

    @property
    def headers(self) -> dict[str, str]:
        """What tells of it."""
        return {
            "ETag": etag_of(self.data),
            "Last-Modified": formatdate(self.made_s, usegmt=True),
            "x-goog-generation": str(self.generation),
            "x-goog-metageneration": "1",
        }


class Answer(NamedTuple):
    """What is sent back."""

    status: int = 200
    headers: dict[str, str] = {}  # noqa: RUF012
    body: bytes = b""


@dataclass
class Bucket:
    """One bucket; everything in it changes under its lock."""

    objects: dict[str, Content] = field(default_factory=dict)
    uploads: dict[str, tuple[str, dict[int, bytes]]] = field(default_factory=dict)
    numbers: "itertools.count[int]" = field(
        default_factory=lambda: itertools.count(time.time_ns() // 1000)
    )
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, key: str, data: bytes, expected: str | None) -> Answer:
        """Make an object, if the one that is there has the generation that is expected."""
        with self.lock:
            found = self.objects.get(key)
            if expected is not None and int(expected) != (found.generation if found else 0):
                raise GcsError("PreconditionFailed")
            made = self.objects[key] = Content(data, next(self.numbers), time.time())
        return Answer(headers=made.headers)

    def get(self, key: str, asked: str | None) -> Answer:
        """Return an object, or a range of it."""
        found = self.objects.get(key)
        if found is None:
            raise GcsError("NoSuchKey")
        if asked is None:
            return Answer(headers=found.headers, body=found.data)
        match, size = re.match(r"bytes=(\d*)-(\d*)\Z", asked), len(found.data)
        if match is None:
            raise GcsError("InvalidArgument")
        first = int(match[1]) if match[1] else max(0, size - int(match[2]))
        last = min(int(match[2]) if match[1] and match[2] else size - 1, size - 1)
        if first > last:
            raise GcsError("InvalidRange")
        told = {"Content-Range": f"bytes {first}-{last}/{size}"}
        return Answer(206, found.headers | told, found.data[first : last + 1])

    def delete(self, key: str) -> Answer:
        """Remove an object."""
        with self.lock:
            if self.objects.pop(key, None) is None:
                raise GcsError("NoSuchKey")
        return Answer(204)

    def begin(self, key: str) -> Answer:
        """Begin an upload in parts."""
        name = f"upload-{next(self.numbers)}"
        self.uploads[name] = (key, {})
        words = f"<Key>{escape(key)}</Key><UploadId>{name}</UploadId>"
        return _xml("InitiateMultipartUploadResult", words)

    def parts_of(self, key: str, name: str) -> dict[int, bytes]:
        """Return the parts that have come."""
        of, parts = self.uploads.get(name, ("", {}))
        if of != key:
            raise GcsError("NoSuchUpload")
        return parts

    def part(self, key: str, name: str, number: int, data: bytes) -> Answer:
        """Keep a part."""
        self.parts_of(key, name)[number] = data
        return Answer(headers={"ETag": etag_of(data)})

    def complete(self, key: str, name: str, asked: str) -> Answer:
        """Make an object of the parts that are listed."""
        parts = self.parts_of(key, name)
        asked = asked.replace("&quot;", '"')
        numbers = [int(number) for number in re.findall(r"<PartNumber>(\d+)<", asked)]
        tags = [tag.strip('"') for tag in re.findall(r"<ETag>([^<]*)<", asked)]
        sent = [etag_of(parts.get(number, b"")).strip('"') for number in numbers]
        if not numbers or numbers != sorted(set(numbers)) or tags != sent:
            raise GcsError("InvalidPart")
        made = self.put(key, b"".join(parts[number] for number in numbers), None)
        self.abort(key, name)
        words = f"<Key>{escape(key)}</Key><ETag>{escape(made.headers['ETag'])}</ETag>"
        return _xml("CompleteMultipartUploadResult", words, made.headers)

    def abort(self, key: str, name: str) -> Answer:
        """Forget an upload."""
        self.parts_of(key, name)
        del self.uploads[name]
        return Answer(204)

    def list(self, prefix: str, delimiter: str, after: str) -> Answer:
        """List keys, and the beginnings up to the delimiter that several share."""
        with self.lock:
            found = sorted(self.objects.items())
        words, shared, count, last = [], "", 0, ""
        for key, content in found:
            end = key.find(delimiter, len(prefix)) + 1 if delimiter else 0
            name = key[:end] if end else key
            if not key.startswith(prefix) or name <= after or name == shared:
                continue
            if count == PAGE_KEYS:
                words.append(f"<NextContinuationToken>{escape(last)}</NextContinuationToken>")
                break
            count, last = count + 1, name
            if end:
                shared = name
                words.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
                continue
            moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(content.made_s))
            words.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(content.data)}</Size>"
                f"<LastModified>{moment}.{int(content.made_s % 1 * 1000):03}Z</LastModified>"
                f"<ETag>{escape(etag_of(content.data))}</ETag></Contents>"
            )
        is_cut = words and words[-1].startswith("<Next")
        words.append(f"<IsTruncated>{'true' if is_cut else 'false'}</IsTruncated>")
        return _xml("ListBucketResult", "".join(words))


def etag_of(data: bytes) -> str:
    """Return the ETag of bytes."""
    return f'"{hashlib.md5(data).hexdigest()}"'


def _xml(name: str, words: str, headers: "dict[str, str] | None" = None) -> Answer:
    text = f"<?xml version='1.0' encoding='UTF-8'?><{name}>{words}</{name}>"
    return Answer(200, {"Content-Type": "application/xml"} | (headers or {}), text.encode())


BUCKETS: dict[str, Bucket] = {}


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # an answer in one piece: two would wait 40 ms for each other

    def answer(self) -> None:
        """Answer one request."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            answer = self._find(body)
        except GcsError as error:
            code = str(error)
            words = f"<Code>{code}</Code><Message>The double says {code}.</Message>"
            answer = _xml("Error", words)._replace(status=ERRORS[code])
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

    def _find(self, body: bytes) -> Answer:
        url = urlsplit(self.path)
        asked = {
            name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()
        }
        name, _, key = url.path.removeprefix("/").partition("/")
        key, method = unquote(key), self.command
        if not name:
            return Answer()  # "are you up?"
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise GcsError("AuthenticationRequired")
        if method == "PUT" and not key:
            BUCKETS.setdefault(name, Bucket())
            return Answer()
        bucket = BUCKETS.get(name)
        if bucket is None:
            raise GcsError("NoSuchBucket")
        upload = asked.get("uploadId", "")
        if not key and method == "GET":
            after = asked.get("continuation-token", asked.get("start-after", ""))
            return bucket.list(asked.get("prefix", ""), asked.get("delimiter", ""), after)
        if method == "POST" and "uploads" in asked:
            return bucket.begin(key)
        if method == "POST" and upload:
            return bucket.complete(key, upload, body.decode())
        if method == "PUT" and upload:
            return bucket.part(key, upload, int(asked["partNumber"]), body)
        if method == "PUT":
            return bucket.put(key, body, self.headers.get("x-goog-if-generation-match"))
        if method == "DELETE":
            return bucket.abort(key, upload) if upload else bucket.delete(key)
        if method in ("GET", "HEAD"):
            return bucket.get(key, self.headers.get("Range"))
        raise GcsError("MethodNotAllowed")

    def log_message(self, *said: object) -> None:
        """Say nothing."""


def server_at(
    port: int, certificate: "Path | None" = None, key: "Path | None" = None
) -> ThreadingHTTPServer:
    """Return a server, of TLS with a certificate; port 0: any."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    return server


def main() -> None:
    """Serve until killed."""
    server_at(int(sys.argv[1])).serve_forever()


if __name__ == "__main__":
    main()
