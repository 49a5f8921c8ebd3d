"""Servers of object stores, real ones, on this machine; each is up while a block runs.

They are not in the environment of the tests: `make build/stores/.installed` puts them into one of
their own, which this starts them from.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.stores.objects_client import forget_clients

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


@contextlib.contextmanager
def running(kind: str) -> Iterator[str]:
    """Run a server, with its settings in the environment; give the URL of an empty bucket."""
    forget_clients()  # they hold the settings of another server
    server, port, root = SERVERS[kind], _free_port(), tempfile.mkdtemp()
    with Path(root, "log").open("w") as log:
        process = subprocess.Popen(
            server.command(port, root), cwd=root, stdout=log, stderr=log, start_new_session=True
        )
    settings = server.settings(port)
    before = {name: os.environ.get(name) for name in settings}
    try:
        _wait_for(process, port, Path(root, "log"))
        server.make_bucket(port)
        os.environ.update(settings)
        yield server.url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(root, ignore_errors=True)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def _free_port() -> int:
    """Return the first of ten ports that are free, as those 10,000 above are."""
    for _ in range(100):
        port = random.randrange(20000, 30000, 10)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
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
