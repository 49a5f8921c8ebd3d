"""Jobs whose ranks are forked, and reach the server by the proxy; and what the driver asks of both.

The driver itself never uses a store: what it forks may.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from forked_ranks import FAILED_EXIT, fork, join, reap

from stores import servers

from .harms import Harm
from .programs import (
    COLLECTIVE_S,
    PATIENCE_S,
    PROGRAMS,
    REQUEST_S,
    Teller,
    Work,
    use_server,
)

PR_SET_PDEATHSIG = 1
SENDERS = 4
UP_S = 60.0
LIBC = ctypes.CDLL(None)
Plant = Callable[[], None]


def die_with_parent() -> None:
    """End this process when the driver ends."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Field:
    """A server, the proxy before it, and the place where ranks meet, for all rounds."""

    def __init__(self, kind: str, work: Path) -> None:
        self.kind, self.work = kind, work
        os.environ["HOLDFAST_CHAOS_SERVER"] = kind
        self._root = tempfile.mkdtemp(dir=work)
        self.port = servers.free_port()
        self.start_server()
        servers.SERVERS[kind].make_bucket(self.port)
        command = [sys.executable, "-m", "stores.chaos.proxy", str(self.port), str(SENDERS)]
        self._proxy = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._proxy.stdout is not None
        self.control, *self.senders = json.loads(self._proxy.stdout.readline())
        self._line = socket.create_connection(("127.0.0.1", self.control))
        self._answers = self._line.makefile()
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.meeting = int(found.getsockname()[1])
        self._host = fork(self._host_meetings, 0)
        self._names = 0

    def start_server(self) -> None:
        """Start the server on its directory, and wait until it answers."""
        with Path(self._root, "log").open("a") as log:
            self._server = subprocess.Popen(
                servers.SERVERS[self.kind].command(self.port, self._root),
                cwd=self._root,
                stdout=log,
                stderr=log,
                env=os.environ | {"S3_UPLOAD_PART_MIN_SIZE": "256"},
                preexec_fn=die_with_parent,
                start_new_session=True,
            )
        servers._wait_for(self._server, self.port, Path(self._root, "log"))

    def restart_server(self, number: int) -> None:
        """End the server by a signal, and start it again."""
        self._server.send_signal(number)
        self._server.wait(UP_S)
        self.start_server()

    def ask(self, do: str, harms: "list[Harm] | None" = None) -> dict[str, Any]:
        """Have the proxy do something; return what it has seen."""
        said = {"do": do, "harms": [harm.told() for harm in harms or []]}
        self._line.sendall(f"{json.dumps(said)}\n".encode())
        answer: dict[str, Any] = json.loads(self._answers.readline())
        return answer

    def new_name(self) -> str:
        """Return a name that nothing had before."""
        self._names += 1
        return f"{self._names}"

    def close(self) -> None:
        """End all of it."""
        self._line.close()
        os.kill(self._host, signal.SIGKILL)
        os.waitpid(self._host, 0)
        for process in (self._proxy, self._server):
            process.kill()
            process.wait()
        shutil.rmtree(self._root, ignore_errors=True)

    def _host_meetings(self, _: int) -> None:
        die_with_parent()
        self.store = dist.TCPStore(
            "127.0.0.1", self.meeting, is_master=True, wait_for_workers=False
        )
        signal.pause()


class Job:
    """The ranks of one job, from their fork to their end."""

    def __init__(
        self, field: Field, work: Work, first: int = 0, plant: Plant | None = None
    ) -> None:
        """Fork the ranks, which wait for `start`; ``first`` is the sender of rank 0."""
        self.work, self.events = work, list[dict[str, Any]]()
        self.ended: dict[int, int] = {}
        self.late: list[int] = []
        self._reading, writing = os.pipe()
        starting, self._start = os.pipe()
        going, self._go = os.pipe()
        self._rest = b""
        name = field.new_name()

        def main(rank: int) -> None:
            die_with_parent()
            for descriptor in (self._reading, self._start, self._go):
                os.close(descriptor)
            os.read(starting, 1)
            use_server(field.senders[first + rank], PATIENCE_S if work.is_patient else REQUEST_S)
            if plant is not None:
                plant()
            if work.ranks > 1:
                limit_s = PATIENCE_S if work.is_patient else COLLECTIVE_S
                join(f"job-{name}", field.meeting, rank, work.ranks, limit_s)
            PROGRAMS[work.kind](work, Teller(work, rank, writing, field.control, going))

        def quiet(rank: int) -> None:
            try:
                main(rank)
            except BaseException as error:
                from holdfast.errors import HoldfastError

                if isinstance(error, HoldfastError):
                    os._exit(0)  # the driver was told
                raise

        self.children = {rank: fork(quiet, rank) for rank in range(work.ranks)}
        for descriptor in (writing, starting, going):
            os.close(descriptor)  # of what jobs share that are forked later, none keeps a pipe open

    @property
    def pids(self) -> list[int]:
        """Return the processes of the ranks."""
        return [self.children[rank] for rank in sorted(self.children)]

    def start(self) -> None:
        """Let the ranks begin."""
        os.write(self._start, b"s" * self.work.ranks)

    def go(self) -> None:
        """Let ranks go on that wait for the driver."""
        with contextlib.suppress(BrokenPipeError):  # they have ended
            os.write(self._go, b"g" * self.work.ranks)

    def hear(self, enough: Callable[[], object], within_s: float) -> bool:
        """Listen until there is enough; return whether there is before all are gone."""
        until = time.monotonic() + within_s
        while not enough():
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            if select.select([self._reading], [], [], min(left_s, 0.01))[0]:
                part = os.read(self._reading, 1 << 16)
                if not part:
                    return bool(enough())
                *lines, self._rest = (self._rest + part).split(b"\n")
                self.events += map(json.loads, lines)
        return True

    def told(self, what: str) -> list[dict[str, Any]]:
        """Return what ranks have told of one kind."""
        return [event for event in self.events if event["what"] == what]

    def waits(self) -> list[float]:
        """Return how long each save took that ended in an error."""
        begun = {(e["rank"], e["step"]): e["at"] for e in self.told("begun")}
        return [e["at"] - begun[e["rank"], e["step"]] for e in self.told("told")]

    def end(self, within_s: float) -> None:
        """Wait for all ranks to end by themselves; kill those that do not."""
        until = time.monotonic() + within_s
        self.hear(lambda: False, within_s)
        self.ended, self.late = reap(self.children, max(0.5, until - time.monotonic()))
        for descriptor in (self._reading, self._start, self._go):
            os.close(descriptor)

    def faults(self) -> list[str]:
        """Say what is wrong with how the ranks ended."""
        found = [f"rank {rank} of job {self.work.job} hung" for rank in self.late]
        for rank, status in self.ended.items():
            if status == FAILED_EXIT:
                found.append(f"rank {rank} of job {self.work.job} met an error that is not ours")
        return found
