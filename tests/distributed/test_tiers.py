"""A local disk before the store, for several ranks: one for all, or one of each host."""

import errno
import glob
import logging
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast
from holdfast import Checkpointer, Keep
from holdfast.engine import epochs
from holdfast.errors import HoldfastError, NotCommittedError, OptionError, StoreError
from holdfast.format.local_mark import LocalMark
from holdfast.format.names import step_name
from holdfast.format.unfinished import ELSEWHERE
from holdfast.report.read import read_run
from holdfast.runs import checkpointer as checkpointer_module
from holdfast.runs import tiers, uploader
from holdfast.runs.fence import Fence
from holdfast.runs.schedule import Schedule
from holdfast.runs.tier_steps import TierSteps
from holdfast.runs.tiers import TieredRun
from holdfast.runs.uploader import Uploader
from holdfast.stores.base import Store
from holdfast.stores.local import LocalStore
from holdfast.tools import ls, verify
from holdfast.tools.verify import verify as verify_all
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
@pytest.mark.parametrize("hosts", [[0, 1, 2], [0, 0, 0], [0, 0, 1], [1, 0, 0]])
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


@needs_namespaces
def test_commands_take_no_file_of_another_host_for_lost(places: tuple[str, str, str]) -> None:
    store, local, disks = places
    run_ranks(3, train, store, local, disks, [0, 1, 1], [1, 2], {})
    first, second = f"{disks}/host0", f"{disks}/host1"
    step = f"{first}/{step_name(2)}"
    others = {f"{step}/{name}" for name in holdfast.open(step).file_names if "/00000-" not in name}

    def bad() -> list[str]:
        said = [fault.where for _, fault in holdfast.scrub(first).damage]
        said += [finding.title for finding in read_run(first).findings if finding.level == "bad"]
        checked = verify_all(first)["checkpoints"]
        return said + [fault["where"] for one in checked for fault in one["damage"]]

    assert not bad()
    verified = holdfast.verify(step, deep=True)
    assert (verified.damage, {fault.where for fault in verified.elsewhere}) == ((), others)
    assert "1 of 3 files (the others are on other hosts)" in verify.render(verify_all(first))[0]
    assert {fault.where for fault in holdfast.repair(step).damage} == others
    assert holdfast.check_run(first, behind_min=1) == holdfast.check_run(second) == []
    with pytest.raises(OptionError, match="rank 0 is on another host"):
        holdfast.check_run(second, behind_min=1)
    listed = ls.ls(second)
    assert listed is not None
    assert {one["unfinished"] for one in listed["shown"]} == {ELSEWHERE}
    titles = [finding.title for finding in read_run(second).findings]
    assert "The committed steps are unknown" in titles
    assert not any("not committed" in title for title in titles)
    with pytest.raises(NotCommittedError, match=f"{ELSEWHERE}. Restore it on all hosts"):
        holdfast.open(f"{second}/{step_name(2)}")

    [mine] = glob.glob(f"{step}/data/*/00000-*")
    os.rename(mine, f"{first}/away")
    assert len(bad()) == 3
    os.rename(f"{first}/away", mine)
    not_said = shutil.ignore_patterns(".store")
    shutil.copytree(second, first, dirs_exist_ok=True, ignore=not_said)
    assert holdfast.verify(step).elsewhere == ()
    assert not bad()
    # What no key has signed makes nothing good that a key has signed.
    key = Path(disks, "key")
    pem = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    key.write_bytes(Ed25519PrivateKey.generate().private_bytes(*pem))
    holdfast.sign(step, key=key)
    for other in others:
        os.unlink(other)
    trusted = holdfast.Options(trust=(holdfast.signer(step) or "",))
    assert {fault.where for fault in holdfast.verify(step, options=trusted).damage} == others


def restore_and_listen(
    rank: int, store: str, local: str, disks: str, hosts: list[int], again: int
) -> tuple[int | None, list[str]]:
    """Restore, and save one step; return what was logged as an error."""
    moved_in(rank, local, disks, hosts)
    said: list[str] = []
    listener = logging.Handler(logging.ERROR)
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(listener)
    more = {"durable": "local", "drain_s": 60.0}
    with Checkpointer(store, local=local, keep=keep(), signals=(), **more) as checkpointer:
        step = checkpointer.restore(state_at(-1))
        if again:
            checkpointer.save(again, state_at(again))
    return step, said


