"""A bucket of objects, or the part of it below a prefix: S3, Azure, GCS, or the process's memory.

Names are keys; a directory is there while something is below it. Nothing is ever synced: a call
that has returned is durable.

Invariants:
  1. What is published appears by one conditional PUT: if nothing has the name, or in place of a bar
     that this process made, told by its ETag. So of many writers one wins, without a clock.
  2. A bar is an object of its own content. Nobody sees it: its name reads as one that nothing has.
     A writer that was about to publish there fails. The newest bar is its maker's alone.
  3. Bytes given to `prepare` stay in memory until they are published: others cannot take them
     away. To keep a dead writer from publishing, `revoke` bars the name that it would give.
Knows names and bytes; the client is obstore's.
"""

import errno
import secrets
from collections.abc import Iterator
from itertools import islice
from typing import Any

from ..errors import StoreError
from .base import Entry, Names
from .objects_client import api, check_conditions, client, errors_of, split_url
from .objects_files import FILES, Files, ObjectQueueKind, Opened, Upload

BAR_MAGIC = b"holdfast bars this name\n"
BAR_BYTES = len(BAR_MAGIC) + 33  # and a random number, so that each has an ETag of its own
ATTEMPTS = 100  # of a change that others race for

_bars: dict[str, str] = {}  # location of a name → ETag of the bar that this process made


