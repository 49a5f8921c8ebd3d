"""What the MANIFEST of an open checkpoint says of it as a whole. Reads nothing."""

from typing import Any

from ..format.fields import comparable_metrics
from ..format.header import Header
from ..format.manifest import Manifest
from ..stores.base import Store
from .names import Names


class Described(Names):
    """An open checkpoint, as its MANIFEST describes it."""

    _store: Store
    _manifest: Manifest
    _header: Header

    @property
    def location(self) -> str:
        """Absolute path of its directory."""
        return self._store.location

    @property
    def kind(self) -> str:
        """Name of its format: "holdfast", or as ``holdfast import --from`` has it."""
        return "holdfast"

    @property
    def step(self) -> int | None:
        """The step that was given to the save, or None."""
        return self._header.step

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote it."""
        return self._header.world_size

    @property
    def base(self) -> str | None:
        """Name of its base, in the same directory, if it is a delta checkpoint that needs one."""
        base = self._header.base
        return base.name if base and len(self._manifest.based) else None

    @property
    def codecs(self) -> tuple[str, ...]:
        """Names of its tensors' codecs."""
        return tuple(codec.name for codec in self._header.codecs)

    @property
    def mesh(self) -> dict[str, Any] | None:
        """Shape and dimension names of the device mesh that saved it, or None."""
        return self._header.mesh

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that were given to the save."""
        return comparable_metrics(self._header.metrics)

    @property
    def save_id(self) -> str:
        """Random identity of the save: 32 hexadecimal digits."""
        return self._header.save_id

    @property
    def written_by(self) -> str:
        """Version of the holdfast that wrote it."""
        return self._header.written_by

    @property
    def file_names(self) -> tuple[str, ...]:
        """Data files, relative to `location`."""
        return self._manifest.file_names

    @property
    def file_bytes(self) -> tuple[int, ...]:
        """Bytes of each data file."""
        return tuple(self._manifest.table.file_bytes.tolist())
