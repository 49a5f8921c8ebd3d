"""DCP's own FileSystemWriter and FileSystemReader, wherever a program uses them: their work → ours.

Their methods are replaced in the classes, so subclasses and wrappers come here too, whoever calls
them. A writer that does more than ours can carry out stays DCP's, and one log line says why.
"""

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    SerializationFormat,
)
from torch.distributed.checkpoint.storage import StorageWriter

from ...engine.marker import is_marker
from ...format.spec import MANIFEST_NAME
from ...stores.url import SCHEME, absolute, open_store
from .names import is_described, place_of
from .reader import HoldfastReader, has_read
from .writer import HoldfastWriter

logger = logging.getLogger("holdfast")

_OURS = "_holdfast"  # the attribute of a writer or reader that holds the one of ours at work for it
_WRITES = ("set_up_storage_writer", "prepare_global_plan", "write_data", "finish")
_READS = ("read_metadata", "set_up_storage_reader", "read_data")
# What a writer of its own kind has changed, nobody else knows how to do.
_OF_WRITERS = {
    *(*_WRITES, "_write_data", "prepare_local_plan", "storage_meta", "reset", "checkpoint_id"),
    *("_metadata_exists", "_get_metadata_path"),
}
_FILE_SCHEME = "file://"


@dataclass(frozen=True, slots=True)
class Choice:
    """What was asked of `install`; see there."""

    every: bool = False
    cast: bool = False
    pickled: bool = False
    types: tuple[type, ...] = ()
    replace: bool = True

    def writer(self, place: "str | os.PathLike[str]", *, overwrite: bool = True) -> HoldfastWriter:
        """Return a writer of ours; ``overwrite`` is what the program asked DCP for."""
        replace = self.replace and overwrite
        return HoldfastWriter(place, pickled=self.pickled, replace=replace)

    def reader(self, place: "str | os.PathLike[str]") -> HoldfastReader:
        """Return a reader of ours."""
        return HoldfastReader(place, cast=self.cast, pickled=self.pickled, types=self.types)


def replacements(current: Callable[[], Choice]) -> list[tuple[type, str, Any]]:
    """Return what takes the place of methods of DCP: (class, name, function).

    Args:
        current: says what counts at the moment of a call.
    """
    base = filesystem._FileSystemWriter
    writes = {name: _handing_on(base, name) for name in _WRITES}
    writes["set_up_storage_writer"] = _setting_up_writer(base, current)
    reads = {
        "read_metadata": _reading_metadata(current),
        "set_up_storage_reader": _setting_up_reader(current),
        "read_data": _handing_on(FileSystemReader, "read_data"),
    }
    return [(base, *item) for item in writes.items()] + [
        (FileSystemReader, *item) for item in reads.items()
    ]


def _handing_on(owner: type, name: str) -> Callable[..., Any]:
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = getattr(self, _OURS, None)
        return getattr(ours, name)(*args, **kwargs) if ours else stock(self, *args, **kwargs)

    return call


