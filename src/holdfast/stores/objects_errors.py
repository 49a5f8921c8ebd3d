"""obstore's errors as ours: the store's own code and words, and what to do. Knows no requests."""

import contextlib
import errno
import re
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from ..errors import HoldfastError, NoSpaceError, StoreError
from .objects_credentials import TO_SET

Answer = TypeVar("Answer")

WORDS_MAX = 500
_QUERY = re.compile(r"(https?://[^\s?]*)\?\S*")  # of a URL in an error: it may hold a signature
# obstore's own: of no use to who reads it, and other numbers each time.
_NOISE = re.compile(
    r"Generic \w+ error: | in [\d.]+[nµm]?s(?=,? )|, after \d+ retries, [^-]*(?= - )"
)
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9_.-]{1,80})\s*</Code>")  # S3's, Azure's and GCS's
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_STATUS = re.compile(r"status code: \d{3}[^:\n]*|redirect without LOCATION|\(code: \w+\)")
# Parts of a message that repeat the request: names and numbers, which say nothing of the fault.
_NAMES = re.compile(r"RequestId:\S+|arn:\S+|\"[^\"]*\"|'[^']*'")
_BULK = re.compile(r"request failed for key [^\n]*: ([^:\n]*\(code: \w+\))")  # of one object of it
_PAGE = re.compile(r"<!doctype html|<html", re.IGNORECASE)
_NUMBERS = {
    "FileNotFoundError": errno.ENOENT,
    "NotFoundError": errno.ENOENT,
    "AlreadyExistsError": errno.EEXIST,
    "PreconditionError": errno.EEXIST,
    "NotSupportedError": errno.EOPNOTSUPP,
    "NotImplementedError": errno.EOPNOTSUPP,
}
_DENIED = ("PermissionDeniedError", "UnauthenticatedError")
_NO_RIGHT = ("403 Forbidden", "(code: 403)", "AccessDenied")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_CONFLICTS = ("ConditionalRequestConflict", "OperationAborted")
_PASSING = ("RequestTimeTooSkewed", "SlowDown", "ExpiredToken", "InvalidToken", "RequestExpired")
_TIMEOUT = re.compile(r"kind: Timeout")
_BROKEN_OFF = ("request or response body error", "error decoding response body")
# The service of a machine's role, which is asked last: where nothing else is set.
_ROLE = re.compile(r"http://169\.254\.169\.254|/latest/(api/token|meta-data)|/computeMetadata/")
_TOKEN = "Error performing token request"
_FULL = (
    "QuotaExceeded",
    "InsufficientStorage",
    "StorageFull",
    "EntityTooLarge",
    "status code: 507",
)
_REGION = "the bucket is elsewhere: set its region (AWS_REGION), or correct the endpoint"
_KEYS = "check the credentials of this store"
_RENEW = "they have expired: give new ones"
_NAME = "correct the endpoint, or the name of the bucket: many stores allow no capitals in it"
_LOCK = "a lock of the bucket keeps it: wait until its time is over"
_LOCKS = (
    *("WORM protected", "object lock", "BlobImmutable", "is immutable", "etention", "egalHold"),
    *("Lease", "a lease on the blob"),
)
_BUSY = "the store has too much to do: use fewer writers, or try again later"
_ARCHIVED = "the object is archived: restore it from the archive first"
_CLOSED = "the account is closed or suspended: ask its provider"
# First what names the fault best. Each: words of the store → what to do.
_ADVICE = (
    ("RequestTimeTooSkewed", "set the clock of this machine, such as by NTP"),
    ("PermanentRedirect", _REGION),
    ("TemporaryRedirect", _REGION),
    ("AuthorizationHeaderMalformed", _REGION),
    ("IllegalLocationConstraint", _REGION),
    ("redirect without LOCATION", _REGION),
    ("301 Moved", _REGION),
    ("307 Temporary", _REGION),
    ("ExpiredToken", _RENEW),
    ("TokenRefreshRequired", _RENEW),
    ("InvalidAccessKeyId", _KEYS),
    ("SignatureDoesNotMatch", _KEYS),
    ("InvalidToken", _KEYS),
    ("AuthenticationFailed", _KEYS),
    ("AuthenticationRequired", _KEYS),
    ("AuthorizationFailure", _KEYS),
    ("Content-MD5", 'give checksum_algorithm="sha256" in a StoreSettings'),
    ("NoSuchBucket", "make the bucket, or correct the URL"),
    ("ContainerNotFound", "make the container, or correct the URL"),
    ("The specified bucket does not exist", "make the bucket, or correct the URL"),
    *((sign, _NAME) for sign in ("InvalidBucketName", "InvalidResourceName", "OutOfRangeInput")),
    *((sign, _LOCK) for sign in _LOCKS),
    *((sign, _BUSY) for sign in ("SlowDown", "503 Service", "429 Too", "TooManyRequests")),
    *((sign, _BUSY) for sign in ("ServerBusy", "ServiceUnavailable", "rateLimitExceeded")),
    *((sign, _ARCHIVED) for sign in ("InvalidObjectState", "BlobArchived")),
    *((sign, _CLOSED) for sign in ("AllAccessDisabled", "AccountProblem", "AccountIsDisabled")),
    (
        "NotImplemented",
        "the store lacks a feature of this request, such as conditions: use another store",
    ),
)
# A web page is no answer of a store. The status says who sent it: first match.
_PAGES = (
    (
        re.compile("413 "),
        "a proxy in front of the store limits the size of requests: raise its limit, or set a "
        "smaller part_bytes in StoreSettings",
    ),
    (
        re.compile("429 |status code: 5"),
        "a proxy in front of the store sent a web page: try again later",
    ),
    (re.compile(""), "this is a web page, no store's answer: correct the endpoint"),
)
# Where nothing was answered. Each: how obstore shows it, what that means, what to do.
_REASONS = (
    (
        re.compile(r'"tcp connect error",\s*127\.0\.0\.1:0,'),
        "the answer was a redirect to another host, which is refused",
        "correct the endpoint or the region",
    ),
    (
        _TIMEOUT,
        "the store did not answer in time",
        "check the server and the network; timeout_s of StoreSettings is the limit",
    ),
    (
        re.compile(r"InvalidCertificate\(\s*(\w+)"),
        "the certificate of the server is not trusted: {}",
        "name a file with the certificate of who has signed it: ca_file of StoreSettings",
    ),
    (
        re.compile(r'invalid path: Path "([^"\n]*)"'),
        "another tool made an object whose name is an invalid path: {}",
        "delete or rename it",
    ),
    (
        re.compile("InvalidContentType"),
        "the server does not use TLS",
        "correct the endpoint; it may be http://HOST:PORT with allow_http=True",
    ),
    (
        re.compile("non-partial response when range requested|invalid list response: unexp"),
        "the answer is not a store's",
        "correct the endpoint",
    ),
    (re.compile(r"dns error"), "nobody knows this host", "correct the endpoint"),
    (
        re.compile(r'Os \{[^}]*message: "([^"]+)"'),
        "{}",
        "check the endpoint, and that its server is up",
    ),
)
_STATE = "\n\nDebug source"  # what follows is for those who write obstore
_under_way: dict[object, tuple[float, str, str]] = {}  # of all threads
_RIGHT = "give this credential the right for it (docs/howto/stores-setup.md lists all)"


