"""A directory of HDFS, or of what speaks as its NameNode does. Knows names and bytes.

There are no links. A rename moves a directory as gladly as a file, so a directory at a pending name
would not keep it from being published, as it does on a disk. Therefore:

Invariants:
  1. What is prepared is the one file in a directory of its own, its box. It is published by one
     rename of that file, which fails if something has the name; so of many writers one wins.
  2. A bar is a file in the place of the box. Then nothing can be prepared there, and what was
     prepared there is gone: the rename finds nothing.
  3. Who removes a box never removes a bar: a rename over an empty directory moves no file.
To callers a box is a file with the pending name, and a bar a directory: as on a disk. The NameNode
has logged a change durably before it replies; bytes are durable as `hdfs_files.py` says.
"""

import contextlib
import errno
import secrets
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from ..errors import StoreError
from .base import Entry, Names, having_each, remove_each
from .hdfs_client import asked, client, split_url
from .hdfs_files import Opened, Upload
from .local_paths import GONE
from .remote_files import FILES, RUN_BYTES, Files, ThreadedQueueKind

BOX_END = ".holdfast-pending"  # of a box's name, and a bar's
FILE_IN_BOX = "it"
ATTEMPTS = 8  # of a bar, where a writer makes its box again: who does so does it once

T = TypeVar("T")


class _Found(NamedTuple):
    path: str
    kind: str
    size_bytes: int
    modified_ms: int


