"""A simulated object store: the calls of obstore that `holdfast.stores.objects` makes.

Promises what S3, Azure and GCS do: a PUT is whole or not there, on a condition or not; what has
been put is read and listed at once; ETags are of the content. Like seaweedfs, it may go on listing
a directory when no object is left in it. Every request is a step of the scheduler, and may fail, be
late, be done with its answer lost, be sent again by the client, or be given up by it and arrive
much later. It is seen as a tree, as `disk.py` is: bars are not there.
"""

import contextlib
import errno
import hashlib
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

from crash.disk_model import Directory, File
from holdfast.stores.objects_bar import BAR_MAGIC

from .actors import Process, Scheduler
from .disk import SimDirectory, SimFile, Trouble

BASE = "s3://b"
ARRIVING = f"{BASE}/arriving.over"  # where the oracle finds a MANIFEST that is about to be put
Answer = TypeVar("Answer")
Said = dict[str, Any]  # of one object
Part, Keys = list[Said], list[str]
Listed = dict[str, list[Any]]


class AlreadyExistsError(Exception):
    """As obstore's."""


class PreconditionError(Exception):
    """As obstore's."""


class Bucket:
    """A bucket for one world; see `disk.Disk` for its attributes."""

    exceptions = SimpleNamespace(
        AlreadyExistsError=AlreadyExistsError, PreconditionError=PreconditionError
    )
    has_gap = True

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.clock_off_s = 1.7e9
        self.trouble: Trouble = lambda operation, path: None
        self.watch: Callable[[str, str, str], None] = lambda operation, path, second: None
        self.free_bytes = 1 << 40
        self.link_began = 0.0
        self.keeps_folders = False  # it lists them when the last object in them is gone
        self._folders: set[str] = set()
        self.objects: dict[str, SimFile] = {}
        self.makers: dict[str, str] = {}  # the process that has put each
        self._arriving = SimFile(0.0)
        self._tree: SimDirectory | None = None

    def node(self, path: str) -> File | Directory | None:
        """Find what is at a path, without a request."""
        if path == ARRIVING:
            return self._arriving
        if self._tree is None:
            self._tree = self._planted()
        found: File | Directory | None = self._tree
        for part in path[len(BASE) + 1 :].split("/"):
            if not isinstance(found, Directory):
                return None
            found = found.now.get(part)
        return found

    def cut(self, rng: random.Random) -> None:
        """Leave it as it is: its power is not ours."""

    # What follows are the requests.

    def put(
        self,
        client: object,
        key: str,
        given: bytes | list[memoryview],
        *,
        mode: Any = "overwrite",
        use_multipart: bool,
    ) -> Said:
        """Put an object, on a condition."""
        began, data = self._scheduler.now, b"".join([given] if isinstance(given, bytes) else given)
        kind = _kind(key, data)
        if kind == "publish" and isinstance(self.node(f"{BASE}/{key}"), SimFile):
            kind = "swap"
        return self._ask(kind, key, lambda: self._put(key, data, mode, began))

    def head(self, client: object, key: str) -> Said:
        """Say what there is of an object."""
        return self._ask("head", key, lambda: self._said(key))

    def get(self, client: object, key: str) -> Any:
        """Read a whole one."""

        def read() -> Any:
            data = self._found(key).now
            return SimpleNamespace(meta=self._said(key), bytes=lambda: data)

        return self._ask("get", key, read)

    def get_range(self, client: object, key: str, *, start: int, length: int) -> bytes:
        """Read a part of one."""
        return self._ask("get", key, lambda: self._found(key).now[start : start + length])

    def delete(self, client: object, key: str | Keys) -> None:
        """Remove an object, or many by one request; no error where there is none."""
        keys = [key] if isinstance(key, str) else key
        self._ask("delete", keys[0], lambda: [*map(self._delete, keys)])

    def list(self, client: object, prefix: str | None, *, chunk_size: int = 0) -> Iterator[Part]:
        """List all that is below a prefix, by one request."""
        below = f"{prefix}/" if prefix else ""
        yield self._ask("list", below, lambda: [*map(self._said, self._below(below))])

    def list_with_delimiter(self, client: object, prefix: str | None) -> Listed:
        """List what is right below a prefix."""
        below = f"{prefix}/" if prefix else ""

        def look() -> Listed:
            keys = self._below(below)
            kept = [f for f in self._folders if self.keeps_folders and f.startswith(below)]
            paths = [path[len(below) :] for path in (*keys, *kept)]
            names = {path.partition("/")[0] for path in paths if "/" in path}
            objects = [self._said(key) for key in keys if "/" not in key[len(below) :]]
            return {"common_prefixes": [below + n for n in sorted(names)], "objects": objects}

        return self._ask("list", below, look)

    def _ask(self, operation: str, key: str, act: Callable[[], Answer]) -> Answer:
        """Send a request: time passes, it may go wrong, then it is done."""
        scheduler = self._scheduler
        scheduler.step(operation, key)
        trouble = self.trouble(operation, key)
        if trouble is None:
            return act()
        kind, number = trouble
        scheduler.note(f"  … {kind} {number}")
        if kind == "slow":
            scheduler.pause(float(number))
            return act()
        if kind == "fail":
            raise Exception("QuotaExceeded" if number == errno.ENOSPC else "503 SlowDown")
        if kind == "again":
            with contextlib.suppress(Exception):
                act()
            return act()
        if kind == "lost":
            with contextlib.suppress(Exception):
                act()
        else:
            self._send_late(act, float(number))
        raise Exception("the request timed out")

    def _send_late(self, act: Callable[[], object], seconds: float) -> None:
        """Let a request arrive when its client has given up, or is dead."""
        scheduler = self._scheduler
        sender = scheduler.current.process
        wire = Process(f"a request of {sender.name}", sender.job, sender.rank)
        wire.is_plain, wire.in_call, wire.tidied_at = (
            sender.is_plain,
            sender.in_call,
            sender.tidied_at,
        )
        wire.forced, wire.retired = sender.forced, sender.retired
        wire.sent_s = scheduler.now

        def arrive() -> None:
            scheduler.pause(seconds)
            with contextlib.suppress(Exception):
                act()

        scheduler.start(wire, arrive)

    def _put(self, key: str, data: bytes, mode: Any, began: float) -> Said:
        old, where = self.objects.get(key), f"{BASE}/{key}"
        if mode == "create" and old is not None:
            raise AlreadyExistsError(key)
        if isinstance(mode, dict):
            if old is None:
                raise FileNotFoundError(key)
            if mode["e_tag"] != _e_tag(old):
                raise PreconditionError(key)
        if key.endswith(".hf") and not self.free_bytes:
            raise Exception("QuotaExceeded")
        is_seen = old is not None and not _is_bar(old.now)
        if key.endswith("/MANIFEST"):
            if not _is_bar(data):
                self._arriving, self.link_began = SimFile(0.0, data), began
                self.watch("rename before" if is_seen else "link", ARRIVING, where)
            elif is_seen:
                self.watch("unlink", where, "")
        file = SimFile(self._scheduler.now + self.clock_off_s, data)
        file.written = self._scheduler.now
        self.objects[key], self._tree = file, None
        self._folders |= {key[: at + 1] for at, letter in enumerate(key) if letter == "/"}
        self.makers[key] = self._scheduler.current.process.name
        self.watch("rename", "", where)
        return {"e_tag": _e_tag(file), "version": None}

    def _delete(self, key: str) -> None:
        if (old := self.objects.get(key)) is None:
            return
        if not _is_bar(old.now):
            self.watch("unlink", f"{BASE}/{key}", "")
        self.objects.pop(key, None)
        self._tree = None

    def _found(self, key: str) -> SimFile:
        if (found := self.objects.get(key)) is None:
            raise FileNotFoundError(key)
        return found

    def _said(self, key: str) -> Said:
        found = self._found(key)
        return {
            "path": key,
            "size": len(found.now),
            "e_tag": _e_tag(found),
            "version": None,
            "last_modified": SimpleNamespace(timestamp=lambda: found.changed),
        }

    def _below(self, below: str) -> Keys:
        return sorted(key for key in self.objects if key.startswith(below))

    def _planted(self) -> SimDirectory:
        """Make the tree that readers see; all of it is durable."""
        root = SimDirectory(0.0)
        for key, file in self.objects.items():
            if _is_bar(file.now):
                continue
            place, (*above, name) = root, key.split("/")
            for part in above:
                place = place.now.setdefault(part, SimDirectory(0.0))  # type: ignore[assignment]
                place.durable = place.now
            place.now[name] = file
        root.durable = root.now
        return root


def _kind(key: str, data: bytes) -> str:
    """Name a PUT by what it does, for upsets that wait for one."""
    if _is_bar(data):
        return "bar"
    return {"MANIFEST": "publish", "over": "lock", "hf": "put"}.get(
        key.rpartition("/")[2].rpartition(".")[2], "put small"
    )


def _is_bar(data: bytes) -> bool:
    return data.startswith(BAR_MAGIC)


def _e_tag(file: SimFile) -> str:
    return hashlib.md5(file.now, usedforsecurity=False).hexdigest()