@needs_namespaces
@pytest.mark.parametrize("then", [[1, 2], [2, 1], [1]])
def test_a_step_whose_manifest_is_on_a_host_that_is_gone_is_spoken_of(
    places: tuple[str, str, str], then: list[int]
) -> None:
    store, local, disks = places
    run_ranks(2, train, store, local, disks, [0, 1], [1], {})
    run_ranks(2, leave_behind, store, local, disks, [0, 1], [2, 3])
    (step, said), *others = run_ranks(len(then), restore_and_listen, store, local, disks, then, 0)
    assert step == 1
    assert (
        len(said) == 1 and "step 2, 3 in" in said[0] and "start the job with that host" in said[0]
    )
    assert all(other == (1, []) for other in others)
    # With that host, they are there; then all hosts know of the same job.
    assert run_ranks(2, restore_and_listen, store, local, disks, [1, 0], 4) == [(3, [])] * 2


@needs_namespaces
def test_what_another_job_has_left_behind_needs_no_host(places: tuple[str, str, str]) -> None:
    store, local, disks = places
    run_ranks(2, train, store, local, disks, [0, 1], [1], {})
    run_ranks(2, leave_behind, store, local, disks, [0, 1], [2, 3])
    run_ranks(1, train, store, local, disks, [2], [2], {})
    assert run_ranks(2, restore_and_listen, store, local, disks, [2, 1], 0) == [(2, [])] * 2


@needs_namespaces
def test_a_save_that_died_is_not_taken_for_one_of_a_host_that_is_gone(
    places: tuple[str, str, str],
) -> None:
    store, local, disks = places
    run_ranks(2, train, store, local, disks, [0, 1], [1], {})
    for host in ("host0", "host1"):
        os.makedirs(f"{disks}/{host}/{step_name(2)}/data/{'0' * 32}")
    assert run_ranks(2, restore_and_listen, store, local, disks, [1, 0], 0) == [(1, [])] * 2
    assert run_ranks(2, restore_and_listen, store, local, disks, [0, 2], 0) == [(1, [])] * 2


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
        assert ("holdfast copy" in str(error)) == (len(set(hosts)) == 1)
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
        assert not back or checkpointer.latest() == back
        if save is not None:
            checkpointer.save(save, state_at(save))
    return step, retired


@needs_namespaces
@pytest.mark.parametrize("then", [[1, 0], [0, 1], [2, 0, 1]])
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
@pytest.mark.parametrize("then", [[0, 2], [0, 0], [0, 0, 2, 2]])
def test_a_step_of_which_a_host_is_gone_is_saved_again_by_all_ranks(
    places: tuple[str, str, str], then: list[int]
) -> None:
    store, local, disks = places
    run_ranks(2, train, store, local, disks, [0, 1], [1], {})
    run_ranks(2, leave_behind, store, local, disks, [0, 1], [2])
    shutil.rmtree(f"{disks}/host1")
    for step, _ in run_ranks(len(then), go_on, store, local, disks, then, 2, 0):
        assert step == 1
    for step, whole, _, _ in run_ranks(2, resume, store, local, disks, [0, 2], {}):
        assert (step, whole) == (2, True)


@needs_namespaces
def test_files_of_a_host_that_is_gone_come_from_the_store(places: tuple[str, str, str]) -> None:
    store, local, disks = places
    run_ranks(3, train, store, local, disks, [0, 1, 2], [1], {})
    shutil.rmtree(f"{disks}/host1")
    for step, whole, path, _ in run_ranks(3, resume, store, local, disks, [0, 1, 2], {}):
        assert (step, whole, path) == (1, True, f"{local}/{step_name(1)}")


def wait_for(sign: str, job: "Future[Any] | None" = None) -> None:
    """Wait until a file is there, or the job that is to make it has ended."""
    end = time.monotonic() + 60.0
    while not Path(sign).exists() and not (job and job.done()):
        assert time.monotonic() < end, sign
        time.sleep(0.01)


