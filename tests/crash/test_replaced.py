"""A checkpoint that is replaced: the old one or the new one is there, whole, at any moment."""

import contextlib
import dataclasses
import errno
import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from crash_content import OPTIONS, load_number, make_near_state, make_state
from crash_oracle import Record, assert_kept, checkpoint_states, record
from crash_ranks import ThreadGroup, run_ranks
from disk_model import crash_states, materialize
from planted import (
    remove_the_old_data_before_replacing,
    remove_the_old_data_before_the_rename_is_durable,
    rename_without_fsync,
    take_the_new_data_for_the_old,
)
from test_barred import AFTER_ALL, Actor, stops

import holdfast
from holdfast.codecs import Delta
from holdfast.engine.basis import forget_bases
from holdfast.engine.retire import retire, settle, sweep
from holdfast.errors import HoldfastError, ReplacedError, StoreError
from holdfast.format.names import step_name
from holdfast.runs.directory import Run
from holdfast.stores.local import LocalStore
from holdfast.testing import Fault, faulty

SEED = int(os.environ.get("CRASH_SEED", "1"))
SUBSETS = int(os.environ.get("CRASH_SUBSETS", "6"))

STRIDE = int(os.environ.get("CRASH_STRIDE", "5"))  # of two that replace, one of so many stops
# One of six stops in `make test`, each of them in `make test-all`.
stops_of_all = pytest.mark.parametrize("stride", [6, 1])
LARGER = dataclasses.replace(OPTIONS, pool_bytes=48 << 20)  # a pool of its own

Plant = Callable[[pytest.MonkeyPatch], None]


def replace(path: Path, number: int) -> None:
    holdfast.save(make_state(number), path, step=number, options=OPTIONS, replace=True)


def names(path: Path) -> list[str]:
    """Name what is there, and count the saves."""
    saves = len(list((path / "data").iterdir()))
    return [*sorted(entry.name for entry in path.iterdir() if entry.name != "data"), str(saves)]


def replace_twice(made: Record) -> None:
    for number in (1, 2, 3):
        made.replace("place", number)


def test_a_replace_survives_a_power_cut_at_any_moment(scratch: Path, disk: Path) -> None:
    with record(disk) as made:
        made.save("older", 1)
        replace_twice(made)
    count, faults = checkpoint_states(made, scratch, seed=SEED, subsets=SUBSETS)
    assert count > 400
    assert_kept(faults)


def test_a_replace_in_the_background_survives_a_power_cut_at_any_moment(
    scratch: Path, disk: Path
) -> None:
    with record(disk) as made:
        made.replace("place", 1)
        made.replacing("place", 2)
        state = make_state(2)
        holdfast.save_async(state, disk / "place", options=OPTIONS, replace=True).result()
        made.acknowledge("place", 2)
    _, faults = checkpoint_states(made, scratch, seed=SEED, subsets=SUBSETS)
    assert_kept(faults)


def test_a_replace_by_two_ranks_survives_a_power_cut_at_any_moment(
    scratch: Path, disk: Path
) -> None:
    def save(group: ThreadGroup) -> None:
        for number in (1, 2):
            made.replace("place", number, group)

    with record(disk) as made:
        assert run_ranks(save, (0, 1)) == [None, None]
    _, faults = checkpoint_states(made, scratch, seed=SEED, subsets=SUBSETS)
    assert_kept(faults)


