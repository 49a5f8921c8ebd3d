"""Settings of an object store, beside the environment, for one bucket. Knows no client.

They hold for a URL in the whole process. So calls that take no options find them, and a URL means
one server: a run never moves to another one half-way.
"""

import base64
import re
import threading
from typing import Any, NoReturn
from urllib.parse import urlsplit

from .errors import OptionError, shown

SECRETS = frozenset(
    [
        "access_key_id",
        "secret_access_key",
        "session_token",
        "sse_customer_key_base64",
        "account_key",
        "sas_key",
        "token",
        "service_account_key",
        "bearer_token",
        "encryption_key",
    ]
)
TIMEOUT_S = 120.0  # of one request with its retries
_BOUNDS = {"part_bytes": (5 << 20, 1 << 30), "parts_in_flight": (1, 256)}  # S3 takes no less
_ALL = {"endpoint": str, "allow_http": bool, "ca_file": str, "timeout_s": float}
_ALL |= {"part_bytes": int, "parts_in_flight": int}
_KNOWN: dict[str, dict[str, type]] = {  # by scheme; named as obstore has them
    "s3": _ALL
    | {"region": str, "access_key_id": str, "secret_access_key": str, "session_token": str}
    | {"skip_signature": bool, "virtual_hosted_style_request": bool}
    | {"server_side_encryption": str, "sse_kms_key_id": str, "sse_bucket_key_enabled": bool}
    | {"sse_customer_key_base64": str, "checksum_algorithm": str, "unsigned_payload": bool},
    "az": _ALL
    | {"account_name": str, "account_key": str, "sas_key": str, "token": str}
    | {"skip_signature": bool, "encryption_key": str},
    "gs": _ALL
    | {"service_account": str, "service_account_key": str, "bearer_token": str}
    | {"skip_signature": bool},
}
_PLACE = re.compile(r"(s3|az|gs)://(?:[A-Za-z0-9_-]+@)?[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_ENCRYPTIONS = ("AES256", "aws:kms", "aws:kms:dsse", "sse-c")
_KMS = _ENCRYPTIONS[1:3]
_CHECKSUMS = ("sha256", "crc64nvme")
_TIMEOUT_S = (0.01, 86400.0)  # least and most
_KEY_BYTES = 32  # of AES-256
_FREE_TEXTS = ("ca_file", "service_account", "service_account_key")  # paths, and JSON


class StoreSettings:
    """Settings of one bucket, instead of those in the environment.

    Give them to a call as ``Options(store=...)``, or call `use`. From then on they hold in this
    process, for all calls with this bucket: also for those without options. What they do not say is
    read from the environment.

    Immutable and hashable. Secrets are in no text of it, and it cannot be pickled.

    Args:
        url: ``s3://BUCKET``, ``az://CONTAINER`` or ``gs://BUCKET``. ``s3://NAME@BUCKET`` tells
            buckets of one name on two servers apart: URLs of checkpoints then begin so.
        settings: for all stores: ``endpoint``, the URL of the server; ``allow_http=True`` for a
            server without TLS; ``ca_file``, certificates in PEM to trust too; ``timeout_s``, the
            seconds that one request may take with its retries (default: 120); ``part_bytes``, the
            size of one part of an upload or a read (default: 16 MiB), and ``parts_in_flight``, how
            many at once (default: 8; ``holdfast bench URL`` finds both). For S3: ``region``,
            ``access_key_id``, ``secret_access_key``, ``session_token``, ``skip_signature``,
            ``virtual_hosted_style_request``, ``server_side_encryption`` ("AES256", "aws:kms",
            "aws:kms:dsse", "sse-c"), ``sse_kms_key_id``, ``sse_bucket_key_enabled``,
            ``sse_customer_key_base64``, ``checksum_algorithm`` ("sha256", "crc64nvme"),
            ``unsigned_payload``. For Azure:
            ``account_name``, and one of ``account_key``, ``sas_key``, ``token``;
            ``skip_signature``; ``encryption_key``. For GCS: one of ``service_account`` (a file),
            ``service_account_key`` (its text), ``bearer_token``; ``skip_signature``.

    Raises:
        OptionError: an invalid setting; the text lists the known ones.

    Example:
        ``holdfast.StoreSettings("s3://bucket", endpoint="https://minio:9000").use()``
    """

    __slots__ = ("_items", "url")

    url: str
    _items: tuple[tuple[str, Any], ...]

    def __init__(self, url: str, **settings: "str | bool | float") -> None:
        place = url.removesuffix("/") if isinstance(url, str) else ""
        if not _PLACE.match(place):
            raise OptionError(
                f"url is {shown(url)}; expected the URL of a bucket, such as 's3://bucket', with "
                "one of s3, az, gs. Settings hold for a whole bucket"
            )
        known = _KNOWN[place[:2]]
        if unknown := sorted(settings.keys() - known.keys()):
            raise OptionError(
                f"{place} has no setting {', '.join(f'{name:.40}' for name in unknown[:5])}; "
                f"expected some of {', '.join(sorted(known))}"
            )
        for name, value in settings.items():
            _check(name, value, known[name])
        _check_together(place, settings)
        object.__setattr__(self, "url", place)
        object.__setattr__(self, "_items", tuple(sorted(settings.items())))

    def use(self) -> None:
        """Let these settings hold in this process, for every call with this bucket.

        Raises:
            OptionError: the bucket is in use in this process on another server.
        """
        with _lock:
            before = _places.get(self.url)
            if before is not None and before[1] != self._server():
                raise OptionError(
                    f"{self.url} is in use in this process at {_told(before[1])}; found settings "
                    f"for {_told(self._server())}. Give this one a name: "
                    f"StoreSettings('{self.url[:5]}NAME@{self.url[5:]}', ...), and use URLs that "
                    "begin so"
                )
            _places[self.url] = (self, self._server())

    def _server(self) -> tuple[Any, ...]:
        given = dict(self._items)
        return (given.get("endpoint"), given.get("account_name"))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise OptionError("StoreSettings cannot be changed; make new ones")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StoreSettings):
            return NotImplemented
        return (self.url, self._items) == (other.url, other._items)

    def __hash__(self) -> int:
        return hash((self.url, self._items))

    def __repr__(self) -> str:
        """Return the settings, without the secrets."""
        texts = (
            f"{name}={'...' if name in SECRETS else repr(value)}" for name, value in self._items
        )
        return f"StoreSettings({', '.join([repr(self.url), *texts])})"

    def __copy__(self) -> "StoreSettings":
        return self

    def __deepcopy__(self, memo: object) -> "StoreSettings":
        return self

    def __reduce__(self) -> NoReturn:
        raise OptionError(
            f"settings of {self.url} may hold secrets, and are not pickled. Make them in each "
            "process"
        )


