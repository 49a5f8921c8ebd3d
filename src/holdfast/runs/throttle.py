"""How uploads go easy on the machine: little memory, and no more bytes a second than they may."""

import time

from ..options import SLOT_BYTES, Options

POOL_SLOTS = 4  # of memory that an upload passes through
BURST_S = 1.0  # of the rate: what was not used so long may be made up for


def upload_options(options: Options) -> Options:
    """Return how the local disk is read for an upload."""
    chosen = {name: getattr(options, name) for name in ("block_bytes", "queue_depth", "io")}
    return Options(pool_bytes=POOL_SLOTS * SLOT_BYTES, **chosen)


class Throttle:
    """Lets so many bytes through a second, on average."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._rate = bytes_per_s
        self._free_at = 0.0  # when what went through so far has been paid for

    def wait_s(self, size: int) -> float:
        """Return how long to wait after so many bytes."""
        if self._rate is None:
            return 0.0
        now = time.monotonic()
        self._free_at = max(self._free_at, now - BURST_S) + size / self._rate
        return max(0.0, self._free_at - now)