@contextlib.contextmanager
def errors_of(what: str, where: str) -> Iterator[None]:
    """Raise a `StoreError` for an error of obstore, with what was done to what."""
    request = object()
    _under_way[request] = (time.monotonic(), what, where)
    try:
        yield
    except HoldfastError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # obstore panics where a secret is no header, such as one with a line's end
        raise failure(what, where, error) from without_secrets(error)
    finally:
        del _under_way[request]


def oldest_request() -> tuple[float, str, str] | None:
    """Return how many seconds the oldest request under way has taken, and what it does to what."""
    oldest = min(list(_under_way.values()), default=None)
    return oldest and (time.monotonic() - oldest[0], *oldest[1:])


def failure(what: str, where: str, cause: BaseException) -> StoreError:
    """Return our error for one of obstore."""
    kind, whole, words = type(cause).__name__, str(cause), said(cause)
    code, status = _CODE.search(whole), _STATUS.search(whole)
    bulk = None if code else _BULK.search(whole)
    # Never the rest of the text: that has names of objects, which say nothing.
    signs = _NAMES.sub("", words) if code else bulk[1] if bulk else status[0] if status else ""
    if any(map((code[1] if code else signs).__contains__, _FULL)):
        error: StoreError = NoSpaceError(f"{what} {where}: {words}")
        error.errno = errno.ENOSPC
        return error
    number = _NUMBERS.get(kind, errno.EREMOTEIO)
    advice = next((advice for sign, advice in _ADVICE if sign in signs), "")
    for sign, reason, remedy in _REASONS:
        if match := sign.search(whole):
            words = f"{reason.format(*match.groups())} ({words})"
            advice = advice or remedy
            break
    if _ROLE.search(whole):
        words, advice = f"no credentials were found ({words})", TO_SET[where[:2]]
    elif _TOKEN in whole:
        words, advice = f"the credentials gave no token ({words})", advice or _KEYS
    elif _PAGE.search(whole):
        advice = next(advice for sign, advice in _PAGES if sign.search(signs))
    elif any(map(signs.__contains__, _NO_BUCKET)):
        number = errno.ENODEV  # "not there" is said of objects
    elif kind in _DENIED or any(map(signs.__contains__, _NO_RIGHT)):
        advice = advice or _RIGHT
    if advice in (_KEYS, _RENEW, _RIGHT, *TO_SET.values()):
        number = errno.EPERM
    elif advice == _ARCHIVED:
        number = errno.EREMOTEIO
    error = StoreError(f"{what} {where}: {words}" + (f". What to do: {advice}" if advice else ""))
    error.errno = number
    return error


