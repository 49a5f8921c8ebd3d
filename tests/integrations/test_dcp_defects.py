"""What goes wrong with DCP's own writer and reader, and does not with ours: each shown on both.

Should a test say that DCP does better than it did, so much the better: take it out, and out of
docs/dcp-inside.md.
"""

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

import holdfast
from holdfast.errors import (
    AlreadyCommittedError,
    CorruptError,
    MismatchError,
    NoSpaceError,
    OptionError,
    StateError,
)
from holdfast.integrations.dcp import HoldfastReader, HoldfastWriter
from holdfast.testing import Fault, faulty

pytestmark = pytest.mark.filterwarnings("ignore")
NewPath = Callable[[], Path]
NAMES = [f"w{n}" for n in range(8)]


def state_of(value: float, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.full((1000,), value, dtype=dtype) for name in NAMES}


def loaded(reader: dcp.StorageReader, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Load a state; return the value of each tensor, the mean where it has several."""
    state = state_of(-1, dtype)
    dcp.load(state, storage_reader=reader)
    return {name: tensor.double().mean().item() for name, tensor in state.items()}


@contextlib.contextmanager
def caused_by(kind: type[BaseException]) -> Iterator[None]:
    with pytest.raises(CheckpointException) as caught:
        yield
    causes = [cause for cause, _ in caught.value.failures.values()]
    assert [type(cause) for cause in causes] == [kind], caught.value


@pytest.fixture
def _threads_without_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full for every file that a thread of DCP's writer opens."""
    stock = FileSystem.create_stream

    def create(self: FileSystem, path: Any, mode: str) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return stock(self, path, mode)

    monkeypatch.setattr(FileSystem, "create_stream", create)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)


@pytest.mark.usefixtures("_threads_without_space")
def test_dcp_reports_success_when_a_writing_thread_fails(new_path: NewPath) -> None:
    path = new_path()
    dcp.save(state_of(1), storage_writer=FileSystemWriter(path, thread_count=4))
    metadata = FileSystemReader(path).read_metadata()
    assert len(metadata.state_dict_metadata) == len(NAMES) > len(metadata.storage_data)


@pytest.mark.parametrize("operation", ["create", "allocate", "write", "link"])
def test_ours_raises_and_leaves_nothing_when_the_disk_is_full(
    new_path: NewPath, operation: str
) -> None:
    path, options = (
        new_path(),
        holdfast.Options(io="buffered"),
    )  # "auto" makes no room for a small file
    with (
        faulty(Fault(operation, persistent=True, argument=errno.ENOSPC)),
        caused_by(NoSpaceError),
    ):
        dcp.save(state_of(1), storage_writer=HoldfastWriter(path, options=options))
    assert not list(path.parent.rglob("*.hf")) and not (path / "MANIFEST").exists()


