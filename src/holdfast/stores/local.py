"""A directory on a file system of this machine, or on NFS or Lustre. Knows names and bytes."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from itertools import islice, starmap
from operator import attrgetter

from .._core import Vfs, above_with, look_anew, probe
from ..errors import StoreError, writable
from .base import Entry, Names, having_each, remove_each
from .local_marks import append, bar, claim
from .local_paths import GONE, forget_below, free_below
from .local_queue import LocalQueue

SETTLED_S = 3600.0  # an entry this old is on the disk: kernels write back within a minute
STALE_ATTEMPTS = 3  # to read a file that another client of NFS may remove once it is open
TICK_S = 10.0  # an entry that comes so much later changes its directory's time, on any file system

_current_vfs = Vfs.posix()  # of new stores; `holdfast.testing` puts faulty and recording ones here
_changed_s: dict[str, float] = {}  # of directories above a root, as this process synced them


@contextlib.contextmanager
def use_vfs(vfs: Vfs) -> Iterator[Vfs]:
    """Make stores opened inside the block go through ``vfs``."""
    global _current_vfs, _changed_s
    before = _current_vfs, _changed_s
    _current_vfs, _changed_s = vfs, {}  # what it says it has synced, the others need not have
    try:
        yield vfs
    finally:
        _current_vfs, _changed_s = before


class LocalStore:
    """See `holdfast.stores.base.Store`."""

    can_link = can_replace = shows_pending = True
    run_bytes, having, remove_all = 2 << 20, having_each, remove_each

    def __init__(self, root: str | os.PathLike[str], vfs: Vfs | None = None) -> None:
        self.location = os.path.abspath(os.fspath(root))
        self._below, self.vfs = f"{self.location.rstrip('/')}/", vfs or _current_vfs
        self._made: set[str] = set()  # directories in which this store has made one
        self._synced: set[str] = set()  # those, and where its files are: since they were made
        self._begun: dict[str, int] = {}  # descriptors of what `begin` wrote, by name

    def sibling(self, name: str) -> "LocalStore":
        """Return the store of another directory in the one that this root is in."""
        return LocalStore(os.path.join(os.path.dirname(self.location), name), self.vfs)

    def above(self) -> "LocalStore":
        """Return the store of the directory that this root is in."""
        return LocalStore(os.path.dirname(self.location), self.vfs)

    def below(self, name: str) -> "LocalStore":
        """Return the store of a directory in this root."""
        return LocalStore(self._below + name, self.vfs)

    def above_with(self, name: str, beginning: bytes) -> str:
        """Return the nearest directory above with a file of this name that begins so."""
        location = self.location if self.location.isascii() else self._path("")
        return above_with(location, name, beginning)

    def queue_kind(self, io: str, depth: int, block_bytes: int) -> LocalQueue:
        """Return how files here are read and written; ``io`` "auto": the fastest that works."""
        if io == "auto":
            try:
                io = probe(_nearby(self.location), self.vfs)
            except (StoreError, OSError):  # the latter of what is removed this moment
                # The probe writes; what cannot be written can still be read.
                io = "buffered"
        return LocalQueue(self.vfs, io, depth, block_bytes)

    def exists(self, name: str) -> bool:
        """Return whether anything of this name is there; a broken link counts."""
        look_anew(path := self._path(name))
        try:
            os.lstat(path)
        except OSError as error:
            # "Cannot tell" must not read as "is not there": a commit would remove its own files.
            if error.errno in GONE:
                return False
            raise self._failure("stat", name, error) from error
        return True

    def create(self, name: str, *, direct: bool) -> int:
        """Open a new file for writing; make the directories above it."""
        path = self._path(name)
        self._make_directories(path.rpartition("/")[0])
        return self.vfs.create(path, direct)

    def open(self, name: str, *, direct: bool) -> int:
        """Open a regular file for reading; no link may be on the way to it from the root."""
        self._path(name)
        return self.vfs.open_beneath(self.location, name, direct)

    def start_read(self, name: str) -> None:
        """Let the disk begin to read a small file, which is opened soon: a hint, never an error."""
        with contextlib.suppress(StoreError):
            descriptor = self.open(name, direct=False)
            self.vfs.start_read(descriptor)
            self.vfs.close(descriptor)

    def sync_made(self, name: str) -> None:
        """Sync the directory of ``name``, and every one that this store has made an entry in."""
        directory = self._path(name).rpartition("/")[0] or "/"
        for place in (directory, *sorted(self._made - {directory}, reverse=True)):
            self.vfs.sync_directory(place)
            self._synced.add(place)

    def sync_path(self, name: str) -> None:
        """Sync the directories up to that which holds the root; not again those of `sync_made`."""
        directory = self._path(name).rpartition("/")[0] or "/"
        top = os.path.dirname(self.location)
        while True:
            if directory not in self._synced:
                self.vfs.sync_directory(directory)
            if directory == top:
                return
            directory = directory.rpartition("/")[0] or "/"

    def sync_above(self, name: str) -> None:
        """Sync the directories above those of `sync_path`, where an entry may be new.

        Whoever made them, we or the user or a process that was killed, may not have done so. What
        this process has synced, and nobody has changed since, is left out.

        Args:
            name: of a file that this save has made: its time is by the clock that gives files
                their times, which may be another machine's.
        """
        now_s = self._stat(name).st_mtime
        try:
            young = _young_above(os.path.dirname(self.location), now_s)
        except OSError as error:
            raise self._failure("stat above", "", error) from error
        for directory, changed_s in young:
            try:
                if directory not in self._synced:
                    self.vfs.sync_directory(directory)
            except StoreError as error:
                # What is not ours to look into is not ours to have made.
                if error.errno not in (errno.EACCES, errno.EPERM):
                    raise
            if now_s - changed_s >= TICK_S:
                _changed_s[directory] = changed_s

    def get(self, name: str, bytes_max: int) -> bytes:
        """Read a whole file; its size is checked before anything is allocated."""
        attempts = STALE_ATTEMPTS
        while True:
            descriptor = self.open(name, direct=False)
            try:
                if (size := self.vfs.size(descriptor)) <= bytes_max:
                    return self.vfs.read(descriptor, size, 0)
                cause = OSError(errno.EFBIG, f"it has {size} bytes; expected at most {bytes_max}")
                raise self._failure("read", name, cause)
            except StoreError as error:
                if error.errno != errno.ESTALE or not (attempts := attempts - 1):
                    raise
            finally:
                self.vfs.close(descriptor)

    def begin(self, pending_name: str, data: bytes) -> None:
        """Write a file, and let the disk begin; `prepare` syncs the same descriptor."""
        if pending_name in self._begun:
            self.remove(pending_name)
        path = self._path(pending_name)
        try:
            self._make_directories(path.rpartition("/")[0])
            self._begun[pending_name] = descriptor = self.vfs.create(path)
            self.vfs.write(descriptor, data, 0)
            self.vfs.start_sync(descriptor)
        except BaseException:
            with contextlib.suppress(StoreError):
                self.remove(pending_name)
            raise

    def prepare(self, pending_name: str, data: bytes, name: str = "") -> None:
        """Write a file and sync its bytes; it is there whole, or not at all, unless by a crash."""
        if pending_name not in self._begun:
            self.begin(pending_name, data)
        try:
            self.vfs.sync(self._begun[pending_name])
            self.vfs.close(self._begun.pop(pending_name))
        except BaseException:
            with contextlib.suppress(StoreError):
                self.remove(pending_name)
            raise

    def publish(self, pending_name: str, name: str) -> bool:
        """Link, sync the directory: the name appears durably, or not at all."""
        pending = self._path(pending_name)
        try:
            if made := self._link(pending, self._path(name)):
                self.vfs.sync_directory(pending.rpartition("/")[0] or "/")
            return made
        finally:
            with contextlib.suppress(StoreError):
                self.vfs.unlink(pending)

    def rename(self, pending_name: str, name: str) -> None:
        """Rename; a crash may leave what was there before."""
        pending = self._path(pending_name)
        try:
            self.vfs.rename(pending, self._path(name))
        except BaseException:
            with contextlib.suppress(StoreError):
                self.vfs.unlink(pending)
            raise

    def replace(self, pending_name: str, name: str) -> None:
        """Rename, and sync the directory."""
        self.rename(pending_name, name)
        self.vfs.sync_directory(os.path.dirname(self._path(name)))

    def move(self, name: str, second: str, *, makes: bool = True) -> None:
        """Rename, of directories too; a crash may leave what was there before."""
        if makes:
            self._make_directories(os.path.dirname(self._path(second)))
        self.rename(name, second)

    def claim(self, name: str, note: bytes) -> bool:
        """Create a file, unsynced: a machine that goes down takes those along whom it keeps out."""
        path = self._path(name)
        self._make_directories(os.path.dirname(path))
        return claim(self.vfs, path, note)

    def revoke(self, pending_name: str, name: str) -> None:
        """Put a directory where a file may be, or may yet be made, by another."""
        bar(self.vfs, self._path(pending_name))

    def swap(self, pending_name: str, name: str, stamp: str) -> bool:
        """Refuse: a disk cannot do that in one step."""
        raise StoreError(f"{self._path(name)} is on a disk, which compares nothing when it renames")

    def reclaim(self, name: str) -> None:
        """Do nothing: names that are pending are each of one save."""

    unbar = reclaim

    def link(self, name: str, second: str) -> None:
        """Give a file a second name, which nothing has yet; it takes no room on a full disk."""
        self.vfs.link(self._path(name), self._path(second))

    def list(self, name: str = "") -> list[Entry]:
        """List a directory, sorted by name; no link may be on the way to it from the root."""
        self._path(name)
        return list(starmap(Entry, self.vfs.list_directory(self.location, name)))

    def scan(self) -> Iterator[str]:
        """Yield the names in the root in no order, one by one: there may be very many."""
        try:
            with os.scandir(self.location) as entries:
                yield from map(attrgetter("name"), entries)
        except OSError as error:
            raise self._failure("list", "", error) from error

    def some(self, count: int) -> Names:
        """Return some names in the root, and of what kind they are; all, if there are fewer."""
        try:
            with os.scandir(self.location) as entries:
                return [(e.name, _kind_of(e)) for e in islice(entries, count)]
        except OSError as error:
            raise self._failure("list", "", error) from error

    def kind(self, name: str) -> str:
        """Return of what kind something is, as `Entry` says it; empty: it is not there."""
        try:
            mode = self._stat(name).st_mode
        except StoreError as error:
            if error.errno in GONE:
                return ""
            raise
        return "file" if stat.S_ISREG(mode) else "directory" if stat.S_ISDIR(mode) else "other"

    def remove(self, name: str) -> None:
        """Remove a file; no error when it is not there."""
        if (begun := self._begun.pop(name, -1)) >= 0:
            with contextlib.suppress(StoreError):
                self.vfs.close(begun)
        try:
            self.vfs.unlink(self._path(name))
        except StoreError as error:
            # NFS's name of a removed file that is open here: it goes when that is closed.
            is_silly = error.errno == errno.EBUSY and "/.nfs" in self._path(name)
            if error.errno not in GONE and not is_silly:
                raise

    def remove_directory(self, name: str = "") -> bool:
        """Remove a directory when it is empty."""
        try:
            self.vfs.remove_directory(self._path(name))
        except StoreError as error:
            return error.errno in GONE
        return True

    def sync_directory(self, name: str = "") -> None:
        """Make the entries of one directory durable."""
        self.vfs.sync_directory(self._path(name))

    def modified_s(self, name: str) -> float:
        """Return when something was last modified: seconds since 1970, by its server's clock."""
        return self._stat(name).st_mtime

    def stamp(self, name: str) -> str:
        """Return what is another when a file is: where another one has taken its name, too."""
        found = self._stat(name)
        return f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"

    def append(self, name: str, data: bytes) -> None:
        """Add lines to a file in one call, unsynced; the rest of a torn line stands alone."""
        append(self._path(name), data)

    def forget_cached(self) -> None:
        """Have the kernel drop what it holds of the files, so that they are read from the disk."""
        forget_below(self.location)

    def free_bytes(self) -> int | None:
        """Return what may still be written below the root; None where that is not known."""
        return free_below(self.location)

    def _path(self, name: str) -> str:
        """Return where a name is; one that is not UTF-8 is none of ours, and a StoreError."""
        path = self._below + name if name else self.location
        if not path.isascii() and path != writable(path):
            error = StoreError(f"the name of {path} is not UTF-8; rename or remove it")
            error.errno = errno.EILSEQ
            raise error
        return path

    def _stat(self, name: str) -> os.stat_result:
        look_anew(path := self._path(name))
        try:
            return os.lstat(path)
        except OSError as error:
            raise self._failure("stat", name, error) from error

    def _failure(self, what: str, name: str, cause: OSError) -> StoreError:
        error = StoreError(f"{what} {self._path(name)}: {cause.strerror}")
        error.errno = cause.errno
        return error

    def _link(self, source: str, target: str) -> bool:
        try:
            self.vfs.link(source, target)
        except StoreError as error:
            if error.errno != errno.EEXIST:
                raise
            return False
        return True

    def _make_directories(self, path: str) -> None:
        """Make a directory and those above it; `sync_made` makes them durable."""
        missing = []
        look_anew(path)
        while path and not os.path.isdir(path):
            missing.append(path)
            path = path.rpartition("/")[0]
        for directory in reversed(missing):
            if self.vfs.make_directory(directory):
                self._made.add(directory.rpartition("/")[0] or "/")