_lock = threading.Lock()
_places: dict[str, tuple[StoreSettings | None, tuple[Any, ...]]] = {}  # url → and its server


def values_of(settings: StoreSettings | None) -> dict[str, Any]:
    """Return what settings say, with the secrets."""
    return {} if settings is None else dict(settings._items)


def settings_for(url: str, default_server: tuple[Any, ...]) -> StoreSettings | None:
    """Return the settings that hold for a bucket; None: those of the environment.

    Args:
        default_server: endpoint and account that the environment names.

    Raises:
        OptionError: the URL has a NAME@, and nothing was set for it.
    """
    with _lock:
        if "@" in url and url not in _places:
            raise OptionError(
                f"no settings hold for {url}; expected holdfast.StoreSettings('{url}', ...) to be "
                "given before, as Options(store=...) or by its use()"
            )
        return _places.setdefault(url, (None, default_server))[0]


def forget_settings() -> None:
    """Let the environment hold again, for every bucket."""
    with _lock:
        _places.clear()


def _check(name: str, value: object, kind: type) -> None:
    if kind is int:
        low, high = _BOUNDS[name]
        fits = type(value) is int and low <= value <= high
        expected = f"an integer from {low} to {high}"
    elif kind is float:
        low_s, high_s = _TIMEOUT_S
        is_number = isinstance(value, (int, float)) and type(value) is not bool
        fits = is_number and low_s <= value <= high_s  # type: ignore[operator]
        expected = f"a number of seconds above 0, from {low_s:g} to {high_s:g}"
    elif kind is bool:
        fits, expected = type(value) is bool, "True or False"
    else:
        fits = type(value) is str and value.strip() == value != ""
        expected = "a text without space around it"
        if name not in _FREE_TEXTS:
            fits = fits and re.fullmatch("[!-~]+", str(value)) is not None
            expected += " or in it, of ASCII characters"
    if name == "checksum_algorithm" and str(value).lower() not in _CHECKSUMS:
        fits, expected = False, f"one of {', '.join(_CHECKSUMS)}"
    if name in ("sse_customer_key_base64", "encryption_key") and not _is_key(value):
        fits, expected = False, f"a key of {_KEY_BYTES} bytes in base64"
    if name == "server_side_encryption" and value not in _ENCRYPTIONS:
        fits, expected = False, f"one of {', '.join(_ENCRYPTIONS)}"
    if not fits:
        found = f"a {type(value).__name__}" if name in SECRETS else shown(value)
        found = "empty" if value == "" else found
        raise OptionError(f"{name} is {found}; expected {expected}")


