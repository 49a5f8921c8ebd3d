"""How uploads go easy on the machine: little memory, and no more bytes a second than they may."""

import time

from ..engine.slot_writes import slots_for
from ..options import SLOT_BYTES, Options
from ..stores.base import Store

POOL_SLOTS = 4  # of memory that an upload passes through, if its target copies what it is given
BURST_S = 1.0  # of the rate: what was not used so long may be made up for


def upload_options(options: Options, target: Store) -> Options:
    """Return how the local disk is read for an upload to a store."""
    chosen = {name: getattr(options, name) for name in ("block_bytes", "queue_depth", "io")}
    slots = max(POOL_SLOTS, slots_for(target, options.pool_bytes))
    return Options(pool_bytes=slots * SLOT_BYTES, **chosen)


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