def _young_above(path: str, now_s: float) -> list[tuple[str, float]]:
    """Return directories above one, of its file system, with a young entry that is not synced."""
    here, young = None, list[tuple[str, float]]()
    while path != "/":
        parent = path.rpartition("/")[0] or "/"
        try:
            here, above = here or os.stat(path), os.stat(parent)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, *GONE):
                raise  # it may be young
            break  # what cannot be reached by its path was not made by it either
        if above.st_dev != here.st_dev:
            break
        if now_s - above.st_ctime < SETTLED_S and _changed_s.get(parent) != above.st_ctime:
            young.append((parent, above.st_ctime))
        path, here = parent, above
    return young


def _nearby(directory: str) -> str:
    """Return a directory to probe in: above this one, which may be a checkpoint's, if it can be."""
    while directory != "/" and not os.path.isdir(directory):
        directory = directory.rpartition("/")[0] or "/"
    above = directory.rpartition("/")[0] or "/"
    same = os.stat(above).st_dev == os.stat(directory).st_dev
    return above if same and os.access(above, os.W_OK) else directory


def _kind_of(entry: "os.DirEntry[str]") -> str:
    if entry.is_file(follow_symlinks=False):
        return "file"
    return "directory" if entry.is_dir(follow_symlinks=False) else "other"