def overtaken(rank: int, store: str, local: str, disks: str, hosts: list[int], signs: str) -> str:
    """Save, wait until a newer job has, and save again."""
    moved_in(rank, local, disks, hosts)
    more = {"durable": "local", "drain_s": 0.1, "upload_bytes_s": 1000.0}
    checkpointer = Checkpointer(store, local=local, keep=keep(), signals=(), **more)
    checkpointer.save(1, state_at(1))
    Path(f"{signs}-begun").touch()
    wait_for(f"{signs}-over")
    try:
        checkpointer.save(2, state_at(2))
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()  # no rank ends, and takes the store of the others with it
    return ""


@needs_namespaces
@pytest.mark.parametrize("then", [[1, 2], [2, 1], [1]])
def test_a_job_that_was_overtaken_on_one_of_its_hosts_deletes_nothing_there(
    places: tuple[str, str, str], tmp_path: Path, then: list[int]
) -> None:
    store, local, disks = places
    signs = str(tmp_path / "job")
    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(run_ranks, 2, overtaken, store, local, disks, [0, 1], signs)
        wait_for(f"{signs}-begun", old)
        run_ranks(len(then), leave_behind, store, local, disks, then, [3, 4])
        Path(f"{signs}-over").touch()
        errors = old.result()
    assert any("FencedError" in error and "belongs to a newer job" in error for error in errors)
    assert all(errors), errors  # the other rank is told
    more = {"durable": "local", "drain_s": 60.0}
    for step, whole, _, _ in run_ranks(len(then), resume, store, local, disks, then, more):
        assert (step, whole) == (4, True)


def save_in_between(
    rank: int, store: str, local: str, disks: str, hosts: list[int], signs: str
) -> list[int]:
    """Save, wait until a newer job has looked at the steps, and save again."""
    moved_in(rank, local, disks, hosts)
    more = {"durable": "local", "drain_s": 0.1, "upload_bytes_s": 1000.0}
    checkpointer = Checkpointer(store, local=local, signals=(), **more)
    checkpointer.save(1, state_at(1))
    Path(f"{signs}-begun").touch()
    wait_for(f"{signs}-looked")
    checkpointer.save(2, state_at(2))
    Path(f"{signs}-saved").touch()
    dist.barrier()
    return checkpointer.steps()


def take_late(
    rank: int, store: str, local: str, disks: str, hosts: list[int], signs: str
) -> tuple[int | None, str, str, list[int]]:
    """Take over the disks when the older job has saved a step since this one looked."""
    moved_in(rank, local, disks, hosts)
    hold = Fence.hold

    def hold_late(self: Fence) -> None:
        Path(f"{signs}-looked").touch()
        wait_for(f"{signs}-saved")
        hold(self)

    Fence.hold = hold_late  # type: ignore[method-assign]
    kept, into = Keep.latest(9) | Keep.local(9), state_at(-1)
    with Checkpointer(store, local=local, keep=kept, signals=()) as checkpointer:
        step = checkpointer.restore(into)
        try:
            checkpointer.save(2, state_at(2))
        except HoldfastError as error:
            kind, text = type(error).__name__, str(error)
        else:
            kind = text = ""
        checkpointer.save(3, state_at(3))
        return step, kind, text, checkpointer.steps()


@needs_namespaces
@pytest.mark.parametrize("then", [[0, 1], [1, 0]])
def test_a_step_that_an_older_job_saves_before_its_disks_are_taken_stays(
    places: tuple[str, str, str], tmp_path: Path, then: list[int]
) -> None:
    store, local, disks = places
    signs = str(tmp_path / "job")
    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(run_ranks, 2, save_in_between, store, local, disks, [0, 1], signs)
        wait_for(f"{signs}-begun", old)
        found = run_ranks(2, take_late, store, local, disks, then, signs)
        old.result()
    assert [kind for _, kind, _, _ in found] == ["AlreadyCommittedError", "PeerError"]
    for step, _, text, steps in found:
        assert (step, steps) == (1, [1, 2, 3])
        assert f"{step_name(2)} holds a committed checkpoint" in text
    for step in (1, 2, 3):
        with holdfast.open(f"{store}/{step_name(step)}") as checkpoint:
            assert checkpoint.verify() == []