class ObjectStore:
    """See `holdfast.stores.base.Store`."""

    can_link = False

    def __init__(self, url: str, named: str = "path") -> None:
        """Prepare; nothing is asked yet.

        Raises:
            OptionError: the URL is invalid, or obstore or its settings are.
        """
        self._scheme, self._bucket, self._prefix = split_url(url, named)
        self._client = client(self._scheme, self._bucket)
        self._base = f"{self._scheme}://{self._bucket}"
        self.location = f"{self._base}/{self._prefix}".rstrip("/")
        self._prepared: dict[str, bytes] = {}

    @property
    def vfs(self) -> Files:
        """The objects that are open."""
        return FILES

    def queue_kind(self, io: str, depth: int, block_bytes: int) -> ObjectQueueKind:
        """Return how objects are written and read; there is one way."""
        return ObjectQueueKind(depth)

    def sibling(self, name: str) -> "ObjectStore":
        """Return the store of another prefix beside this one."""
        above = self._prefix.rpartition("/")[0]
        return ObjectStore("/".join(part for part in (self._base, above, name) if part))

    def above(self) -> "ObjectStore":
        """Return the store of the prefix above; of a whole bucket, itself."""
        return self.sibling("")

    def below(self, name: str) -> "ObjectStore":
        """Return the store of a prefix below this one."""
        return ObjectStore(f"{self._base}/{self._key(name)}")

    def above_with(self, name: str, beginning: bytes) -> str:
        """Return the nearest prefix above with an object of this name that begins so."""
        above = self._prefix
        while above:
            above = above.rpartition("/")[0]
            key = f"{above}/{name}" if above else name
            found = self._read(key, len(beginning))
            if found == beginning:
                return f"{self._base}/{above}".rstrip("/")
        return ""

    def exists(self, name: str) -> bool:
        """Return whether an object has the name, or is below it."""
        return bool(self.kind(name))

    def create(self, name: str, *, direct: bool) -> int:
        """Begin an object; nobody sees it before it is synced."""
        return FILES.add(Upload(self._client, self._key(name), self._where(name)))

    def open(self, name: str, *, direct: bool) -> int:
        """Open an object for ranged reads."""
        size = self._head(name)["size"]
        return FILES.add(Opened(self._client, self._key(name), self._where(name), size))

    def sync_made(self, name: str) -> None:
        """Do nothing: what is there is durable."""

    def sync_path(self, name: str) -> None:
        """Do nothing: what is there is durable."""

    def sync_above(self, name: str) -> None:
        """Do nothing: what is there is durable."""

    def sync_directory(self, name: str = "") -> None:
        """Do nothing: what is there is durable."""

    def get(self, name: str, bytes_max: int) -> bytes:
        """Read a whole object; its size is checked before its bytes are asked for."""
        if name in self._prepared:
            return self._prepared[name]
        found = self._found(name)
        if found is None or self._is_bar(name, found):
            raise _error(errno.ENOENT, f"read {self._where(name)}: there is no such object")
        if found["size"] > bytes_max:
            text = f"it has {found['size']} bytes; expected at most {bytes_max}"
            raise _error(errno.EFBIG, f"read {self._where(name)}: {text}")
        return bytes(
            Opened(self._client, self._key(name), self._where(name), found["size"]).read(
                found["size"], 0
            )
        )

    def prepare(self, pending_name: str, data: bytes) -> None:
        """Keep the bytes until they get their name."""
        self._prepared[pending_name] = data

    def publish(self, pending_name: str, name: str) -> bool:
        """Put the object if nothing has its name, or a bar of this process.

        Raises:
            OptionError: the store does not keep to conditions.
        """
        check_conditions(self._client, self._base, f"{self._key('')}.probe".strip("/"))
        data = self._prepared.pop(pending_name)
        bar = _bars.pop(self._where(name), None)
        return self._put(name, data, "create" if bar is None else {"e_tag": bar})

    def replace(self, pending_name: str, name: str) -> None:
        """Put the object in place of what has its name; not of a bar."""
        data = self._prepared.pop(pending_name)
        for _ in range(ATTEMPTS):
            found = self._found(name)
            if found is not None and self._is_bar(name, found):
                raise _error(errno.EEXIST, f"replace {self._where(name)}: another job bars it")
            if self._put(name, data, _instead_of(found)):
                return
        raise self._contended("replace", name)

    rename = replace

    def claim(self, name: str, note: bytes) -> bool:
        """Put an object if nothing has its name."""
        return self._put(name, note, "create") or self._is_ours(name, note)

    def revoke(self, pending_name: str, name: str) -> None:
        """Bar a name, unless an object has it: that one was published before us."""
        self._bar(name, lambda found: found is None or self._is_bar(name, found))

    def reclaim(self, name: str) -> None:
        """Make a bar of this name ours, if there is one."""
        if self._where(name) not in _bars:
            self._bar(name, lambda found: found is not None and self._is_bar(name, found))

    def withdraw(self, name: str) -> None:
        """Put a bar in place of a published object: other writers come too late."""
        self._bar(name, lambda found: found is not None)

    def unbar(self, name: str) -> None:
        """Remove a bar."""
        found = self._found(name)
        if found is not None and self._is_bar(name, found):
            self._delete(name)
            _bars.pop(self._where(name), None)

    def link(self, name: str, second: str) -> None:
        """Refuse: there are no second names."""
        raise _error(errno.EOPNOTSUPP, f"link {self._where(name)}: objects have one name")

    def append(self, name: str, data: bytes) -> None:
        """Put an object again with more at its end; of two who do, none is lost."""
        for _ in range(ATTEMPTS):
            found = self._found(name)
            before = b"" if found is None else self._read(self._key(name), found["size"])
            if before and not before.endswith(b"\n"):
                before += b"\n"
            if self._put(name, before + data, _instead_of(found)):
                return
        raise self._contended("append to", name)

    def list(self, name: str = "") -> list[Entry]:
        """List what is below a name, sorted; a bar is not listed."""
        key = self._key(name)
        with errors_of("list", self._where(name)):
            found = api().list_with_delimiter(self._client, key or None)
        start = len(key) + 1 if key else 0
        entries = [Entry(path[start:], "directory", 0) for path in found["common_prefixes"]]
        barred = 0
        for item in found["objects"]:
            child = item["path"][start:]
            if self._is_bar(f"{name}/{child}" if name else child, item):
                barred += 1
            else:
                entries.append(Entry(child, "file", item["size"]))
        if not entries and not barred and key:
            raise _error(errno.ENOENT, f"list {self._where(name)}: nothing is there")
        return sorted(entries, key=lambda entry: entry.name)

    def scan(self) -> Iterator[str]:
        """Yield the names in the root."""
        yield from (entry.name for entry in self.list())

    def some(self, count: int) -> Names:
        """Return some names in the root, with their kinds."""
        return [(entry.name, entry.kind) for entry in islice(self.list(), count)]

    def kind(self, name: str) -> str:
        """Return "file", "directory" or empty: nothing has the name, or a bar."""
        if name in self._prepared:
            return "file"
        key = self._key(name)
        if not key:
            return "directory"
        if name and (found := self._found(name)) is not None:
            return "" if self._is_bar(name, found) else "file"
        return "directory" if next(self._all_below(key, 1), None) is not None else ""

    def modified_s(self, name: str) -> float:
        """Return when an object, or the youngest below a name, was put, by the store's clock."""
        if (found := self._found(name) if name else None) is not None:
            return float(found["last_modified"].timestamp())
        times = [item["last_modified"].timestamp() for item in self._all_below(self._key(name))]
        if not times:
            raise _error(errno.ENOENT, f"stat {self._where(name)}: nothing is there")
        return float(max(times))

    def stamp(self, name: str) -> object:
        """Return the ETag."""
        return self._head(name)["e_tag"]

    def forget_cached(self) -> None:
        """Do nothing: nothing is cached."""

    def free_bytes(self) -> int | None:
        """Return None: a store does not tell."""
        return None

    def remove(self, name: str) -> None:
        """Remove an object; no error when it is not there. A bar stays."""
        if self._prepared.pop(name, None) is None:
            found = self._found(name)
            if found is not None and not self._is_bar(name, found):
                self._delete(name)

    def remove_directory(self, name: str = "") -> bool:
        """Return whether nothing is below a name."""
        return next(self._all_below(self._key(name), 1), None) is None

    def _bar(self, name: str, may: Any) -> None:
        """Put a bar of our own, where what has the name lets us."""
        for _ in range(ATTEMPTS):
            found = self._found(name)
            if not may(found):
                return
            data = BAR_MAGIC + secrets.token_hex(16).encode() + b"\n"
            if self._put(name, data, _instead_of(found), is_bar=True):
                return
        raise self._contended("bar", name)

    def _put(self, name: str, data: bytes, mode: Any, *, is_bar: bool = False) -> bool:
        """Put an object on a condition; return False where that does not hold."""
        where, exceptions = self._where(name), api().exceptions
        with errors_of("write", where):
            try:
                made = api().put(
                    self._client, self._key(name), data, mode=mode, use_multipart=False
                )
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                # Ours may have come through before its answer was lost, and it was sent again.
                if not is_bar or not self._is_ours(name, data):
                    return False
                made = self._head(name)
            except FileNotFoundError:
                if isinstance(mode, str):
                    raise  # there is no bucket
                return False  # what was to be replaced is gone
        if is_bar:
            _bars[where] = made["e_tag"]
        return True

    def _is_ours(self, name: str, data: bytes) -> bool:
        return self._read(self._key(name), len(data) + 1) == data

    def _is_bar(self, name: str, found: Any) -> bool:
        is_alike = found["size"] == BAR_BYTES
        return is_alike and self._read(self._key(name), len(BAR_MAGIC)) == BAR_MAGIC

    def _read(self, key: str, size: int) -> bytes:
        """Return the first bytes of an object; none, where there is none."""
        try:
            with errors_of("read", f"{self._base}/{key}"):
                found = api().head(self._client, key)
                size = min(size, found["size"])
                return bytes(Opened(self._client, key, f"{self._base}/{key}", size).read(size, 0))
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise
            return b""

    def _found(self, name: str) -> Any:
        """Return what the store says of an object; None: there is none."""
        try:
            return self._head(name)
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise
            return None

    def _head(self, name: str) -> Any:
        with errors_of("find", self._where(name)):
            return api().head(self._client, self._key(name))

    def _delete(self, name: str) -> None:
        try:
            with errors_of("remove", self._where(name)):
                api().delete(self._client, self._key(name))
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise

    def _all_below(self, key: str, count: int = 1000) -> Iterator[Any]:
        with errors_of("list", f"{self._base}/{key}"):
            for part in api().list(self._client, key or None, chunk_size=count):
                yield from part

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}".strip("/") if name else self._prefix

    def _where(self, name: str) -> str:
        return f"{self._base}/{self._key(name)}"

    def _contended(self, what: str, name: str) -> StoreError:
        text = f"{what} {self._where(name)}: others changed it {ATTEMPTS} times meanwhile"
        return _error(errno.EAGAIN, text)


def _instead_of(found: Any) -> Any:
    return "create" if found is None else {"e_tag": found["e_tag"]}


def _error(number: int, text: str) -> StoreError:
    error = StoreError(text)
    error.errno = number
    return error
