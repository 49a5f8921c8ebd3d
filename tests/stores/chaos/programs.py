"""What a rank does on a store: it saves, replaces or copies, and tells what it sees, line by line.

Knows nothing of what is going to strike it, but for the two lines between which that happens.
"""

import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any, Literal

import forked_ranks
import torch.distributed as dist
from crash_content import make_state, number_in

import holdfast
import holdfast.engine.replace
import holdfast.runs.directory
from holdfast.errors import HoldfastError
from holdfast.stores import objects_settings
from namespaces import own_disk
from stores import servers

BUCKET = f"s3://{servers.BUCKET}"
REQUEST_S = 6.0  # what one request may take, with its retries
COLLECTIVE_S = 10.0
DEADLINE_S = 5.0  # of a save in the background
UPLOADED_S = 10.0  # deadline of a save that has to reach the store: hosts ask once a second
PATIENCE_S = 60.0
PART_BYTES = {"moto": 6000}  # an upload has several parts, where a server takes small ones
STEPS_MAX = 1000  # of one job
OPTIONS = dataclasses.replace(
    forked_ranks.OPTIONS, pool_bytes=3 << 20, deadline_s=DEADLINE_S, chunk_elements=4096
)


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What all ranks of a job do.

    Attributes:
        kind: a name of `PROGRAMS`.
        job: its number; states of different jobs differ.
        before: saves that nothing harms.
        saves: saves that may be harmed.
        stage: "sync", or as Checkpointer's.
        on_error: whether a rank saves on after an error.
        step: what is saved by a process of its own, beside a run.
        is_old: a day has passed for those who tidy up, at every look.
        local: a directory of the local disk before the store; "": none.
        has_own_disks: whether each rank has a disk of its own there.
        durable: as Checkpointer's.
        is_patient: nothing harms this job, so its limits are long.
    """

    kind: str
    place: str
    job: int = 1
    ranks: int = 2
    before: int = 0
    saves: int = 1
    keep: int = 2
    stage: str = "sync"
    on_error: bool = False
    step: int = 0
    is_old: bool = False
    local: str = ""
    has_own_disks: bool = False
    durable: Literal["store", "local"] = "store"
    is_patient: bool = False

    def disk_of(self, rank: int) -> str:
        """Return the directory that a rank sees as ``local``."""
        return f"{self.local}-{rank}" if self.has_own_disks else self.local


class Teller:
    """Writes what happens to a pipe, and says to the proxy where harm may begin."""

    def __init__(self, work: Work, rank: int, pipe: int, control: int, go: int) -> None:
        self._work, self.rank, self._pipe = work, rank, pipe
        self._control, self._go = control, go

    def tell(self, what: str, step: int = 0, error: Exception | None = None) -> None:
        """Tell one thing: "begun", "saved" or "told" (of an error) of a step, or "ready".

        Of a run with a local disk also "local": that disk has it; "restored": the number of that
        state.
        """
        said = {
            "job": self._work.job,
            "rank": self.rank,
            "what": what,
            "step": step,
            "at": time.monotonic(),
            "error": type(error).__name__ if error else "",
            "text": str(error).encode("ascii", "replace").decode()[:700] if error else "",
        }
        os.write(self._pipe, f"{json.dumps(said)}\n".encode())

    def window(self, what: str) -> None:
        """Say "begin" or "end" to the proxy, for all ranks of the job."""
        if what == "begin":
            self._meet()
        if self.rank == 0:
            with socket.create_connection(("127.0.0.1", self._control)) as connection:
                connection.sendall(f"{json.dumps({'do': what})}\n".encode())
                connection.makefile().readline()
        if what == "begin":
            self._meet()

    def _meet(self) -> None:
        try:
            if dist.is_initialized():
                dist.barrier()
        except RuntimeError:
            os._exit(0)  # an upload in the background was harmed, and the other rank is gone

    def await_go(self) -> None:
        """Wait for the driver."""
        os.read(self._go, 1)


def use_server(port: int, request_s: float = REQUEST_S) -> None:
    """Have this process use a server, or a proxy before it."""
    os.environ.update(servers.SERVERS["moto"].settings(port))
    holdfast.StoreSettings(BUCKET, timeout_s=request_s).use()
    server = os.environ["HOLDFAST_CHAOS_SERVER"]
    objects_settings.PART_BYTES = PART_BYTES.get(server, objects_settings.PART_BYTES)


def let_a_day_pass() -> None:
    """Whatever is removed when it is a day old may be removed at once."""
    holdfast.runs.directory.GRACE_S = holdfast.engine.replace.GRACE_S = -1e9


def number_of(job: int, step: int) -> int:
    """Return the number of the state that a job saves as a step."""
    return job * STEPS_MAX + step


def open_run(work: Work) -> holdfast.Checkpointer:
    """Open the run of a job."""
    return holdfast.Checkpointer(
        work.place,
        every=1,
        keep=holdfast.Keep.latest(work.keep),
        stage=work.stage,
        signals=(),
        deadline_s=DEADLINE_S,
        options=OPTIONS,
    )


def try_save(work: Work, teller: Teller, step: int, save: Callable[[Any], object]) -> None:
    """Save the state of a step; tell how that ends.

    Args:
        save: returns False if the store may not have it yet.
    """
    state = make_state(number_of(work.job, step))
    teller.tell("begun", step)
    try:
        is_saved = save(state) is not False
    except HoldfastError as error:
        teller.tell("told", step, error)
        if not work.on_error:
            raise
        return
    if is_saved:
        teller.tell("saved", step)


def save_steps(work: Work, teller: Teller) -> None:
    """Restore a run, and save steps."""
    if work.is_old:
        let_a_day_pass()
    run = open_run(work)

    def save(state: Any) -> None:
        run.step(step, state)
        run.wait()

    start = run.restore(make_state(-1)) or work.step
    for step in range(start + 1, start + 1 + work.before):
        try_save(work, teller, step, save)
    start += work.before
    teller.tell("ready")
    teller.window("begin")
    for step in range(start + 1, start + 1 + work.saves):
        try_save(work, teller, step, save)
    teller.window("end")


def save_on(work: Work, teller: Teller) -> None:
    """Do as `save_steps`, when the driver says so, and say nothing to the proxy."""
    teller.window = lambda what: teller.await_go() if what == "begin" else None  # type: ignore
    save_steps(work, teller)


def save_tiers(work: Work, teller: Teller) -> None:
    """Restore a run that has a local disk before its store, and save steps."""
    if work.has_own_disks:
        own_disk(work.local, work.disk_of(teller.rank))
    limit_s = PATIENCE_S if work.is_patient else UPLOADED_S
    run = holdfast.Checkpointer(
        work.place,
        local=work.local,
        durable=work.durable,
        drain_s=limit_s,
        every=1,
        keep=holdfast.Keep.latest(work.keep) | holdfast.Keep.local(1),
        stage=work.stage,
        signals=(),
        deadline_s=limit_s,
        options=OPTIONS,
    )
    state = make_state(-1)
    start = run.restore(state) or 0
    if start:
        teller.tell("restored", number_in(state, f"step {start}"))
    harmed, last = start + work.before, start + work.before + work.saves

    def save(state: Any) -> bool:
        run.step(step, state)
        run.wait(tier="local")
        teller.tell("local", step)
        if work.durable == "local" and step not in (harmed, last):
            return False
        run.wait(tier="store")
        return True

    for step in range(start + 1, last + 1):
        if step == harmed + 1:
            teller.tell("ready")
            teller.window("begin")
        try_save(work, teller, step, save)
    teller.window("end")
    run.close()


def replace(work: Work, teller: Teller) -> None:
    """Save one checkpoint again and again in its place."""
    for step in range(1, work.before + work.saves + 1):
        if step == work.before + 1:
            teller.tell("ready")
            teller.window("begin")
        save = _replace_now if work.stage == "sync" else _replace_later
        try_save(work, teller, step, lambda state, save=save: save(state, work))  # type: ignore
    teller.window("end")


def _replace_now(state: Any, work: Work) -> None:
    holdfast.save(state, work.place, replace=True, options=OPTIONS)


def _replace_later(state: Any, work: Work) -> None:
    holdfast.save_async(state, work.place, replace=True, options=OPTIONS).result()


def save_beside(work: Work, teller: Teller) -> None:
    """Save one step of a run that another process has."""
    path = f"{work.place}/step-{work.step:08}"
    teller.window("begin")
    try_save(work, teller, work.step, lambda state: holdfast.save(state, path, options=OPTIONS))


def copy(work: Work, teller: Teller) -> None:
    """Copy a checkpoint of this machine, which the driver has made."""
    source = os.environ["HOLDFAST_CHAOS_SOURCE"]
    teller.window("begin")
    try_save(
        work,
        teller,
        work.step,
        lambda _: holdfast.copy_checkpoint(source, work.place, options=OPTIONS),
    )
    teller.window("end")


PROGRAMS: dict[str, Callable[[Work, Teller], None]] = {
    "steps": save_steps,
    "steps on": save_on,
    "tiers": save_tiers,
    "replace": replace,
    "beside": save_beside,
    "copy": copy,
}
