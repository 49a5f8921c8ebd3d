"""A URL → a client of obstore for its bucket, and obstore's errors as ours. Knows no checkpoints.

Clients are kept for a process and a bucket: they hold connections, and a `memory://` its objects.
"""

import contextlib
import errno
import importlib
import os
import re
import secrets
from collections.abc import Iterator
from typing import Any

from ..errors import HoldfastError, NoSpaceError, OptionError, StoreError, shown
from ..version import needs

SCHEMES = {"memory": "s3", "s3": "s3", "az": "az", "gs": "gs"}  # → the extra to install
WORDS_MAX = 500
_URL = re.compile(r"([a-z0-9]+)://([^/?#]*)((?:/[^?#]*)?)\Z")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_QUERY = re.compile(r"(https?://[^\s?]*)\?\S*")  # of a URL in an error: it may hold a signature
_CODE = re.compile(r"<Code>([^<]*)</Code>\s*<Message>([^<]*)</Message>")  # S3's and Azure's
_NUMBERS = {
    "FileNotFoundError": errno.ENOENT,
    "NotFoundError": errno.ENOENT,
    "AlreadyExistsError": errno.EEXIST,
    "PreconditionError": errno.EEXIST,
    "PermissionDeniedError": errno.EACCES,
    "UnauthenticatedError": errno.EACCES,
    "NotSupportedError": errno.EOPNOTSUPP,
    "NotImplementedError": errno.EOPNOTSUPP,
}
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_METADATA_SERVICE = "http://169.254.169.254"  # asked last, where nothing else is set
_CREDENTIALS = "set those of the store in the environment, such as AWS_ACCESS_KEY_ID"
_FULL = ("QuotaExceeded", "InsufficientStorage", "507 ", "EntityTooLarge")

_clients: dict[tuple[str, str], Any] = {}
_is_forked = False  # from a process whose client had threads
_checked: list[Any] = []  # those that keep to conditions


def split_url(url: str, named: str = "path") -> tuple[str, str, str]:
    """Return scheme, bucket and prefix of a URL: ``s3://b/runs/a/`` → ``("s3", "b", "runs/a")``.

    Raises:
        OptionError: it is no URL of an object store.
    """
    match = _URL.match(url)
    scheme, bucket, prefix = match.groups() if match else ("", "", "")
    prefix = prefix.removeprefix("/").removesuffix("/")
    parts = prefix.split("/") if prefix else []
    if scheme not in SCHEMES or not _BUCKET.match(bucket) or not all(map(_is_part, parts)):
        raise OptionError(
            f"{named} is {shown(url)}; expected SCHEME://BUCKET/NAME with a scheme of "
            f"{', '.join(SCHEMES)}, and a name without empty parts, '.', '..', '?' and '#'"
        )
    return scheme, bucket, prefix


def api() -> Any:
    """Return the package obstore, which takes a moment to import.

    Raises:
        OptionError: this is a forked child of a process that has used it.
    """
    if _is_forked:
        raise OptionError(
            "this process was forked from one that uses a store of objects, whose client has "
            "threads that are not here. Start it with the method 'spawn' or 'forkserver'"
        )
    import obstore

    return obstore


def client(scheme: str, bucket: str) -> Any:
    """Return obstore's client of a bucket; settings come from the environment, as obstore reads it.

    Raises:
        OptionError: obstore is not installed, or refuses the settings.
    """
    if (kept := _clients.get((scheme, bucket))) is not None:
        return kept
    try:
        stores = importlib.import_module("obstore.store")
    except ImportError as error:
        raise OptionError(needs("obstore", SCHEMES[scheme], f"{scheme}://{bucket}")) from error
    try:
        made: Any = (
            stores.MemoryStore() if scheme == "memory" else stores.from_url(f"{scheme}://{bucket}")
        )
    except Exception as error:
        raise OptionError(f"{scheme}://{bucket}: {_said(error)}") from error
    return _clients.setdefault((scheme, bucket), made)


def check_conditions(client: Any, base: str, key: str) -> None:
    """Check, once for a client, that a store makes no object where there is one: P2 rests on that.

    Raises:
        OptionError: it does.
        StoreError: that cannot be found out.
    """
    if client in _checked:
        return
    key = f"{key}-{secrets.token_hex(8)}"
    with errors_of("write", f"{base}/{key}"):
        api().put(client, key, b"1", mode="create", use_multipart=False)
        try:
            api().put(client, key, b"2", mode="create", use_multipart=False)
        except api().exceptions.AlreadyExistsError:
            _checked.append(client)
        with contextlib.suppress(Exception):  # it may not delete; one small object is left
            api().delete(client, key)
    if client not in _checked:
        raise OptionError(
            f"{base} overwrites an object that is to be made only if there is none "
            "(If-None-Match). Two jobs could both commit there. Use a store that supports "
            "conditional writes"
        )


def forget_clients() -> None:
    """Let the next call read the settings again."""
    _clients.clear()
    _checked.clear()


def _in_child() -> None:
    global _is_forked
    _is_forked = bool(_clients)  # obstore would wait for its threads without an end


os.register_at_fork(after_in_child=_in_child)


@contextlib.contextmanager
def errors_of(what: str, where: str) -> Iterator[None]:
    """Raise a `StoreError` for an error of obstore, with what was done to what."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        raise failure(what, where, error) from error


def failure(what: str, where: str, cause: Exception) -> StoreError:
    """Return our error for one of obstore."""
    text = f"{what} {where}: {_said(cause)}"
    if any(map(str(cause).__contains__, _FULL)):
        error: StoreError = NoSpaceError(text)
        error.errno = errno.ENOSPC
        return error
    error = StoreError(text)
    error.errno = _NUMBERS.get(type(cause).__name__, errno.EREMOTEIO)
    if _METADATA_SERVICE in text:
        said = f"no credentials were found; {_CREDENTIALS} ({_said(cause)})"
        error = StoreError(f"{what} {where}: {said}")
        error.errno = errno.EACCES
    elif any(map(str(cause).__contains__, _NO_BUCKET)):
        error.errno = errno.ENODEV  # "not there" is said of objects
    return error


def _said(error: Exception) -> str:
    """What an error says, without what may be secret: the store's own words, where it has some."""
    text = str(error).split("\n\nDebug source", 1)[0].strip()
    if found := _CODE.search(text):
        return f"{found[1]}: {found[2]}"[:WORDS_MAX]
    return _QUERY.sub(r"\1", " ".join(text.split()))[:WORDS_MAX] or type(error).__name__


def _is_part(part: str) -> bool:
    return part not in ("", ".", "..") and "\0" not in part
