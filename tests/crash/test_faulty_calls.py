"""Every call of a save and of a load goes wrong once, and for ever: a typed error or success.

Never a checkpoint that is half there, never harm to an older one, nothing left behind.
"""

import dataclasses
import errno
import shutil
from pathlib import Path

import pytest
from crash_content import OPTIONS, load_number, make_state

import holdfast
from descriptors import open_descriptors
from holdfast.errors import (
    AlreadyCommittedError,
    CorruptError,
    NoSpaceError,
    NotCommittedError,
    StoreError,
)
from holdfast.testing import Fault, faulty

OLDER, NEWER = 1, 2  # numbers of the states saved
SAVE_OPERATIONS = (
    *("make_directory", "create", "allocate", "write", "truncate", "sync", "close"),
    *("sync_directory", "list_directory", "link", "unlink"),
)
REMOVALS = ("unlink", "remove_directory", "list_directory")
CALLS_MAX = 200  # of one operation in one save; far more than there are


@pytest.fixture(params=["buffered", "direct", "io_uring"])
def options(request: pytest.FixtureRequest, scratch: Path) -> holdfast.Options:
    """Small saves through one backend, where this machine has it."""
    found = dataclasses.replace(OPTIONS, io=request.param)
    try:
        holdfast.save(make_state(0), scratch / "try", options=found)
    except StoreError as error:
        pytest.skip(f"{request.param} does not work here: {error}")
    shutil.rmtree(scratch / "try")
    return found


@pytest.fixture
def root(scratch: Path, options: holdfast.Options) -> Path:
    """A directory with an older checkpoint, which nothing may touch."""
    path = scratch / "root"
    holdfast.save(make_state(OLDER), path / "older", options=options)
    return path


def everything_below(path: Path) -> dict[str, int]:
    """All files and directories, with the inode of each: a file made anew is another one."""
    return {str(p.relative_to(path)): p.lstat().st_ino for p in sorted(path.rglob("*"))}


def newer_number(root: Path) -> int | None:
    try:
        return load_number(root / "newer")
    except NotCommittedError:
        return None


def save_newer(
    root: Path, options: holdfast.Options, *faults: Fault
) -> tuple[StoreError | None, dict[str, int]]:
    """Save beside the older checkpoint; return the error, if any, and the calls made.

    Only errors that callers know may come out.
    """
    with faulty(*faults) as disk:
        try:
            holdfast.save(make_state(NEWER), root / "newer", options=options)
        except StoreError as error:
            return error, disk.calls()
        return None, disk.calls()


def check_attempt(root: Path, options: holdfast.Options, fault: Fault) -> bool:
    """Save with a fault, check all that must hold, save without; return whether the fault fired."""
    before = everything_below(root)
    error, calls = save_newer(root, options, fault)
    assert load_number(root / "older") == OLDER
    found = newer_number(root)
    if error is None:
        assert found == NEWER
    else:
        number = fault.argument if fault.action == "fail" else errno.EIO
        assert error.errno == number, f"{error!r} has errno {error.errno}"
        assert isinstance(error, NoSpaceError) == (number == errno.ENOSPC), repr(error)
        assert isinstance(error.__cause__, (OSError, StoreError))
    if found is None:
        if fault.operation not in (*REMOVALS, "*"):
            assert everything_below(root) == before
        assert save_newer(root, options)[0] is None
        assert newer_number(root) == NEWER
    else:
        with pytest.raises(AlreadyCommittedError):
            save_newer(root, options)
    shutil.rmtree(root / "newer")
    made = sum(calls.values()) if fault.operation == "*" else calls.get(fault.operation, 0)
    return made >= fault.nth


def check_every_call(root: Path, options: holdfast.Options, fault: Fault) -> int:
    """Check the fault at the first call, the second, …, until it does not fire; return how many."""
    check_attempt(root, options, dataclasses.replace(fault, nth=CALLS_MAX))
    descriptors = open_descriptors()
    for nth in range(1, CALLS_MAX):
        if not check_attempt(root, options, dataclasses.replace(fault, nth=nth)):
            assert open_descriptors() == descriptors
            return nth - 1
    raise AssertionError(f"a save makes more than {CALLS_MAX} calls")


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("operation", [*SAVE_OPERATIONS, "*"])
def test_a_save_survives_the_failure_of_any_call(
    root: Path, options: holdfast.Options, operation: str, number: int, persistent: bool
) -> None:
    fault = Fault(operation, persistent=persistent, argument=number)
    assert check_every_call(root, options, fault) > 0


@pytest.mark.parametrize(
    ("operation", "nth"), [("unlink", 1), ("remove_directory", 1), ("list_directory", 3)]
)
def test_a_save_that_fails_and_cannot_tidy_up_raises_what_failed_first(
    root: Path, options: holdfast.Options, operation: str, nth: int
) -> None:
    faults = [Fault("link", argument=errno.EACCES), Fault(operation, nth, persistent=True)]
    error, _ = save_newer(root, options, *faults)
    assert error is not None and error.errno == errno.EACCES
    assert newer_number(root) is None
    assert save_newer(root, options)[0] is None
    assert (newer_number(root), load_number(root / "older")) == (NEWER, OLDER)


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "for ever"])
def test_short_writes_are_resumed(root: Path, options: holdfast.Options, persistent: bool) -> None:
    fault = Fault("write", persistent=persistent, action="short", argument=100)
    assert check_every_call(root, options, fault) > 0 if not persistent else True
    error, calls = save_newer(root, options, dataclasses.replace(fault, nth=1))
    assert error is None and calls["write"] > 1
    assert newer_number(root) == NEWER


def test_interrupted_calls_are_made_again(root: Path, options: holdfast.Options) -> None:
    faults = [Fault(operation, argument=errno.EINTR) for operation in ("write", "sync", "create")]
    assert save_newer(root, options, *faults)[0] is None
    assert newer_number(root) == NEWER


def test_a_torn_write_fails_the_save(root: Path, options: holdfast.Options) -> None:
    assert check_every_call(root, options, Fault("write", action="torn", argument=512)) > 0


def test_a_disk_that_forgets_a_write_never_gives_wrong_data(
    root: Path, options: holdfast.Options
) -> None:
    for nth in range(1, CALLS_MAX):
        error, calls = save_newer(root, options, Fault("write", nth, action="lie"))
        assert error is None
        if calls["write"] < nth:
            break
        with pytest.raises(CorruptError):
            newer_number(root)
        shutil.rmtree(root / "newer")
    assert nth > 5
    assert (newer_number(root), load_number(root / "older")) == (NEWER, OLDER)


@pytest.mark.parametrize("operation", ["sync", "sync_directory"])
def test_after_a_failed_fsync_the_file_is_written_again_under_another_number(
    root: Path, options: holdfast.Options, operation: str
) -> None:
    error, _ = save_newer(root, options, Fault(operation))
    assert error is None
    with holdfast.open(root / "newer") as checkpoint:
        assert [Path(name).name for name in checkpoint.file_names] == ["00000-1.hf"]
        assert checkpoint.verify() == []  # no unknown file either: the dropped one is gone
    assert newer_number(root) == NEWER


def test_two_failed_fsyncs_fail_the_save(root: Path, options: holdfast.Options) -> None:
    before = everything_below(root)
    error, calls = save_newer(root, options, Fault("sync", persistent=True))
    assert error is not None and error.errno == errno.EIO
    assert calls["sync"] == 2  # one for each number: none is repeated on the same file
    assert everything_below(root) == before
