"""A bucket of objects, or the part of it below a prefix: S3, Azure, GCS, or the process's memory.

Names are keys; a directory is there while something is below it. Nothing is ever synced: a call
that has returned is durable.

Invariants:
  1. A bar is an object of its own content. Nobody sees it: its name reads as one that nothing has.
     The newest bar of a name is its maker's alone.
  2. What is published appears by one conditional PUT, in place of a bar that this process put there
     before, told by its ETag. So of many writers one wins, without a clock.
  3. Bytes given to `prepare` stay in memory until they are published: others cannot take them
     away. To keep a dead writer from publishing, `revoke` puts another bar in place of its own. A
     request that is still on its way then fails, however late it comes, and also when that bar
     has been removed.
Knows names and bytes; the client is obstore's.
"""

import contextlib
import errno
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from ..errors import StoreError
from . import objects_client as requests
from .base import Entry, Names
from .objects_bar import BAR_BYTES, BAR_MAGIC, SeenBars, new_bar
from .objects_client import api, check_answers, check_conditions, connect, head, instead_of, this
from .objects_errors import contended, errors_of, if_there, is_lock, store_error
from .objects_files import ATTEMPTS, Opened, Upload, first_bytes
from .remote_files import FILES, RUN_BYTES, Files, ThreadedQueueKind, short_read

HEADS_PER_PAGE = 8  # that take as long as one listed page

_seen = SeenBars()
_bars: dict[str, Any] = {}  # location of a name → the bar that this process made, as `this` says


