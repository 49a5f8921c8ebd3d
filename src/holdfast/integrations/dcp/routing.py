"""DCP's plain checkpoint_ids → holdfast, by `install`.

Imports what serves DCP only when it is in use: `install` may be called in the middle of whatever
is being imported (`autoload`).
"""

import importlib
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ...format.spec import MANIFEST_NAME
from ...stores.url import SCHEME, absolute

DCP = "torch.distributed.checkpoint"
_EXECUTORS = {
    "_async_thread_executor": "_ThreadBasedAsyncCheckpointExecutor",
    "_async_process_executor": "_ProcessBasedAsyncCheckpointExecutor",
}


class Routing:
    """The routing of DCP's calls that `install` has set up. It ends with a ``with`` block.

    Attributes:
        every: as for `install`.
        pickled: as for `install`.

    Example::

        routing = install()
        dcp.save(state_dict, checkpoint_id="holdfast://runs/a/first")
        routing.remove()
    """

    def __init__(self, *, every: bool, pickled: bool) -> None:
        self.every, self.pickled = every, pickled

    def __enter__(self) -> "Routing":
        return self

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


def install(*, every: bool = False, pickled: bool = False) -> Routing:
    """Make `dcp.save`, ``async_save`` and ``load`` take ``checkpoint_id="holdfast://DIRECTORY"``.

    ``holdfast:///a/b`` is the directory ``/a/b``, ``holdfast://a/b`` is ``a/b``, from here.

    Args:
        every: route plain paths too, and DCP's own FileSystemWriter and FileSystemReader where a
            program gives them. DCP still reads its own checkpoints.
        pickled: as for `HoldfastWriter` and `HoldfastReader`.

    Returns:
        The routing. Its ``remove()`` ends it, and so does the end of a ``with`` block.

    Example:
        ``with install(): dcp.save(state_dict, checkpoint_id="holdfast://runs/a/first")``
    """
    routing = Routing(every=every, pickled=pickled)
    if not _routings:
        _patch()
    _routings.append(routing)
    return routing


def _patch() -> None:
    modules = [importlib.import_module(f"{DCP}.{name}") for name in _EXECUTORS]
    for module, name in zip(modules, _EXECUTORS.values(), strict=True):
        executor = getattr(module, name)
        _replace(executor, "execute_save", _executing(executor.execute_save))
    for part in ("state_dict_saver", "state_dict_loader", "_storage_utils"):
        module = importlib.import_module(f"{DCP}.{part}")
        _replace(module, "_storage_setup", _setting_up(module._storage_setup))


def _replace(owner: Any, name: str, ours: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, ours)


def _setting_up(stock: Callable[..., Any]) -> Callable[..., Any]:
    def set_up(storage: Any, checkpoint_id: Any, reader: bool = False) -> Any:
        ours = _chosen(storage, checkpoint_id, reader=reader)
        return ours or stock(storage, checkpoint_id, reader)

    return set_up


def _executing(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Choose the writer where `async_save` is called: later, in its thread or process, is late."""

    def execute(self: Any, state: Any, **given: Any) -> Any:
        storage = given.get("storage_writer")
        ours = _chosen(storage, given.get("checkpoint_id"), reader=False)
        return stock(self, state, **given | {"storage_writer": ours or storage})

    return execute


def _chosen(storage: Any, checkpoint_id: Any, *, reader: bool) -> Any:
    """Return a writer or reader of ours, or None where DCP is to go its own way."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

    from .reader import HoldfastReader
    from .writer import HoldfastWriter

    routing = _routings[-1] if _routings else Routing(every=False, pickled=False)
    place = checkpoint_id
    if storage is not None:
        # Of others' subclasses nobody knows what else they do.
        if not routing.every or type(storage) not in (FileSystemReader, FileSystemWriter):
            return None
        place = storage.path if checkpoint_id is None else checkpoint_id
    if not place:
        return None
    name = os.fspath(place)
    if not name.startswith(SCHEME):
        if not routing.every or "://" in name:
            return None
        if reader and not os.path.lexists(os.path.join(absolute(name), MANIFEST_NAME)):
            return None
    kind = HoldfastReader if reader else HoldfastWriter
    return kind(place, pickled=routing.pickled)
