"""The bar: an object that has a name so that nothing is published there. Readers do not see it."""

import secrets
from collections.abc import Callable
from typing import Any

from .objects_client import this
from .objects_errors import if_there

SEEN_MAX = 1 << 16
BAR_MAGIC = b"holdfast bars this name\n"
BAR_BYTES = len(BAR_MAGIC) + 33  # and a random number, so that each has an ETag of its own


def new_bar() -> bytes:
    """Return the content of a bar that is like no other."""
    return BAR_MAGIC + secrets.token_hex(16).encode() + b"\n"


class SeenBars:
    """The bars that were read or made: an ETag names one content, so one look is enough."""

    def __init__(self) -> None:
        self._tags: dict[str, Any] = {}  # location → the ETag of its bar

    def add(self, where: str, tag: Any) -> None:
        """Take note of a bar; ``tag`` is as `this` says."""
        if len(self._tags) >= SEEN_MAX:
            self._tags.clear()
        self._tags[where] = tag

    def has(self, where: str, found: Any, read: Callable[[], bytes]) -> bool:
        """Return whether an object is a bar; read it, unless that is known.

        Args:
            found: what the store says of it.
            read: returns its content, where that is as long as a bar's.
        """
        if found["size"] != BAR_BYTES:
            return False
        tag = this(found)
        if not tag or self._tags.get(where) != tag:
            if not (if_there(read) or b"").startswith(BAR_MAGIC):
                return False
            self.add(where, tag)
        return True
