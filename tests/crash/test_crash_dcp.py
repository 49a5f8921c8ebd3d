"""What DCP saves through us survives a power cut at any moment, as `test_crash_states` has it."""

from pathlib import Path

import pytest
from crash_content import OPTIONS, make_state
from crash_oracle import Record, assert_kept, checkpoint_states, record
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from holdfast.errors import StoreError
from holdfast.integrations.dcp import HoldfastWriter
from holdfast.testing import Fault


def save_as_dcp(place: Path, number: int, order: tuple[int, ...]) -> None:
    """Make DCP's calls for several ranks in one thread; ``order`` is that in which they write."""
    ranks = range(len(order))
    planners = [DefaultSavePlanner() for _ in ranks]
    writers = [HoldfastWriter(place, options=OPTIONS) for _ in ranks]
    plans = []
    for rank, (planner, writer) in enumerate(zip(planners, writers, strict=True)):
        planner.set_up_planner(make_state(number), is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = {}
    for rank in order:
        plan = planners[rank].finish_plan(plans[rank])
        results[rank] = writers[rank].write_data(plan, planners[rank]).value()
    writers[0].finish(metadata, [results[rank] for rank in ranks])


def record_save(made: Record, disk: Path, number: int, order: tuple[int, ...]) -> None:
    made.begun.add(("newer", number))
    save_as_dcp(disk / "newer", number, order)
    made.acknowledge("newer", number)


@pytest.mark.parametrize("order", [(0,), (0, 1), (2, 0, 1)])
def test_a_save_through_dcp_survives_a_power_cut_at_any_moment(
    scratch: Path, disk: Path, order: tuple[int, ...]
) -> None:
    with record(disk) as made:
        made.save("older", 1)
        record_save(made, disk, 2, order)
    count, faults = checkpoint_states(made, scratch, seed=1, subsets=6)
    assert count > 200
    assert_kept(faults)


def test_a_save_through_dcp_after_one_that_failed_survives_a_power_cut(
    scratch: Path, disk: Path
) -> None:
    with record(disk, Fault("truncate", 2)) as made:
        made.begun.add(("newer", 1))
        with pytest.raises(StoreError):
            save_as_dcp(disk / "newer", 1, (0, 1))
        record_save(made, disk, 2, (1, 0))
    _, faults = checkpoint_states(made, scratch, seed=1, subsets=6)
    assert_kept(faults)
