"""Where the product meets the simulation: `os`, the clock, threads, chance and what processes hold.

Promises that what runs is the code that ships (commit, publish, retire, fence, keep, sweep, the
waits of ranks), of which nothing is replaced but how it reaches the system, and the payload
(`payload.py`). `installed` puts the stand-ins in place; `enter` gives them a world.
"""

import contextlib
import itertools
import logging
import os
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from crash.disk_model import Directory
from holdfast.chains import base_choice as base_choice_module
from holdfast.chains import recompress as recompress_module
from holdfast.engine import copied_files, epochs, known, ledger, removal, retire
from holdfast.errors import HoldfastError
from holdfast.group import barrier
from holdfast.runs import checkpointer as checkpointer_module
from holdfast.runs import directory as directory_module
from holdfast.runs import fence as fence_module
from holdfast.runs import (
    host_uploads,
    hosts,
    leaving,
    local_mark,
    metrics_file,
    progress_file,
    rewind,
    throttle,
    tier_steps,
    tier_waits,
    tiers,
    upload_thread,
    upload_waits,
    uploader,
)
from holdfast.runs import restore as restore_module
from holdfast.runs import saver as saver_module
from holdfast.saving import handle as handle_module
from holdfast.saving import save as save_module
from holdfast.stores import (
    local,
    local_marks,
    objects,
    objects_bar,
    objects_client,
    objects_files,
    remote_files,
)

from . import payload
from .actors import Killed, Process, Scheduler
from .bucket import Bucket
from .disk import Disk
from .ranks import clock_of, threads_of, workers_of


class Seat:
    """The world that the stand-ins work in."""

    scheduler: Scheduler
    disk: Disk | Bucket
    bucket: Disk | Bucket  # what stores of objects ask
    names: Iterator[int]
    saving: Callable[[str], None]  # told of each save_id
    tidying: Callable[[str, int], None]  # told of a run, and each step of it that is committed


SEAT = Seat()


class Epochs(dict[str, epochs.Epoch]):
    """The epochs that a process holds; ``taken`` is told of each, and of which run it is."""

    taken: Callable[[str, int], None] = staticmethod(lambda place, epoch: None)

    def __setitem__(self, place: str, epoch: epochs.Epoch) -> None:
        super().__setitem__(place, epoch)
        self.taken(place, epoch[0])


def switch(before: Process, after: Process) -> None:
    """Put what the process that goes on holds where the product looks for it."""
    before.flight, before.preparing = handle_module._last, handle_module._owner
    handle_module._last = after.flight  # type: ignore[assignment]
    handle_module._owner = after.preparing
    epochs.held, epochs._names = after.epochs, after.names
    local._changed_s = after.synced
    objects._bars = after.bars


def enter(
    scheduler: Scheduler,
    disk: Disk | Bucket,
    bucket: Disk | Bucket,
    saving: Callable[[str], None],
    tidying: Callable[[str, int], None],
) -> None:
    """Let the stand-ins work in a world."""
    SEAT.scheduler, SEAT.disk, SEAT.names = scheduler, disk, itertools.count(1)
    SEAT.bucket = bucket
    SEAT.saving, SEAT.tidying = saving, tidying
    local._current_vfs = disk  # type: ignore[assignment]
    handle_module._last, handle_module._owner, epochs.held, epochs._names = None, None, {}, []
    local._changed_s, objects._bars = {}, {}
    remote_files.FILES.__init__()  # type: ignore[misc]  # processes were killed with some open


def _number(size: int) -> str:
    return f"{next(SEAT.names):0{2 * size}x}"


def _token(size: int) -> str:
    name = _number(size)
    SEAT.saving(name)
    return name


def _is_directory(path: str) -> bool:
    SEAT.scheduler.step("is_directory", path)
    return isinstance(SEAT.disk.node(path), Directory)


def _scan(path: str) -> Any:
    return nullcontext(
        SimpleNamespace(
            name=name,
            is_dir=lambda follow_symlinks, kind=kind: kind == "directory",
            is_file=lambda follow_symlinks, kind=kind: kind == "file",
        )
        for name, kind, _ in SEAT.disk.list_directory(path, "")
    )


def _above_with(store: local.LocalStore, name: str, beginning: bytes) -> str:
    SEAT.scheduler.step("above_with", above := store.location)
    while "/" in above:
        above = above.rpartition("/")[0]
        if SEAT.disk.node(f"{above}/{name}") is not None:
            return above or "/"
    return ""


def _free_bytes(store: object) -> int:
    SEAT.scheduler.step("free_bytes")
    return SEAT.disk.free_bytes


def _write_note(fd: int, data: bytes) -> int:
    return SEAT.disk.write_note(fd, data)


class _KnownOfProcess(UserDict[str, object]):
    """What each simulated process knows of MANIFESTs: none begins with what another has seen."""

    def __init__(self) -> None:
        """Hold nothing of its own."""

    @property
    def data(self) -> dict[str, object]:  # type: ignore[override]
        """What the process that runs knows."""
        return SEAT.scheduler.current.process.known


def _note_link(writing: payload.TinyAgreed, basis: object) -> None:
    SEAT.scheduler.current.process.last_link = writing.store.location