def take_over(rank: int, store: str, local: str, disks: str, hosts: list[int], signs: str) -> bool:
    """Have the disks; name this job on them, and take the store, when another one has read that."""
    moved_in(rank, local, disks, hosts)
    write_mark, enter = tiers.write_mark, TieredRun._enter

    def write_late(*given: Any, **more: Any) -> None:
        Path(f"{signs}-has-disks").touch()
        wait_for(f"{signs}-read")
        write_mark(*given, **more)

    def enter_alone(self: TieredRun, uploader: Uploader) -> None:
        enter(self, uploader)
        Path(f"{signs}-has-store").touch()
        raise OptionError("this job ends here")

    tiers.write_mark, TieredRun._enter = write_late, enter_alone  # type: ignore[method-assign]
    checkpointer = Checkpointer(store, local=local, signals=(), durable="local", drain_s=0.1)
    try:
        checkpointer.save(3, state_at(3))
    except HoldfastError as error:
        return "this job ends here" in str(error)
    return False


def look_meanwhile(
    rank: int, store: str, local: str, disks: str, hosts: list[int], signs: str
) -> tuple[int | None, bool]:
    """Restore; read what the disk says as early, and what the store says as late as it may be."""
    moved_in(rank, local, disks, hosts)
    checked_mark, newest_job = TierSteps.checked_mark, epochs.newest_job

    def read_early(self: TierSteps) -> LocalMark:
        mark = checked_mark(self)
        Path(f"{signs}-read").touch()
        return mark

    def look_late(place: Store) -> str | None:
        end = time.monotonic() + 3.0
        while time.monotonic() < end and not Path(f"{signs}-has-store").exists():
            time.sleep(0.01)
        return newest_job(place)

    TierSteps.checked_mark = read_early  # type: ignore[method-assign]
    epochs.newest_job = look_late
    into = state_at(-1)
    more = {"durable": "local", "drain_s": 0.1}
    with Checkpointer(store, local=local, keep=keep(), signals=(), **more) as checkpointer:
        step = checkpointer.restore(into)
    return step, is_whole(into, step or 0)


@needs_namespaces
@pytest.mark.parametrize("hosts", [[0, 1], [1, 0]])
def test_steps_of_another_host_count_while_a_job_takes_the_store(
    places: tuple[str, str, str], tmp_path: Path, hosts: list[int]
) -> None:
    store, local, disks = places
    signs = str(tmp_path / "job")
    run_ranks(2, leave_behind, store, local, disks, [0, 1], [1, 2])
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(run_ranks, 2, take_over, store, local, disks, [0, 1], signs)
        wait_for(f"{signs}-has-disks", other)
        found = run_ranks(2, look_meanwhile, store, local, disks, hosts, signs)
        assert other.result() == [True, True]
    assert found == [(2, True)] * 2


def fail_to_read(
    rank: int, store: str, local: str, disks: str, hosts: list[int]
) -> tuple[int | None, str]:
    """Begin when the disk of rank 1 cannot be read for a moment; then save."""
    moved_in(rank, local, disks, hosts)
    kept, into = Keep.latest(9) | Keep.local(9), state_at(-1)
    with Checkpointer(store, local=local, keep=kept, signals=()) as checkpointer:
        step = checkpointer.restore(into)
        get, failed = LocalStore.get, list[str]()

        def fail_once(self: LocalStore, name: str, limit: int) -> bytes:
            if rank == 1 and name == f"{step_name(2)}/MANIFEST" and not failed:
                failed.append(name)
                error = StoreError(f"read {self.location}/{name}: Input/output error")
                error.errno = errno.EIO
                raise error
            return get(self, name, limit)

        LocalStore.get = fail_once  # type: ignore[method-assign]
        try:
            checkpointer.save(3, state_at(3))
        except HoldfastError as error:
            text = str(error)
        else:
            text = ""
        checkpointer.save(4, state_at(4))
        return step, text


@needs_namespaces
def test_a_step_of_another_host_stays_if_its_manifest_cannot_be_read_for_a_moment(
    places: tuple[str, str, str],
) -> None:
    store, local, disks = places
    run_ranks(2, leave_behind, store, local, disks, [0, 1], [1, 2])
    for step, text in run_ranks(2, fail_to_read, store, local, disks, [1, 0]):
        assert step == 2
        assert f"{step_name(2)}/MANIFEST: Input/output error" in text
    assert Checkpointer(store).steps() == [1, 2, 4]


