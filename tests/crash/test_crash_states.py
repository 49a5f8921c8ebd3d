"""After a power cut at any moment: what was acknowledged is whole, nothing else is half there."""

import contextlib
import os
from pathlib import Path

import pytest
from crash_content import OPTIONS, load_number, make_state
from crash_oracle import Record, assert_kept, checkpoint_states, record, run_states
from crash_ranks import ThreadGroup, run_ranks
from disk_model import crash_states, materialize

import holdfast
from holdfast import Keep
from holdfast.engine import epochs
from holdfast.errors import AlreadyCommittedError, StoreError
from holdfast.runs import directory as directory_module
from holdfast.runs.directory import Run
from holdfast.stores.local import LocalStore
from holdfast.testing import Fault

SEED = int(os.environ.get("CRASH_SEED", "1"))
SUBSETS = int(os.environ.get("CRASH_SUBSETS", "6"))  # random states at each moment


def two_rank_save(made: Record, place: str, number: int, order: tuple[int, ...]) -> None:
    def save(group: ThreadGroup) -> None:
        made.save(place, number, group)

    assert run_ranks(save, order) == [None] * len(order)


def test_a_save_of_one_rank_survives_a_power_cut_at_any_moment(scratch: Path, disk: Path) -> None:
    with record(disk) as made:
        made.save("older", 1)
        made.save("runs/a/newer", 2)
    count, faults = checkpoint_states(made, scratch, seed=SEED, subsets=SUBSETS)
    assert count > 200
    assert_kept(faults)


def test_a_save_in_the_background_survives_a_power_cut_at_any_moment(
    scratch: Path, disk: Path
) -> None:
    with record(disk) as made:
        made.save("older", 1)
        made.begun.add(("newer", 2))
        holdfast.save_async(make_state(2), disk / "newer", step=2, options=OPTIONS).result()
        made.acknowledge("newer", 2)
    count, faults = checkpoint_states(made, scratch, seed=SEED, subsets=SUBSETS)
    assert count > 200
    assert_kept(faults)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (2, 0, 1)])
def test_a_save_of_several_ranks_survives_a_power_cut_at_any_moment(
    scratch: Path, disk: Path, order: tuple[int, ...]
) -> None:
    with record(disk) as made:
        made.save("older", 1)
        two_rank_save(made, "newer", 2, order)
    count, faults = checkpoint_states(made, scratch, seed=SEED, subsets=SUBSETS)
    assert count > 200
    assert_kept(faults)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_run_with_retention_survives_a_power_cut_at_any_moment(
    scratch: Path, disk: Path, keep: int
) -> None:
    with record(disk) as made:
        run = holdfast.Checkpointer(disk / "run", keep=holdfast.Keep.latest(keep), options=OPTIONS)
        for step in range(1, 5):
            run.save(step, make_state(step))
            made.acknowledge("run", step)
    count, faults = run_states(made, scratch, "run", keep=keep, seed=SEED, subsets=SUBSETS)
    assert count > 500
    assert_kept(faults)


def test_a_step_whose_removal_was_reported_as_failed_goes_whole(
    scratch: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its MANIFEST is gone, but not durably, when its data is taken for that of a dead save."""
    remove = LocalStore.remove

    def remove_silently(self: LocalStore, name: str) -> None:
        remove(self, name)
        if name == "MANIFEST":
            raise StoreError("unlink: the reply was lost")

    monkeypatch.setattr(LocalStore, "remove", remove_silently)
    monkeypatch.setattr(directory_module, "GRACE_S", -3600)
    with record(disk) as made:
        run = holdfast.Checkpointer(disk / "run", keep=holdfast.Keep.latest(1), options=OPTIONS)
        for step in (1, 2):
            run.save(step, make_state(step))
            made.acknowledge("run", step)
    assert not (disk / "run" / "step-00000001").exists()
    _, faults = run_states(made, scratch, "run", keep=1, seed=SEED, subsets=SUBSETS)
    assert_kept(faults)


def test_a_save_that_was_let_go_of_before_it_was_told_goes_whole(
    scratch: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply to `link()` is lost; meanwhile another job removes MANIFEST, but not durably."""
    link = LocalStore._link

    def link_silently(self: LocalStore, source: str, target: str) -> bool:
        link(self, source, target)
        self.vfs.unlink(target)
        raise StoreError("link: the reply was lost")

    monkeypatch.setattr(LocalStore, "_link", link_silently)
    with record(disk) as made, pytest.raises(StoreError, match="the reply was lost"):
        made.save("newer", 1)
    assert not (disk / "newer").exists()
    _, faults = checkpoint_states(made, scratch, seed=SEED, subsets=SUBSETS)
    assert_kept(faults)


def test_a_save_into_directories_that_others_just_made_survives_a_power_cut(
    scratch: Path, disk: Path
) -> None:
    with record(disk) as made:
        for name in ("runs", "runs/a"):
            made.disk.make_directory(str(disk / name))
        made.save("runs/a/newer", 1)
    _, faults = checkpoint_states(made, scratch, seed=SEED, subsets=SUBSETS)
    assert_kept(faults)


@pytest.mark.parametrize("nth", range(1, 12))
def test_a_save_after_one_whose_directory_sync_failed_survives_a_power_cut(
    scratch: Path, disk: Path, nth: int
) -> None:
    with record(disk, Fault("sync_directory", nth)) as made:
        with contextlib.suppress(StoreError):
            made.save("runs/a/newer", 1)
        # The sync after the manifest appeared may be the one that failed: then it is there, whole.
        with contextlib.suppress(AlreadyCommittedError):
            made.save("runs/a/newer", 2)
        made.save("runs/a/newest", 3)
    _, faults = checkpoint_states(made, scratch, seed=SEED, subsets=SUBSETS)
    assert_kept(faults)


def test_what_a_crash_leaves_is_no_obstacle_to_the_next_save(scratch: Path, disk: Path) -> None:
    with record(disk) as made:
        made.save("newer", 1)
    for number, state in enumerate(crash_states(made.disk.trace(), disk, SEED, subsets=1)):
        place = scratch / f"state-{number}"
        materialize(state.tree, place)
        with contextlib.suppress(AlreadyCommittedError):
            holdfast.save(make_state(1), place / "newer", options=OPTIONS)
        assert load_number(place / "newer") == 1


def test_an_epoch_of_a_store_says_whose_it_is_after_a_power_cut_at_any_moment(
    scratch: Path, disk: Path
) -> None:
    run = holdfast.Checkpointer(disk, local=scratch / "local", options=OPTIONS, signals=())
    with record(disk) as made:
        assert run._tiers is not None
        fence = Run(disk, Keep.all()).fence
        fence.is_whole = run._tiers.store.fence.is_whole
        fence.hold()
    run.close()
    said = set[str | None]()
    for number, state in enumerate(crash_states(made.disk.trace(), disk, SEED, SUBSETS)):
        materialize(state.tree, place := scratch / f"state-{number}")
        said.add(epochs.newest_job(LocalStore(str(place))))  # raises where it is torn
    assert said == {None, epochs.this_job()}