class ObjectStore:
    """See `holdfast.stores.base.Store`."""

    can_link, can_replace, shows_pending = False, True, False
    run_bytes = RUN_BYTES

    def __init__(self, url: str, named: str = "path", limit_s: float | None = None) -> None:
        """Prepare; nothing is asked yet.

        Args:
            limit_s: how long a request may take at most, with its retries; see `client`.

        Raises:
            OptionError: the URL is invalid, or obstore or its settings are.
        """
        made = connect(url, named, limit_s)
        self._scheme, self._bucket, self._prefix, self._client, self._traffic = made
        self._limit_s = limit_s
        self._base = f"{self._scheme}://{self._bucket}"
        self.location = f"{self._base}/{self._prefix}".rstrip("/")
        self._prepared: dict[str, bytes] = {}
        self._reserved: set[str] = set()  # prepared for a name that is barred, or has an object

    @property
    def vfs(self) -> Files:
        """The objects that are open."""
        return FILES

    def queue_kind(self, io: str, depth: int, block_bytes: int) -> ThreadedQueueKind:
        """Return how objects are written and read; there is one way."""
        return ThreadedQueueKind(self._traffic.parts_in_flight, self._traffic.part_bytes, True)

    def sibling(self, name: str) -> "ObjectStore":
        """Return the store of another prefix beside this one."""
        above = self._prefix.rpartition("/")[0]
        url = "/".join(part for part in (self._base, above, name) if part)
        return ObjectStore(url, limit_s=self._limit_s)

    def above(self) -> "ObjectStore":
        """Return the store of the prefix above; of a whole bucket, itself."""
        return self.sibling("")

    def below(self, name: str) -> "ObjectStore":
        """Return the store of a prefix below this one."""
        return ObjectStore(f"{self._base}/{self._key(name)}", limit_s=self._limit_s)

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

    def having(self, names: Sequence[str], file: str) -> list[str]:
        """List all objects where that takes less than a look at each: many may hold only a bar."""
        files = {self._key(f"{name}/{file}"): f"{name}/{file}" for name in names}
        with errors_of("list", self.location):
            pages_max = 1 + len(names) // HEADS_PER_PAGE
            found, is_all = requests.list_some(self._client, self._prefix, files, pages_max)
        there = {files[key] for key, item in found.items() if not self._is_bar(files[key], item)}
        if not is_all:
            there.update(filter(self.exists, [files[key] for key in files.keys() - found.keys()]))
        return [name for name in names if f"{name}/{file}" in there]

    def create(self, name: str, *, direct: bool) -> int:
        """Begin an object; nobody sees it before it is synced."""
        where = self._where(name)
        return FILES.add_written(Upload(self._client, self._key(name), where, self._traffic))

    def open(self, name: str, *, direct: bool) -> int:
        """Open an object for ranged reads."""
        size = self._head(name)["size"]
        return FILES.add_read(Opened(self._client, self._key(name), self._where(name), size))

    def sync_made(self, name: str = "") -> None:
        """Do nothing: what is there is durable, and is read when it is asked for."""

    sync_path = sync_above = sync_directory = start_read = sync_made

    def get(self, name: str, bytes_max: int) -> bytes:
        """Read a whole object by one request: another may be put in its place meanwhile."""
        if name in self._prepared:
            return self._prepared[name]
        where = self._where(name)
        with errors_of("read", where):
            size, data = requests.get(self._client, self._key(name), bytes_max)
        if size > bytes_max:
            text = f"read {where}: {size} bytes; at most {bytes_max} expected"
            raise store_error(errno.EFBIG, text)
        if len(data) != size:
            raise short_read(where, size, 0, len(data))
        if data.startswith(BAR_MAGIC):
            raise self._missing("read", name)
        return data

    def begin(self, pending_name: str, data: bytes) -> None:
        """Do nothing: `prepare` makes no file."""

    def prepare(self, pending_name: str, data: bytes, name: str = "") -> None:
        """Keep the bytes until they get their name; bar that, if nothing has it.

        Raises:
            OptionError: the store does not keep to conditions.
            StoreError: another process bars it.
        """
        self._prepared[pending_name] = data
        if name and self._reserve(name):
            self._reserved.add(pending_name)

    def publish(self, pending_name: str, name: str) -> bool:
        """Put the object in place of the bar that `prepare` made; one made now is too late.

        Raises:
            OptionError: as `prepare`, if that was not told the name.
        """
        data = self._prepared.pop(pending_name)
        try:
            has_bar = pending_name in self._reserved or self._reserve(name)
            mode = _bars.pop(self._where(name), None) if has_bar else "create"
        except StoreError as error:
            if error.errno != errno.EEXIST:
                raise
            return False
        return mode is not None and self._put(name, data, mode)

    def replace(self, pending_name: str, name: str) -> None:
        """Put the object in place of what has its name; not of a bar."""
        data = self._prepared.pop(pending_name)
        for _ in range(ATTEMPTS):
            found = self._found(name)
            if found is not None and self._is_bar(name, found):
                raise store_error(errno.EEXIST, f"replace {self._where(name)}: another job bars it")
            if self._put(name, data, instead_of(found)):
                return
        raise contended("replace", self._where(name))

    rename = replace

    def swap(self, pending_name: str, name: str, stamp: str) -> bool:
        """Put the object in place of the one that has this ETag."""
        return self._put(name, self._prepared.pop(pending_name), json.loads(stamp))

    def claim(self, name: str, note: bytes) -> bool:
        """Put an object if nothing has its name."""
        return self._put(name, note, "create") or self._is_ours(name, note)

    def revoke(self, pending_name: str, name: str) -> None:
        """Bar a name, unless an object has it: that one was published before us."""
        self._bar(name, lambda found: found is None or self._is_bar(name, found))

    def reclaim(self, name: str) -> None:
        """Make a bar of this name ours, if there is one."""
        held = _bars.get(self._where(name))
        self._bar(name, lambda found: found and this(found) != held and self._is_bar(name, found))

    def unbar(self, name: str) -> None:
        """Remove a bar."""
        found = self._found(name)
        if found is not None and self._is_bar(name, found):
            self._delete(name)
            _bars.pop(self._where(name), None)

    def link(self, name: str, second: str, *, makes: bool = True) -> None:
        """Refuse: there are no second names."""
        raise store_error(errno.EOPNOTSUPP, f"link {self._where(name)}: objects have one name")

    move = link

    def append(self, name: str, data: bytes) -> None:
        """Put an object again with more at its end; of two who do, none is lost or twice there."""
        whole = b""
        for _ in range(ATTEMPTS):
            found = self._found(name)
            before = b"" if found is None else self._read(self._key(name), found["size"])
            if whole and before.startswith(whole):
                return  # ours came through before its answer was lost, and it was sent again
            whole = before + b"\n" * (before[-1:] not in (b"", b"\n")) + data
            if self._put(name, whole, instead_of(found)):
                return
        raise contended("append to", self._where(name))

    def list(self, name: str = "") -> list[Entry]:
        """List what is below a name, sorted; without bars, and the object that some keep for it."""
        key = self._key(name)
        with errors_of("list", self._where(name)):
            found = requests.repeated(lambda: api().list_with_delimiter(self._client, key or None))
        start = len(key) + 1 if key else 0
        entries = [Entry(path[start:], "directory", 0) for path in found["common_prefixes"]]
        hidden = 0
        for item in found["objects"]:
            child = item["path"][start:]
            if not child or self._is_bar(f"{name}/{child}" if name else child, item):
                hidden += 1
            else:
                entries.append(Entry(child, "file", item["size"], item["e_tag"] or ""))
        if not entries and not hidden:
            check_answers(self._client, self._base)
        if not entries and not hidden and key:
            raise store_error(errno.ENOENT, f"list {self._where(name)}: nothing is there")
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
        return "directory" if self._is_any_below(key) else ""

    def modified_s(self, name: str) -> float:
        """Return when an object, or the youngest below a name, was put, by the store's clock."""
        if (found := self._found(name) if name else None) is not None:
            return float(found["last_modified"].timestamp())
        with errors_of("list", self._where(name)):
            below = requests.list_below(self._client, self._key(name))
        times = [item["last_modified"].timestamp() for item in below]
        if not times:
            raise store_error(errno.ENOENT, f"stat {self._where(name)}: nothing is there")
        return float(max(times))

    def stamp(self, name: str) -> str:
        """Return the ETag, or what the store has for that, as JSON."""
        found = self._head(name)
        if self._is_bar(name, found):
            raise self._missing("find", name)
        return json.dumps(this(found))

    def forget_cached(self) -> None:
        """Do nothing: nothing is cached."""

    def free_bytes(self) -> int | None:
        """Return None: a store does not tell."""
        return None

    def remove(self, name: str) -> None:
        """Remove an object; no error when it is not there. A bar stays."""
        is_here = self._prepared.pop(name, None) is not None
        if not is_here and (found := self._found(name)) and not self._is_bar(name, found):
            self._delete(name)

    def remove_all(self, names: Sequence[str]) -> None:
        """Remove data files, which are no bars, by one request for many where a store has that."""
        with contextlib.suppress(StoreError), errors_of("delete", self.location):
            if names:
                api().delete(self._client, [*map(self._key, names)])
            return
        for name in names:  # a lock, or a right that is missing: the first that stays says why
            self.remove(name)

    def remove_directory(self, name: str = "") -> bool:
        """Return whether nothing is below a name."""
        return not self._is_any_below(self._key(name))

    def _reserve(self, name: str) -> bool:
        """Bar a name that nothing has, unless this process does already.

        Returns:
            False: nothing can be replaced here, a bar neither.
        """
        if not check_conditions(self._client, self._base, f"{self._key('')}.probe".strip("/")):
            return False
        if self._where(name) in _bars or self._put(name, new_bar(), "create", is_bar=True):
            return True
        if (found := self._found(name)) is None or self._is_bar(name, found):
            text = "another save or job bars it. Let one job save to each path"
            raise store_error(errno.EEXIST, f"write {self._where(name)}: {text}")
        return True

    def _bar(self, name: str, may: Any) -> None:
        """Put a bar of our own, where what has the name lets us."""
        for _ in range(ATTEMPTS):
            found = self._found(name)
            if not may(found):
                return
            if self._put(name, new_bar(), instead_of(found), is_bar=True):
                return
        raise contended("bar", self._where(name))

    def _put(self, name: str, data: bytes, mode: Any, *, is_bar: bool = False) -> bool:
        """Put an object on a condition; return False where that does not hold."""
        where, exceptions = self._where(name), api().exceptions
        with errors_of("write", where):
            try:
                made = requests.put(self._client, self._key(name), data, mode)
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
                if is_lock(error):
                    raise
                # Ours may have come through before its answer was lost, and it was sent again.
                if not is_bar or not self._is_ours(name, data):
                    return False
                made = self._head(name)
            except FileNotFoundError:
                if isinstance(mode, str):
                    raise  # there is no bucket
                return False  # what was to be replaced is gone
        if is_bar:
            _bars[where] = this(made)
            _seen.add(where, this(made))
        return True

    def _is_ours(self, name: str, data: bytes) -> bool:
        return self._read(self._key(name), len(data) + 1) == data

    def _is_bar(self, name: str, found: Any) -> bool:
        return _seen.has(self._where(name), found, lambda: self._content(name))

    def _content(self, name: str) -> bytes:
        with errors_of("read", self._where(name)):
            return requests.get(self._client, self._key(name), BAR_BYTES)[1]

    def _read(self, key: str, size: int) -> bytes:
        """Return the first bytes of an object; none, where there is none."""
        return first_bytes(self._client, key, f"{self._base}/{key}", size)

    def _found(self, name: str) -> Any:
        """Return what the store says of an object; None: there is none."""
        return if_there(lambda: self._head(name))

    def _head(self, name: str) -> Any:
        with errors_of("find", self._where(name)):
            return head(self._client, self._key(name))

    def _delete(self, name: str) -> None:
        try:
            with errors_of("remove", self._where(name)):
                requests.repeated(lambda: api().delete(self._client, self._key(name)))
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise

    def _is_any_below(self, key: str) -> bool:
        with errors_of("list", f"{self._base}/{key}"):
            return requests.is_any_below(self._client, key)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}".strip("/") if name else self._prefix

    def _where(self, name: str) -> str:
        return f"{self._base}/{self._key(name)}"

    def _missing(self, what: str, name: str) -> StoreError:
        return store_error(errno.ENOENT, f"{what} {self._where(name)}: there is no such object")
