"""A simulated disk: the calls of `Vfs` and of `os` that stores make, on files as POSIX promises.

Promises no more than POSIX: bytes are durable after fsync of their file, entries after fsync of
their directory (`tests/crash/disk_model.py`, whose nodes these are). `cut` leaves what a power cut
may. Every call is a step of the scheduler, and may fail, be late, or be done and reported as
failed. Times of files are of the disk's own clock.
"""

import errno
import itertools
import os
import random
import stat
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from crash.disk_model import Directory, File, Keeps
from holdfast.errors import NoSpaceError, StoreError

from .actors import Scheduler

MOUNT = "/disk"
WRITTEN_BACK_S = 3600.0  # what is older is on the disk, synced or not: docs/durability.md

# (process's name, operation, path) → None, or how the call goes wrong: see `worlds.py`.
Trouble = Callable[[str, str], "tuple[str, int] | None"]


_numbers = itertools.count(1)  # of files, in all worlds: which one it is says nothing


class SimFile(File):
    """A file with what a reader sees now, and when it was changed."""

    __slots__ = ("changed", "now", "number", "written")

    def __init__(self, changed: float, content: bytes = b"") -> None:
        super().__init__(content)
        self.number = next(_numbers)
        self.changed, self.now = changed, content
        self.written = 0.0  # when, by the scheduler


class SimDirectory(Directory):
    """A directory with the time of its last change, and when each of `pending` was made."""

    __slots__ = ("changed", "times")

    def __init__(self, changed: float) -> None:
        super().__init__()
        self.changed = changed
        self.times: list[float] = []

    def settle(self, before: float) -> None:
        """Make durable what was changed before a time."""
        late = next((n for n, time in enumerate(self.times) if time >= before), len(self.times))
        pending, self.pending = self.pending, self.pending[:late]
        self.durable = self.entries(lambda _: True)
        self.pending, self.times = pending[late:], self.times[late:]


def error_of(number: int, text: str) -> StoreError:
    """Make the error that the core makes of an errno."""
    kind = NoSpaceError if number in (errno.ENOSPC, errno.EDQUOT) else StoreError
    error = kind(f"{text}: {os.strerror(number)}")
    error.errno = number
    return error


