"""A file or directory that appears whole, durably, or not at all. Knows no formats.

Invariants:
  1. It is built in a hidden directory beside the target, on the same file system, and gets its
     name in one step of the file system: a link for a file, a rename for a directory. What has
     that name already stays.
  2. Bytes and names are synced before that step, and the step before the call returns.
  3. Whoever builds holds a lock on the hidden directory (flock, which ends with the process). The
     next one who builds the same target removes hidden directories that nobody has locked.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator

from .._core import xxh3_64
from ..errors import AlreadyCommittedError, StoreError
from .base import Store
from .local import LocalStore

PREFIX = ".holdfast-"  # then the hash of the target's name, and a random number
# What a file system without locks says of flock.
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EPERM)
ATTEMPTS = 8  # one may be taken for abandoned between its making and its lock


def check_free(path: str, *, is_file: bool) -> None:
    """Check that nothing is where a target is to be; an empty directory may become a full one.

    Raises:
        AlreadyCommittedError: something is there.
        StoreError: that cannot be found out.
    """
    try:
        is_directory = os.path.isdir(path) and not os.path.islink(path)
        if not is_file and is_directory and not os.listdir(path):
            return
    except OSError as error:
        failure = StoreError(f"list {path}: {error.strerror}")
        failure.errno = error.errno
        raise failure from error
    if os.path.lexists(path):
        raise _there(path)


def _there(path: str) -> AlreadyCommittedError:
    return AlreadyCommittedError(
        f"{path} is there already, and is never overwritten; choose another place, or remove it"
    )


@contextlib.contextmanager
def building(path: str, *, is_file: bool) -> Iterator[Store]:
    """Give a directory that becomes the target when the block ends well, and nothing when not.

    Args:
        is_file: the target is the one file of the target's own name in that directory. Every file
            is to be synced by whoever writes it.

    Raises:
        AlreadyCommittedError: something is at ``path``, before or at the end.
        StoreError: disk, network or permission.
    """
    check_free(path, is_file=is_file)
    above, name = LocalStore(os.path.dirname(path)), os.path.basename(path)
    made = _make_above(above)
    beginning = f"{PREFIX}{xxh3_64(os.fsencode(name)):016x}-"
    _remove_abandoned(above, beginning)
    with _locked(above, beginning) as hidden:
        store = above.below(hidden)
        yield store
        store.sync_directory()
        _publish(store, path, name if is_file else "")
        try:
            for directory in (above.location, *map(os.path.dirname, made)):
                above.vfs.sync_directory(directory)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path) if is_file else shutil.rmtree(path)
            raise


def _publish(store: LocalStore, path: str, file: str) -> None:
    """Give the file, or all of the directory, its name."""
    try:
        if file:
            store.vfs.link(f"{store.location}/{file}", path)
        else:
            store.vfs.rename(store.location, path)
    except StoreError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise _there(path) from error  # somebody was faster
        raise


def _make_above(above: LocalStore) -> list[str]:
    """Make the directories above a target; return those that were missing, innermost first."""
    missing, place = [], above.location
    while not os.path.isdir(place):
        missing.append(place)
        place = os.path.dirname(place)
    for directory in reversed(missing):
        above.vfs.make_directory(directory)
    return missing


@contextlib.contextmanager
def _locked(above: LocalStore, beginning: str) -> Iterator[str]:
    """Make a hidden directory, and lock it; remove what is left of it in the end."""
    for _ in range(ATTEMPTS):
        name = beginning + secrets.token_hex(8)
        place = f"{above.location.rstrip('/')}/{name}"
        above.vfs.make_directory(place)
        try:
            descriptor = _lock(place)
        except StoreError:
            os.rmdir(place)
            raise
        if descriptor is not None:
            break
    else:
        raise StoreError(
            f"{above.location}: another process removed a new hidden directory {ATTEMPTS} times; "
            "choose a directory that no other program cleans up"
        )
    try:
        yield name
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(descriptor)


def _lock(place: str) -> int | None:
    """Lock a directory; return its descriptor, or None: somebody has it, or it is gone."""
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(place)):
            return descriptor
    except OSError as error:
        if error.errno in NO_LOCKS:
            os.close(descriptor)
            raise StoreError(
                f"lock {place}: {error.strerror}. This file system has no locks (flock). Choose a "
                "directory on another file system, or mount this one with locks (Lustre: -o flock)"
            ) from error
    os.close(descriptor)
    return None


def _remove_abandoned(above: LocalStore, beginning: str) -> None:
    """Remove what processes have left that were killed."""
    for name in above.scan():
        place = f"{above.location.rstrip('/')}/{name}"
        with contextlib.suppress(StoreError):  # without locks, nobody knows whose it is
            if name.startswith(beginning) and (descriptor := _lock(place)) is not None:
                shutil.rmtree(place, ignore_errors=True)
                os.close(descriptor)
