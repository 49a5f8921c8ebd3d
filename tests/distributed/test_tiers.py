"""A local disk before the store, for several ranks: one for all, or one of each host."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast
from holdfast import Checkpointer, Keep
from holdfast.errors import OptionError
from holdfast.format.names import step_name
from namespaces import needs_namespaces, own_disk

from .ranks import run_ranks

ROWS = 12


def state_at(step: int, rows: int = ROWS) -> dict[str, Any]:
    """A sharded tensor, one that all ranks have, and a number."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(rows * 1000, dtype=torch.float32).reshape(rows, 1000) + step
    return {
        "cut": distribute_tensor(full, mesh, [Shard(0)]),
        "same": torch.full((5000,), float(step)),
        "step": step,
    }


def is_whole(state: dict[str, Any], step: int) -> bool:
    cut = state["cut"]
    whole = cut.full_tensor() if isinstance(cut, DTensor) else cut
    expected = torch.arange(ROWS * 1000, dtype=torch.float32).reshape(ROWS, 1000) + step
    return bool(
        torch.equal(whole, expected) and (state["same"] == step).all() and state["step"] == step
    )


def keep() -> Keep:
    return Keep.latest(2) | Keep.local(1)


def moved_in(rank: int, local: str, disks: str, hosts: list[int]) -> None:
    """Go to the host of this rank."""
    own_disk(local, f"{disks}/host{hosts[rank]}")


def train(
    rank: int, store: str, local: str, disks: str, hosts: list[int], steps: list[int], more: Any
) -> list[int]:
    moved_in(rank, local, disks, hosts)
    with Checkpointer(store, local=local, keep=keep(), signals=(), **more) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_at(step))
        checkpointer.wait("local")
    return sorted(int(n[5:]) for n in os.listdir(local) if n.startswith("step-"))


def resume(
    rank: int, store: str, local: str, disks: str, hosts: list[int], more: Any
) -> tuple[int | None, bool, str, int]:
    moved_in(rank, local, disks, hosts)
    into = state_at(-1)
    with Checkpointer(store, local=local, keep=keep(), signals=(), **more) as checkpointer:
        step = checkpointer.restore(into)
        report = checkpointer.report
    path, read = ("", 0) if report is None else (report.path, report.bytes_read)
    return step, is_whole(into, step or 0), path, read


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str, str]:
    (tmp_path / "disks").mkdir()
    return str(tmp_path / "store"), str(tmp_path / "local"), str(tmp_path / "disks")


@needs_namespaces
@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 1, 2], [0, 0, 1], [1, 0, 0]])
def test_a_step_goes_up_from_the_disks_of_all_hosts(
    places: tuple[str, str, str], hosts: list[int]
) -> None:
    store, local, disks = places
    kept = run_ranks(3, train, store, local, disks, hosts, [1, 2, 3, 4], {})
    assert all(steps[-1] == 4 and len(steps) <= 2 for steps in kept), kept
    assert Checkpointer(store).steps() == [3, 4]
    with holdfast.open(f"{store}/{step_name(4)}") as checkpoint:
        assert checkpoint.verify() == []
    # From the disks of the same hosts, and from the store alone.
    for found in run_ranks(3, resume, store, local, disks, hosts, {}):
        assert found[:3] == (4, True, f"{local}/{step_name(4)}")
    shutil.rmtree(disks)
    for found in run_ranks(3, resume, store, local, disks, hosts, {}):
        assert found[:3] == (4, True, f"{store}/{step_name(4)}")


def leave_behind(
    rank: int, store: str, local: str, disks: str, hosts: list[int], steps: list[int]
) -> str:
    """Save steps that do not go up."""
    moved_in(rank, local, disks, hosts)
    more = {"durable": "local", "drain_s": 0.2, "upload_bytes_s": 1000.0}
    checkpointer = Checkpointer(store, local=local, signals=(), **more)
    for step in steps:
        checkpointer.save(step, state_at(step))
    try:
        checkpointer.close()
    except holdfast.errors.HoldfastError as error:
        return str(error)
    return ""


@needs_namespaces
@pytest.mark.parametrize(
    ("hosts", "then"),
    [
        ([0, 1, 2], [0, 1, 2]),
        ([0, 1, 2], [2, 0, 1]),
        ([0, 0, 1], [1, 0, 0]),
        ([0, 1], [1, 0, 0]),
        ([0, 1], [2, 0, 1]),  # rank 0 is on a host that has nothing
    ],
)
def test_what_only_the_disks_of_hosts_have_is_restored_from_all_of_them(
    places: tuple[str, str, str], hosts: list[int], then: list[int]
) -> None:
    store, local, disks = places
    found = run_ranks(len(hosts), leave_behind, store, local, disks, hosts, [1, 2])
    assert all("drain_s=0.2" in text for text in found)  # no rank ends well
    more = {"durable": "local", "drain_s": 60.0}
    for step, whole, path, _ in run_ranks(len(then), resume, store, local, disks, then, more):
        assert (step, whole, path) == (2, True, f"{local}/{step_name(2)}")
    assert Checkpointer(store).steps() == []  # restore alone uploads nothing