def damage_on_another_host(
    rank: int, store: str, local: str, disks: str, again: bool
) -> tuple[str, str, list[tuple[str, int | None]]]:
    """Save two steps, of which the newer is damaged on the host of rank 1; perhaps save it again.

    Returns:
        What waiting for it says, and closing; and what observers are told of uploads.
    """
    moved_in(rank, local, disks, [0, 1])
    events, texts = list[tuple[str, int | None]](), list[str]()

    def observe(event: holdfast.Event) -> None:
        if event.kind in ("behind", "uploaded"):
            events.append((event.kind, event.step))

    more: Any = {"durable": "local", "drain_s": 80.0, "deadline_s": 80.0, "observe": [observe]}
    kept = Keep.latest(9) | Keep.local(9)
    checkpointer = Checkpointer(store, local=local, keep=kept, signals=(), **more)
    assert checkpointer._tiers is not None
    with checkpointer._tiers.paused():
        for step in (1, 2):
            checkpointer.save(step, state_at(step))
        if rank == 1:
            flip(local)
        dist.barrier()
    for ends in (lambda: checkpointer.wait("store"), checkpointer.close):
        if again and texts:
            checkpointer.retire_after(1)
            checkpointer.save(2, state_at(2))
        try:
            ends()
            texts.append("")
        except holdfast.errors.HoldfastError as error:
            texts.append(str(error))
    return texts[0], texts[1], events


