"""A path or URL → the store it names."""

import os
import re

from ..errors import OptionError
from .local import LocalStore

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# Without what Python puts for bytes that are no UTF-8, and what ends a name for the system.
_IN_UNICODE = re.compile("[^\0\ud800-\udfff]+")


def open_store(path: "str | os.PathLike[str]") -> LocalStore:
    """Return the store at ``path``.

    Raises:
        OptionError: a URL of a scheme there is no store for, or no path at all.
    """
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(name, str) or not name or not _IN_UNICODE.fullmatch(name):
        raise OptionError(f"path is {path!r}; expected the path of a directory")
    if match := _SCHEME.match(name):
        raise OptionError(
            f"{name!r} is a URL; this holdfast has no store for {match[1]}://, "
            "only for paths of directories"
        )
    return LocalStore(name)
