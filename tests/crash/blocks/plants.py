"""The planted faults that real file systems are to show, each with a run in which it matters."""

from collections.abc import Callable
from dataclasses import dataclass

import forked_ranks  # noqa: F401  before anything that makes pools
import planted
import pytest

from holdfast._core import Vfs

from .saved_runs import Plan

SYNC = Plan("raw", "sync", "buffered", steps=4)
LAST_ONLY = Plan("raw", "sync", "buffered", steps=4, keep=1)
EAGER = Plan("raw", "eager", "buffered", steps=4)
CHAIN = Plan("delta", "sync", "buffered", steps=5)
REBASED = Plan("delta", "sync", "buffered", steps=4, rebased=2)


def _nothing(rank: int) -> None:
    return


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault, and where to look for it.

    Attributes:
        plant: called in each rank before it saves.
        options, on: of the mount, on these file systems alone.
    """

    plan: Plan
    plant: Callable[[int], None] = _nothing
    options: str = ""
    on: tuple[str, ...] = ()


NOTHING = Planted(SYNC)


def _all(plant: planted.Plant) -> Callable[[int], None]:
    return lambda rank: _put(plant)


def _one(which: int, plant: planted.Plant) -> Callable[[int], None]:
    return lambda rank: _put(plant) if rank == which else None


def _put(plant: planted.Plant) -> None:
    """Break the protocol, on a kernel that heeds no hint to write early: it need not."""
    patch = pytest.MonkeyPatch()
    patch.setattr(Vfs, "start_sync", lambda vfs, descriptor: None)
    plant(patch)


PLANTED = {
    "no fsync of data files": Planted(SYNC, _all(planted.drop_a_file_fsync)),
    "no fsync of data files on one rank": Planted(SYNC, _one(1, planted.drop_a_file_fsync)),
    "no fsync of MANIFEST": Planted(SYNC, _all(planted.drop_the_manifest_fsync)),
    "MANIFEST synced before it is written": Planted(
        SYNC, _all(planted.sync_the_manifest_before_it_is_written)
    ),
    "MANIFEST renamed without fsync": Planted(SYNC, _all(planted.publish_by_rename_without_fsync)),
    "no fsync of any directory": Planted(SYNC, _all(planted.drop_every_directory_fsync)),
    "MANIFEST published before the data is durable": Planted(
        SYNC, _all(planted.publish_before_durable)
    ),
    "acknowledged when staged": Planted(EAGER, _all(planted.say_saved_when_staged)),
    "retired: data before MANIFEST": Planted(LAST_ONLY, _all(planted.retire_data_first)),
    "retired: before the new step is saved": Planted(
        LAST_ONLY, _one(0, planted.retire_before_saving)
    ),
    "retired: what links need": Planted(CHAIN, _all(planted.retire_what_links_need)),
    "rebased: old files removed first": Planted(
        REBASED, _all(planted.remove_the_old_files_before_rebasing)
    ),
    "rebased, LATEST: renamed without fsync": Planted(REBASED, _all(planted.rename_without_fsync)),
    "mounted so that fsync does not flush the disk": Planted(
        SYNC, options="nobarrier", on=("ext4", "btrfs")
    ),
}
