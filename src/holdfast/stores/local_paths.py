"""What a disk has: its number, room below a place, and what the kernel holds of its files.

Changes no file.
"""

import contextlib
import errno
import os

from ..errors import StoreError

GONE = (errno.ENOENT, errno.ENOTDIR)


def forget_below(location: str) -> None:
    """Have the kernel drop what it holds of the files below a directory."""
    for directory, _, names in os.walk(location):
        for name in names:
            with contextlib.suppress(OSError):
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                descriptor = os.open(os.path.join(directory, name), flags)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)


def device_of(directory: str) -> int | None:
    """Return the number of the disk that a directory is on; None: it is not there."""
    try:
        return os.stat(directory).st_dev
    except OSError:
        return None


def free_below(place: str) -> int | None:
    """Return what may be written below a place that may not be there; None: nobody tells.

    Raises:
        StoreError: nothing may, for what lies there, rights, or a read-only mount.
    """
    wanted = place
    while not os.path.lexists(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    try:
        system, reason = os.statvfs(place), 0
    except OSError as cause:
        error = StoreError(f"write below {wanted}: {cause.strerror}")
        error.errno = cause.errno
        raise error from cause
    if not os.path.isdir(place):
        reason = errno.ENOTDIR
    elif not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        reason = errno.EROFS if system.f_flag & os.ST_RDONLY else errno.EACCES
    if reason:
        error = StoreError(f"write below {wanted}: {place}: {os.strerror(reason)}")
        error.errno = reason
        raise error
    # Blocks that are kept back may be written by root; what a quota leaves is not told.
    blocks = system.f_bfree if os.geteuid() == 0 else system.f_bavail
    return blocks * system.f_frsize if system.f_blocks else None
