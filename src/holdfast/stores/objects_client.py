"""A URL → a client of obstore for its bucket. Knows no checkpoints.

Clients are kept for a process, a bucket and its settings: they hold connections, and a `memory://`
its objects.
"""

import contextlib
import importlib
import os
import re
import secrets
import time
from collections.abc import Callable, Container
from typing import Any, TypeVar

from ..errors import OptionError, StoreError, shown
from ..store_settings import StoreSettings, forget_settings, settings_for, values_of
from ..version import needs
from .objects_credentials import PREFIXES, check_credentials, unusable
from .objects_errors import errors_of, is_broken_off, is_conflict, is_passing, is_timeout, said
from .objects_settings import (
    Traffic,
    arguments_of,
    default_server,
    limit_of,
    traffic_of,
)

SCHEMES = {"memory": "s3", "s3": "s3", "az": "az", "gs": "gs"}  # → the extra to install
_URL = re.compile(r"([a-z0-9]+)://([^/?#]*)((?:/[^?#]*)?)\Z")
_BUCKET = re.compile(r"(?:[A-Za-z0-9_-]+@)?[A-Za-z0-9][A-Za-z0-9._-]*\Z")

PAGE_OBJECTS = 1000  # that one request lists
REPEATED_S = 10.0  # after which a request whose answer breaks off is not sent again
_PAUSES_S = (0.1, 0.4, 1.6)
_REFUSED = re.compile("status code: 4(?!08|29)")  # and not to be sent again
Answer = TypeVar("Answer")

_clients: dict[tuple[str, str, StoreSettings | None, float], Any] = {}
_is_forked = False  # from a process whose client had threads
# By `id`, as obstore compares clients by some of their settings.
_checked: dict[int, tuple[Any, bool]] = {}  # clients whose stores keep to conditions
_answering: dict[int, Any] = {}  # and those whose stores know what is not there


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
            "this process was forked from one that uses an object store, whose client has "
            "threads that are not here. Start it with the method 'spawn' or 'forkserver'"
        )
    import obstore

    return obstore


def client(scheme: str, bucket: str, limit_s: float | None = None) -> Any:
    """Return obstore's client of a bucket, with the settings that hold for it.

    Args:
        bucket: with the ``NAME@`` of its settings, if they have one.
        limit_s: how long a request may take at most, with its retries.

    Raises:
        OptionError: obstore is not installed, or refuses the settings.
    """
    url, is_memory = f"{scheme}://{bucket}", scheme not in PREFIXES
    settings = None if is_memory else settings_for(url, default_server(scheme))
    limit_s = 0.0 if is_memory else limit_of(settings, limit_s)
    key = (scheme, bucket, settings, limit_s)
    if (kept := _clients.get(key)) is not None:
        return kept
    try:
        stores = importlib.import_module("obstore.store")
    except ImportError as error:
        raise OptionError(needs("obstore", SCHEMES[scheme], url)) from error
    if is_memory:
        return _clients.setdefault(key, stores.MemoryStore())
    given = values_of(settings)
    check_credentials(url, scheme, given)
    arguments = arguments_of(scheme, settings, limit_s)
    try:
        made = stores.from_url(f"{scheme}://{bucket.rpartition('@')[2]}", **arguments)
    except Exception as error:
        raise unusable(url, scheme, given, said(error)) from None  # it may hold a secret
    return _clients.setdefault(key, made)


def connect(url: str, named: str, limit_s: float | None) -> tuple[str, str, str, Any, Traffic]:
    """Return scheme, bucket and prefix of a URL, its client, and how bytes go to and from there.

    Raises:
        OptionError: as `split_url` and `client`.
    """
    scheme, bucket, prefix = split_url(url, named)
    found = client(scheme, bucket, limit_s)
    place, is_memory = f"{scheme}://{bucket}", scheme not in PREFIXES
    settings = None if is_memory else settings_for(place, default_server(scheme))
    return scheme, bucket, prefix, found, traffic_of(settings)


def check_conditions(client: Any, base: str, key: str) -> bool:
    """Check, once for a client, that a store keeps to conditions of a PUT: P2 rests on that.

    Returns:
        Whether an object may be replaced: there may be a lock that keeps all.

    Raises:
        OptionError: it makes an object where there is one, or in place of one that has changed.
        StoreError: that cannot be found out.
    """
    if id(client) in _checked:
        return _checked[id(client)][1]
    key = f"{key}-{secrets.token_hex(8)}"
    with errors_of("write", f"{base}/{key}"):
        made = _made(client, key)
        ignored = "If-None-Match" if _is_done(client, key, "create") else ""
        is_replaced = not ignored and _is_done(client, key, this(made))
        if is_replaced and _is_done(client, key, this(made)):
            ignored = "If-Match"
        with contextlib.suppress(Exception):  # it may not delete; one small object is left
            api().delete(client, key)
    if ignored:
        raise OptionError(
            f"{base} overwrites an object although the condition of the request ({ignored}) does "
            "not hold. Two jobs could both commit there. Use a store that supports conditional "
            "writes"
        )
    _checked[id(client)] = client, is_replaced
    return is_replaced


