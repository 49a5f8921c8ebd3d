"""What the steps of a run say of themselves: their metrics, and what deltas are made from."""

import errno
import logging
from collections.abc import Mapping, Sequence

from ..errors import CorruptError, StoreError, VersionError
from ..format import spec
from ..format.fields import comparable_metrics
from ..format.header import Header
from ..format.manifest import decode_manifest
from ..format.names import step_name, step_of
from ..stores.base import Store

logger = logging.getLogger("holdfast")


class Described:
    """Headers of the steps that were looked at; each is read once, unless it is replaced."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._headers: dict[int, Header] = {}
        self._stamps: dict[int, object] = {}  # of their MANIFESTs: a step may be replaced
        self._said: dict[int, str] = {}  # why a step could not be read

    def forget(self, step: int) -> None:
        """Forget a step: one of this number may be saved again, with others."""
        self._headers.pop(step, None)
        self._stamps.pop(step, None)

    def read(self, step: int) -> bool:
        """Read what a step says; return False, with a warning, where it cannot be read."""
        name = f"{step_name(step)}/{spec.MANIFEST_NAME}"
        try:
            stamp = self._store.stamp(name)
            if step not in self._headers or self._stamps[step] != stamp:
                data = self._store.get(name, spec.MANIFEST_BYTES_MAX)
                manifest = decode_manifest(data, f"{self._store.location}/{name}")
                # Without what may be large.
                self._headers[step] = manifest.table.header.part(())
                self._stamps[step] = stamp  # the older of the two: what came since is read again
        except (CorruptError, StoreError, VersionError) as error:
            # One that is not there any more has just been let go of, by another thread or job.
            is_gone = isinstance(error, StoreError) and error.errno == errno.ENOENT
            is_said = is_gone or self._said.get(step) == str(error)
            level = logging.DEBUG if is_said else logging.WARNING
            logger.log(level, "step %d cannot be read, and is not deleted: %s", step, error)
            self.forget(step)
            self._said[step] = str(error)
            return False
        return True

    def base_of(self, step: int) -> str | None:
        """Return the name of what a step that was read is a delta of."""
        base = self._headers[step].base if step in self._headers else None
        return base.name if base else None

    def save_id(self, step: int) -> str:
        """Return the save that made a step; empty: it cannot be read."""
        return self._headers[step].save_id if self.read(step) else ""

    def metrics(self) -> dict[int, Mapping[str, float]]:
        """Return the metrics of the steps that were read."""
        return {s: comparable_metrics(header.metrics) for s, header in self._headers.items()}

    def bases(self, steps: Sequence[int]) -> dict[int, int]:
        """Read steps; return, of those that are deltas, what each is made from."""
        found = {s: step_of(self.base_of(s) or "") for s in steps if self.read(s)}
        return {s: base for s, base in found.items() if base is not None}