def flip(local: str) -> None:
    """Change a bit of the data file of step 2; done twice, it is as it was."""
    (data,) = Path(local, step_name(2)).rglob("*.hf")
    content = bytearray(data.read_bytes())
    content[len(content) // 3] ^= 1
    data.write_bytes(content)


@needs_namespaces
@pytest.mark.parametrize("again", [False, True])
def test_a_file_that_is_damaged_on_another_host_holds_up_no_other_step(
    places: tuple[str, str, str], again: bool
) -> None:
    store, local, disks = places
    found = run_ranks(2, damage_on_another_host, store, local, disks, again)
    for waited, closed, _ in found:
        assert "step 2 of" in waited and "the bytes were damaged" in waited, waited
        assert again or ("lacks step 2 of" in closed and "were damaged" in closed), closed
        assert not again or not closed, closed
    told = [("behind", 2), ("uploaded", 1), *([("uploaded", 2)] if again else [])]
    assert [sorted(events) for *_, events in found] == [told, []]
    if not again:
        assert Checkpointer(store).steps() == [1]
        flip(f"{disks}/host1")
    for step, _ in run_ranks(2, go_on, store, local, disks, [0, 1], 3, 0):
        assert step == 2
    assert Checkpointer(store).steps() == [1, 2, 3]
    assert not [name for name in os.listdir(store) if name.startswith(".uploading")]


def replace_damaged(
    rank: int, store: str, local: str, disks: str, hosts: list[int], damages: bool, dies: bool
) -> None:
    """Save step 2 again, which is damaged; perhaps die when rank 0 has deleted it on its host."""
    moved_in(rank, local, disks, hosts)
    if damages and rank == 0:
        flip(local)
    dist.barrier()
    kept = Keep.latest(9) | Keep.local(9)
    with Checkpointer(store, local=local, keep=kept, signals=()) as checkpointer:
        into = state_at(-1)
        assert checkpointer.restore(into) == 1
        assert is_whole(into, 1)
        if dies:
            assert checkpointer._tiers is not None
            checkpointer._tiers.retire_elsewhere = die  # type: ignore[method-assign]
            with pytest.raises(ZeroDivisionError):
                checkpointer.save(2, state_at(2))
        else:
            checkpointer.save(2, state_at(2))


def die(*_: Any) -> None:
    raise ZeroDivisionError


@needs_namespaces
@pytest.mark.parametrize("dies_before", [None, [0, 1], [1, 0]])
def test_no_host_keeps_a_damaged_step_that_was_saved_again(
    places: tuple[str, str, str], dies_before: list[int] | None
) -> None:
    store, local, disks = places
    run_ranks(2, train, store, local, disks, [0, 1], [1], {})
    run_ranks(2, leave_behind, store, local, disks, [0, 1], [2])
    run_ranks(2, replace_damaged, store, local, disks, [1, 0], True, dies_before is not None)
    if dies_before is not None:
        assert Checkpointer(store).steps() == [1]
        run_ranks(2, replace_damaged, store, local, disks, dies_before, False, False)
    if dies_before != [0, 1]:  # LATEST of the first host says nothing of the step any more
        with pytest.raises(NotCommittedError, match=f"{ELSEWHERE}. Restore it on all hosts"):
            holdfast.open(f"{disks}/host0/{step_name(2)}")
    for then in ([0, 1], [1, 0]):
        for step, _ in run_ranks(2, go_on, store, local, disks, then, None, 0):
            assert step == 2
    assert Checkpointer(store).steps() == [1, 2]


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


def ends(rank: int, store: str, local: str) -> tuple[int, bool]:
    """Train until the time is over, by a clock by which every upload takes 300 s."""
    now_s = [0.0]
    real = uploader.transfer

    def transfer(*given: Any) -> Any:
        now_s[0] += 300.0
        return real(*given)

    uploader.transfer = transfer  # type: ignore[assignment]
    made = partial(Schedule, clock=lambda: now_s[0])
    checkpointer_module.Schedule = made  # type: ignore[assignment, misc]
    with Checkpointer(store, local=local, ends_in_s=1000.0, signals=()) as checkpointer:
        checkpointer.save(1, state_at(1))
        step = 1
        while not checkpointer.stopping and step < 9:
            step += 1
            checkpointer.step(step, state_at(step))
        return step, checkpointer.stopping


def test_all_ranks_leave_time_for_the_upload_of_the_last_save(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    found = run_ranks(2, ends, store, str(tmp_path / "local"))
    assert found == [(3, True)] * 2  # asked at step 2
    assert Checkpointer(store).steps() == [1, 3]


def save_between(rank: int, store: str, local: str, disks: str, hosts: list[int]) -> list[int]:
    """Go back to a step, and save one that the policy does not keep beside the later one."""
    moved_in(rank, local, disks, hosts)
    policy = Keep.latest(1) | Keep.every(10)
    given: dict[str, Any] = {"keep": policy, "deadline_s": 40.0, "signals": ()}
    with Checkpointer(store, local=local, **given) as checkpointer:
        for step in (10, 20):
            checkpointer.save(step, state_at(step))
        checkpointer.restore(state_at(0), step=10)
        with pytest.raises(HoldfastError, match=r"does not go to .*call retire_after"):
            checkpointer.save(15, state_at(15))
    return Checkpointer(store, group="alone").steps()


@needs_namespaces
@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_no_rank_waits_for_an_upload_that_the_policy_does_not_want(
    places: tuple[str, str, str], hosts: list[int]
) -> None:
    assert run_ranks(2, save_between, *places, hosts) == [[10, 20]] * 2


def fail_after_a_restore(rank: int, store: str, local: str, disks: str, hosts: list[int]) -> None:
    moved_in(rank, local, disks, hosts)
    more: dict[str, Any] = {"durable": "local", "upload_bytes_s": 30_000.0, "signals": ()}
    with (
        pytest.raises(ZeroDivisionError),
        Checkpointer(store, local=local, **more) as checkpointer,
    ):
        checkpointer.save(1, state_at(1))
        checkpointer.restore(state_at(0))
        raise ZeroDivisionError


@needs_namespaces
@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_an_exception_after_a_restore_does_not_leave_the_last_step_behind(
    places: tuple[str, str, str], hosts: list[int]
) -> None:
    run_ranks(2, fail_after_a_restore, *places, hosts)
    assert Checkpointer(places[0]).steps() == [1]


def seen(checkpointer: Checkpointer) -> tuple[int | None, list[int], list[str]]:
    """What a rank says of the steps, and of which it can load what `path` names, and where."""
    paths = {step: checkpointer.path(step) for step in checkpointer.steps()}
    whole = []
    for step, path in paths.items():
        try:
            into = {"same": torch.zeros(5000), "step": -1}
            holdfast.load(path, into, strict=False, group="alone")
        except holdfast.errors.NotCommittedError:
            continue
        assert into["step"] == step
        with holdfast.open(path) as checkpoint:
            assert checkpoint.verify() == []
        whole.append(path)
    return checkpointer.latest(), [*paths], whole


def look(
    rank: int, store: str, local: str, disks: str, hosts: list[int], save: int
) -> tuple[Any, Any, Any]:
    """Restore; save a step; what this rank says of the steps after each, and when it is up."""
    moved_in(rank, local, disks, hosts)
    kept = Keep.latest(9) | Keep.local(9)
    given: dict[str, Any] = {"keep": kept, "durable": "local", "drain_s": 60.0, "signals": ()}
    into = state_at(-1)
    with Checkpointer(store, local=local, **given) as checkpointer:
        step = checkpointer.restore(into)
        assert is_whole(into, step or 0)
        restored = seen(checkpointer)
        dist.barrier()
        checkpointer.save(save, state_at(save), metrics={"loss": 1.0})
        saved = checkpointer.latest(), checkpointer.steps()
        assert rank or checkpointer.best("loss") == save  # its MANIFEST is here, if not its files
        checkpointer.wait("store")
    up = seen(checkpointer)
    dist.barrier()  # no rank deletes what another looks at
    return restored, saved, up


@needs_namespaces
@pytest.mark.parametrize("then", [[1, 0], [0, 1], [2, 0, 1], [1, 1, 0], [0, 0, 1]])
def test_all_ranks_name_the_steps_that_were_found_on_any_host(
    places: tuple[str, str, str], then: list[int]
) -> None:
    store, local, disks = places
    run_ranks(2, train, store, local, disks, [0, 1], [1], {})
    run_ranks(2, leave_behind, store, local, disks, [0, 1], [2, 3])
    for restored, saved, up in run_ranks(len(then), look, store, local, disks, then, 4):
        assert restored == (3, [1, 2, 3], [f"{store}/{step_name(1)}"])
        assert saved == (4, [1, 2, 3, 4])
        assert up == (4, [1, 2, 3, 4], [f"{store}/{step_name(step)}" for step in (1, 2, 3, 4)])


@needs_namespaces
@pytest.mark.parametrize("then", [[1, 0], [0, 1], [2, 0, 1], [1, 0, 0]])
def test_no_rank_names_a_step_that_another_job_has_left_behind(
    places: tuple[str, str, str], then: list[int]
) -> None:
    store, local, disks = places
    run_ranks(2, train, store, local, disks, [0, 1], [1], {})
    run_ranks(2, leave_behind, store, local, disks, [0, 1], [2, 3])
    run_ranks(2, look, store, local, disks, [3, 3], 2)
    in_store = [f"{store}/{step_name(step)}" for step in (1, 2)]
    for restored, saved, up in run_ranks(len(then), look, store, local, disks, then, 3):
        assert restored == (2, [1, 2], in_store)
        assert saved == (3, [1, 2, 3])
        assert up == (3, [1, 2, 3], [*in_store, f"{store}/{step_name(3)}"])


@needs_namespaces
@pytest.mark.parametrize("then", [[2, 0], [0, 2], [2, 0, 0]])
def test_no_rank_names_a_step_of_which_a_host_is_gone(
    places: tuple[str, str, str], then: list[int]
) -> None:
    store, local, disks = places
    run_ranks(2, train, store, local, disks, [0, 1], [1], {})
    run_ranks(2, leave_behind, store, local, disks, [0, 1], [2, 3])
    shutil.rmtree(f"{disks}/host1")
    in_store = f"{store}/{step_name(1)}"
    for restored, saved, up in run_ranks(len(then), look, store, local, disks, then, 3):
        assert restored == (1, [1], [in_store])
        assert saved == (3, [1, 3])
        assert up == (3, [1, 3], [in_store, f"{store}/{step_name(3)}"])


def ask_for(rank: int, store: str, local: str, disks: str, hosts: list[int], step: int) -> str:
    moved_in(rank, local, disks, hosts)
    checkpointer = Checkpointer(store, local=local, durable="local", signals=())
    with checkpointer, pytest.raises(HoldfastError) as caught:
        checkpointer.restore(state_at(-1), step=step)
    return f"{caught.typename}: {caught.value}"


@needs_namespaces
@pytest.mark.parametrize("then", [[0, 0], [0, 1]])
def test_a_step_that_another_job_has_left_behind_is_not_restored_by_its_number(
    places: tuple[str, str, str], then: list[int]
) -> None:
    store, local, disks = places
    run_ranks(2, train, store, local, disks, [0, 0], [1], {})
    run_ranks(2, leave_behind, store, local, disks, [0, 0], [2, 3])
    run_ranks(2, look, store, local, disks, [3, 3], 2)
    for text in run_ranks(2, ask_for, store, local, disks, then, 3):
        assert f"{store}/{step_name(3)} does not exist" in text
