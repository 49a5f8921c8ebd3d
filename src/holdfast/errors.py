"""Every error holdfast raises. Knows nothing else.

HoldfastError
├── StateError             the state cannot be saved as given (names the path of the leaf)
├── MismatchError          the target does not fit the checkpoint (how many differ, and some)
├── StoreError             disk, network, permission; cause chained, path and offset in the text
│   └── NoSpaceError           the disk or the quota is full
├── NotCommittedError      no MANIFEST here
│   └── ReplacedError          another save was committed in its place meanwhile
├── AlreadyCommittedError  this step exists, with other contents
├── FencedError            a newer job writes to this run
├── OptionError            an invalid option or argument (lists what is allowed)
├── CorruptError           committed bytes fail a check (file, tensor, chunk, found, expected)
│   └── TrustError             no trusted key has signed these bytes
├── VersionError           written by a newer holdfast
├── BusyError              another save is in flight, and busy="fail"
├── CancelledError         the save was cancelled
└── PeerError              another rank failed; .rank, .cause
"""

import errno

_ADVICE = {
    errno.ENOSPC: "free space or choose another directory",
    errno.EDQUOT: "free space, have the quota raised or choose another directory",
    errno.EROFS: "remount it writable or choose another directory",
    errno.EACCES: "give this user access or choose another directory",
    errno.EIO: "check the disk and the kernel log",
    errno.ESTALE: "another machine removed it while it was open, or the file system has to be "
    "mounted again",
}


class HoldfastError(Exception):
    """Base of all errors of holdfast. Its text can always be printed and logged.

    Args:
        args: the text; what no terminal can print in it is escaped.

    Example::

        try:
            holdfast.save(state, "runs/a/step-00001000")
        except holdfast.errors.HoldfastError as error:
            print(f"training goes on without this checkpoint: {error}")
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(writable(arg) if isinstance(arg, str) else arg for arg in args))


class StateError(HoldfastError):
    """The state cannot be saved as given."""


class MismatchError(HoldfastError):
    """The target does not fit the checkpoint; the text counts the differences and shows some.

    Attributes:
        is_repaired: True if a repair left tensors out of the checkpoint; another one may fit.
    """

    is_repaired: bool = False


class StoreError(HoldfastError):
    """A call of the disk or the file system failed; its cause is chained.

    Attributes:
        errno: the number of the system's error, or None.
    """

    errno: int | None = None

    def __str__(self) -> str:
        """Return the text, with advice for common errors of the system."""
        advice = _ADVICE.get(self.errno or 0)
        return f"{super().__str__()}; {advice}" if advice else super().__str__()


class NoSpaceError(StoreError):
    """The disk or the quota is full."""


class NotCommittedError(HoldfastError):
    """The directory holds no committed checkpoint."""


class ReplacedError(NotCommittedError):
    """Another save (``replace=True``) replaced this checkpoint while it was saved or read."""


class AlreadyCommittedError(HoldfastError):
    """There is a checkpoint at this path already: ``replace=True`` was not given, or it must stay.

    It must stay if a delta checkpoint is made from it, or if it is signed.
    """


class FencedError(HoldfastError):
    """A newer job writes to this run; the text names its epoch, host and start."""


class OptionError(HoldfastError):
    """An invalid option or argument; the text says what is allowed."""


class CorruptError(HoldfastError):
    """Committed bytes fail a check.

    Attributes:
        filled: names of the target's tensors that hold verified bytes of the checkpoint, in whole
            or in part. All other tensors are unchanged.
        location: directory of the damaged checkpoint if `holdfast repair` may help, or "".
    """

    filled: tuple[str, ...] = ()
    location: str = ""

    def __str__(self) -> str:
        """Return the text, with advice."""
        advice = f"; {what_is_left(self.location)}" if self.location else ""
        return f"{super().__str__()}{advice}"


class TrustError(CorruptError):
    """``Options(trust=…)`` was given, and no trusted key has signed this checkpoint."""


class VersionError(HoldfastError):
    """The checkpoint was written by a newer holdfast."""


class BusyError(HoldfastError):
    """Another save is in flight, and ``busy="fail"`` or ``busy="skip"`` was given."""


class CancelledError(HoldfastError):
    """The save was cancelled before it was committed."""


class PeerError(HoldfastError):
    """Another rank failed, so the call failed on all ranks.

    Args:
        message: the text.
        rank: the first rank that failed; -1 if it is unknown.
        cause: the text of that rank's error.
    """

    def __init__(self, message: str, *, rank: int, cause: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.cause = cause

    def __reduce__(self) -> tuple[object, ...]:
        """Let itself be sent to other processes, as frameworks do with errors."""
        return _peer_error, (str(self), self.rank, self.cause), self.__dict__


SHOWN_MAX = 80  # characters of a value in the text of an error
SHOWN_ITEMS_MAX = 8  # of a list or tuple
_PLAIN = (str, bytes, int, float, bool, type(None))


def shown(value: object) -> str:
    """Say what was given instead of what was expected: short, and of a state only its type.

    ``5`` → ``5``; ``{"w": tensor}`` → ``a dict``
    """
    if not _is_plain(value):
        kind = type(value).__name__
        return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
    text = repr(value[:SHOWN_MAX] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= SHOWN_MAX else f"{text[: SHOWN_MAX - 1]}…"


def writable(text: str) -> str:
    r"""Escape what no file or terminal takes: Python's stand-ins for bytes that are no UTF-8.

    ``"a\udcff"`` → ``"a\\udcff"``
    """
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _is_plain(value: object) -> bool:
    """Whether a value is quickly shown: no tensor, no object, no number of a thousand digits."""
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return len(value) <= SHOWN_ITEMS_MAX and all(_is_plain(item) for item in value)
    return type(value) in _PLAIN and not (isinstance(value, int) and abs(value) >= 1 << 64)


def damaged(location: str, text: str) -> CorruptError:
    """Return the error of a damaged checkpoint that a repair may help."""
    error = CorruptError(text)
    error.location = location
    return error


def what_is_left(location: str) -> str:
    """Say what to do about a damaged checkpoint."""
    return f"run 'holdfast repair {location}' to see which tensors are readable"


def _peer_error(message: str, rank: int, cause: str) -> PeerError:
    return PeerError(message, rank=rank, cause=cause)


def without_frames(error: BaseException) -> BaseException:
    """Take the tracebacks out of an exception and those behind it, with all that they hold."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        behind = waiting.pop()
        if behind is not None and id(behind) not in seen:
            seen.add(id(behind))
            waiting += [behind.__cause__, behind.__context__]
            behind.__traceback__ = None
    return error