def go_on(
    rank: int, store: str, local: str, disks: str, hosts: list[int], save: int | None, back: int
) -> tuple[int | None, list[int]]:
    """Restore the newest step, go back to one, or save another, and end."""
    moved_in(rank, local, disks, hosts)
    kept = Keep.latest(9) | Keep.local(9)
    into = state_at(-1)
    with Checkpointer(store, local=local, keep=kept, signals=()) as checkpointer:
        step = checkpointer.restore(into)
        assert is_whole(into, step or 0)
        retired = checkpointer.retire_after(back) if back else []
        if save is not None:
            checkpointer.save(save, state_at(save))
    return step, retired


@needs_namespaces
@pytest.mark.parametrize("then", [[0, 1], [1, 0], [2, 0, 1]])
def test_what_hosts_have_goes_up_wherever_rank_0_is_then(
    places: tuple[str, str, str], then: list[int]
) -> None:
    store, local, disks = places
    run_ranks(2, leave_behind, store, local, disks, [0, 1], [1, 2])
    for step, _ in run_ranks(len(then), go_on, store, local, disks, then, 3, 0):
        assert step == 2
    assert Checkpointer(store).steps() == [1, 2, 3]
    for step in (1, 2, 3):
        with holdfast.open(f"{store}/{step_name(step)}") as checkpoint:
            assert checkpoint.verify() == []


@needs_namespaces
@pytest.mark.parametrize("then", [[0, 1], [1, 0], [2, 0, 1]])
def test_a_retired_step_does_not_come_back_from_another_host(
    places: tuple[str, str, str], then: list[int]
) -> None:
    store, local, disks = places
    run_ranks(2, leave_behind, store, local, disks, [0, 1], [1, 2])
    for found in run_ranks(len(then), go_on, store, local, disks, then, None, 1):
        assert found == (2, [2])
    for step, whole, _, _ in run_ranks(2, resume, store, local, disks, [0, 1], {}):
        assert (step, whole) == (1, True)


@needs_namespaces
def test_a_step_of_which_a_host_is_gone_is_passed_over(places: tuple[str, str, str]) -> None:
    store, local, disks = places
    run_ranks(2, train, store, local, disks, [0, 1], [1], {})
    run_ranks(2, leave_behind, store, local, disks, [0, 1], [2])
    shutil.rmtree(f"{disks}/host1")
    for step, whole, path, _ in run_ranks(2, resume, store, local, disks, [0, 2], {}):
        assert (step, whole) == (1, True)
        assert path.startswith((local, store))


@needs_namespaces
def test_files_of_a_host_that_is_gone_come_from_the_store(places: tuple[str, str, str]) -> None:
    store, local, disks = places
    run_ranks(3, train, store, local, disks, [0, 1, 2], [1], {})
    shutil.rmtree(f"{disks}/host1")
    for step, whole, path, _ in run_ranks(3, resume, store, local, disks, [0, 1, 2], {}):
        assert (step, whole, path) == (1, True, f"{local}/{step_name(1)}")


def with_deltas(rank: int, store: str, local: str, disks: str) -> str:
    moved_in(rank, local, disks, [0, 1])
    with Checkpointer(store, local=local, codec="delta", signals=()) as checkpointer:
        try:
            checkpointer.save(1, state_at(1))
        except OptionError as error:
            return str(error)
    return ""


@needs_namespaces
def test_deltas_on_the_disks_of_several_hosts_are_refused(places: tuple[str, str, str]) -> None:
    for text in run_ranks(2, with_deltas, *places):
        assert "which each host has for itself, and the codec makes deltas" in text


def shared(rank: int, store: str, local: str) -> tuple[bool, list[int]]:
    with Checkpointer(store, local=local, every=1, signals=()) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.step(step, state_at(step))
        checkpointer.wait()
        into = state_at(-1)
        assert checkpointer.restore(into) == 3
        return is_whole(into, 3), checkpointer.steps()


def test_ranks_that_share_a_local_disk(tmp_path: Path) -> None:
    found = run_ranks(2, shared, str(tmp_path / "store"), str(tmp_path / "local"))
    assert found == [(True, [1, 2, 3])] * 2
