"""Faults planted in the protocol: each breaks one step of it, and the oracle has to notice.

A plant is a list of (where, name, what stands there instead), put in place after the stand-ins.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from holdfast.chains import base_choice
from holdfast.engine import commit as commits
from holdfast.engine import epochs, ledger, retire
from holdfast.engine import replace as replace_module
from holdfast.engine.write import DataFileWriter
from holdfast.errors import StoreError
from holdfast.format.rows import Planned
from holdfast.runs import directory as directory_module
from holdfast.runs import fence as fence_module
from holdfast.saving import save as save_module
from holdfast.stores.local import LocalStore

from . import payload

Plant = list[tuple[Any, str, Any]]


def nothing(*given: object) -> None:
    pass


def _nothing_kept(store: object, *, revoke: bool) -> None:
    pass


def _sync_directories_alone(writer: Any, call: Callable[..., None], *given: Any) -> None:
    if writer._descriptor < 0:
        call(*given)


def _sync_again(writer: Any, call: Callable[..., None], *given: Any) -> None:
    try:
        call(*given)
    except StoreError:
        call(*given)


def _write_carelessly(store: Any, path: str, data: bytes) -> None:
    descriptor = store.vfs.create(path)
    store.vfs.write(descriptor, data, 0)
    store.vfs.close(descriptor)


_sync_made = LocalStore.sync_made


def _sync_made_by_one(store: Any, name: str) -> None:
    if "/00000-" in name:
        _sync_made(store, name)


def _prepare_carelessly(store: Any, pending_name: str, data: bytes, name: str = "") -> None:
    begun = store._begun.pop(pending_name, None)
    if begun is None:
        _write_carelessly(store, store._path(pending_name), data)
    else:
        store.vfs.close(begun)


def _sync_late(store: Any, pending_name: str, name: str) -> bool:
    """Publish what was prepared without fsync; sync it first."""
    descriptor = store.open(pending_name, direct=False)
    store.vfs.sync(descriptor)
    store.vfs.close(descriptor)
    return _publish(store, pending_name, name)


_publish = LocalStore.publish


def _publish_without_sync(store: Any, pending_name: str, name: str) -> bool:
    pending = store._path(pending_name)
    try:
        return bool(store._link(pending, store._path(name)))
    finally:
        with contextlib.suppress(StoreError):
            store.vfs.unlink(pending)


class _LinkBeforeTheLastLook(commits.Commit):
    """Lets the manifest appear where it should only be prepared."""

    def prepare(self, *given: Any) -> None:
        super().prepare(*given)
        super().publish()

    def publish(self) -> None:
        pass


class _LastLookBeforeTheSync(commits.Commit):
    """Prepares the manifest when all have looked."""

    def prepare(self, *given: Any) -> None:
        self._given = given

    def publish(self) -> None:
        super().prepare(*self._given)
        super().publish()


def _manifest_without_one(store: Any, header: Any, planned: Planned, written: Any) -> Any:
    """Leave out what the last rank wrote."""
    if header.world_size > 1:
        first = planned.first[:-1]
        some = np.arange(int(first[-1]))
        first_number = planned.first_number[:-1]
        numbers = planned.numbers[: int(first_number[-1])]
        kept = planned.tensor[some], numbers, planned.chunks[some]
        planned = Planned(*kept, first, first_number)
        written = written[:-1]
    return payload.manifest_of(store, header, planned, written)


def _retire_data_first(store: Any) -> None:
    for save in retire._saves(store, store.list()):
        for file in store.list(f"data/{save}"):
            store.remove(f"data/{save}/{file.name}")
    retire.retire(store)


_hold = fence_module.Fence.hold


def hold_without_a_look(fence: Any) -> None:
    if fence._store.location not in epochs.held:
        _hold(fence)


_stat = LocalStore._stat


def _stat_by_own_clock(store: Any, name: str) -> Any:
    return SimpleNamespace(**{**vars(_stat(store, name)), "st_mtime": save_module.time.time()})


def keep_but_one(run: Any, kept: set[int]) -> set[int]:
    return kept - {max(kept)} if kept else kept


def _replace_without_sync(made: Any) -> None:
    made._may_be_there = True
    made._store.rename(made._ready, "MANIFEST")


def _remove_save_without_sync(store: Any, save: str) -> bool:
    for file in retire._list_if_there(store, f"data/{save}"):
        store.remove(f"data/{save}/{file.name}")
    store.remove_directory(f"data/{save}")
    return True


_prepare_replacement = replace_module.Replacement.prepare


def _prepare_without_sync(made: Any, *given: Any) -> None:
    made._store.prepare = lambda *given: _prepare_carelessly(made._store, *given)
    try:
        _prepare_replacement(made, *given)
    finally:
        del made._store.prepare


_replace = replace_module.Replacement.replace


def _remove_old_data_first(made: Any) -> None:
    store = made._store
    for save in retire._saves(store, store.list()):
        if save != made._save_id:
            _remove_save_without_sync(store, save)
    _replace(made)


PLANTS: dict[str, Plant] = {
    "old data removed before the rename": [
        (replace_module.Replacement, "replace", _remove_old_data_first)
    ],
    "old data removed before the rename is durable": [
        (replace_module.Replacement, "replace", _replace_without_sync),
        (retire, "_remove_save", _remove_save_without_sync),
    ],
    "a manifest that is not synced replaces another": [
        (replace_module.Replacement, "prepare", _prepare_without_sync)
    ],
    "data of who replaced is swept": [
        (retire, "_save_of", lambda store, mark: retire.replacer_of(mark)),
        (retire, "_published", lambda store: ""),
    ],
    "a replace looks for no deltas": [(replace_module, "check_free", _nothing_kept)],
    "a replace does not look at the epoch": [(replace_module, "check_epoch", nothing)],
    "no fsync of data": [(DataFileWriter, "_sync", _sync_directories_alone)],
    "no fsync of directories": [
        (LocalStore, "sync_made", nothing),
        (LocalStore, "sync_path", nothing),
    ],
    "no fsync of directories that others made": [(LocalStore, "sync_path", nothing)],
    "no fsync of directories but by one rank": [(LocalStore, "sync_made", _sync_made_by_one)],
    "no fsync of directories above": [(LocalStore, "sync_above", nothing)],
    "no fsync of the pending manifest": [(LocalStore, "prepare", _prepare_carelessly)],
    "fsync again after a failed one": [(DataFileWriter, "_sync", _sync_again)],
    "acknowledged before the link is durable": [(LocalStore, "publish", _publish_without_sync)],
    "link before the last check": [(commits, "Commit", _LinkBeforeTheLastLook)],
    "last check before the manifest is synced": [(commits, "Commit", _LastLookBeforeTheSync)],
    "no look at the deadline": [(ledger.Ledger, "check_deadline", nothing)],
    "no look at the epoch": [(fence_module.Fence, "hold", hold_without_a_look)],
    "pending manifests are not revoked": [(fence_module.Fence, "_revoke", nothing)],
    "data retired before the manifest": [(directory_module, "retire", _retire_data_first)],
    "manifest retired without fsync": [(LocalStore, "sync_directory", nothing)],
    "sweep ignores age": [(retire, "_is_older", lambda store, names, before_s: True)],
    "data of dead saves goes unbarred": [
        (LocalStore, "revoke", nothing),
        (commits, "check_present", nothing),
    ],
    "LATEST is not atomic": [
        (LocalStore, "prepare", _prepare_carelessly),
        (LocalStore, "publish", _sync_late),
    ],
    "a step is made from a higher one": [(base_choice, "_is_lower", lambda below, step: True)],
    "retention ignores bases": [
        (directory_module.Run, "_with_bases", lambda run, kept: kept),
        (directory_module.Run, "_check_unneeded", nothing),  # it would notice
    ],
    "a link does not look at its base": [(commits, "check_base", nothing)],
    "retention does not look for new links": [(directory_module.Run, "_check_unneeded", nothing)],
    "retention leaves pending links": [(directory_module, "revoke_links", nothing)],
    "retention leaves no mark": [(directory_module, "leaving", contextlib.nullcontext)],
    "retention lets the newest go": [(directory_module.Run, "_with_bases", keep_but_one)],
    "commit without one rank": [
        (commits, "_manifest_of", _manifest_without_one),
        (commits, "check_tiling", nothing),
    ],
    "files removed though published": [
        (commits, "_certainly_not_published", lambda store, data: True)
    ],
    "own clock for the disk's": [(LocalStore, "_stat", _stat_by_own_clock)],
}


@contextlib.contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """Break the protocol in one way, and mend it."""
    put = [(where, what, getattr(where, what), new) for where, what, new in plant]
    for where, what, _, new in put:
        setattr(where, what, new)
    try:
        yield
    finally:
        for where, what, old, _ in put:
            setattr(where, what, old)
