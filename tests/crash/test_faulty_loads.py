"""Every call of a load goes wrong: an error that tells a bad disk from bad bytes."""

import dataclasses
import errno
from pathlib import Path

import pytest
from crash_content import OPTIONS, load_number, make_state

import holdfast
from descriptors import open_descriptors
from holdfast.errors import CorruptError, StoreError
from holdfast.testing import Fault, faulty

NUMBER = 7
CALLS_MAX = 200  # of one operation in one load; far more than there are
LOAD_OPERATIONS = ("open", "read", "size", "list_directory", "close")


@pytest.fixture(params=["buffered", "direct", "io_uring"])
def options(request: pytest.FixtureRequest, place: Path) -> holdfast.Options:
    """Loads through one backend, where this machine has it."""
    found = dataclasses.replace(OPTIONS, io=request.param)
    try:
        load_number(place, found)
    except StoreError as error:
        pytest.skip(f"{request.param} does not work here: {error}")
    return found


@pytest.fixture
def place(scratch: Path) -> Path:
    """A good checkpoint."""
    holdfast.save(make_state(NUMBER), scratch / "place", options=OPTIONS)
    return scratch / "place"


def load_with(
    place: Path, options: holdfast.Options, fault: Fault
) -> tuple[StoreError | None, int]:
    """Load with a fault; return the error, which must be a StoreError, and the calls made."""
    with faulty(fault) as disk:
        try:
            assert load_number(place, options) == NUMBER
        except StoreError as error:
            return error, disk.calls().get(fault.operation, 0)
        return None, disk.calls().get(fault.operation, 0)


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("operation", LOAD_OPERATIONS)
def test_a_load_tells_that_the_disk_failed(
    place: Path, options: holdfast.Options, operation: str, persistent: bool
) -> None:
    load_number(place, options)
    descriptors = open_descriptors()
    for nth in range(1, CALLS_MAX):
        error, calls = load_with(place, options, Fault(operation, nth, persistent))
        if calls < nth:
            break
        assert error is not None and error.errno == errno.EIO, f"call {nth}: {error!r}"
        assert str(place) in str(error)
        assert load_number(place, options) == NUMBER
        assert open_descriptors() == descriptors
    assert nth > 1


@pytest.mark.parametrize("size", [1, 100, 4096])
def test_short_reads_are_resumed(place: Path, options: holdfast.Options, size: int) -> None:
    fault = Fault("read", persistent=True, action="short", argument=size)
    error, calls = load_with(place, options, fault)
    assert error is None and calls > 8


def test_interrupted_reads_are_made_again(place: Path, options: holdfast.Options) -> None:
    assert load_with(place, options, Fault("read", argument=errno.EINTR))[0] is None


def test_a_disk_that_reads_zeros_never_gives_wrong_data(
    place: Path, options: holdfast.Options
) -> None:
    noticed = 0
    for nth in range(1, CALLS_MAX):
        try:
            with faulty(Fault("read", nth, action="lie")) as disk:
                assert load_number(place, options) == NUMBER
        except CorruptError:
            noticed += 1
        if disk.calls()["read"] < nth:
            break
    assert noticed > 3


def test_a_run_skips_a_step_that_the_disk_cannot_read(scratch: Path) -> None:
    run = holdfast.Checkpointer(scratch / "run", options=OPTIONS)
    for step in (1, 2):
        run.save(step, make_state(step))
    for operation in ("read", "size", "open"):
        into = make_state(-1)
        with faulty(Fault(operation, 2)):  # the first is of the epoch
            run = holdfast.Checkpointer(scratch / "run", options=OPTIONS)
            assert run.restore(into) == 1
        assert into["loop"]["number"] == 1