class HdfsStore:
    """See `holdfast.stores.base.Store`."""

    can_link = can_replace = False
    shows_pending = True
    run_bytes = RUN_BYTES
    having, remove_all = having_each, remove_each

    def __init__(self, url: str, named: str = "path") -> None:
        """Prepare; nothing is asked yet.

        Raises:
            OptionError: the URL is invalid, or hdfs-native or its settings are.
        """
        self._base, self._root = split_url(url, named)
        self._client = client(self._base)
        self.location = f"{self._base}{self._root or '/'}"

    @property
    def vfs(self) -> Files:
        """The files that are open."""
        return FILES

    def queue_kind(self, io: str, depth: int, block_bytes: int) -> ThreadedQueueKind:
        """Return how files are written and read; there is one way."""
        return ThreadedQueueKind(depth)

    def sibling(self, name: str) -> "HdfsStore":
        """Return the store of another directory beside this one."""
        return HdfsStore(f"{self._base}{self._root.rpartition('/')[0]}/{name}")

    def above(self) -> "HdfsStore":
        """Return the store of the directory above; of the whole file system, itself."""
        return self.sibling("")

    def below(self, name: str) -> "HdfsStore":
        """Return the store of a directory below this one."""
        return HdfsStore(f"{self._base}{self._path(name)}")

    def above_with(self, name: str, beginning: bytes) -> str:
        """Return the nearest directory above with a file of this name that begins so."""
        above = self._root
        while above:
            above = above.rpartition("/")[0]
            try:
                file = self._opened(f"{above}/{name}")
                if bytes(file.read(len(beginning), 0)) == beginning:
                    return f"{self._base}{above or '/'}"
            except StoreError as error:
                if error.errno not in (errno.ENOENT, errno.EISDIR, errno.EACCES):
                    raise
        return ""

    def start_read(self, name: str) -> None:
        """Do nothing: a file is read in one request, when it is opened."""

    def exists(self, name: str) -> bool:
        """Return whether anything of this name is there."""
        return self._found(name) is not None

    def create(self, name: str, *, direct: bool) -> int:
        """Open a new file for writing; make the directories above it."""
        writer = self._create("create", self._path(name))
        status = self._ask("find", name, self._client.get_file_info, self._path(name))
        return FILES.add_written(Upload(writer, self._where(name), status.blocksize))

    def open(self, name: str, *, direct: bool) -> int:
        """Open a file for ranged reads."""
        return FILES.add_read(self._opened(self._path(name)))

    def sync_made(self, name: str) -> None:
        """Do nothing: what is there is durable."""

    def sync_path(self, name: str) -> None:
        """Do nothing: what is there is durable."""

    def sync_above(self, name: str) -> None:
        """Do nothing: what is there is durable."""

    def sync_directory(self, name: str = "") -> None:
        """Do nothing: what is there is durable."""

    def get(self, name: str, bytes_max: int) -> bytes:
        """Read a whole file; its size is checked before its bytes are asked for."""
        file = self._opened(self._path(name))
        if file.size > bytes_max:
            text = f"it has {file.size} bytes; expected at most {bytes_max}"
            raise _error(errno.EFBIG, f"read {file.where}: {text}")
        return bytes(file.read(file.size, 0))

    def begin(self, pending_name: str, data: bytes) -> None:
        """Do nothing: it would be one request more."""

    def prepare(self, pending_name: str, data: bytes, name: str = "") -> None:
        """Write a file into a box of its own; its bytes are durable."""
        try:
            self._write("write", self._in_box(pending_name), data)
        except BaseException as error:
            if getattr(error, "errno", None) == errno.ENOTDIR:  # as a disk says it of a bar
                where = self._where(pending_name)
                raise _error(errno.EEXIST, f"write {where}: another job bars it") from error
            with contextlib.suppress(StoreError):
                self._remove_box(pending_name)
            raise

    def publish(self, pending_name: str, name: str) -> bool:
        """Rename: the name appears durably, or not at all."""
        try:
            self._move(pending_name, name, overwrite=False)
        except StoreError as error:
            # The client repeats a call whose reply was lost: then ours has the name.
            if error.errno == errno.EEXIST or (error.errno in GONE and self.exists(name)):
                return False
            raise
        return True

    def replace(self, pending_name: str, name: str) -> None:
        """Rename; what had the name is gone."""
        self._move(pending_name, name, overwrite=True)

    rename = replace

    def move(self, name: str, second: str, *, makes: bool = True) -> None:
        """Rename a file that is closed, or a directory."""
        if makes:
            above = self._path(second).rpartition("/")[0]
            self._ask("make", second, self._client.mkdirs, above, 0o755, True)
        stamp = self.stamp(name)
        try:
            self._ask("move", name, self._client.rename, self._path(name), self._path(second), True)
        except StoreError as error:
            # The client repeats a call whose reply was lost.
            if error.errno not in GONE or self.stamp(second) != stamp:
                raise

    def swap(self, pending_name: str, name: str, stamp: str) -> bool:
        """Refuse: a NameNode compares nothing when it renames."""
        raise _error(errno.EOPNOTSUPP, f"swap {self._where(name)}: HDFS renames without conditions")

    def claim(self, name: str, note: bytes) -> bool:
        """Create a file in one exclusive step; return False when it is there already."""
        try:
            writer = self._create("create", self._path(name))
        except StoreError as error:
            if error.errno != errno.EEXIST:
                raise
            return False
        with contextlib.suppress(StoreError):
            self._ask("write", name, writer.write, note)
        with contextlib.suppress(StoreError):
            self._ask("write", name, writer.close)
        return True

    def revoke(self, pending_name: str, name: str) -> None:
        """Put a bar where a box may be, or may yet be made, by another."""
        for _ in range(ATTEMPTS):
            try:
                writer = self._create("bar", self._box(pending_name))
            except StoreError as error:
                if error.errno != errno.EEXIST:
                    raise
                found = self._found(pending_name)
                if found is not None and found.kind == "directory":
                    return  # another's bar
                self._remove_box(pending_name)
                continue
            with contextlib.suppress(StoreError):  # it bars as well while it is open
                self._ask("bar", pending_name, writer.close)
            return
        text = f"bar {self._where(pending_name)}: other processes created it again"
        raise _error(errno.EEXIST, f"{text}, {ATTEMPTS} times")

    def withdraw(self, name: str) -> None:
        """Remove a file: what is pending is revoked by its own name."""
        self.remove(name)

    def reclaim(self, name: str) -> None:
        """Do nothing: names that are pending are each of one save."""

    unbar = reclaim

    def link(self, name: str, second: str) -> None:
        """Refuse: there are no second names."""
        raise _error(errno.EOPNOTSUPP, f"link {self._where(name)}: files of HDFS have one name")

    def append(self, name: str, data: bytes) -> None:
        """Add lines to a file; the rest of a torn line stands alone."""
        try:
            file = self._opened(self._path(name))
            if file.size and bytes(file.read(1, file.size - 1)) != b"\n":
                data = b"\n" + data
            writer = self._ask("append to", name, self._client.append, self._path(name))
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise
            writer = self._create("append to", self._path(name))
        self._ask("append to", name, writer.write, data)
        self._ask("append to", name, writer.close)

    def list(self, name: str = "") -> list[Entry]:
        """List a directory, sorted by name."""
        path = self._path(name)
        found = self._ask("list", name, lambda: [*self._client.list_status(path)])
        if len(found) == 1 and found[0].path == path and not found[0].isdir:
            raise _error(errno.ENOTDIR, f"list {self._where(name)}: it is not a directory")
        entries = [_entry(status) for status in found]
        return sorted(entries, key=lambda entry: entry.name)

    def scan(self) -> Iterator[str]:
        """Yield the names in the root."""
        yield from (entry.name for entry in self.list())

    def some(self, count: int) -> Names:
        """Return some names in the root, with their kinds."""
        return [(entry.name, entry.kind) for entry in islice(self.list(), count)]

    def kind(self, name: str) -> str:
        """Return "file" or "directory"; empty: it is not there."""
        found = self._found(name)
        return "" if found is None else found.kind

    def modified_s(self, name: str) -> float:
        """Return when something was last modified, by the NameNode's clock."""
        return self._there(name).modified_ms / 1000

    def stamp(self, name: str) -> str:
        """Return size and time, in milliseconds: the client tells no more of a file."""
        found = self._there(name)
        return f"{found.size_bytes} {found.modified_ms}"

    def forget_cached(self) -> None:
        """Do nothing: nothing is cached here."""

    def free_bytes(self) -> int | None:
        """Return None: the client does not tell."""
        return None

    def remove(self, name: str) -> None:
        """Remove a file; no error when it is not there."""
        if not self._ask("remove", name, self._client.delete, self._path(name), False):
            found = self._found(name)
            if found is not None and found.kind == "file":
                self._remove_box(name)

    def remove_directory(self, name: str = "") -> bool:
        """Remove a directory when it is empty, or a bar."""
        found = self._found(name)
        if found is None or found.kind != "directory":
            return True
        try:
            self._ask("remove", name, self._client.delete, found.path, False)
        except StoreError as error:
            if error.errno == errno.ENOTEMPTY:
                return False
            raise
        return True

    def _move(self, pending_name: str, name: str, *, overwrite: bool) -> None:
        """Rename what is prepared, and remove its box."""
        source, target = self._in_box(pending_name), self._path(name)
        try:
            asked("publish", self._where(name), self._client.rename, source, target, overwrite)
        except StoreError as error:
            if error.errno in (errno.EEXIST, errno.EISDIR):  # else it is gone, or nobody can tell
                with contextlib.suppress(StoreError):
                    self._remove_box(pending_name)
            raise
        with contextlib.suppress(StoreError):  # an empty one is not prepared, nor in the way
            self._ask("remove", pending_name, self._client.delete, self._box(pending_name), False)

    def _remove_box(self, name: str) -> None:
        """Remove what is prepared, and no bar."""
        gone = self._box(f"{name}.{secrets.token_hex(8)}")
        self._ask("remove", name, self._client.mkdirs, gone)
        try:
            self._ask("remove", name, self._client.rename, self._box(name), gone, True)
        except StoreError as error:
            if error.errno not in (errno.ENOENT, errno.EISDIR):  # there is none; it is a bar
                raise
        finally:
            self._ask("remove", name, self._client.delete, gone, True)

    def _write(self, what: str, path: str, data: bytes) -> None:
        """Write a new file of one block or many, durably."""
        writer = self._create(what, path)
        where = f"{self._base}{path}"
        status = asked("find", where, self._client.get_file_info, path)
        file = Upload(writer, where, status.blocksize)
        file.write(memoryview(data), 0)
        file.finish()

    def _create(self, what: str, path: str) -> Any:
        from hdfs_native import WriteOptions

        options = WriteOptions(overwrite=False, create_parent=True)
        return asked(what, f"{self._base}{path}", self._client.create, path, options)

    def _opened(self, path: str) -> Opened:
        where = f"{self._base}{path}"
        reader = asked("read", where, self._client.read, path)
        return Opened(reader, where, len(reader))

    def _there(self, name: str) -> _Found:
        if (found := self._found(name)) is None:
            raise _error(errno.ENOENT, f"find {self._where(name)}: nothing is there")
        return found

    def _found(self, name: str) -> _Found | None:
        """Return what has a name, or is prepared under it, or bars it; None: nothing."""
        for path in (self._path(name), *([self._box(name)] if name else [])):
            try:
                status = self._ask("find", name, self._client.get_file_info, path)
            except StoreError as error:
                if error.errno not in GONE:
                    raise
                continue
            entry = _entry(status)
            return _Found(path, entry.kind, entry.size_bytes, status.modification_time)
        return None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root or "/"

    def _box(self, name: str) -> str:
        return f"{self._path(name)}{BOX_END}"

    def _in_box(self, name: str) -> str:
        return f"{self._box(name)}/{FILE_IN_BOX}"

    def _where(self, name: str) -> str:
        return f"{self._base}{self._path(name)}"

    def _ask(self, what: str, name: str, call: Callable[..., T], *args: Any) -> T:
        return asked(what, self._where(name), call, *args)


def _entry(status: Any) -> Entry:
    """Return what a caller sees: a box as a file, a bar as a directory."""
    name, is_directory = status.path.rpartition("/")[2], status.isdir
    if name.endswith(BOX_END):
        return Entry(name.removesuffix(BOX_END), "file" if is_directory else "directory", 0)
    kind = "directory" if is_directory else "file"
    return Entry(name, kind, 0 if is_directory else status.length)


def _error(number: int, text: str) -> StoreError:
    error = StoreError(text)
    error.errno = number
    return error
