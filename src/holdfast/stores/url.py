"""A path or URL, as a user gives it → the store it names."""

import os
import re

from ..errors import OptionError, StoreError, shown
from . import hdfs_client
from .base import Store
from .hdfs import HdfsStore
from .local import LocalStore
from .objects import ObjectStore
from .objects_client import SCHEMES

SCHEME = "holdfast://"  # of a checkpoint's directory, where DCP's calls name one
HDFS = f"{hdfs_client.SCHEME}://"
REMOTE = (HDFS, *(f"{scheme}://" for scheme in SCHEMES))
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_NO_URL = tuple(beginning[:-2] for beginning in REMOTE)  # pathlib.Path drops one of two slashes


def open_store(
    path: "str | os.PathLike[str]", named: str = "path", limit_s: float | None = None
) -> Store:
    """Return the store at ``path``.

    Args:
        named: the argument that a user gave it as.
        limit_s: how long one request to a server may take, with its retries; less, if its settings
            say so.

    Raises:
        OptionError: a URL of a scheme there is no store for, or no path at all.
        StoreError: it is relative, and the working directory was deleted.
    """
    if isinstance(path, str) and path.startswith(HDFS):
        return HdfsStore(path, named)
    if isinstance(path, str) and path.startswith(REMOTE):
        return ObjectStore(path, named, limit_s)
    return LocalStore(absolute(path, named))


def located(
    path: "str | os.PathLike[str]", named: str = "path", expected: str = "the path of a directory"
) -> str:
    """Return where a path or URL is, as `Store.location` tells it.

    Args:
        named, expected: as for `absolute`.

    Raises:
        OptionError, StoreError: as `open_store`.
    """
    if is_remote(path):
        return open_store(path, named).location
    return absolute(path, named, expected)


def is_remote(path: object) -> bool:
    """Return whether this is the URL of a store that is no disk, of whatever form."""
    return isinstance(path, str) and path.startswith(REMOTE)


def absolute(
    path: "str | os.PathLike[str]", named: str = "path", expected: str = "the path of a directory"
) -> str:
    """Return a path from the root, with ``~`` expanded: what a later ``os.chdir`` does not change.

    ``"~/runs/../a"`` → ``"/home/me/a"``; ``"./~"`` is a directory of that name.

    Args:
        named: the argument that a user gave it as.
        expected: what it should be.

    Raises:
        OptionError, StoreError: as `open_store`.
    """
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(name, str) or not name or "\0" in name:
        raise OptionError(f"{named} is {shown(path)}; expected {expected}")
    if match := _SCHEME.match(name):
        scheme = f"There is no store for {match[1]:.20}://"
        why = "This call takes no URL" if is_remote(name) else scheme
        raise OptionError(f"{named} {shown(name)} is a URL; expected {expected}. {why}")
    if name.startswith(_NO_URL):
        raise OptionError(
            f"{named} is {shown(name)}; expected two slashes, of which pathlib.Path drops one. "
            "Give the URL as a string. For a directory of this name, begin with './'"
        )
    expanded = _with_home(name, named) if name.startswith("~") else name
    try:
        found = os.path.abspath(expanded)
    except OSError as error:
        raise _lost_here(name, named, error) from error
    try:
        found.encode()
    except UnicodeEncodeError as error:  # Python's stand-ins for bytes that are no UTF-8
        raise OptionError(
            f"{named} is {shown(found)}, which is not UTF-8; expected {expected} in UTF-8. Rename "
            "the directory"
        ) from error
    return found


def _with_home(name: str, named: str) -> str:
    """Replace the ``~`` or ``~user`` that a path begins with."""
    user, _, rest = name.partition("/")
    # HOME alone, as shells read it: one that is empty would make "~/runs" mean "/runs".
    home = os.environ.get("HOME", "") if user == "~" else os.path.expanduser(user)
    if not os.path.isabs(home):
        reason = "HOME is not an absolute path" if user == "~" else f"no user has the name {user}"
        raise OptionError(
            f"{named} is {shown(name)}, but {reason}; write the directory in full, or "
            f"{shown(f'./{name}')} if its name begins with ~"
        )
    return f"{home}/{rest}"


def _lost_here(name: str, named: str, cause: OSError) -> StoreError:
    is_deleted = isinstance(cause, FileNotFoundError)
    fault = "was deleted" if is_deleted else f"cannot be found: {cause.strerror}"
    error = StoreError(
        f"{named} is {shown(name)}, relative to the working directory, which {fault}. Give an "
        "absolute path, or os.chdir() to a directory that exists"
    )
    error.errno = cause.errno
    return error
