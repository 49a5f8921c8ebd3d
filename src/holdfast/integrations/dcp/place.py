"""Where DCP's calls go: what our writer and reader have in common. Reads and writes nothing."""

import os
import threading

from ...stores.url import absolute
from .names import place_of


class Call(threading.local):
    """The save or load that a thread is at: DCP makes all calls for one in one thread.

    Attributes:
        coming: where the next one goes, when this thread was told; else where any thread was told.
    """

    path = coming = ""


class Placed:
    """The part of DCP's StorageWriter and StorageReader that is about paths."""

    _call: Call
    _path = ""

    def reset(self, checkpoint_id: "str | os.PathLike[str] | None" = None) -> None:
        """Make ready for the next save or load, at another place if one is given."""
        if checkpoint_id is not None:
            self._move_to(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """Directory of the checkpoint."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: "str | os.PathLike[str]") -> bool:
        """Tell whether it is a path, or a ``holdfast://`` URL of one."""
        return "://" not in place_of(checkpoint_id)

    def _move_to(self, path: "str | os.PathLike[str]") -> None:
        """Go there with the next save or load, wherever the process is by then."""
        self._path = self._call.coming = absolute(place_of(path))
