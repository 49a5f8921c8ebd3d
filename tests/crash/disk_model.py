"""A small model of a POSIX file system under power loss: what a log of calls may leave on the disk.

Knows nothing of checkpoints. A file's bytes are durable up to its last fsync; an entry of a
directory (create, link, unlink, rename, mkdir, rmdir) is durable after an fsync of that directory
and not before, whatever else was synced. Everything else may or may not have reached the disk, in
any order, writes in pieces of 512 bytes.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SECTOR_BYTES = 512  # what a disk writes whole or not at all

Call = tuple[str, str, str, int, bytes]  # operation, path, second path, number, bytes: `Vfs.trace`
Tree = dict[str, "bytes | Tree"]  # a directory as it is found after a crash
Keeps = Callable[[str], bool]  # asked of each effect that was not synced: "entry" or "bytes"


@dataclass(slots=True, eq=False)
class File:
    """Synced bytes, and the changes since: (offset, bytes) written, or (size, None) set."""

    durable: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def content(self, keeps: Keeps) -> bytes:
        """Return what a crash leaves of the file."""
        found = bytearray(self.durable)
        for number, data in self.pending:
            if data is None:
                if keeps("bytes"):
                    found = found[:number].ljust(number, b"\0")
                continue
            if keeps("bytes"):  # the size alone may have reached the disk
                found = found.ljust(number + len(data), b"\0")
            for start in range(0, len(data), SECTOR_BYTES):
                if keeps("bytes"):
                    part = data[start : start + SECTOR_BYTES]
                    found = found.ljust(number + start + len(part), b"\0")
                    found[number + start : number + start + len(part)] = part
        return bytes(found)

    def sync(self) -> None:
        """Make all changes durable."""
        self.durable, self.pending = self.content(lambda _: True), []


@dataclass(slots=True, eq=False)
class Directory:
    """Synced entries, the changes since (each atomic: names and their new nodes), the present."""

    durable: "dict[str, File | Directory]" = field(default_factory=dict)
    pending: "list[dict[str, File | Directory | None]]" = field(default_factory=list)
    now: "dict[str, File | Directory]" = field(default_factory=dict)

    def change(self, entries: "dict[str, File | Directory | None]") -> None:
        """Change entries in one atomic step."""
        self.pending.append(entries)
        _apply(self.now, entries)

    def tree(self, keeps: Keeps) -> Tree:
        """Return what a crash leaves of the directory and everything below it."""
        return {
            name: node.content(keeps) if isinstance(node, File) else node.tree(keeps)
            for name, node in sorted(self.entries(keeps).items())
        }

    def entries(self, keeps: Keeps) -> "dict[str, File | Directory]":
        """Return what a crash leaves of its entries."""
        entries = dict(self.durable)
        for change in self.pending:
            if keeps("entry"):
                _apply(entries, change)
        return entries

    def sync(self) -> None:
        """Make all entries durable; what they stand for is not touched."""
        self.durable, self.pending = dict(self.now), []


def _apply(
    entries: "dict[str, File | Directory]", change: "dict[str, File | Directory | None]"
) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Disk:
    """The state of everything below one directory, which itself is durable."""

    def __init__(self, base: Path) -> None:
        self._base, self._root = base, Directory()

    def tree(self, keeps: Keeps) -> Tree:
        """Return what a crash at this moment leaves."""
        return self._root.tree(keeps)

    def apply(self, call: Call) -> None:
        """Carry out one logged call; those outside the base are not of interest."""
        operation, path, second, number, data = call
        if not Path(path).is_relative_to(self._base):
            return
        if operation in ("sync", "sync_directory", "write", "allocate", "truncate"):
            self._change_node(operation, self._node(path), number, data)
            return
        parent, name = self._parent(path)
        if operation == "create":
            parent.change({name: File()})
        elif operation == "make_directory":
            if name not in parent.now:  # it is logged, too, when it was there
                parent.change({name: Directory()})
        elif operation in ("unlink", "remove_directory"):
            parent.change({name: None})
        elif operation in ("link", "rename"):
            target, target_name = self._parent(second)
            node = parent.now[name]
            gone: dict[str, File | Directory | None] = {name: None} if operation == "rename" else {}
            if target is parent:
                parent.change({**gone, target_name: node})
            else:  # two directories: a crash may leave both names, or none
                target.change({target_name: node})
                parent.change(gone)
        else:
            raise ValueError(f"the model does not know the call {operation}")

    def _change_node(
        self, operation: str, node: File | Directory | None, number: int, data: bytes
    ) -> None:
        if operation in ("sync", "sync_directory"):
            if node is not None:
                node.sync()
        elif isinstance(node, File):
            if operation == "allocate":
                number = max(number, len(node.content(lambda _: True)))
            node.pending.append((number, data if operation == "write" else None))

    def _node(self, path: str) -> File | Directory | None:
        node: File | Directory | None = self._root
        for part in Path(path).relative_to(self._base).parts:
            node = node.now.get(part) if isinstance(node, Directory) else None
        return node

    def _parent(self, path: str) -> tuple[Directory, str]:
        parent = self._node(str(Path(path).parent))
        assert isinstance(parent, Directory), f"{path} lies in no directory"
        return parent, Path(path).name


@dataclass(frozen=True, slots=True)
class CrashState:
    """What a crash after ``position`` calls of a log may leave; ``kind`` says what was chosen."""

    position: int
    kind: str
    tree: Tree


def crash_states(log: Sequence[Call], base: Path, seed: int, subsets: int) -> Iterator[CrashState]:
    """Enumerate crash states at every prefix of a log.

    Of what was not synced at each: nothing, everything, entries alone, bytes alone, everything but
    one entry (for each of them), and ``subsets`` random choices.
    """
    disk, rng = Disk(base), random.Random(seed)
    for position in range(len(log) + 1):
        if position:
            disk.apply(log[position - 1])
        yield CrashState(position, "nothing", disk.tree(lambda _: False))
        yield CrashState(position, "entries", disk.tree(lambda effect: effect == "entry"))
        yield CrashState(position, "bytes", disk.tree(lambda effect: effect == "bytes"))
        everything = _AllBut(-1)
        yield CrashState(position, "everything", disk.tree(everything))
        for number in range(everything.entries):
            yield CrashState(position, f"all but entry {number}", disk.tree(_AllBut(number)))
        for number in range(subsets):
            share = rng.choice((0.1, 0.5, 0.9))
            tree = disk.tree(lambda _, share=share: rng.random() < share)
            yield CrashState(position, f"subset {number}", tree)


class _AllBut:
    """Keeps everything but the entry of one number, in the order of asking."""

    def __init__(self, dropped: int) -> None:
        self.entries, self._dropped = 0, dropped

    def __call__(self, effect: str) -> bool:
        self.entries += effect == "entry"
        return effect == "bytes" or self.entries - 1 != self._dropped


def materialize(tree: Tree, path: Path) -> None:
    """Write a tree as a real directory, which must not exist."""
    path.mkdir(parents=True)
    for name, node in tree.items():
        if isinstance(node, bytes):
            (path / name).write_bytes(node)
        else:
            materialize(node, path / name)
