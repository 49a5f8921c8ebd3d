"""Faults planted in the protocol: each breaks one step of it, and the oracle has to notice.

A plant is a list of (where, name, what stands there instead), put in place after the stand-ins.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from holdfast.engine import commit as commits
from holdfast.engine import ledger, retire
from holdfast.engine.write import DataFileWriter
from holdfast.errors import StoreError
from holdfast.format.rows import Planned
from holdfast.runs import directory as directory_module
from holdfast.runs import fence as fence_module
from holdfast.saving import save as save_module
from holdfast.stores.local import LocalStore

Plant = list[tuple[Any, str, Any]]


def _nothing(*given: object) -> None:
    pass


def _sync_directories_alone(writer: Any, call: Callable[[], None]) -> None:
    if writer._descriptor < 0:
        call()


def _sync_again(writer: Any, call: Callable[[], None]) -> None:
    try:
        call()
    except StoreError:
        call()


def _write_carelessly(store: Any, path: str, data: bytes) -> None:
    descriptor = store.vfs.create(path)
    store.vfs.write(descriptor, data, 0)
    store.vfs.close(descriptor)


def _replace_carelessly(
    store: Any, name: str, pending: str, data: bytes, check: Callable[[], None] = _nothing
) -> None:
    _write_carelessly(store, store._path(pending), data)
    check()
    store.vfs.rename(store._path(pending), store._path(name))


def _publisher(order: Sequence[str]) -> Callable[..., bool]:
    """Return a `LocalStore.publish` that takes its steps in another order, or leaves some out."""

    def publish(
        store: Any, name: str, pending_name: str, data: bytes, check: Callable[[], None]
    ) -> bool:
        pending, made = store._path(pending_name), False
        try:
            for step in order:
                if step == "write":
                    store._write_durably(pending, data)
                elif step == "above":
                    store._sync_above(store.modified_s(pending_name))
                elif step == "check":
                    check()
                elif step == "link":
                    made = store._link(pending, store._path(name))
                elif made:
                    store.sync_path(name)
            return made
        finally:
            with contextlib.suppress(StoreError):
                store.vfs.unlink(pending)

    return publish


def _retire_data_first(store: Any) -> None:
    for save in retire._saves(store):
        for file in store.list(f"data/{save}"):
            store.remove(f"data/{save}/{file.name}")
    retire.retire(store)


_hold = fence_module.Fence.hold


def _hold_without_a_look(fence: Any) -> None:
    if fence._store.location not in fence_module._held:
        _hold(fence)


def _commit_without_one(
    store: Any, header: Any, planned: Planned, written: Any, check: Callable[[], None]
) -> None:
    if header.world_size > 1:
        first = planned.first[:-1]
        some = np.arange(int(first[-1]))
        planned, written = Planned(planned.tensor[some], planned.boxes[some], first), written[:-1]
    commits.commit(store, header, planned, written, check)


def _modified_by_own_clock(store: Any, name: str) -> float:
    return float(save_module.time.time())


def _keep_but_one(run: Any, kept: set[int]) -> set[int]:
    return kept - {max(kept)} if kept else kept


PLANTS: dict[str, Plant] = {
    "no fsync of data": [(DataFileWriter, "_sync", _sync_directories_alone)],
    "no fsync of directories": [(LocalStore, "sync_path", _nothing)],
    "no fsync of directories above": [(LocalStore, "_sync_above", _nothing)],
    "no fsync of the pending manifest": [(LocalStore, "_write_durably", _write_carelessly)],
    "fsync again after a failed one": [(DataFileWriter, "_sync", _sync_again)],
    "acknowledged before the link is durable": [
        (LocalStore, "publish", _publisher(("write", "above", "check", "link")))
    ],
    "link before the last check": [
        (LocalStore, "publish", _publisher(("write", "above", "link", "check", "sync")))
    ],
    "last check before the manifest is synced": [
        (LocalStore, "publish", _publisher(("check", "write", "above", "link", "sync")))
    ],
    "no look at the deadline": [(ledger.Ledger, "check_deadline", _nothing)],
    "no look at the epoch": [(fence_module.Fence, "hold", _hold_without_a_look)],
    "pending manifests are not revoked": [(fence_module.Fence, "_revoke", _nothing)],
    "data retired before the manifest": [(directory_module, "retire", _retire_data_first)],
    "manifest retired without fsync": [(LocalStore, "sync_directory", _nothing)],
    "sweep ignores age": [(retire, "_is_older", lambda store, names, before_s: True)],
    "data of dead saves goes unbarred": [
        (LocalStore, "bar", _nothing),
        (commits, "check_present", _nothing),
    ],
    "LATEST is not atomic": [(LocalStore, "replace", _replace_carelessly)],
    "retention ignores bases": [
        (directory_module.Run, "_with_bases", lambda run, kept: kept),
        (directory_module.Run, "_check_unneeded", _nothing),  # it would notice
    ],
    "a link does not look at its base": [(commits, "check_base", _nothing)],
    "retention does not look for new links": [(directory_module.Run, "_check_unneeded", _nothing)],
    "retention leaves pending links": [(directory_module, "revoke_links", _nothing)],
    "retention leaves no mark": [(directory_module, "leaving", contextlib.nullcontext)],
    "retention lets the newest go": [(directory_module.Run, "_with_bases", _keep_but_one)],
    "commit without one rank": [
        (save_module, "commit", _commit_without_one),
        (commits, "check_tiling", _nothing),
    ],
    "files removed though published": [
        (commits, "_certainly_not_published", lambda store, data: True)
    ],
    "own clock for the disk's": [(LocalStore, "modified_s", _modified_by_own_clock)],
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Break the protocol in one way, and mend it."""
    put = [(where, what, getattr(where, what), new) for where, what, new in PLANTS[name]]
    for where, what, _, new in put:
        setattr(where, what, new)
    try:
        yield
    finally:
        for where, what, old, _ in put:
            setattr(where, what, old)
