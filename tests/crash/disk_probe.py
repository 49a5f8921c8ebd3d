"""Whether the disk hangs: a process syncs a small file again and again, and says how long it took.

So a campaign can tell a save that is late by itself from one that waited for its disk.
"""

import mmap
import os
import signal
import struct
import time
from pathlib import Path

from forked_ranks import fork

PAUSE_S = 0.2
_TIMES = struct.Struct("dd")  # when the sync began that is under way, or 0; the longest in seconds


class DiskProbe:
    """See the module; one process, until `close`."""

    def __init__(self, directory: Path) -> None:
        self._shared = mmap.mmap(-1, _TIMES.size)
        self.path = directory / "probe"
        self._child = fork(self._sync_for_ever, 0)

    def reset(self) -> None:
        """Forget how long syncs took until now."""
        began, _ = _TIMES.unpack(self._shared[:])
        self._shared[:] = _TIMES.pack(began, 0.0)

    def longest_s(self) -> float:
        """Return the longest sync since `reset`, also if it is under way."""
        began, longest = _TIMES.unpack(self._shared[:])
        return max(longest, time.monotonic() - began if began else 0.0)

    def close(self) -> None:
        """End the process."""
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)

    def _sync_for_ever(self, _: int) -> None:
        parent = os.getppid()
        descriptor = os.open(self.path, os.O_CREAT | os.O_WRONLY)
        while os.getppid() == parent:
            began = time.monotonic()
            self._shared[:8] = struct.pack("d", began)
            os.pwrite(descriptor, os.urandom(4096), 0)
            os.fsync(descriptor)
            longest = max(time.monotonic() - began, _TIMES.unpack(self._shared[:])[1])
            self._shared[:] = _TIMES.pack(0.0, longest)
            time.sleep(PAUSE_S)