class Dying(DefaultSavePlanner):
    """Ends a save half-way."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == NAMES[4]:
            raise RuntimeError("killed here")
        return super().resolve_data(write_item)


def save_twice(make: Callable[[], dcp.StorageWriter]) -> None:
    """Save, and save again to the same place, but die half-way."""
    dcp.save(state_of(1), storage_writer=make())
    with pytest.raises(CheckpointException):
        dcp.save(state_of(2), storage_writer=make(), planner=Dying())


def test_dcp_destroys_a_checkpoint_when_its_id_is_used_again(new_path: NewPath) -> None:
    path = new_path()
    save_twice(lambda: FileSystemWriter(path))
    assert (path / ".metadata").exists(), "it still looks like a checkpoint"
    with pytest.raises(CheckpointException):
        loaded(FileSystemReader(path))


def test_dcp_mixes_two_saves_and_loads_the_mixture(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, stock = new_path(), FileSystem.create_stream
    dcp.save(state_of(1), storage_writer=FileSystemWriter(path, single_file_per_rank=False))

    def create(self: FileSystem, path: Any, mode: str) -> Any:
        if Path(path).name == "__0_4.distcp":
            raise OSError(errno.EIO, "killed here")
        return stock(self, path, mode)

    with monkeypatch.context() as patched, pytest.raises(CheckpointException):
        patched.setattr(FileSystem, "create_stream", create)
        dcp.save(state_of(2), storage_writer=FileSystemWriter(path, single_file_per_rank=False))
    assert set(loaded(FileSystemReader(path)).values()) == {1.0, 2.0}


def test_ours_keeps_the_checkpoint_when_its_id_is_used_again(new_path: NewPath) -> None:
    path = new_path()
    save_twice(lambda: HoldfastWriter(path))
    assert set(loaded(HoldfastReader(path)).values()) == {1.0}
    with caused_by(AlreadyCommittedError):
        dcp.save(state_of(2), storage_writer=HoldfastWriter(path))


def test_a_file_of_another_save_is_loaded_by_dcp_and_refused_by_ours(new_path: NewPath) -> None:
    theirs, ours = [new_path(), new_path()], [new_path(), new_path()]
    for value in range(2):
        dcp.save(state_of(value), checkpoint_id=theirs[value])
        dcp.save(state_of(value), storage_writer=HoldfastWriter(ours[value]))
    shutil.copy(theirs[1] / "__0_0.distcp", theirs[0] / "__0_0.distcp")
    assert set(loaded(FileSystemReader(theirs[0])).values()) == {1.0}, "that was another step"
    (source,), (target,) = ours[1].rglob("*.hf"), ours[0].rglob("*.hf")
    shutil.copy(source, target)
    with caused_by(CorruptError):
        loaded(HoldfastReader(ours[0]))


def flip(path: Path, start: int) -> None:
    """Flip a bit within the elements of the tensor that begin at ``start``."""
    content = bytearray(path.read_bytes())
    content[start + 2001] ^= 1 << 5
    path.write_bytes(content)


def test_a_flipped_bit_is_loaded_by_dcp_and_refused_by_ours(new_path: NewPath) -> None:
    theirs, ours = new_path(), new_path()
    dcp.save(state_of(1), checkpoint_id=theirs)
    dcp.save(state_of(1), storage_writer=HoldfastWriter(ours))
    elements = torch.ones(1000).numpy().tobytes()
    for file in (theirs / "__0_0.distcp", *ours.rglob("*.hf")):
        flip(file, file.read_bytes().index(elements))
    assert set(loaded(FileSystemReader(theirs)).values()) != {1.0}
    with caused_by(CorruptError):
        loaded(HoldfastReader(ours))


def test_a_dtype_is_converted_silently_by_dcp_and_not_by_ours(new_path: NewPath) -> None:
    theirs, ours = new_path(), new_path()
    dcp.save(state_of(0.1), checkpoint_id=theirs)
    dcp.save(state_of(0.1), storage_writer=HoldfastWriter(ours))
    found = loaded(FileSystemReader(theirs), torch.bfloat16)
    assert 0.00001 < abs(found["w0"] - 0.1) < 0.001
    with caused_by(MismatchError):
        loaded(HoldfastReader(ours), torch.bfloat16)


def save_as_two_dtypes(make: Callable[[], dcp.StorageWriter]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state_of(1, dtype), storage_writer=make(), planner=planner)


@pytest.fixture
def _no_plans_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in vars(SavePlanner):
        if name.startswith("_cached_"):
            monkeypatch.setattr(SavePlanner, name, {})


@pytest.mark.usefixtures("_no_plans_cached")
def test_dcp_writes_the_wrong_dtype_when_its_plan_is_cached(new_path: NewPath) -> None:
    paths = [new_path(), new_path()]
    following = iter(paths)
    save_as_two_dtypes(lambda: FileSystemWriter(next(following)))
    metadata: Any = FileSystemReader(paths[1]).read_metadata().state_dict_metadata["w0"]
    assert metadata.properties.dtype == torch.float32, "it is bfloat16"


@pytest.mark.usefixtures("_no_plans_cached")
def test_ours_refuses_a_cached_plan_of_another_dtype(new_path: NewPath) -> None:
    paths = [new_path(), new_path()]
    following = iter(paths)
    with caused_by(StateError):
        save_as_two_dtypes(lambda: HoldfastWriter(next(following)))
    assert paths[0].exists() and not paths[1].exists()


class Attack:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_checkpoint_is_run_by_dcp_and_not_by_ours(new_path: NewPath) -> None:
    theirs, ours, made = new_path(), new_path(), new_path()
    dcp.save({"n": Attack(made)}, checkpoint_id=theirs)
    dcp.save({"n": Attack(made)}, storage_writer=HoldfastWriter(ours, pickled=True))
    with caused_by(OptionError):
        dcp.load({"n": 0}, storage_reader=HoldfastReader(ours))
    with holdfast.open(ours) as checkpoint:
        checkpoint.objects()
        checkpoint.state()
    assert not made.exists()
    dcp.load({"n": 0}, checkpoint_id=theirs)
    assert made.exists()


OPERATIONS = ("make_directory", "create", "write", "sync", "sync_directory", "link", "rename")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_whatever_call_fails_there_is_all_or_nothing(new_path: NewPath, operation: str) -> None:
    root = new_path()
    dcp.save(state_of(1), storage_writer=HoldfastWriter(root / "older"))
    nth, fired = 0, True
    while fired:
        nth += 1
        path = root / f"{nth}"
        with faulty(Fault(operation, nth=nth)) as disk:
            failed = False
            try:
                dcp.save(state_of(2), storage_writer=HoldfastWriter(path))
            except CheckpointException:
                failed = True
        if (path / "MANIFEST").exists():
            assert set(loaded(HoldfastReader(path)).values()) == {2.0}
        else:
            assert failed and not list(path.rglob("*.hf"))
        fired = disk.calls()[operation] >= nth
    assert nth > 1, "a fault, and a save with none"
    assert set(loaded(HoldfastReader(root / "older")).values()) == {1.0}