def _made(client: Any, key: str) -> Any:
    """Put an object of a name that nobody else has."""
    try:
        return put(client, key, b"1", "create")
    except (api().exceptions.AlreadyExistsError, api().exceptions.PreconditionError):
        return head(client, key)  # its answer was lost, and it was sent again


def _is_done(client: Any, key: str, mode: Any) -> bool:
    """Put an object on a condition; return whether the store has done it."""
    refusals, data = api().exceptions, secrets.token_bytes(8)
    try:
        put(client, key, data, mode)
    except (refusals.AlreadyExistsError, refusals.PreconditionError):
        # Also what is sent again, when it was done and its answer lost.
        return get(client, key, len(data))[1] == data
    except refusals.PermissionDeniedError as error:
        if is_passing(error):
            raise
        return False
    return True


def repeated(request: Callable[[], Answer]) -> Answer:
    """Send a request; send it again if its answer breaks off, or if it collided with another.

    obstore sends again what had no answer, but not this. Whoever calls it knows what comes of a
    request that is done twice.
    """
    until = time.monotonic() + REPEATED_S
    for pause_s in _PAUSES_S:
        try:
            return request()
        except Exception as error:
            if not (is_broken_off(error) or is_conflict(error)) or time.monotonic() > until:
                raise
        time.sleep(pause_s)
    return request()


def put(client: Any, key: str, data: bytes | list[memoryview], mode: Any = "overwrite") -> Any:
    """Put an object, on a condition or not, in one request; return what the store says of it.

    A conditional request without an answer is sent once more, which obstore does not do.
    """

    def request() -> Any:
        return api().put(client, key, data, mode=mode, use_multipart=False)

    try:
        return repeated(request)
    except Exception as error:
        if mode == "overwrite" or not is_timeout(error):
            raise
    return repeated(request)


def get(client: Any, key: str, bytes_max: int) -> tuple[int, bytes]:
    """Return the size of an object, and its bytes, if that is not above ``bytes_max``."""

    def request() -> tuple[int, bytes]:
        found = api().get(client, key)
        size = int(found.meta["size"])
        return size, bytes(found.bytes()) if size <= bytes_max else b""

    return repeated(request)


def list_below(client: Any, key: str) -> list[Any]:
    """Return what a store says of all objects below a key."""
    parts = repeated(lambda: [*api().list(client, key or None)])
    return [item for part in parts for item in part]


def list_some(
    client: Any, key: str, wanted: Container[str], pages_max: int
) -> tuple[dict[str, Any], bool]:
    """Return what a store says of some objects below a key, and whether all have been listed."""

    def request() -> tuple[dict[str, Any], bool]:
        found: dict[str, Any] = {}
        pages = api().list(client, key or None, chunk_size=PAGE_OBJECTS)
        for number, page in enumerate(pages, 1):
            found |= {item["path"]: item for item in page if item["path"] in wanted}
            if number == pages_max and len(page) == PAGE_OBJECTS:
                return found, False
        return found, True

    return repeated(request)


def is_any_below(client: Any, key: str) -> bool:
    """Return whether an object is below a key."""
    return any(repeated(lambda: next(iter(api().list(client, key or None)), [])))


def this(found: Any) -> Any:
    """Name one content of an object: by its ETag, or as GCS does, by its generation."""
    return {key: found[key] for key in ("e_tag", "version") if found[key] is not None}


def instead_of(found: Any) -> Any:
    """Return the condition of a PUT in place of what was found; None: of nothing."""
    return "create" if found is None else this(found)


def check_answers(client: Any, base: str) -> None:
    """Check, once for a client, that this is a store: a web page reads as an empty one.

    Raises:
        StoreError: it is none, or does not answer.
    """
    if id(client) in _answering:
        return
    key = f".probe-{secrets.token_hex(8)}"
    with errors_of("find", f"{base}/{key}"):
        try:
            head(client, key)
        except FileNotFoundError:
            _answering[id(client)] = client
            return
    raise StoreError(
        f"{base} says that it has {key}, which was never made: this is a web page, no store's "
        "answer. Correct the endpoint"
    )


def head(client: Any, key: str) -> Any:
    """Return what a store says of an object.

    Where that fails, a read of it fails too, and says more: the answer to a HEAD has no words.
    """
    try:
        return repeated(lambda: api().head(client, key))
    except FileNotFoundError:
        raise
    except Exception as error:
        if _REFUSED.search(str(error)):
            api().get_range(client, key, start=0, length=1)
        raise


def forget_clients() -> None:
    """Let the next call read the settings again, from the environment."""
    forget_settings()
    _clients.clear()
    _checked.clear()
    _answering.clear()


def _in_child() -> None:
    global _is_forked
    _is_forked = bool(_clients)  # obstore would wait for its threads without an end


os.register_at_fork(after_in_child=_in_child)


def _is_part(part: str) -> bool:
    return part not in ("", ".", "..") and "\0" not in part