def store_error(number: int, text: str) -> StoreError:
    """Return an error of our own, with its number."""
    error = StoreError(text)
    error.errno = number
    return error


def is_conflict(error: Exception) -> bool:
    """Return whether the request collided with another one, and is to be sent again."""
    code = _CODE.search(str(error))
    return code is not None and code[1] in _CONFLICTS


def is_timeout(error: Exception) -> bool:
    """Return whether the store did not answer in time."""
    return _TIMEOUT.search(str(error)) is not None


def is_broken_off(error: Exception) -> bool:
    """Return whether the connection broke when part of an answer had come."""
    return any(map(str(error).__contains__, _BROKEN_OFF))


def is_passing(error: Exception) -> bool:
    """Return whether a refusal is temporary: it says nothing about the object."""
    code = _CODE.search(str(error))
    return code is not None and code[1] in _PASSING


def is_lock(error: Exception) -> bool:
    """Return whether a store keeps what is there: Azure says so as if a condition did not hold."""
    code = _CODE.search(str(error))
    return code is not None and code[1].startswith(("BlobImmutable", "Lease"))


def said(error: BaseException) -> str:
    """What an error says, without what may be secret: the store's own words, where it has some."""
    text = _NOISE.sub("", str(error).split(_STATE, 1)[0].strip())
    if code := _CODE.search(text):
        message = _MESSAGE.search(text)
        return f"{code[1]}: {' '.join(message[1].split())}"[:WORDS_MAX] if message else code[1]
    if (page := _PAGE.search(text)) is not None:
        text = text[: page.start()]
    return (
        _QUERY.sub(r"\1", " ".join(text.split()))[:WORDS_MAX].rstrip(" :") or type(error).__name__
    )


def without_secrets(error: BaseException) -> BaseException:
    """Return an error of obstore to chain, without its inner state and what may be secret.

    Of an answer it has the code and the message alone: the rest may repeat the request.
    """
    text = str(error).split(_STATE, 1)[0]
    answer = said(error) if _CODE.search(text) else ""
    return type(error)(_QUERY.sub(r"\1", text.partition("<")[0]) + answer)


def contended(what: str, where: str) -> StoreError:
    """Say that something cannot be done since others do the like all the time."""
    return store_error(errno.EAGAIN, f"{what} {where}: others keep changing it")


def if_there(look: Callable[[], Answer]) -> Answer | None:
    """Return what a look finds; None, where there is nothing."""
    try:
        return look()
    except StoreError as error:
        if error.errno != errno.ENOENT:
            raise
        return None
