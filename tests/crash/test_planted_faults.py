"""The oracle of the crash states notices when the commit is broken: each planted fault is caught.

Without a fault it reports nothing (`test_crash_states`, and the first test here).
"""

import contextlib
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import planted
import pytest
from crash_content import OPTIONS, make_state
from crash_oracle import Record, checkpoint_states, record, run_states
from crash_ranks import ThreadGroup, run_ranks
from planted import (
    Plant,
    drop_a_directory_fsync,
    drop_a_file_fsync,
    overwrite_in_place,
    publish_before_durable,
    rename_without_fsync,
    retire_before_saving,
    retire_before_the_hint_is_durable,
    retire_data_first,
    retire_without_fsync,
)

import holdfast.runs.directory
import holdfast.runs.saver
import holdfast.saving.agreement
import holdfast.saving.save
from holdfast.engine import commit
from holdfast.engine.commit import Commit
from holdfast.errors import PeerError, StateError
from holdfast.group.base import Group
from holdfast.plan import cached_plans
from holdfast.testing import Fault


def _is_plant(value: object) -> bool:
    return inspect.isfunction(value) and list(inspect.signature(value).parameters) == ["patch"]


PLANTS = [name for name, value in vars(planted).items() if _is_plant(value)]


def skip_the_tile_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit, "check_tiling", lambda manifest: None)


def acknowledge_early(patch: pytest.MonkeyPatch) -> None:
    owed: list[Callable[[], None]] = []
    publish, save = Commit.publish, Record.save

    def save_then_publish(
        self: Record, place: str, number: int, group: Group | None = None
    ) -> None:
        save(self, place, number, group)
        while owed:
            owed.pop()()

    patch.setattr(Commit, "publish", lambda self: owed.append(lambda: publish(self)))
    patch.setattr(Record, "save", save_then_publish)


def leave_a_gap(patch: pytest.MonkeyPatch) -> None:
    """Make the last rank forget a shard: no fault of the commit, but one that it has to notice."""
    plan_save = holdfast.saving.agreement.plan_save

    def plan_with_a_gap(*arguments: object) -> object:
        plan = plan_save(*arguments)
        kept = np.arange(len(plan.tensor)) != plan.first[-2]
        first = np.append(plan.first[:-1], plan.first[-1] - 1)
        return replace(plan, tensor=plan.tensor[kept], boxes=plan.boxes[kept], first=first)

    patch.setattr(holdfast.saving.agreement, "plan_save", plan_with_a_gap)
    # Nor is it to be used by another test.
    patch.setattr(cached_plans, "find", lambda *held: ((), None))
    patch.setattr(cached_plans, "remember", lambda _: None)


def two_rank_save(made: Record, place: str, number: int) -> list[BaseException | None]:
    # The coordinator comes last: a rank that does not wait for it is ahead of it.
    def save(group: ThreadGroup) -> None:
        made.save(place, number, group)

    return run_ranks(save, order=(1, 0))


def faults_found(scratch: Path, disk: Path, *rules: Fault) -> list[str]:
    """Save on two ranks beside an older checkpoint, and again in its place; judge every state."""
    with record(disk, *rules) as made:
        two_rank_save(made, "runs/older", 1)
        two_rank_save(made, "runs/newer", 2)
        with contextlib.suppress(holdfast.errors.AlreadyCommittedError):
            made.save("runs/older", 3)
    return checkpoint_states(made, scratch, seed=1, subsets=4)[1]


def test_no_fault_is_found_where_none_is_planted(scratch: Path, disk: Path) -> None:
    assert faults_found(scratch, disk) == []


@pytest.mark.parametrize(
    "plant",
    [
        drop_a_file_fsync,
        drop_a_directory_fsync,
        publish_before_durable,
        overwrite_in_place,
        acknowledge_early,
    ],
)
def test_a_planted_fault_is_found(
    scratch: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    plant(monkeypatch)
    assert faults_found(scratch, disk) != []


def test_a_skipped_tile_check_is_found(
    scratch: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_a_gap(monkeypatch)
    skip_the_tile_check(monkeypatch)
    with record(disk) as made:
        assert two_rank_save(made, "newer", 1) == [None, None]
    assert checkpoint_states(made, scratch, seed=1, subsets=4)[1] != []


def test_the_tile_check_refuses_boxes_that_leave_a_gap_on_two_ranks(
    scratch: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_a_gap(monkeypatch)
    with record(disk) as made:
        mine, other = two_rank_save(made, "newer", 1)
    assert isinstance(mine, StateError)
    assert isinstance(other, PeerError) and other.rank == 0
    assert list(disk.iterdir()) == []
    assert checkpoint_states(made, scratch, seed=1, subsets=4)[1] == []


def test_each_fsync_of_a_save_is_needed(scratch: Path) -> None:
    def faults_without(operation: str, nth: int) -> tuple[Record, list[str]]:
        here = scratch / f"{operation}-{nth}"
        (here / "disk").mkdir(parents=True)
        with record(here / "disk", Fault(operation, nth, action="lie")) as made:
            made.save("runs/newer", 1)
        return made, checkpoint_states(made, here, seed=1, subsets=4)[1]

    made, _ = faults_without("sync", 0)
    synced = [call[:2] for call in made.disk.trace() if call[0] in ("sync", "sync_directory")]
    needless, within = [], []
    for number, (operation, path) in enumerate(synced):
        nth = [other for other, _ in synced[: number + 1]].count(operation)
        if Path(path).is_relative_to(made.base):
            within.append(re.sub("[0-9a-f]{32}", "ID", str(Path(path).relative_to(made.base))))
            if not faults_without(operation, nth)[1]:
                needless.append(path)
    assert within == [
        *("runs/newer/data/ID/00000-0.hf", "runs/newer/data/ID", "runs/newer/data", "runs/newer"),
        *("runs", ".", "runs/newer/.manifest-ID", "runs/newer"),
    ]
    assert needless == []


def run_faults_found(scratch: Path, disk: Path) -> list[str]:
    with record(disk) as made:
        run = holdfast.Checkpointer(disk / "run", keep=holdfast.Keep.latest(1), options=OPTIONS)
        for step in (1, 2):
            run.save(step, make_state(step))
            made.acknowledge("run", step)
    return run_states(made, scratch, "run", keep=1, seed=1, subsets=4)[1]


def test_no_fault_is_found_in_a_run_where_none_is_planted(scratch: Path, disk: Path) -> None:
    assert run_faults_found(scratch, disk) == []


@pytest.mark.parametrize(
    "plant",
    [
        retire_data_first,
        retire_without_fsync,
        retire_before_saving,
        retire_before_the_hint_is_durable,
        rename_without_fsync,
    ],
)
def test_a_fault_planted_in_a_run_is_found(
    scratch: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    plant(monkeypatch)
    assert run_faults_found(scratch, disk) != []


class CheckedPatch:
    """In place of pytest's: takes nothing that cannot be called as what it replaces."""

    def setattr(self, where: object, name: str, value: Callable[..., object]) -> None:
        of = inspect.signature(getattr(where, name)).parameters.values()
        places = [p for p in of if p.kind is p.POSITIONAL_OR_KEYWORD]
        named = {p.name: None for p in of if p.kind is p.KEYWORD_ONLY}
        for given in (places, [p for p in places if p.default is p.empty]):
            inspect.signature(value).bind(*given, **named)


@pytest.mark.parametrize("name", PLANTS)
def test_what_a_planted_fault_puts_in_place_can_be_called(name: str) -> None:
    getattr(planted, name)(CheckedPatch())
