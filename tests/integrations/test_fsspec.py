"""``holdfast://`` paths through fsspec's own calls: what is there, is listed, read and deleted."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
from holdfast.codecs import Delta
from holdfast.engine import epochs
from holdfast.errors import (
    AlreadyCommittedError,
    FencedError,
    NotCommittedError,
    OptionError,
    StoreError,
)
from holdfast.format.spec import MARKER
from holdfast.integrations.dcp import HoldfastWriter, install, routing
from holdfast.integrations.fsspec import HoldfastFileSystem, NotThereError
from holdfast.testing.faults import Fault, faulty

pytestmark = pytest.mark.filterwarnings("ignore")
NewPath = Callable[[], Path]
STATE = {"w": torch.arange(6.0)}
CHANGED = {"w": torch.arange(6.0) + 1}
needs_routing = pytest.mark.skipif(
    not routing._is_known(), reason="DCP of this torch is left alone"
)


@pytest.fixture
def run(new_path: NewPath) -> Path:
    """A run of three steps; the second is a delta of the first, the third died before MANIFEST."""
    root = new_path()
    for step, state in ((1, STATE), (2, CHANGED), (3, STATE)):
        holdfast.save(state, root / f"step-0000000{step}", step=step, codec=Delta(every=2))
    (root / "step-00000003" / "MANIFEST").unlink()
    return root


@pytest.fixture
def fs() -> Any:
    return fsspec.filesystem("holdfast")


def names(found: list[str]) -> list[str]:
    return [os.path.basename(name) for name in found]


def test_fsspec_finds_the_protocol_by_itself() -> None:
    code = "import fsspec, sys; print(type(fsspec.filesystem('holdfast')), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    kind = "<class 'holdfast.integrations.fsspec.HoldfastFileSystem'>"
    assert done.stdout.strip() == f"{kind} False", done.stderr


def test_a_relative_url_begins_here(run: Path, fs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    found, path = url_to_fs(f"holdfast://{run.name}/step-00000001/")
    assert type(found) is HoldfastFileSystem and path == str(run / "step-00000001")
    assert fs.isdir(f"holdfast://{run.name}") and fs.isdir(Path(run.name))
    assert fs.unstrip_protocol(path) == f"holdfast://{path}"


def test_ls_lists_committed_steps(run: Path, fs: Any) -> None:
    assert names(fs.ls(f"holdfast://{run}", detail=False)) == ["step-00000001", "step-00000002"]
    entries = fs.ls(f"holdfast://{run}")
    assert [(item["name"], item["type"]) for item in entries] == [
        (str(run / "step-00000001"), "directory"),
        (str(run / "step-00000002"), "directory"),
    ]
    assert fs.glob(f"holdfast://{run}/step-*") == [item["name"] for item in entries]


def test_a_file_of_a_step_is_there_when_it_is_committed(run: Path, fs: Any) -> None:
    for step, committed in (("step-00000001", True), ("step-00000003", False)):
        place = f"holdfast://{run}/{step}"
        for name in (".metadata", "MANIFEST"):
            assert fs.isfile(f"{place}/{name}") is committed
        assert fs.isdir(place) is fs.exists(place) is committed
        assert fs.exists(f"{place}/data") is committed
    with pytest.raises(NotThereError, match="step-00000003 is not there") as raised:
        fs.info(f"holdfast://{run}/step-00000003")
    assert isinstance(raised.value, (FileNotFoundError, NotCommittedError))


def test_a_marker_that_a_crash_kept_away_is_there_all_the_same(run: Path, fs: Any) -> None:
    place = run / "step-00000001"
    assert not (place / ".metadata").exists()
    assert fs.info(f"holdfast://{place}/.metadata")["size"] == len(MARKER)
    assert fs.cat(f"holdfast://{place}/.metadata") == MARKER
    assert names(fs.ls(f"holdfast://{place}", detail=False)) == [".metadata", "MANIFEST", "data"]


@pytest.mark.parametrize("what", ["marker", "word", "data", "pending"])
def test_what_a_save_or_deletion_has_left_is_not_shown(
    new_path: NewPath, fs: Any, what: str
) -> None:
    root = new_path()
    dcp.save(STATE, storage_writer=HoldfastWriter(root / "best"))
    dcp.save(STATE, storage_writer=HoldfastWriter(root / "torn"))
    torn = root / "torn"
    (torn / "MANIFEST").unlink()
    if what != "marker":
        (torn / ".metadata").unlink()
    if what != "data":
        shutil.rmtree(torn / "data")
    if what == "word":
        (torn / ".manifest-dcp").write_bytes(b"{}")
    if what == "pending":
        (root / "best" / f".manifest-{'0' * 32}").write_bytes(b"")
        assert names(fs.ls(root / "best", detail=False)) == [".metadata", "MANIFEST", "data"]
        assert not fs.exists(root / "best" / f".manifest-{'0' * 32}")
        return
    assert names(fs.ls(root, detail=False)) == ["best"]
    assert not fs.exists(torn) and not fs.isfile(torn / ".metadata")


def test_other_directories_and_files_are_shown(run: Path, fs: Any) -> None:
    (run / "data").mkdir()
    (run / "data" / "corpus.txt").write_text("text")
    (run / "config.json").write_text("{}")
    (run / "step-00000001" / "meta.pt").write_bytes(b"theirs")
    assert names(fs.ls(run.parent, detail=False)).count(run.name) == 1
    assert "config.json" in names(fs.ls(run, detail=False))
    assert fs.find(f"{run}/data") == [str(run / "data" / "corpus.txt")]
    assert fs.ls(run / "config.json")[0]["size"] == 2
    assert fs.cat_file(f"holdfast://{run}/step-00000001/meta.pt") == b"theirs"


def test_a_checkpoint_of_dcp_has_no_marker_here(new_path: NewPath, fs: Any) -> None:
    path = new_path()
    dcp.save(STATE, checkpoint_id=path)
    assert (path / ".metadata").exists() and not fs.isfile(path / ".metadata")
    assert ".metadata" not in names(fs.ls(path, detail=False))


def test_a_checkpoint_is_downloaded_whole(run: Path, fs: Any, new_path: NewPath) -> None:
    copy = new_path()
    fs.get(f"holdfast://{run}/step-00000001", str(copy), recursive=True)
    target = {"w": torch.zeros(6)}
    holdfast.load(copy, into=target)
    assert torch.equal(target["w"], STATE["w"])
    with fsspec.open(f"holdfast://{run}/step-00000001/MANIFEST", "rb") as file:
        assert file.read() == (copy / "MANIFEST").read_bytes()


def test_rm_deletes_a_step(run: Path, fs: Any) -> None:
    (run / "LATEST").write_text("step-00000002\n")
    fs.rm(f"holdfast://{run}/step-00000002", recursive=True)
    assert sorted(os.listdir(run)) == ["step-00000001", "step-00000003"], "LATEST named it"
    (run / "LATEST").write_text("step-00000007\n")
    fs.rm(str(run / "step-00000001"), recursive=True)
    assert sorted(os.listdir(run)) == ["LATEST", "step-00000003"]
    with pytest.raises(FileNotFoundError):
        fs.rm(f"holdfast://{run}/step-00000001", recursive=True)


def test_rm_of_a_pattern_deletes_deltas_before_their_bases(run: Path, fs: Any) -> None:
    fs.rm(f"holdfast://{run}/step-*", recursive=True)
    assert os.listdir(run) == ["step-00000003"]


def test_rm_leaves_what_is_not_ours(run: Path, fs: Any) -> None:
    place = run / "step-00000002"
    (place / "meta.pt").write_bytes(b"theirs")
    fs.rm(place, recursive=True)
    assert os.listdir(place) == ["meta.pt"]


def test_rm_of_the_base_of_a_delta_is_refused(run: Path, fs: Any) -> None:
    with pytest.raises(AlreadyCommittedError, match="base of the delta checkpoint step-00000002"):
        fs.rm(f"holdfast://{run}/step-00000001", recursive=True)
    target = {"w": torch.zeros(6)}
    holdfast.load(run / "step-00000002", into=target)
    assert torch.equal(target["w"], CHANGED["w"])
    assert not [name for name in os.listdir(run / "step-00000001") if name.startswith(".manifest")]


def test_rm_by_a_process_of_an_older_job_is_refused(
    run: Path, fs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / ".epoch-00000002").write_text("{}")
    monkeypatch.setitem(epochs.held, str(run), (1, ""))
    with pytest.raises(FencedError, match="may not replace or delete step-00000002"):
        fs.rm(f"holdfast://{run}/step-00000002", recursive=True)
    monkeypatch.delitem(epochs.held, str(run))
    fs.rm(f"holdfast://{run}/step-00000002", recursive=True)


def test_rm_of_anything_but_a_checkpoint_is_refused(run: Path, fs: Any) -> None:
    first = run / "step-00000001"
    (run / "link").symlink_to("step-00000002")
    for path, text in {
        run: "is no checkpoint",
        first / "MANIFEST": f"is a part of the checkpoint {first}",
        first / ".metadata": "is a part of the checkpoint",
        first / "data": "is a part of the checkpoint",
        run / "link": "is a symlink",
    }.items():
        with pytest.raises(OptionError, match=text):
            fs.rm(path, recursive=True)
    for remove in (fs.rm, fs.rm_file, fs.rmdir):
        with pytest.raises(OptionError, match="recursive=True"):
            remove(str(run / "step-00000002"))
    assert not holdfast.verify(run / "step-00000002").damage


def test_writing_is_refused(run: Path, fs: Any) -> None:
    first, new = f"holdfast://{run}/step-00000001", f"holdfast://{run}/new"
    fs.makedirs(new)
    fs.mkdir(new)
    for call in (
        lambda: fs.open(new, "wb"),
        lambda: fs.open(f"{first}/MANIFEST", "ab"),
        lambda: fs.open(new, "w"),
        lambda: fs.pipe(new, b"bytes"),
        lambda: fs.put(__file__, new),
        lambda: fs.touch(new),
        lambda: fs.touch(f"{first}/MANIFEST", truncate=False),
        lambda: fs.cp(f"{first}/MANIFEST", new),
        lambda: fs.mv(first, new, recursive=True),
    ):
        with pytest.raises(OptionError, match="only saves write"):
            call()
    assert not (run / "new").exists()
    assert not holdfast.verify(run / "step-00000001").damage


def test_bad_paths_are_errors(run: Path, fs: Any) -> None:
    for path, text in {"holdfast://": "path is ''", "s3://a": "takes no URL", 7: "is 7"}.items():
        with pytest.raises(OptionError, match=text):
            fs.isfile(path)
    with pytest.raises(OptionError, match="is a directory"):
        fs.open(run, "rb")
    with pytest.raises(NotThereError):
        fs.open(run / "nothing", "rb")
    with pytest.raises(NotThereError):
        fs.ls(run / "nothing")


def test_a_disk_that_fails_is_not_taken_for_nothing_there(
    run: Path, fs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError(5, "Input/output error")

    for look in (fs.isfile, fs.isdir, fs.exists):
        with monkeypatch.context() as patched:
            patched.setattr(os, "lstat", failing)
            with pytest.raises(StoreError, match="Input/output error"):
                look(f"holdfast://{run}/step-00000001/.metadata")


def test_without_a_routing_a_save_of_dcp_says_what_to_do(run: Path) -> None:
    place = f"holdfast://{run}/step-00000009"
    with pytest.raises(CheckpointException, match=r"call holdfast\.integrations\.dcp\.install\(\)"):
        dcp.save(STATE, checkpoint_id=place)
    assert not (run / "step-00000009").exists()


@needs_routing
def test_fsspec_writers_and_readers_of_dcp_are_routed(new_path: NewPath, fs: Any) -> None:
    place = f"holdfast://{new_path()}"
    target = {"w": torch.zeros(6)}
    with install():
        writer, reader = FsspecWriter(place), FsspecReader(place)
        dcp.save(STATE, storage_writer=writer)
        assert fs.isfile(f"{place}/MANIFEST")
        assert list(reader.read_metadata().state_dict_metadata) == ["w"]
        dcp.load(target, storage_reader=reader)
        dcp.save(CHANGED, storage_writer=writer)
    assert torch.equal(target["w"], STATE["w"])
    holdfast.load(place.removeprefix("holdfast://"), into=target)
    assert torch.equal(target["w"], CHANGED["w"])


@needs_routing
def test_a_reader_of_a_url_finds_no_checkpoint_in_words(run: Path) -> None:
    with install(), pytest.raises(NotCommittedError, match="has data files but no MANIFEST"):
        FsspecReader(f"holdfast://{run}/step-00000003").read_metadata()


@pytest.mark.parametrize("persistent", [False, True], ids=["one call fails", "all fail from there"])
def test_rm_that_fails_at_any_call_leaves_the_step_whole_or_not_there(
    run: Path, fs: Any, new_path: NewPath, persistent: bool
) -> None:
    """Where all calls fail, that is what a crash leaves: nothing is tidied up either."""
    shutil.rmtree(run / "step-00000003")

    def copied() -> Path:
        copy = new_path()
        shutil.copytree(run, copy)
        (copy / "LATEST").write_text("step-00000002\n")
        return copy

    with faulty() as disk:
        fs.rm(copied() / "step-00000002", recursive=True)
    calls, whole = sum(disk.calls().values()), 0
    for nth in range(1, 1 + calls):
        copy = copied()
        step = copy / "step-00000002"
        with faulty(Fault("*", nth=nth, persistent=persistent)), contextlib.suppress(StoreError):
            fs.rm(step, recursive=True)
        target = {"w": torch.zeros(6)}
        is_there = fs.isfile(step / ".metadata")
        assert is_there == fs.isdir(step) == (step / "MANIFEST").exists()
        if is_there:
            whole += 1
            holdfast.load(step, into=target)
            assert torch.equal(target["w"], CHANGED["w"])
            fs.rm(step, recursive=True)
            assert not step.exists()
        holdfast.load(copy / "step-00000001", into=target)
        assert torch.equal(target["w"], STATE["w"])
        fs.rm(copy / "step-00000001", recursive=True)
    assert 0 < whole < calls