def _sleep_longer(seconds: float) -> None:
    """Look less often than the product does: that is all that hosts do most of the time."""
    SEAT.scheduler.pause(20 * seconds)


_tidy = directory_module.Run.tidy


def _tidy_committed(run: directory_module.Run, step: int, *given: Any) -> None:
    SEAT.tidying(run.root, step)
    _tidy(run, step, *given)


class _OwnFaults(logging.Handler):
    """Notes what the product logs as a fault of its own, and goes on after."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, (HoldfastError, Killed)):
            SEAT.scheduler.errors.append(error)


def _patches() -> list[tuple[Any, str, Any]]:
    clock, threads = clock_of(SEAT), threads_of(SEAT)
    workers = workers_of(SEAT, threads)
    path = SimpleNamespace(
        join=lambda root, name: f"{root}/{name}",
        dirname=lambda path: path.rpartition("/")[0] or "/",
        basename=os.path.basename,
        split=os.path.split,
        abspath=os.path.normpath,
        realpath=os.path.normpath,  # there are no links
        isdir=_is_directory,
    )
    lstat = lambda path: SEAT.disk.lstat(path)  # noqa: E731
    chance = SimpleNamespace(token_hex=_token)
    system = SimpleNamespace(
        path=path,
        lstat=lstat,
        stat=lstat,
        fspath=os.fspath,
        scandir=_scan,
        write=_write_note,
        getpid=lambda: 1,
        getpriority=lambda *whose: 0,
        setpriority=lambda *kind: None,
        PRIO_PROCESS=0,
        urandom=lambda size: next(SEAT.names).to_bytes(size, "big"),
    )
    cached_plans = SimpleNamespace(
        NUMBERS=1,
        settled=lambda sums: False,
        find=lambda *held: ((), None),
        remember=lambda made: None,
    )
    return [
        *(
            (module, "os", system)
            for module in (
                local,
                local_marks,
                base_choice_module,
                directory_module,
                epochs,
                fence_module,
                handle_module,
                host_uploads,
                local_mark,
                retire,
                tiers,
            )
        ),
        *(
            (m, "time", clock)
            for m in (
                *(barrier, ledger, handle_module, save_module, saver_module, restore_module),
                *(leaving, throttle, tier_steps, tier_waits),
                *(upload_thread, upload_waits, uploader),
            )
        ),
        (host_uploads, "time", SimpleNamespace(**{**vars(clock), "sleep": _sleep_longer})),
        *((module, "threading", threads) for module in (handle_module, uploader, fence_module)),
        (uploader, "SimpleQueue", threads.SimpleQueue),
        (upload_thread, "running", set()),
        *(
            (module, "worker", workers)
            for module in (
                *(checkpointer_module, handle_module, save_module, leaving, rewind),
                *(host_uploads, tier_waits, upload_thread, upload_waits, uploader),
            )
        ),
        (save_module, "secrets", chance),
        (recompress_module, "secrets", chance),
        (copied_files, "secrets", SimpleNamespace(token_hex=_number)),
        (removal, "secrets", SimpleNamespace(token_hex=_number)),
        (save_module, "cached_plans", cached_plans),
        (save_module, "end_link", _note_link),
        (
            base_choice_module,
            "last_link",
            lambda run, rank: SEAT.scheduler.current.process.last_link,
        ),
        (known, "_known", _KnownOfProcess()),
        (fence_module, "_description", lambda epoch: {"epoch": epoch}),
        (directory_module.Run, "tidy", _tidy_committed),
        *((metrics_file.MetricsFile, n, lambda *line: None) for n in ("add", "take_save")),
        (hosts, "secrets", SimpleNamespace(token_hex=_number)),
        (progress_file.ProgressFile, "begin", lambda progress: None),  # the same; it has a thread
        *(
            (module, "api", lambda: SEAT.bucket)
            for module in (objects, objects_client, objects_files)
        ),
        (objects_client, "client", lambda *which: SEAT.bucket),
        (objects, "check_conditions", lambda *where: True),
        (objects, "check_answers", lambda *where: None),
        (objects_bar, "secrets", SimpleNamespace(token_hex=_number)),
        (local, "look_anew", lambda path: None),  # nothing is cached here
        (local.LocalStore, "above_with", _above_with),
        (local.LocalStore, "free_bytes", _free_bytes),
        *payload.PATCHES,
    ]


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Put the stand-ins in place, and back."""
    put = [(where, name, getattr(where, name), new) for where, name, new in _patches()]
    before = local._current_vfs, handle_module._last, handle_module._owner, epochs.held
    synced, bars, own_names = local._changed_s, objects._bars, epochs._names
    logger = logging.getLogger("holdfast")
    level, handlers, passes_on = logger.level, logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [_OwnFaults()], False
    logger.setLevel(logging.WARNING)
    for where, name, _, new in put:
        setattr(where, name, new)
    try:
        yield
    finally:
        for where, name, old, _ in reversed(put):
            setattr(where, name, old)
        local._current_vfs, handle_module._last, handle_module._owner, epochs.held = before
        local._changed_s, objects._bars, epochs._names = synced, bars, own_names
        logger.handlers, logger.propagate = handlers, passes_on
        logger.setLevel(level)