def _setting_up_writer(owner: type[StorageWriter], current: Callable[[], Choice]) -> Any:
    """Decide here: this is the first call of each save, on every rank."""
    stock = owner.set_up_storage_writer

    @functools.wraps(stock)
    def set_up(self: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        stock(self, is_coordinator, *args, **kwargs)
        collective = kwargs.get("use_collectives", True)
        ours = writer_for(self, current(), use_collectives=collective)
        setattr(self, _OURS, ours)
        if ours is not None:
            ours.set_up_storage_writer(is_coordinator, *args, **kwargs)

    return set_up


def _reading_metadata(current: Callable[[], Choice]) -> Any:
    stock = FileSystemReader.read_metadata

    @functools.wraps(stock)
    def read_metadata(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = reader_for(self, current())
        setattr(self, _OURS, ours)
        if ours is None:
            return stock(self, *args, **kwargs)
        metadata = ours.read_metadata()
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata

    return read_metadata


def _setting_up_reader(current: Callable[[], Choice]) -> Any:
    stock = FileSystemReader.set_up_storage_reader

    @functools.wraps(stock)
    def set_up(self: Any, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        stock(self, metadata, is_coordinator, *args, **kwargs)
        ours = getattr(self, _OURS, None)
        if not is_described(metadata):
            ours = None
        elif ours is None or not has_read(ours, metadata):  # but another reader, rank or thread
            ours = current().reader(_place_of(self))
        setattr(self, _OURS, ours)
        if ours is not None:
            ours.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    return set_up


def reader_for(storage: FileSystemReader, choice: Choice) -> HoldfastReader | None:
    """Return our reader where a reader of DCP's stands at a checkpoint of ours."""
    if _is_url(storage):
        return choice.reader(_place_of(storage))
    place = _place_of(storage) if choice.every else ""
    return choice.reader(place) if place and is_ours(place) else None


def writer_for(
    storage: Any, choice: Choice, *, use_collectives: bool = True
) -> HoldfastWriter | None:
    """Return our writer for one of DCP's; None, and one log line says why, where DCP goes on."""
    if not isinstance(storage, FileSystemWriter) or not (choice.every or _is_url(storage)):
        return None
    if why := _why_left(storage, use_collectives):
        _say_left(storage, why)
        return None
    return choice.writer(_place_of(storage), overwrite=storage.overwrite)


def is_stock(storage: object) -> bool:
    """Return whether a writer or reader is DCP's own, of no other class."""
    return type(storage) in (FileSystemWriter, FileSystemReader)


def note_passed(storage: Any, choice: Choice) -> None:
    """Log a writer that is not DCP's, which nothing routes; ours is not one."""
    known = isinstance(storage, (FileSystemWriter, HoldfastWriter))
    if choice.every and isinstance(storage, StorageWriter) and not known:
        _say_left(storage, "is not a FileSystemWriter")


def is_ours(place: str) -> bool:
    """Return whether a checkpoint of ours is at a path, or was: the marker stands without it."""
    if os.path.lexists(os.path.join(place, MANIFEST_NAME)):
        return True
    return os.path.isdir(place) and is_marker(open_store(place))


def _why_left(storage: Any, use_collectives: bool) -> str:
    """Say what a writer does that ours does not carry out; empty: nothing."""
    for name in sorted(_OF_WRITERS):
        if getattr(type(storage), name) is not getattr(FileSystemWriter, name):
            return f"has a {name} of its own"
    if not _place_of(storage):
        return f"writes to {storage.path}, which is not a path of this machine"
    if storage.transforms.extensions:
        names = [type(extension).__name__ for extension in storage.transforms.extensions]
        return f"writes through extensions: {', '.join(names)}"
    if storage.serialization_format is not SerializationFormat.TORCH_SAVE:
        return f"writes {storage.serialization_format}"
    if not use_collectives:
        return "writes without collectives: use_collectives=False"
    return ""


def _is_url(storage: Any) -> bool:
    """Return whether a writer or reader of DCP's stands at a ``holdfast://`` URL, as fsspec's."""
    return str(storage.path).startswith(SCHEME)


def _place_of(storage: Any) -> str:
    """Return the directory that a writer or reader of DCP's stands at; empty: none of ours."""
    name = os.fspath(storage.path).removeprefix(_FILE_SCHEME)
    if _is_url(storage):
        return absolute(place_of(name))
    fs = storage.fs
    if type(fs) is not filesystem.FileSystem:
        # One for fsspec, which may be anything.
        protocol = getattr(getattr(fs, "fs", None), "protocol", ())
        if "file" not in (protocol, *protocol):
            return ""
    return "" if "://" in name else os.path.abspath(name)  # of which `~` is no part, as with DCP


def _say_left(storage: Any, why: str) -> None:
    kind = type(storage)
    _say_once(f"{kind.__module__}.{kind.__qualname__}", why)


@functools.cache
def _say_once(kind: str, why: str) -> None:
    logger.warning("saves of %s are not written by holdfast: it %s", kind, why)
