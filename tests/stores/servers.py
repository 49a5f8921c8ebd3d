"""Servers of object stores, real but for one, on this machine; each is up while a block runs.

They are not in the environment of the tests: `make build/stores/.installed` puts them into one of
their own, which this starts them from. That of GCS is a double: see `gcs_double.py`.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.stores.objects_client import forget_clients
from stores import gcs_double

ROOT = Path(__file__).parents[2]
BIN = ROOT / "build" / "stores" / "bin"
UP_S = 60.0
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test12345678"}
BUCKET = "bucket"


@dataclass(frozen=True)
class Server:
    """How one is started, and what tells obstore of it.

    Attributes:
        command: for a port and a directory of its own.
        settings: the environment of who uses it, for a port.
        make_bucket: called when it is up.
    """

    url: str
    command: Callable[[int, str], list[str]]
    settings: Callable[[int], dict[str, str]]
    make_bucket: Callable[[int], object]


def _s3(port: int) -> dict[str, str]:
    return KEYS | {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


def _s3_bucket(port: int) -> None:
    program = (
        "import sys, boto3; boto3.client('s3', endpoint_url=sys.argv[1], region_name='us-east-1')"
        f".create_bucket(Bucket='{BUCKET}')"
    )
    command = [str(BIN / "python"), "-c", program, f"http://127.0.0.1:{port}"]
    subprocess.run(command, check=True, env=os.environ | KEYS)


BOTO = (  # a program for the server of a port, which reads its request as JSON
    "import sys, json, boto3; port, service, calls = sys.argv[1:]; client = boto3.client(service,"
    "endpoint_url=f'http://127.0.0.1:{port}', region_name='us-east-1'); print(json.dumps("
    "[getattr(client, name)(**given) for name, given in json.loads(calls)], default=str))"
)


def boto(port: int, service: str, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
    """Call Amazon's own client; return its answers."""
    command = [str(BIN / "python"), "-c", BOTO, str(port), service, json.dumps(calls)]
    done = subprocess.run(command, check=True, env=os.environ | KEYS, stdout=subprocess.PIPE)
    answers: list[Any] = json.loads(done.stdout)
    return answers


AZURE_KEY = (  # of every emulator, as its documentation says
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


def _azure(port: int) -> dict[str, str]:
    return {
        "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1",
        "AZURE_ALLOW_HTTP": "true",
        "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{port}",
    }


def _azure_container(port: int) -> None:
    program = (
        "import sys; from azure.storage.blob import BlobServiceClient as Client; "
        "Client(sys.argv[1], credential=sys.argv[2], api_version='2023-11-03')"
        f".create_container('{BUCKET}')"
    )
    url = f"http://127.0.0.1:{port}/devstoreaccount1"
    subprocess.run([str(BIN / "python"), "-c", program, url, AZURE_KEY], check=True)


def _gcs(port: int) -> dict[str, str]:
    return {
        "GOOGLE_BASE_URL": f"http://127.0.0.1:{port}",
        "GOOGLE_BEARER_TOKEN": gcs_double.TOKEN,
        "GOOGLE_ALLOW_HTTP": "true",
    }


def _gcs_bucket(port: int) -> None:
    bears = {"Authorization": f"Bearer {gcs_double.TOKEN}"}
    url = f"http://127.0.0.1:{port}/{BUCKET}"
    urllib.request.urlopen(urllib.request.Request(url, b"", bears, method="PUT")).close()


SERVERS = {
    "moto": Server(
        f"s3://{BUCKET}",
        lambda port, root: [str(BIN / "moto_server"), "-p", str(port)],
        _s3,
        _s3_bucket,
    ),
    "seaweedfs": Server(
        f"s3://{BUCKET}",
        lambda port, root: [
            *[str(BIN / "weed"), "server", f"-dir={root}", "-ip=127.0.0.1", "-s3", "-filer"],
            *[f"-s3.port={port}", f"-master.port={port + 1}", f"-volume.port={port + 2}"],
            *[f"-filer.port={port + 3}", "-master.volumeSizeLimitMB=256", "-volume.max=40"],
            # Ports that two servers cannot both have, and word to its makers.
            *["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"],
        ],
        _s3,
        _s3_bucket,
    ),
    "azurite": Server(
        f"az://{BUCKET}",
        lambda port, root: [
            *[str(BIN.parent / "node_modules" / ".bin" / "azurite-blob"), "--silent"],
            *["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", root],
        ],
        _azure,
        _azure_container,
    ),
    "gcs": Server(
        f"gs://{BUCKET}",
        lambda port, root: [sys.executable, str(Path(gcs_double.__file__)), str(port)],
        _gcs,
        _gcs_bucket,
    ),
    # It has no conditional writes, so holdfast refuses it.
    "rclone": Server(
        f"s3://{BUCKET}",
        lambda port, root: [
            *[str(BIN / "rclone"), "serve", "s3", root, "--addr", f"127.0.0.1:{port}"],
            *["--auth-key", ",".join(KEYS.values())],
        ],
        _s3,
        _s3_bucket,
    ),
}
REFUSED = ("rclone",)


class Up(NamedTuple):
    """A server that is up."""

    port: int
    process: "subprocess.Popen[bytes]"


@contextlib.contextmanager
def running(kind: str) -> Iterator[str]:
    """Run a server, with its settings in the environment; give the URL of an empty bucket."""
    with serving(kind) as up, environment(SERVERS[kind].settings(up.port)):
        yield SERVERS[kind].url


@contextlib.contextmanager
def serving(kind: str, more: dict[str, str] | None = None) -> Iterator[Up]:
    """Run a server with an empty bucket; nobody is told.

    Args:
        more: for its own environment.
    """
    server, port, root = SERVERS[kind], free_port(), tempfile.mkdtemp()
    with Path(root, "log").open("w") as log:
        process = subprocess.Popen(
            server.command(port, root),
            cwd=root,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | (more or {}),
        )
    try:
        _wait_for(process, port, Path(root, "log"))
        server.make_bucket(port)
        yield Up(port, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def environment(settings: dict[str, str]) -> Iterator[None]:
    """Have settings in the environment, and none of another server."""
    forget_clients()
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
        forget_clients()


_taken: list[socket.socket] = []


def free_port() -> int:
    """Return the first of ten ports that are free, as those 10,000 above are.

    No other process that asks gets these, as long as this one lives: servers take a while to begin.
    All are below 32768, where Linux begins to give ports to whoever connects.
    """
    for _ in range(100):
        port = random.SystemRandom().randrange(12000, 22000, 10)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            mine = socket.socket(socket.AF_UNIX)
            mine.bind(f"\0holdfast-tests-port-{port}")
            _taken.append(mine)
            for other in (*range(port, port + 10), *range(port + 10000, port + 10010)):
                free = held.enter_context(socket.socket())
                free.bind(("127.0.0.1", other))
            return port
    raise AssertionError("all ports are in use")


def _wait_for(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + UP_S
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        with contextlib.suppress(OSError):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2)
            except urllib.error.HTTPError:
                return  # it answers
            return
        time.sleep(0.1)
