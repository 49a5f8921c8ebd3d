"""The same start for everyone: nothing dirty, nothing cached, free memory that is really there."""

import ctypes
import gc
import mmap
import os
import time
from pathlib import Path

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
SETTLE_S = 0.5  # the disk goes on discarding the blocks of removed files for a moment
FREE_SHARE_MAX = 0.7  # of the memory that is free; touching all of it would push others out
MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap has no name for it
PAGE_BYTES = 4096


def prepare(directory: Path, warm_bytes: int) -> None:
    """Bring the machine into the state in which every measurement starts.

    A virtual machine gives free pages back to its host, and their next use is about 10 times as
    slow: whoever first fills the page cache, or a new tensor, would pay for it. So free pages are
    touched before. What the allocator keeps of a format that is done goes back first: with Orbax it
    grows by half a state a round, and would be missing in the page cache of the others.

    Args:
        directory: its files leave the page cache even where the whole cache cannot be dropped
            (only root may).
        warm_bytes: free memory to touch.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    os.sync()
    time.sleep(SETTLE_S)
    if can_drop_caches():
        DROP_CACHES.write_text("3")
    else:
        _forget(directory)
    touch_free_memory(min(warm_bytes, int(FREE_SHARE_MAX * available_bytes())))


def can_drop_caches() -> bool:
    """Return whether this process may drop the whole page cache."""
    return os.geteuid() == 0 and os.access(DROP_CACHES, os.W_OK)


def _forget(directory: Path) -> None:
    for path in directory.rglob("*"):
        if not path.is_file():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def available_bytes() -> int:
    """Return the memory that is free without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def touch_free_memory(size_bytes: int) -> None:
    """Write to every page of ``size_bytes`` of free memory, and free it again."""
    if size_bytes < PAGE_BYTES:
        return
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
        try:
            memory.madvise(MADV_POPULATE_WRITE)
        except OSError:
            for at in range(0, size_bytes, PAGE_BYTES):
                memory[at] = 0
    finally:
        memory.close()
