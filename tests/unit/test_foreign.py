"""Names beside a checkpoint that holdfast did not write are nobody's damage: nothing opens them."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import holdfast
from holdfast.cli import main
from holdfast.engine.around import LOOKED_MAX
from holdfast.engine.commit import check_absent
from holdfast.errors import CorruptError, OptionError, StoreError
from holdfast.stores.base import Entry
from holdfast.stores.local import LocalStore

NewPath = Callable[[], Path]
WEIGHT = torch.arange(8.0)
NAMES = ["MANIFEST.bak", "config.json", "manifest", "meta.pt", "pipe", "sub", "\u212b", "\u00c5"]


def put_foreign(path: Path) -> None:
    """Put beside a checkpoint what others put there, and worse: opening the pipe would hang."""
    path.mkdir(exist_ok=True)
    for name in NAMES:
        if name not in ("pipe", "sub"):
            (path / name).write_bytes(b"not ours")
    os.mkfifo(path / "pipe")
    (path / "sub").mkdir()
    (path / "sub" / "MANIFEST").symlink_to("/etc/passwd")


@pytest.fixture
def checkpoint(new_path: NewPath) -> Path:
    path = new_path()
    holdfast.save({"w": WEIGHT}, path)
    put_foreign(path)
    return path


def test_a_full_load_lets_foreign_names_be(checkpoint: Path) -> None:
    into = {"w": torch.zeros(8)}
    holdfast.load(checkpoint, into=into)
    assert torch.equal(into["w"], WEIGHT)
    assert sorted(os.listdir(checkpoint)) == sorted(["MANIFEST", "data", *NAMES])


def test_verify_names_them_and_finds_no_damage(checkpoint: Path) -> None:
    found = holdfast.verify(checkpoint)
    assert found.damage == ()
    assert sorted(found.foreign) == sorted(NAMES)


def test_verify_counts_them_as_bad_with_strict_alone(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(checkpoint)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("good ") and "not written by holdfast: " in said
    assert "and 5 more, not checked" in said
    assert main(["verify", "--strict", str(checkpoint)]) == 1
    assert capsys.readouterr().out.startswith("BAD ")


def test_inspect_names_them(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint)]) == 0
    assert "not written by holdfast: MANIFEST.bak, config.json" in capsys.readouterr().out


def test_a_save_goes_beside_them(new_path: NewPath) -> None:
    path = new_path()
    put_foreign(path)
    holdfast.save({"w": WEIGHT}, path)
    assert torch.equal(holdfast.open(path).tensor("w"), WEIGHT)
    assert (path / "config.json").read_bytes() == b"not ours"


def test_a_save_that_fails_leaves_them(new_path: NewPath, monkeypatch: pytest.MonkeyPatch) -> None:
    path = new_path()
    put_foreign(path)

    def fail(*_: object) -> None:
        raise StoreError("the disk is gone")

    monkeypatch.setattr("holdfast.engine.commit.check_present", fail)
    with pytest.raises(StoreError, match="the disk is gone"):
        holdfast.save({"w": WEIGHT}, path)
    assert sorted(os.listdir(path)) == sorted(NAMES)


def test_a_step_that_is_deleted_leaves_them_and_may_be_saved_again(new_path: NewPath) -> None:
    run = new_path()
    with holdfast.Checkpointer(run, every=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": WEIGHT + step})
        path = Path(checkpointer.path(2))
        put_foreign(path)
        assert checkpointer.retire_after(1) == [2]
        assert sorted(os.listdir(path)) == sorted(NAMES)
        assert checkpointer.steps() == [1]
        checkpointer.save(2, {"w": WEIGHT})
        assert checkpointer.steps() == [1, 2]
    into = {"w": torch.zeros(8)}
    assert holdfast.Checkpointer(run).restore(into) == 2
    assert torch.equal(into["w"], WEIGHT)


def test_a_deleted_step_without_them_leaves_nothing(new_path: NewPath) -> None:
    run = new_path()
    with holdfast.Checkpointer(run, every=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": WEIGHT})
        checkpointer.retire_after(1)
        assert not os.path.exists(checkpointer.path(2))


def test_a_foreign_directory_called_data_is_not_written_to(new_path: NewPath) -> None:
    path = new_path()
    (path / "data").mkdir(parents=True)
    (path / "data" / "train.bin").write_bytes(b"samples")
    with pytest.raises(OptionError, match=r"data is not a checkpoint's: it holds train\.bin"):
        holdfast.save({"w": WEIGHT}, path)
    assert os.listdir(path / "data") == ["train.bin"]


@pytest.mark.parametrize("kind", ["file", "link", "pipe"])
def test_something_else_called_data_is_refused(new_path: NewPath, kind: str) -> None:
    path, elsewhere = new_path(), new_path()
    path.mkdir()
    elsewhere.mkdir()
    if kind == "file":
        (path / "data").write_bytes(b"samples")
    elif kind == "link":
        (path / "data").symlink_to(elsewhere)
    else:
        os.mkfifo(path / "data")
    with pytest.raises(OptionError, match="data is not a checkpoint's: it is not a directory"):
        holdfast.save({"w": WEIGHT}, path)
    assert os.listdir(elsewhere) == []


def test_a_checkpoint_is_not_saved_among_the_steps_of_a_run(new_path: NewPath) -> None:
    run = new_path()
    with holdfast.Checkpointer(run, every=1) as checkpointer:
        checkpointer.save(7, {"w": WEIGHT})
    with pytest.raises(OptionError, match=r"is a run, with step-00000007; .*step-00000008"):
        holdfast.save({"w": WEIGHT}, run)


def put_file(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("")


MADE_BELOW: dict[str, tuple[Callable[[Path], object], str]] = {
    "a step": (
        lambda run: holdfast.save({"w": WEIGHT}, run / "step-00000007"),
        "run-a in it is a run, with step-00000007",
    ),
    "an epoch": (lambda run: put_file(run / ".epoch-00000001"), "run-a in it is a run"),
}


@pytest.mark.parametrize("what", MADE_BELOW)
def test_a_checkpoint_is_not_saved_above_a_run(new_path: NewPath, what: str) -> None:
    """Nothing could be saved below it any more."""
    runs, (make, text) = new_path(), MADE_BELOW[what]
    (runs / ".hidden").mkdir(parents=True)
    make(runs / "run-a")
    with pytest.raises(OptionError, match=f"{runs} is one directory too high: {text}.*new direc"):
        holdfast.save({"w": WEIGHT}, runs)
    with pytest.raises(OptionError, match="one directory too high"):
        holdfast.save({"w": WEIGHT}, runs, replace=True)
    assert sorted(os.listdir(runs)) == [".hidden", "run-a"]
    holdfast.save({"w": WEIGHT}, runs / "run-b")


def test_what_is_no_run_may_be_below_a_checkpoint(new_path: NewPath) -> None:
    """As where a framework saves its last state above the others."""
    path = new_path()
    holdfast.save({"w": WEIGHT}, path / "epoch-1")
    put_file(path / "vendor" / "LATEST")
    holdfast.save({"w": WEIGHT}, path)
    assert not holdfast.verify(path / "epoch-1").damage


def test_a_run_behind_a_link_is_seen_as_well(new_path: NewPath) -> None:
    runs, elsewhere = new_path(), new_path()
    runs.mkdir()
    holdfast.save({"w": WEIGHT}, elsewhere / "step-00000001")
    (runs / "a").symlink_to(elsewhere)
    with pytest.raises(OptionError, match="a in it is a run, with step-00000001"):
        holdfast.save({"w": WEIGHT}, runs)


def test_the_root_of_the_file_system_is_no_place_for_a_checkpoint() -> None:
    with pytest.raises(OptionError, match="/ is the root of the file system"):
        check_absent(LocalStore("/"))


def test_directories_of_others_keep_nobody_from_saving(new_path: NewPath) -> None:
    path, elsewhere = new_path(), new_path()
    (path / "source" / "step-1").mkdir(parents=True)
    (path / "source" / "MANIFEST").write_text("# file GENERATED by distutils, do NOT edit")
    (path / "gone").symlink_to(elsewhere)
    os.mkfifo(path / "pipe")
    holdfast.save({"w": WEIGHT}, path)
    assert holdfast.verify(path).foreign_count == 3


def test_a_crowd_of_directories_costs_no_more_than_a_look(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, listed, really = new_path(), list[str](), LocalStore.list
    for number in range(3 * LOOKED_MAX):
        (path / f"shard-{number}").mkdir(parents=True)

    def counted(self: LocalStore, name: str = "") -> list[Entry]:
        listed.append(self.location)
        return really(self, name)

    monkeypatch.setattr(LocalStore, "list", counted)
    check_absent(LocalStore(path))
    assert len(listed) == 1 + LOOKED_MAX
    listed.clear()
    monkeypatch.setattr(LocalStore, "shows_pending", False)  # as where a listing is a request
    check_absent(LocalStore(path))
    assert len(listed) == 2
    listed.clear()
    check_absent(LocalStore(new_path()))
    assert listed == []


def test_a_signature_leaves_them_out_and_says_so(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert holdfast.repair(checkpoint).whole
    pem = (form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    key = tmp_path / "key.pem"
    key.write_bytes(Ed25519PrivateKey.generate().private_bytes(*pem))
    holdfast.sign(checkpoint, key=str(key))
    assert main(["verify", "--signature", str(checkpoint)]) == 0
    assert "not checked, and not signed" in capsys.readouterr().out


def test_a_crowd_of_them_costs_no_more_than_a_look(new_path: NewPath) -> None:
    path = new_path()
    holdfast.save({"w": WEIGHT}, path)
    for number in range(5000):
        (path / f"shard-{number}").touch()
    into = {"w": torch.zeros(8)}
    holdfast.load(path, into=into)
    assert holdfast.verify(path).foreign_count == 5000
    shutil.rmtree(path)


MANY = 30_000


@pytest.fixture
def crowded(new_path: NewPath) -> Path:
    """A checkpoint beside very many files of others."""
    path = new_path()
    holdfast.save({"w": WEIGHT}, path)
    for number in range(MANY):
        (path / f"part-{number:07d}.json").touch()
    return path


def test_a_load_looks_at_a_bounded_number_of_foreign_names(
    crowded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = 0
    scandir = os.scandir

    @contextlib.contextmanager
    def counted(place: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        def count() -> Iterator[os.DirEntry[str]]:
            nonlocal seen
            for entry in entries:
                seen += 1
                yield entry

        with scandir(place) as entries:
            yield count()

    def refuse(store: LocalStore, name: str = "") -> list[Entry]:
        assert name, "a load lists all names"
        return listed(store, name)

    listed = LocalStore.list
    monkeypatch.setattr(LocalStore, "list", refuse)
    monkeypatch.setattr("holdfast.stores.local.os.scandir", counted)
    for load in (
        lambda: holdfast.load(crowded, into={"w": torch.zeros(8)}),
        lambda: holdfast.load(crowded, into={"w": torch.zeros(8)}, partial=True),
        lambda: holdfast.open(crowded).tensor("w"),
    ):
        seen = 0
        load()
        assert seen <= 1001


def test_verify_and_inspect_name_some_of_many_foreign_files_and_count_all(
    crowded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = holdfast.verify(crowded)
    assert found.damage == () and found.foreign_count == MANY
    assert found.foreign == tuple(f"part-{number:07d}.json" for number in range(1000))
    for verb in ("verify", "inspect"):
        assert main([verb, str(crowded)]) == 0
        said = capsys.readouterr().out
        assert "part-0000002.json and 29,997 more" in " ".join(said.split())
        assert main([verb, "--json", str(crowded)]) == 0
        assert '"foreign_count": 30000' in capsys.readouterr().out


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__7_3.distcp"])
def test_a_checkpoint_of_dcp_among_many_files_is_found(crowded: Path, name: str) -> None:
    (crowded / name).write_bytes(b"not ours")
    if name != "__7_3.distcp":  # which may be anywhere among them
        with pytest.raises(CorruptError, match="holds two checkpoints"):
            holdfast.load(crowded, into={"w": torch.zeros(8)})
    (fault,) = holdfast.verify(crowded).damage
    assert "holds two checkpoints" in fault.what and name in fault.what
