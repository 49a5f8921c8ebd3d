"""Disks that are really full, and places that really cannot be written to."""

import dataclasses
import errno
import os
import re
import shutil
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from crash_content import OPTIONS, load_number, make_state
from crash_ranks import ThreadGroup, run_ranks

import holdfast
from holdfast import Keep
from holdfast.errors import NoSpaceError, NotCommittedError, StoreError

PAGE_BYTES = 4096
NOBODY = 65534


@pytest.fixture
def small_disk(scratch: Path) -> Iterator[Path]:
    """A file system of 1 MiB and 64 inodes, which holds an older checkpoint."""
    path = scratch / "small"
    path.mkdir()
    if os.geteuid():
        pytest.skip("only root may mount a small file system")
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=64", "tmpfs", path]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr}")
    try:
        holdfast.save(make_state(1), path / "older", options=OPTIONS)
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def fill_bytes(place: Path, left: int) -> None:
    """Take all space but ``left`` bytes."""
    free = os.statvfs(place).f_bavail * PAGE_BYTES - left
    (place / "filler").write_bytes(bytes(max(0, free)))


def fill_inodes(place: Path, left: int) -> None:
    """Take all inodes but ``left``."""
    (place / "filler").mkdir()
    while os.statvfs(place).f_ffree > left:
        (place / "filler" / str(os.statvfs(place).f_ffree)).touch()


def remove_filler(place: Path) -> None:
    if (place / "filler").is_dir():
        shutil.rmtree(place / "filler")
    else:
        (place / "filler").unlink(missing_ok=True)


