"""Every call of a run, and of a save of two ranks, goes wrong: the newest good step is kept."""

import errno
from pathlib import Path

import pytest
from crash_content import OPTIONS, load_number, make_state
from crash_ranks import ThreadGroup, run_ranks

import holdfast
from holdfast.errors import HoldfastError, NotCommittedError, PeerError, StoreError
from holdfast.testing import Fault, faulty

CALLS_MAX = 200  # of one save; far more than there are


def restored(root: Path) -> int | None:
    """Restore a run, check that every step of it is whole, and return the one restored."""
    with holdfast.Checkpointer(root, options=OPTIONS) as run:
        for step in run.steps():
            assert load_number(Path(run.path(step))) == step
        into = make_state(-1)
        step = run.restore(into)
        assert step == into["loop"]["number"]
        return step


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_run_survives_the_failure_of_any_call(
    scratch: Path, number: int, persistent: bool
) -> None:
    for nth in range(1, CALLS_MAX):
        root = scratch / f"run-{nth}"
        keep = holdfast.Keep.latest(1)
        with holdfast.Checkpointer(root, options=OPTIONS) as run:
            run.save(1, make_state(1))
        saved = False
        with faulty(Fault("*", nth, persistent, argument=number)) as disk:
            run = holdfast.Checkpointer(root, keep=keep, options=OPTIONS)
            try:
                run.save(2, make_state(2))
                saved = True
            except StoreError as error:
                assert error.errno == number
        run.close()
        assert restored(root) in ((2,) if saved else (1, 2))
        with holdfast.Checkpointer(root, keep=keep, options=OPTIONS) as run:
            run.save(3, make_state(3))
            assert run.steps() == [3]
        assert restored(root) == 3
        if sum(disk.calls().values()) < nth:
            break
    assert nth > 30


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_ranks_fail_together_whatever_call_fails(scratch: Path, order: tuple[int, int]) -> None:
    place = scratch / "newer"

    def save(group: ThreadGroup) -> None:
        holdfast.save(make_state(1), place, options=OPTIONS, group=group)

    for nth in range(1, CALLS_MAX):
        with faulty(Fault("*", nth)) as disk:
            errors = run_ranks(save, order)
        if sum(disk.calls().values()) < nth:
            break
        check_together(place, errors)
        if not place.exists():
            assert run_ranks(save, order) == [None, None]
        assert load_number(place) == 1
        place.rename(scratch / f"done-{nth}")
    assert nth > 30
    assert errors == [None, None]


def check_together(place: Path, errors: list[BaseException | None]) -> None:
    """All ranks succeed, or one tells what failed, the other who; then no file is left."""
    if errors == [None, None]:
        return
    assert all(isinstance(error, HoldfastError) for error in errors), errors
    (failed,) = [rank for rank, error in enumerate(errors) if not isinstance(error, PeerError)]
    other = errors[1 - failed]
    assert isinstance(other, PeerError) and other.rank == failed
    assert "StoreError" in other.cause or "SyncError" in other.cause
    try:
        load_number(place)
    except NotCommittedError:
        assert not list(place.rglob("*"))
