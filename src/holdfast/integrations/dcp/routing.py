"""DCP's own calls and classes → holdfast, by `install`.

Imports what serves DCP only when it is in use: `install` may be called in the middle of whatever
is being imported (`autoload`).
"""

import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ...stores.url import SCHEME

if TYPE_CHECKING:
    from .routed import Choice

logger = logging.getLogger("holdfast")

DCP = "torch.distributed.checkpoint"
VERSIONS = ("2.13",)  # of torch, whose private names are replaced: others may mean something else
_EXECUTORS = {
    "_async_thread_executor": "_ThreadBasedAsyncCheckpointExecutor",
    "_async_process_executor": "_ProcessBasedAsyncCheckpointExecutor",
}


class Routing:
    """The routing of DCP's calls that `install` has set up. It ends with a ``with`` block.

    A further ``with`` block sets it up again.

    Attributes:
        every, cast, pickled, types, replace: as for `install`.

    Example::

        routing = install()
        dcp.save(state_dict, checkpoint_id="holdfast://runs/a/first")
        routing.remove()
    """

    def __init__(
        self, *, every: bool, cast: bool, pickled: bool, types: tuple[type, ...], replace: bool
    ) -> None:
        self.every, self.cast, self.pickled = every, cast, pickled
        self.types, self.replace = types, replace

    def __enter__(self) -> "Routing":
        if self not in _routings:
            self._begin()
        return self

    def _begin(self) -> None:
        if not _routings and _is_known():
            _patch()
        _routings.append(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Restore DCP's own behaviour. Background saves that have begun still go to holdfast."""
        if self in _routings:
            _routings.remove(self)
        while not _routings and _replaced:
            owner, name, stock = _replaced.pop()
            setattr(owner, name, stock)


_routings: list[Routing] = []  # the newest counts
_replaced: list[tuple[Any, str, Any]] = []


def install(
    *,
    every: bool = False,
    cast: bool = False,
    pickled: bool = False,
    types: Iterable[type] = (),
    replace: bool = True,
) -> Routing:
    """Make `dcp.save`, ``async_save`` and ``load`` take ``checkpoint_id="holdfast://DIRECTORY"``.

    ``holdfast:///a/b`` is the directory ``/a/b``, ``holdfast://a/b`` is ``a/b``, from here. Under
    a version of torch that is not known to work so, DCP is left as it is, and the log says so.

    Args:
        every: route plain paths too, and DCP's own FileSystemWriter and FileSystemReader wherever
            a program uses them. DCP still reads its own checkpoints.
        cast, types: as for `HoldfastReader`.
        pickled: as for `HoldfastWriter` and `HoldfastReader`.
        replace: whether a save replaces the checkpoint that is there, as DCP's does. One by a
            FileSystemWriter with ``overwrite=False`` never does.

    Returns:
        The routing. Its ``remove()`` ends it, and so does the end of a ``with`` block.

    Example:
        ``with install(): dcp.save(state_dict, checkpoint_id="holdfast://runs/a/first")``
    """
    routing = Routing(every=every, cast=cast, pickled=pickled, types=tuple(types), replace=replace)
    routing._begin()
    return routing


def _is_known() -> bool:
    """Return whether this torch is one that may be patched; the log says when it is not."""
    import torch

    found = torch.__version__
    if ".".join(found.split(".")[:2]) in VERSIONS:
        return True
    logger.warning(
        "torch is %s; holdfast routes the calls of DCP in torch %s only, so DCP reads and writes "
        "its own files. Use HoldfastWriter and HoldfastReader, or upgrade holdfast",
        found,
        ", ".join(VERSIONS),
    )
    return False


def _patch() -> None:
    from .routed import replacements

    modules = [importlib.import_module(f"{DCP}.{name}") for name in _EXECUTORS]
    for module, name in zip(modules, _EXECUTORS.values(), strict=True):
        executor = getattr(module, name)
        _replace(executor, "execute_save", _executing(executor.execute_save))
    for part in ("state_dict_saver", "state_dict_loader", "_storage_utils"):
        module = importlib.import_module(f"{DCP}.{part}")
        _replace(module, "_storage_setup", _setting_up(module._storage_setup))
    for owner, name, ours in replacements(_current):
        _replace(owner, name, ours)


def _replace(owner: Any, name: str, ours: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, ours)


def _current() -> "Choice":
    """Return what was asked for last."""
    from .routed import Choice

    if not _routings:
        return Choice()
    routing = _routings[-1]
    return Choice(routing.every, routing.cast, routing.pickled, routing.types, routing.replace)


def _setting_up(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def set_up(storage: Any, checkpoint_id: Any, reader: bool = False) -> Any:
        from .routed import note_passed

        ours = _chosen(storage, checkpoint_id, reader=reader)
        if ours is None and not reader:
            note_passed(storage, _current())
        return ours or stock(storage, checkpoint_id, reader)

    return set_up


def _executing(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Choose the writer where `async_save` is called: later, in its thread or process, is late."""

    @functools.wraps(stock)
    def execute(*args: Any, **given: Any) -> Any:
        storage, place = given.get("storage_writer"), given.get("checkpoint_id")
        ours = _chosen(storage, place, reader=False)
        if ours is None and _current().every:
            ours = _background(storage, place, given.get("use_collectives", True))
        return stock(*args, **given | {"storage_writer": ours or storage})

    return execute


def _chosen(storage: Any, checkpoint_id: Any, *, reader: bool) -> Any:
    """Return a writer or reader of ours for a URL of ours; None: DCP goes on."""
    name = os.fspath(checkpoint_id) if isinstance(checkpoint_id, (str, os.PathLike)) else ""
    if not isinstance(name, str) or not name.startswith(SCHEME):
        return None
    from .routed import is_stock

    choice = _current()
    if storage is not None and not (choice.every and is_stock(storage)):
        return None
    return choice.reader(name) if reader else choice.writer(name)


def _background(storage: Any, checkpoint_id: Any, use_collectives: bool) -> Any:
    """Return our writer for what DCP is about to write in another thread or process."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    from .routed import writer_for

    if storage is None and FileSystemWriter.validate_checkpoint_id(checkpoint_id or ""):
        storage = FileSystemWriter(checkpoint_id)
    elif isinstance(storage, FileSystemWriter) and checkpoint_id:
        storage.reset(checkpoint_id)
    return writer_for(storage, _current(), use_collectives=use_collectives) if storage else None