def names_below(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


@pytest.mark.parametrize("io", ["auto", "buffered", "direct", "io_uring"])
@pytest.mark.parametrize(
    ("fill", "step", "enough"),
    [(fill_bytes, 2 * PAGE_BYTES, 48 * PAGE_BYTES), (fill_inodes, 1, 8)],
    ids=["bytes", "inodes"],
)
def test_a_full_disk_is_a_typed_error_and_nothing_is_left(
    small_disk: Path, fill: Callable[[Path, int], None], step: int, enough: int, io: str
) -> None:
    options = dataclasses.replace(OPTIONS, io=io)
    newer, failed = small_disk / "newer", 0
    for left in range(0, enough, step):
        fill(small_disk, left)
        before = names_below(small_disk)
        try:
            holdfast.save(make_state(2), newer, options=options)
        except NoSpaceError as error:
            failed += 1
            assert "free space or choose another directory" in str(error)
            assert str(newer) in str(error)
            assert names_below(small_disk) == before
        else:
            assert load_number(newer) == 2
            shutil.rmtree(newer)
        assert load_number(small_disk / "older", options) == 1
        remove_filler(small_disk)
        holdfast.save(make_state(2), newer, options=options)
        assert load_number(newer) == 2
        shutil.rmtree(newer)
    assert 2 <= failed < enough // step  # from "nothing at all" to "just enough"


@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_what_is_small_when_encoded_fits_where_the_elements_do_not(
    small_disk: Path, io: str
) -> None:
    options = dataclasses.replace(OPTIONS, io=io)
    state = {"zeros": torch.zeros(1 << 20), "some": torch.randn(100)}  # 4 MiB on 1 MiB
    with pytest.raises(NoSpaceError):
        holdfast.save(state, small_disk / "raw", options=options)
    keep = holdfast.Keep.all()
    run = holdfast.Checkpointer(small_disk / "run", keep=keep, codec="lossless", options=options)
    run.save(1, state)
    run.close()
    with holdfast.open(run.path(1)) as checkpoint:
        assert torch.equal(checkpoint.tensor("some"), state["some"])
    with pytest.raises(NoSpaceError):
        noise = {"noise": torch.randn(1 << 20)}
        holdfast.save(noise, small_disk / "noise", codec="lossless", options=options)


def test_a_run_on_a_full_disk_goes_on_when_there_is_space(small_disk: Path) -> None:
    run = holdfast.Checkpointer(small_disk / "run", keep=holdfast.Keep.latest(1), options=OPTIONS)
    run.save(1, make_state(1))
    fill_bytes(small_disk, 0)
    for _ in range(3):
        with pytest.raises(NoSpaceError):
            run.save(2, make_state(2))
        assert run.steps() == [1]
        assert run.restore(make_state(-1)) == 1
    remove_filler(small_disk)
    run.save(2, make_state(2))
    assert run.steps() == [2]
    assert load_number(Path(run.path(2))) == 2


def test_a_run_refuses_a_state_that_cannot_fit_before_it_writes(small_disk: Path) -> None:
    """The disk holds one of these steps, and room is needed for one more than is kept."""
    state = {"w": torch.ones(130_000), "step": 1}
    run = small_disk / "run"
    with holdfast.Checkpointer(run, every=1, keep=holdfast.Keep.latest(1)) as checkpointer:
        checkpointer.step(1, state)
        checkpointer.wait()
        before = names_below(small_disk)
        for use in (checkpointer.step, checkpointer.save):
            with pytest.raises(NoSpaceError) as caught:
                use(2, state)
            assert re.search(
                r"step-00000002: it needs [\d.]+ [kM]B, and [\d.]+ kB are free", str(caught.value)
            )
            assert re.search(
                r"Steps kept here: 1, of [\d.]+ [kM]B together \(Keep\.latest\(1\)\)",
                str(caught.value),
            )
            assert "n steps take the room of n + 1" in str(caught.value)
            assert caught.value.errno == errno.ENOSPC
        assert names_below(small_disk) == before
        assert checkpointer.restore(state) == 1
        shutil.rmtree(small_disk / "older")
        small = {"w": torch.ones(60_000), "step": 2}
        assert checkpointer.step(2, small)
    assert checkpointer.steps() == [2]


@pytest.mark.parametrize("order", [(0,), (0, 1)], ids=["one rank", "two ranks"])
def test_a_run_on_a_full_disk_goes_on_when_it_is_to_keep_fewer_steps(
    small_disk: Path, order: tuple[int, ...]
) -> None:
    def state_at(step: int) -> dict[str, torch.Tensor]:
        return {"w": torch.full((50_000,), float(step))}

    def run(group: ThreadGroup, keep: Keep, *steps: int) -> None:
        options = dataclasses.replace(OPTIONS, pool_bytes=32 << 20)
        with holdfast.Checkpointer(
            small_disk / "run", keep=keep, stage="sync", group=group, options=options
        ) as checkpointer:
            checkpointer.restore(state_at(0))
            for step in steps:
                checkpointer.save(step, state_at(step))

    def steps_there() -> list[int]:
        return holdfast.Checkpointer(small_disk / "run").steps()

    assert all_saved(run_ranks(lambda group: run(group, Keep.all(), 1, 2, 3, 4), order))
    for error in run_ranks(lambda group: run(group, Keep.latest(4), 6), order):
        assert type(error) is NoSpaceError
        assert "Steps kept here: 4" in str(error)
    assert steps_there() == [1, 2, 3, 4]
    assert all_saved(run_ranks(lambda group: run(group, Keep.latest(2), 6, 7), order))
    assert steps_there() == [6, 7]


def all_saved(errors: list[BaseException | None]) -> bool:
    return not any(errors)


def test_a_run_on_a_read_only_disk_says_so_at_the_call_and_goes_on_later(small_disk: Path) -> None:
    with holdfast.Checkpointer(small_disk / "run", every=1, options=OPTIONS) as checkpointer:
        checkpointer.step(1, make_state(1))
        checkpointer.wait()
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        for step in (2, 3):
            with pytest.raises(StoreError, match="remount it writable") as caught:
                checkpointer.step(step, make_state(step))
            assert caught.value.errno == errno.EROFS
        assert checkpointer.restore(make_state(-1)) == 1
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
        assert checkpointer.step(4, make_state(4))
    assert checkpointer.steps() == [1, 4]


def test_a_full_disk_does_not_stop_a_run_from_letting_go(small_disk: Path) -> None:
    run = holdfast.Checkpointer(small_disk / "run", options=OPTIONS)
    for step in (1, 2, 3):
        run.save(step, make_state(step))
    fill_bytes(small_disk, 0)
    assert run.retire_after(1) == [2, 3]
    assert run.restore(make_state(-1)) == 1


def test_a_read_only_disk_can_be_loaded_from_and_says_so_to_a_save(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    before = names_below(small_disk)
    for io in ("auto", "buffered"):
        options = dataclasses.replace(OPTIONS, io=io)
        with pytest.raises(StoreError, match="remount it writable") as caught:
            holdfast.save(make_state(2), small_disk / "newer", options=options)
        assert caught.value.errno == errno.EROFS
        with pytest.raises(StoreError, match="remount it writable") as caught:
            holdfast.save(make_state(2), small_disk / "older", replace=True, options=options)
        assert caught.value.errno == errno.EROFS
        assert load_number(small_disk / "older", options) == 1
    with pytest.raises(NotCommittedError):
        load_number(small_disk / "newer")
    assert names_below(small_disk) == before
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    holdfast.save(make_state(2), small_disk / "newer", options=OPTIONS)
    assert load_number(small_disk / "newer") == 2


def without_rights(function: Callable[[], None]) -> None:
    """Run a function as a user without any rights, in a process of its own when we are root."""
    if os.geteuid():
        function()
        return
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return
    status = 1
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def test_a_directory_of_others_can_be_loaded_from_and_says_so_to_a_save(scratch: Path) -> None:
    holdfast.save(make_state(1), scratch / "older", options=OPTIONS)
    before = names_below(scratch)
    scratch.chmod(0o555)

    def load_and_save() -> None:
        for io in ("auto", "buffered"):
            options = dataclasses.replace(OPTIONS, io=io)
            assert load_number(scratch / "older", options) == 1
            with pytest.raises(StoreError, match="give this user access") as caught:
                holdfast.save(make_state(2), scratch / "newer", options=options)
            assert caught.value.errno == errno.EACCES

    without_rights(load_and_save)
    scratch.chmod(0o755)
    assert names_below(scratch) == before
    holdfast.save(make_state(2), scratch / "newer", options=OPTIONS)
    assert load_number(scratch / "newer") == 2


def test_a_checkpoint_that_may_not_be_read_is_not_taken_for_an_absent_one(scratch: Path) -> None:
    holdfast.save(make_state(1), scratch / "hidden" / "older", options=OPTIONS)
    scratch.chmod(0o755)
    (scratch / "hidden").chmod(0)

    def load() -> None:
        with pytest.raises(StoreError, match="give this user access"):
            load_number(scratch / "hidden" / "older")

    without_rights(load)
    (scratch / "hidden").chmod(0o755)
    assert load_number(scratch / "hidden" / "older") == 1


@pytest.mark.parametrize("durable", ["store", "local"])
def test_a_local_disk_that_is_smaller_than_one_checkpoint_says_so(
    durable: Literal["store", "local"], small_disk: Path, scratch: Path
) -> None:
    store, local = scratch / "store", small_disk / "run"
    given: dict[str, Any] = {"local": local, "durable": durable, "signals": (), "options": OPTIONS}
    with holdfast.Checkpointer(store, **given) as checkpointer:
        with pytest.raises(NoSpaceError, match=re.escape(str(local))):
            checkpointer.save(1, {"w": torch.ones(1 << 19)})  # 2 MiB, of 1 MiB
        assert checkpointer.steps() == [] and not list(local.glob("step-*/data/*/*"))
        checkpointer.save(1, make_state(1))
    assert holdfast.Checkpointer(store, options=OPTIONS).steps() == [1]
    assert load_number(store / "step-00000001") == 1