def _is_key(value: object) -> bool:
    try:
        return len(base64.b64decode(str(value), validate=True)) == _KEY_BYTES
    except ValueError:
        return False


def _check_encryption(place: str, settings: dict[str, Any]) -> None:
    """Check that settings of encryption go together: a store ignores those that do not."""
    found = settings.get("server_side_encryption")
    for name, fitting in (
        ("sse_customer_key_base64", ("sse-c",)),
        ("sse_kms_key_id", _KMS),
        ("sse_bucket_key_enabled", _KMS[:1]),
    ):
        if name in settings and found not in fitting:
            raise OptionError(
                f"{place} has {name}, and server_side_encryption is {found!r}; expected "
                f"{' or '.join(map(repr, fitting))}, or no {name}"
            )
    if found == "sse-c" and "sse_customer_key_base64" not in settings:
        raise OptionError(
            f"{place} has server_side_encryption 'sse-c', but no sse_customer_key_base64; give "
            f"both. The key has {_KEY_BYTES} bytes"
        )


def _check_together(place: str, settings: dict[str, Any]) -> None:
    """Check what only makes sense with, or without, another setting."""
    for first, second in (
        ("access_key_id", "secret_access_key"),
        ("secret_access_key", "access_key_id"),
        ("session_token", "access_key_id"),
    ):
        if first in settings and second not in settings:
            raise OptionError(f"{place} has {first}, but no {second}; give both")
    ways = ("account_key", "sas_key", "token", "service_account", "service_account_key")
    given = [name for name in (*ways, "bearer_token") if name in settings]
    if len(given) > 1:
        raise OptionError(f"{place} has {' and '.join(given)}; expected one of them")
    given += [name for name in ("access_key_id",) if name in settings]
    if settings.get("skip_signature") and given:
        raise OptionError(
            f"{place} has {given[0]} and skip_signature=True, with which no request is signed; "
            "expected one of them"
        )
    if "{" in settings.get("service_account", ""):
        raise OptionError(
            f"service_account of {place} is the text of a key; expected the path of its file. Give "
            "the text as service_account_key"
        )
    _check_encryption(place, settings)
    endpoint = settings.get("endpoint")
    if endpoint is None:
        return
    if not is_server(endpoint):
        raise OptionError(
            f"endpoint of {place} is no URL of a server; expected https://HOST or "
            "https://HOST:PORT, without user, password and query"
        )
    if endpoint.startswith("http:") and not settings.get("allow_http"):
        raise OptionError(
            f"endpoint of {place} is {shown(endpoint)}, where others can read and change "
            "requests; use https, or give allow_http=True"
        )


def is_server(url: str) -> bool:
    """Return whether this is the URL of a server: without user, password and query."""
    try:
        has_port = urlsplit(url).port != 0  # it raises where that is no number, or too large
    except ValueError:
        return False
    return has_port and re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", url) is not None


def _told(server: tuple[Any, ...]) -> str:
    return " of the account ".join(part for part in server if part) or "the store's own endpoint"
