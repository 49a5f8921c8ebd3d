"""The disk under a directory: what it is, room on it, a place to measure in, the start of each run.

Knows no checkpoints and no settings.
"""

import contextlib
import mmap
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from ..errors import OptionError, StoreError
from .text import show_bytes

FREE_FACTOR = 3  # of the state: what is written, what is about to be discarded, a rest
MEMORY_FACTOR = 2  # of the state: itself, and the page cache of a buffered write
SETTLE_S = 0.1  # the disk goes on discarding the blocks of removed files for a moment
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
TOUCHED_SHARE_MAX = 0.5  # of the memory that is free; touching all of it would push others out
MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap has no name for it
PAGE_BYTES = 4096
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def check_room(directory: Path, size_bytes: int, *, free_bytes: int, memory_bytes: int) -> None:
    """Refuse a state that the disk or the memory cannot hold.

    Raises:
        OptionError: the text says how much there is, and how much it takes.
    """
    for found, needed, what in (
        (free_bytes, FREE_FACTOR * size_bytes, f"free in {directory}"),
        (memory_bytes, MEMORY_FACTOR * size_bytes, "of free memory"),
    ):
        if found < needed:
            raise OptionError(
                f"found {show_bytes(found)} {what}; expected {show_bytes(needed)}, for a state of "
                f"{show_bytes(size_bytes)}. Choose a smaller --gib"
            )


def available_bytes() -> int:
    """Return the memory that is free without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def scratch_in(directory: Path) -> Iterator[Path]:
    """Make a directory in another; remove it with all that is in it, whatever happens.

    SIGTERM and SIGHUP end the block by an exception, as Ctrl-C does.

    Raises:
        StoreError: it cannot be made, or not be removed.
    """
    handlers = _own_handlers()
    try:
        for number in handlers.keys() - {signal.SIGINT}:
            signal.signal(number, _stop)
        try:
            made = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=directory))
        except OSError as error:
            raise failure(f"make a directory in {directory}", error) from error
        try:
            yield made
        finally:
            for number in handlers:
                signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not stop the removal
            _remove_scratch(made)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def failure(what: str, cause: OSError) -> StoreError:
    """Return the error of a system call that failed."""
    error = StoreError(f"{what}: {cause.strerror or cause}")
    error.errno = cause.errno
    return error


def remove(path: Path) -> None:
    """Remove a file, or a directory and all that is in it, or nothing."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def settle() -> None:
    """Wait until nothing is left to write, and the disk has had a moment to itself."""
    os.sync()
    time.sleep(SETTLE_S)


def forget(path: Path) -> None:
    """Take a file, or all files of a directory, out of the page cache; they must be durable."""
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
    if os.geteuid() == 0:
        # Caches of their own, as ZFS has one, listen to this alone. In a container it is read-only.
        with contextlib.suppress(OSError):
            DROP_CACHES.write_text("3")


def touch_free_memory(size_bytes: int) -> None:
    """Write to every page of so much free memory, and free it again.

    A virtual machine gives free pages back to its host, and their next use is about 10 times as
    slow: a page cache that has to grow first would be measured, not the disk.
    """
    size_bytes = min(size_bytes, int(TOUCHED_SHARE_MAX * available_bytes()))
    with mmap.mmap(-1, max(size_bytes, PAGE_BYTES), flags=mmap.MAP_PRIVATE) as memory:
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
            memory.madvise(MADV_POPULATE_WRITE)
        except OSError:
            for at in range(0, size_bytes, PAGE_BYTES):
                memory[at] = 0


def describe(directory: Path) -> dict[str, str | None]:
    """Return the type of the file system, what it lies on, and the disk's model where known."""
    kind, source = _mount_of(directory)
    return {"file_system": kind, "device": source, "model": _model_of(directory)}


def _own_handlers() -> "dict[signal.Signals, signal._HANDLER]":
    """Return the handlers of the signals that end a program, as far as nobody has changed them."""
    if threading.current_thread() is not threading.main_thread():
        return {}  # which may not set any
    found = {number: signal.getsignal(number) for number in STOPPING}
    ours = (signal.SIG_DFL, signal.default_int_handler)
    return {number: handler for number, handler in found.items() if handler in ours}


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # as shells report it


def _remove_scratch(made: Path) -> None:
    try:
        shutil.rmtree(made)
    except OSError as error:
        raise failure(f"remove {made}, which is left", error) from error


def _mount_of(directory: Path) -> tuple[str, str]:
    """Return type and source of the mount that holds a directory."""
    path, longest, found = os.path.realpath(directory), 0, ("unknown", "unknown")
    mounts = Path("/proc/self/mounts").read_text(errors="surrogateescape")
    for line in mounts.splitlines():
        source, point, kind = map(_unescape, line.split(" ")[:3])
        # Of several mounts at one point the last is seen.
        if len(point) >= longest and os.path.commonpath([path, point]) == point:
            longest, found = len(point), (kind, source)
    return found


def _unescape(field: str) -> str:
    r"""Undo what the kernel does to spaces: ``a\040b`` → ``a b``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _model_of(directory: Path) -> str | None:
    device = os.stat(directory).st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    for place in (block, block.parent):  # a partition lies in its disk
        model = place / "device" / "model"
        if model.is_file():
            return " ".join(model.read_text().split())
    return None
