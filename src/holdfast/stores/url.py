"""A path or URL → the store it names."""

import os
import re

from ..errors import OptionError
from .local import LocalStore

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def open_store(path: "str | os.PathLike[str]") -> LocalStore:
    """Return the store at ``path``.

    Raises:
        OptionError: a URL of a scheme there is no store for, or no path at all.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise OptionError(f"path is {path!r}; expected the path of a directory")
    if match := _SCHEME.match(os.fspath(path)):
        raise OptionError(
            f"{os.fspath(path)!r} is a URL; this holdfast has no store for {match[1]}://, "
            "only for paths of directories"
        )
    return LocalStore(path)
