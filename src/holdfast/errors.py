"""Every error holdfast raises. Knows nothing else.

HoldfastError
├── StateError             the state cannot be saved as given (names the path of the leaf)
├── MismatchError          the target does not fit the checkpoint (all differences, not the first)
├── StoreError             disk, network, permission; cause chained, path and offset in the text
│   └── NoSpaceError           the disk or the quota is full
├── NotCommittedError      no MANIFEST here
├── AlreadyCommittedError  this step exists, with other contents
├── FencedError            a newer job writes to this run
├── OptionError            an option or argument that cannot be (lists what there is)
├── CorruptError           committed bytes fail a check (file, tensor, chunk, found, expected)
│   └── TrustError             they are not what a trusted key has signed
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
}


class HoldfastError(Exception):
    """Base of every error raised on purpose by holdfast."""


class StateError(HoldfastError):
    """The state cannot be saved as given."""


class MismatchError(HoldfastError):
    """The target does not fit the checkpoint; the text lists every difference.

    ``is_repaired``: the checkpoint lacks what a repair could not recover; another may fit.
    """

    is_repaired: bool = False


class StoreError(HoldfastError):
    """A store call failed; the cause is chained, ``errno`` is its number where there is one."""

    errno: int | None = None

    def __str__(self) -> str:
        """Return the text, and what to do where that is known."""
        advice = _ADVICE.get(self.errno or 0)
        return f"{super().__str__()}; {advice}" if advice else super().__str__()


class NoSpaceError(StoreError):
    """The disk or the quota is full."""


class NotCommittedError(HoldfastError):
    """The directory holds no committed checkpoint."""


class AlreadyCommittedError(HoldfastError):
    """The step exists already, with other contents."""


class FencedError(HoldfastError):
    """A newer job writes to this run; the text names its epoch, host and start."""


class OptionError(HoldfastError):
    """An option or argument that cannot be."""


class CorruptError(HoldfastError):
    """Committed bytes fail a check.

    ``filled`` names the tensors of a load's target that hold verified bytes of the checkpoint, in
    whole or in part; all others are as they were. ``location`` is the damaged checkpoint, where
    something can be done about it.
    """

    filled: tuple[str, ...] = ()
    location: str = ""

    def __str__(self) -> str:
        """Return the text, and what to do."""
        advice = f"; {what_is_left(self.location)}" if self.location else ""
        return f"{super().__str__()}{advice}"


class TrustError(CorruptError):
    """Only what a trusted key has signed was to be loaded, and this is something else."""


class VersionError(HoldfastError):
    """The checkpoint was written by a newer holdfast."""


class BusyError(HoldfastError):
    """Another save is in flight, and ``busy="fail"`` was asked for."""


class CancelledError(HoldfastError):
    """The save was cancelled before it was committed."""


class PeerError(HoldfastError):
    """Another rank failed, so the operation failed on all.

    ``rank`` is the first rank that failed; ``cause`` is the text of its error.
    """

    def __init__(self, message: str, *, rank: int, cause: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.cause = cause

    def __reduce__(self) -> tuple[object, ...]:
        """Let itself be sent to other processes, as frameworks do with errors."""
        return _peer_error, (str(self), self.rank, self.cause), self.__dict__


def damaged(location: str, text: str) -> CorruptError:
    """Return the error of a checkpoint about which something can be done."""
    error = CorruptError(text)
    error.location = location
    return error


def what_is_left(location: str) -> str:
    """Say what to do about a damaged checkpoint."""
    return f"'holdfast repair {location}' says what is left"


def _peer_error(message: str, rank: int, cause: str) -> PeerError:
    return PeerError(message, rank=rank, cause=cause)
