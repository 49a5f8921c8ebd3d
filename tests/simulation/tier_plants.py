"""Faults planted in a run with a local disk before the store: the oracle has to notice each.

As in `plants.py`.
"""

from typing import Any

from holdfast.engine import copied_files, retire, transfer
from holdfast.runs import directory as directory_module
from holdfast.runs import fence as fence_module
from holdfast.runs import tiers, uploader
from holdfast.runs.tier_steps import TierSteps
from holdfast.runs.tiers import TieredRun
from holdfast.runs.uploader import Uploader
from holdfast.saving import save as save_module

from . import payload
from .plants import Plant, hold_without_a_look, keep_but_one, nothing
from .seams import SEAT

_write_mark = tiers.write_mark


_start, _end = copied_files._NewFile.__init__, copied_files._NewFile.__exit__
_is_whole, _is_committed = copied_files.is_whole, transfer._is_committed
_note_known = Uploader._note_known


def _named_in_its_directory(local: Any, *given: Any, **more: Any) -> None:
    """Name a job; the directories above may go with a power cut."""
    local.sync_path = local.sync_above = nothing
    _write_mark(local, *given, **more)


def _commit_first(here: Any, there: Any, manifest: Any, data: bytes, look: Any) -> None:
    pending = f".manifest-{manifest.table.header.save_id}"
    there.prepare(pending, data, "MANIFEST")
    there.publish(pending, "MANIFEST")


def _transfer_manifest_first(
    here: Any, there: Any, options: Any, report: Any, look: Any, use: str, *more: Any
) -> Any:
    manifest = transfer.read_manifest(here)
    _commit_first(here, there, manifest, here.get("MANIFEST", 1 << 20), None)
    files = range(len(manifest.file_names))
    with transfer.lease(here, options, use) as leased:
        copied_files.copy_files(here, there, leased, manifest, files, nothing)
    return 0, 0


def _start_by_name(self: Any, here: Any, there: Any, manifest: Any, file: int, below: str) -> None:
    _start(self, here, there, manifest, file, below)
    self._pending = self._name


def _end_by_name(self: Any, kind: Any, error: Any, trace: Any) -> None:
    _end(self, kind, error, trace)
    if error is not None:
        self._there.remove(self._name)


def _is_whole_or_goes(store: Any, manifest: Any, file: int, *given: Any) -> bool:
    if is_there := _is_whole(store, manifest, file, *given):
        return is_there
    store.remove(manifest.file_names[file])
    return False


class _NeverSynced:
    """A store whose directories nobody syncs."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def sync_directory(self, name: str = "") -> None:
        pass


def _is_committed_if_seen(store: Any, data: bytes) -> bool:
    return _is_committed(_NeverSynced(store), data)  # type: ignore[arg-type]


def _note_what_is_seen(self: Any, there: list[int]) -> None:
    root = self._root
    self._root = _NeverSynced(root)
    try:
        _note_known(self, there)
    finally:
        self._root = root


def _nothing_left(self: Any, until: float) -> list[int]:
    return []


def _enter_later(self: Any, uploader: Any) -> None:
    uploader.may_enter = True


def _unchecked_value(name: str, content: bytes) -> int:
    return payload.value_in(content)


PLANTS: dict[str, Plant] = {
    "nobody looks whether data is damaged": [(payload, "checked_value", _unchecked_value)],
    "acknowledged before the upload": [(Uploader, "is_up", lambda self, step: True)],
    "MANIFEST goes up first": [(uploader, "transfer", _transfer_manifest_first)],
    "an upload does not look at the epoch": [
        (fence_module.Fence, "hold", hold_without_a_look),
    ],
    "the store is taken with the first upload": [(TieredRun, "_enter", _enter_later)],
    "local steps of another past count": [
        (TierSteps, "_left_behind", lambda self, *given: set[int]())
    ],
    "a local disk does not say whose steps it has": [
        (tiers, "write_mark", lambda local, store, jobs, **_: _write_mark(local, store, ())),
    ],
    "the newest local step goes": [(directory_module.Run, "_with_bases", keep_but_one)],
    "close does not wait for uploads": [(Uploader, "wait_all", _nothing_left)],
}

# On an object store, a file that is not whole has no name.
ON_DISK: dict[str, Plant] = PLANTS | {
    "an upload takes files away by their names": [
        (copied_files._NewFile, "__init__", _start_by_name),
        (copied_files._NewFile, "__exit__", _end_by_name),
        (transfer, "is_whole", _is_whole_or_goes),
    ],
    "a removal is not announced": [(retire, "announce", lambda store, save: "")],
    "copies share the name of what is pending": [
        (transfer, "pending_of_copy", lambda store, save: f".manifest-{save}"),
    ],
    "what another copy published is not synced": [
        (transfer, "_is_committed", _is_committed_if_seen),
    ],
    "what is in the store is not synced": [(Uploader, "_note_known", _note_what_is_seen)],
}


_hold, _found = fence_module.Fence.hold, TierSteps.found


def _hold_on_the_first_host(self: Any) -> None:
    """Leads of other hosts take no epoch of their disk, and look at none."""
    if not SEAT.scheduler.current.process.rank:
        _hold(self)


def _found_in_store(self: Any, *given: Any, **more: Any) -> Any:
    """Find the steps of the store alone."""
    found = _found(self, *given, **more).items()
    return {step: places for step, places in found if places[0].path == self.store.path(step)}


# Where each host has a disk of its own.
ON_HOSTS: dict[str, Plant] = {
    "other hosts have no epoch": [(fence_module.Fence, "hold", _hold_on_the_first_host)],
    "other hosts keep nothing": [(TieredRun, "_tell_ranks", lambda self: b"{}")],
    "a retired step stays on other hosts": [(TieredRun, "retire_elsewhere", nothing)],
    "names on other hosts are not durable": [
        (save_module, "make_durable", nothing),
        (tiers, "write_mark", _named_in_its_directory),
    ],
    "acknowledged before the upload": PLANTS["acknowledged before the upload"],
    "nobody looks whether data is damaged": PLANTS["nobody looks whether data is damaged"],
    "a restore does not look at local disks": [(TierSteps, "found", _found_in_store)],
}