@pytest.mark.parametrize(
    "plant",
    [
        remove_the_old_data_before_replacing,
        remove_the_old_data_before_the_rename_is_durable,
        rename_without_fsync,
        take_the_new_data_for_the_old,
    ],
)
def test_a_planted_fault_of_a_replace_is_noticed(
    scratch: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    plant(monkeypatch)
    with record(disk) as made:
        replace_twice(made)
    _, faults = checkpoint_states(made, scratch, seed=SEED, subsets=SUBSETS)
    assert faults


@pytest.mark.parametrize("nth", range(1, 12))
def test_a_replace_whose_directory_sync_failed_survives_a_power_cut(
    scratch: Path, disk: Path, nth: int
) -> None:
    with record(disk, Fault("sync_directory", nth)) as made:
        for number in (1, 2):
            with contextlib.suppress(HoldfastError):
                made.replace("place", number)
        made.replace("place", 3)
    _, faults = checkpoint_states(made, scratch, seed=SEED, subsets=SUBSETS)
    assert_kept(faults)


def test_what_a_crash_leaves_is_replaced_and_swept_and_the_new_one_stays(
    scratch: Path, disk: Path
) -> None:
    with record(disk) as made:
        replace(disk / "place", 1)
        first = len(made.disk.trace())
        replace(disk / "place", 2)
    tried = 0
    for number, state in enumerate(crash_states(made.disk.trace(), disk, SEED, subsets=1)):
        if state.position < first:
            continue
        place = scratch / f"state-{number}" / "place"
        materialize(state.tree, place.parent)
        settle(LocalStore(place))
        left = load_number(place)
        assert left in (1, 2)
        replace(place, 3)
        assert load_number(place) == 3
        sweep(LocalStore(place), AFTER_ALL)  # as if what died were old
        assert load_number(place) == 3 and names(place) == ["MANIFEST", "1"]
        shutil.rmtree(place.parent)
        tried += 1
    assert tried > 40


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_replace_on_a_full_or_broken_disk_leaves_the_old_one_or_the_new(
    scratch: Path, number: int, persistent: bool
) -> None:
    ends = set()
    for nth in range(1, 100):  # of some 90 calls
        place = scratch / str(nth) / "place"
        replace(place, 1)
        with faulty(Fault("*", nth, persistent=persistent, argument=number)):
            failed = None
            try:
                replace(place, 2)
            except StoreError as error:
                failed = error
        found = load_number(place)
        ends.add((failed is None, found))
        assert found == 2 if failed is None else found in (1, 2)
        if found == 2 and failed is not None:
            assert any("may exist" in note for note in failed.__notes__)
        replace(place, 3)
        assert load_number(place) == 3
        sweep(LocalStore(place), AFTER_ALL)
        assert load_number(place) == 3 and names(place) == ["MANIFEST", "1"]
        shutil.rmtree(place.parent)
    assert {(True, 2), (False, 1)} <= ends


# Two at once: each is stopped before each of its calls, while the other runs to its end.


def interleave(
    path: Path, other: Callable[[], object], first: int, second: int, begins_at: str
) -> tuple[Actor, Actor]:
    """Stop a replace before a call, another job before one; let them end in that order."""
    saver = Actor(lambda: replace(path, 2), first, "begin")
    saver.start()
    also = Actor(other, second, begins_at)
    also.start()
    saver.finish()
    also.finish()
    return saver, also


def every_interleaving(
    scratch: Path,
    other: Callable[[Path], object],
    check: Callable[[Path, Actor, Actor], object],
    *,
    begins_at: str = "",
    stride: int = 1,
) -> int:
    made = scratch / "made"
    replace(made, 1)
    tried = first = calls = 1
    with stops():
        while first <= calls:
            second = others = 1 + first % stride
            while second <= others:
                path = scratch / f"{first}-{second}"
                shutil.copytree(made, path)
                act = functools.partial(other, path)
                saver, also = interleave(path, act, first, second, begins_at)
                check(path, saver, also)
                calls, others = saver.calls, also.calls
                second, tried = second + stride, tried + 1
                shutil.rmtree(path, ignore_errors=True)
            first += 1
    return tried


@stops_of_all
def test_a_replace_of_what_is_retired_is_whole_or_not_there(scratch: Path, stride: int) -> None:
    def check(path: Path, saver: Actor, also: Actor) -> None:
        where = f"{path.name}: {saver.error!r}, {also.error!r}"
        is_there = (path / "MANIFEST").exists()
        assert not (path / "MANIFEST").is_dir(), where
        if is_there:
            assert load_number(path) == 2, where
            with holdfast.open(path) as checkpoint:
                assert checkpoint.verify() == [], where
        assert saver.error is not None or is_there or also.error is None, where

    tried = every_interleaving(scratch, lambda path: retire(LocalStore(path)), check, stride=stride)
    assert tried > 100 / stride


@stops_of_all
def test_what_is_swept_during_a_replace_is_never_the_winner(scratch: Path, stride: int) -> None:
    def check(path: Path, saver: Actor, also: Actor) -> None:
        where = f"{path.name}: {saver.error!r}, {also.error!r}"
        assert load_number(path) == (1 if saver.error else 2), where
        with holdfast.open(path) as checkpoint:
            assert checkpoint.verify() == [], where

    def swept(path: Path) -> None:
        sweep(LocalStore(path), AFTER_ALL)

    assert every_interleaving(scratch, swept, check, stride=stride) > 50 / stride


@pytest.mark.parametrize("stride", [4 * STRIDE, STRIDE])
def test_of_two_that_replace_the_last_one_stands(scratch: Path, stride: int) -> None:
    lost = 0

    def check(path: Path, saver: Actor, also: Actor) -> None:
        nonlocal lost
        where = f"{path.name}: {saver.error!r}, {also.error!r}"
        for one in (saver, also):
            assert one.error is None or type(one.error) is ReplacedError, where
        found = load_number(path)
        assert found == (3 if saver.error else 2 if also.error else found), where
        assert found in (2, 3), where
        with holdfast.open(path) as checkpoint:
            assert checkpoint.verify() == [], where
        lost += bool(saver.error or also.error)

    def other(path: Path) -> None:
        holdfast.save(make_state(3), path, options=LARGER, replace=True)

    begins_at = "begin"
    tried = every_interleaving(scratch, other, check, begins_at=begins_at, stride=stride)
    assert tried > 300 / stride and lost


def save_delta(root: Path, step: int) -> None:
    """Save a step: a delta, where there is one before it."""
    path, codec = root / step_name(step), Delta(every=2)
    holdfast.save(make_near_state(step), path, step=step, codec=codec, options=LARGER)


@stops_of_all
def test_a_delta_of_what_is_replaced_is_whole_or_not_there(scratch: Path, stride: int) -> None:
    made, ends = scratch / "made", set()
    save_delta(made, 1)
    first = calls = 1
    with stops():
        while first <= calls:
            second = others = 1 + first % stride
            while second <= others:
                root = scratch / f"{first}-{second}"
                shutil.copytree(made, root)
                forget_bases()
                link = Actor(lambda root=root: save_delta(root, 9), first, "create")  # type: ignore[misc]
                link.start()
                saver = Actor(lambda root=root: replace(root / step_name(1), 2), second)  # type: ignore[misc]
                saver.start()
                link.finish()
                saver.finish()
                where = f"{root.name}: {link.error!r}, {saver.error!r}"
                steps = Run(root, holdfast.Keep.all()).steps()
                assert (9 in steps) == (link.error is None), where
                if saver.error is None:
                    assert load_number(root / step_name(1)) == 2, where
                if 9 in steps:
                    with holdfast.open(root / step_name(9)) as checkpoint:
                        assert checkpoint.verify() == [], where
                        assert load_number(root / step_name(9), LARGER, make_near_state) == 9
                ends.add((link.error is None, saver.error is None))
                calls, others = link.calls, saver.calls
                shutil.rmtree(root)
                second += stride
            first += 1
    assert {(True, False), (False, True)} <= ends


def replace_step(path: Path) -> None:
    holdfast.save(make_state(3), path, step=2, options=OPTIONS, replace=True)


def test_a_rebase_never_undoes_a_replace(scratch: Path) -> None:
    made, ends = scratch / "made", set()
    for step in (1, 2):
        save_delta(made, step)
    first = calls = 1
    with stops():
        while first <= calls:
            second = others = 1
            while second <= others:
                path = scratch / f"{first}-{second}" / step_name(2)
                shutil.copytree(made, path.parent)
                saver = Actor(functools.partial(replace_step, path), first, "link")
                saver.start()
                also = Actor(functools.partial(holdfast.rebase, path), second, "link")
                also.start()
                saver.finish()
                also.finish()
                where = f"{path.parent.name}: {saver.error!r}, {also.error!r}"
                assert saver.error is None and load_number(path) == 3, where
                assert type(also.error) in (type(None), ReplacedError, StoreError), where
                with holdfast.open(path) as checkpoint:
                    assert checkpoint.verify() == [], where
                ends.add(also.error is None)
                calls, others = saver.calls, also.calls
                shutil.rmtree(path.parent)
                second += 1
            first += 3  # of the stops between its last look and the rename there are more
    assert ends == {True, False}