class Disk:
    """A `Vfs` for one world.

    Attributes:
        clock_off_s: of the disk's clock against the scheduler's.
        trouble: says of each call how it goes wrong.
        watch: told of each change that stands: (operation, path, second path).
        free_bytes: what `LocalStore.free_bytes` says.
        has_gap: whether an overtaken job may still replace a step by a request that began before.
        link_began: when the `link` or `rename` that `watch` is told of was called.
    """

    has_gap = False

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.clock_off_s = 1.7e9
        self.trouble: Trouble = lambda operation, path: None
        self.watch: Callable[[str, str, str], None] = lambda operation, path, second: None
        self.free_bytes = 1 << 40
        self.link_began = 0.0
        self.root = SimDirectory(self.time())
        self._open: dict[int, tuple[SimFile, str]] = {}
        self._next = 3

    def time(self) -> float:
        """Return what the disk's clock says."""
        return self._scheduler.now + self.clock_off_s

    def node(self, path: str) -> File | Directory | None:
        """Find what is at a path, without a call."""
        if path in ("/", MOUNT):
            return self.root
        found: File | Directory | None = self.root
        for part in path[len(MOUNT) + 1 :].split("/"):
            if not isinstance(found, Directory):
                return None
            found = found.now.get(part)
        return found

    def make(self, path: str, *, durable: bool) -> None:
        """Make a directory, and those above it, as the user does."""
        parts = path[len(MOUNT) + 1 :].split("/")
        place = self.root
        for part in parts:
            if part not in place.now:
                self._change(place, {part: SimDirectory(self.time())})
            if durable:
                place.sync()
                place.times.clear()
                place.changed -= 1e6
            place = place.now[part]  # type: ignore[assignment]

    def cut(self, rng: random.Random) -> None:
        """Leave what a power cut may leave of it."""
        kind, share = rng.random(), rng.choice((0.1, 0.5, 0.9))
        keeps: Keeps
        if kind < 0.35:
            keeps = lambda effect: False  # noqa: E731
        elif kind < 0.5:
            keeps = lambda effect: True  # noqa: E731
        elif kind < 0.6:
            keeps = lambda effect: effect == "entry"  # noqa: E731
        else:
            keeps = lambda effect: rng.random() < share  # noqa: E731
        self.root = _survivor(self.root, keeps, self._scheduler.now - WRITTEN_BACK_S)
        self._open.clear()

    # What follows are the calls.

    def create(self, path: str, direct: bool = False) -> int:
        """Open a new file."""
        late = self._begin("create", path)
        parent, name = self._parent("create", path)
        if name in parent.now:
            raise error_of(errno.EEXIST, f"create {path}")
        file = SimFile(self.time())
        self.watch("create", "", path)
        self._change(parent, {name: file})
        self._end(late, "create", path)
        return self._opened(file, path)

    def open_beneath(self, root: str, name: str, direct: bool = False) -> int:
        """Open a file for reading."""
        path = f"{root}/{name}"
        late = self._begin("open", path)
        file = self.node(path)
        if not isinstance(file, SimFile):
            raise error_of(errno.EISDIR if file else errno.ENOENT, f"open {path}")
        self._end(late, "open", path)
        return self._opened(file, path)

    def close(self, fd: int) -> None:
        """Close; no other can come in between."""
        self._open.pop(fd, None)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        """Write; a write that fails may have written a part."""
        file, path = self._open[fd]
        late = self._begin("write", path, lambda: self._write(file, data[:300], offset))
        self._write(file, data, offset)
        self._end(late, "write", path)

    def start_sync(self, fd: int) -> None:
        """Do nothing: what is not synced may be on the disk at any time."""

    def start_read(self, fd: int) -> None:
        """Do nothing."""

    def wants_direct(self, fd: int, size: int) -> bool:
        """Return False: it is all in memory."""
        return False

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """Read."""
        file, path = self._open[fd]
        late = self._begin("read", path)
        self._end(late, "read", path)
        return file.now[offset : offset + size]

    def size(self, fd: int) -> int:
        """Return the size of an open file."""
        return len(self._open[fd][0].now)

    def allocate(self, fd: int, size: int) -> None:
        """Reserve room; where there is none, this says so first."""
        _, path = self._open[fd]
        self._end(self._begin("allocate", path), "allocate", path)

    def truncate(self, fd: int, size: int) -> None:
        """Do nothing: nobody here writes more than a file is to have."""
        assert len(self._open[fd][0].now) == size

    def sync(self, fd: int) -> None:
        """Make bytes durable; where it fails, they never will be: the pages count as clean."""
        file, path = self._open[fd]
        late = self._begin("sync", path, file.pending.clear)
        file.sync()
        self._end(late, "sync", path)

    def sync_directory(self, path: str) -> None:
        """Make entries durable."""
        late = self._begin("sync_directory", path)
        node = self.node(path)
        if not isinstance(node, Directory):
            raise error_of(errno.ENOENT, f"sync {path}")
        node.sync()
        node.times.clear()  # type: ignore[attr-defined]
        self._end(late, "sync_directory", path)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; a lost reply says that it had it already, as NFS may."""
        began = self._scheduler.now
        late = self._begin("link", target)
        parent, name = self._parent("link", target)
        node = self.node(source)
        if node is None:
            raise error_of(errno.ENOENT, f"link {source}")
        if name in parent.now or isinstance(node, Directory):
            raise error_of(errno.EEXIST if name in parent.now else errno.EPERM, f"link {target}")
        self._change(parent, {name: node})
        self.link_began = began
        self.watch("link", source, target)
        self._end(late, "link", target)

    def rename(self, source: str, target: str) -> None:
        """Give a file or a directory another name, in any directory."""
        began = self._scheduler.now
        late = self._begin("rename", target)
        parent, name = self._parent("rename", target)
        node = self.node(source)
        if node is None:
            raise error_of(errno.ENOENT, f"rename {source}")
        before, old = self._parent("rename", source)
        if isinstance(node, Directory) and name in parent.now:
            raise error_of(errno.ENOTDIR, f"rename {source}")
        self.link_began = began
        self.watch("rename before", source, target)
        if before is parent:
            self._change(parent, {old: None, name: node})
        else:  # a power cut may leave both names, or none
            self._change(parent, {name: node})
            self._change(before, {old: None})
        self.watch("rename", source, target)
        self._end(late, "rename", target)

    def unlink(self, path: str) -> None:
        """Remove a name."""
        late = self._begin("unlink", path)
        parent, name = self._parent("unlink", path)
        node = parent.now.get(name)
        if not isinstance(node, SimFile):
            raise error_of(errno.EISDIR if node else errno.ENOENT, f"unlink {path}")
        self.watch("unlink", path, "")
        self._change(parent, {name: None})
        self._end(late, "unlink", path)

    def make_directory(self, path: str) -> bool:
        """Make a directory; False: it is there."""
        late = self._begin("make_directory", path)
        parent, name = self._parent("make_directory", path)
        if name in parent.now:
            if isinstance(parent.now[name], Directory):
                return False
            raise error_of(errno.EEXIST, f"make {path}")
        self._change(parent, {name: SimDirectory(self.time())})
        self._end(late, "make_directory", path)
        return True

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        late = self._begin("remove_directory", path)
        parent, name = self._parent("remove_directory", path)
        node = parent.now.get(name)
        if not isinstance(node, Directory) or node.now:
            raise error_of(errno.ENOTEMPTY if node else errno.ENOENT, f"remove {path}")
        self._change(parent, {name: None})
        self._end(late, "remove_directory", path)

    def list_directory(self, root: str, name: str) -> list[tuple[str, str, int]]:
        """List a directory, sorted by name."""
        path = f"{root}/{name}" if name else root
        late = self._begin("list_directory", path)
        node = self.node(path)
        if not isinstance(node, Directory):
            raise error_of(errno.ENOTDIR if node else errno.ENOENT, f"list {path}")
        found = [
            (name, "file", len(entry.now)) if isinstance(entry, SimFile) else (name, "directory", 0)
            for name, entry in sorted(node.now.items())
        ]
        self._end(late, "list_directory", path)
        return found

    # What stores ask `os`.

    def lstat(self, path: str) -> SimpleNamespace:
        """Find the times of what is at a path."""
        self._scheduler.step("stat", path)
        trouble = self.trouble("stat", path)
        if trouble and trouble[1] == errno.EIO:
            raise OSError(errno.EIO, "simulated", path)
        node = self.node(path)
        if node is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        changed: float = node.changed  # type: ignore[union-attr]
        mode = stat.S_IFDIR if isinstance(node, Directory) else stat.S_IFREG
        device = 2 if path.startswith(MOUNT) else 1
        return SimpleNamespace(
            st_mtime=changed,
            st_mtime_ns=int(changed * 1e9),
            st_ctime=changed,
            st_dev=device,
            st_mode=mode,
            st_ino=getattr(node, "number", 0),
            st_size=len(node.now),  # type: ignore[union-attr]
        )

    def write_note(self, fd: int, data: bytes) -> int:
        """Write as `os.write` does, at the beginning."""
        self._write(self._open[fd][0], data, 0)
        return len(data)

    def _opened(self, file: SimFile, path: str) -> int:
        self._next += 1
        self._open[self._next] = file, path
        return self._next

    def _begin(self, operation: str, path: str, broken: Callable[[], object] = lambda: None) -> int:
        """Come to a call; fail, where it is to; return the error that it is to end with, or 0."""
        self._scheduler.step(operation, path)
        trouble = self.trouble(operation, path)
        if trouble is None:
            return 0
        kind, number = trouble
        self._scheduler.note(f"  … {kind} {number}")
        if kind == "slow":
            self._scheduler.pause(float(number))
            return 0
        if kind == "fail":
            broken()
            raise error_of(number, f"{operation} {path}")
        return number  # its reply is lost

    def _end(self, late: int, operation: str, path: str) -> None:
        if late:
            raise error_of(late, f"{operation} {path}")

    def _parent(self, operation: str, path: str) -> tuple[SimDirectory, str]:
        above, _, name = path.rpartition("/")
        parent = self.node(above)
        if not isinstance(parent, SimDirectory):
            raise error_of(errno.ENOENT, f"{operation} {path}")
        return parent, name

    def _change(self, parent: SimDirectory, entries: dict[str, File | Directory | None]) -> None:
        parent.change(entries)
        parent.changed = self.time()
        parent.times.append(self._scheduler.now)

    def _write(self, file: SimFile, data: bytes, offset: int) -> None:
        file.pending.append((offset, data))
        file.now = file.now[:offset].ljust(offset, b"\0") + data + file.now[offset + len(data) :]
        file.changed, file.written = self.time(), self._scheduler.now


def _survivor(directory: Any, keeps: Keeps, before: float) -> SimDirectory:
    found = SimDirectory(directory.changed)
    directory.settle(before)
    for name, node in sorted(directory.entries(keeps).items()):
        if isinstance(node, Directory):
            found.now[name] = _survivor(node, keeps, before)
        elif isinstance(node, SimFile):
            content = node.content(keeps if node.written >= before else lambda _: True)
            found.now[name] = SimFile(node.changed, content)
    found.durable = dict(found.now)
    return found
