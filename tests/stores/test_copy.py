"""`holdfast copy`: from a disk to each store and back, cut off, damaged, refused."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

import holdfast
from descriptors import open_descriptors, opened_since
from holdfast.cli import main
from holdfast.engine import copied_files, transfer
from holdfast.errors import (
    AlreadyCommittedError,
    CorruptError,
    HoldfastError,
    NoSpaceError,
    NotCommittedError,
    OptionError,
    StoreError,
)
from holdfast.stores.base import Store
from holdfast.stores.url import open_store
from holdfast.tools import copy
from namespaces import mounted
from stores.places import Place


@pytest.fixture
def target(new_place: Place) -> str:
    return new_place()


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = str(tmp_path / "run" / "step-00000001")
    holdfast.save(state(1), path, step=1, options=holdfast.Options(chunk_elements=1 << 14))
    return path


def state(n: int) -> dict[str, Any]:
    torch.manual_seed(n)
    large = torch.randn(300, 1000)
    return {"n": n, "large": large, "half": torch.randn(70).bfloat16(), "none": torch.zeros(0)}


def files(path: str) -> dict[str, bytes]:
    """Return the bytes of all files below a place."""
    found = dict[str, bytes]()

    def look(store: Store, below: str) -> None:
        for entry in store.list(below):
            name = f"{below}/{entry.name}" if below else entry.name
            if entry.kind == "directory":
                look(store, name)
            else:
                found[name] = store.get(name, 1 << 30)

    look(open_store(path), "")
    return found


def test_a_copy_has_the_same_files_there_and_back(source: str, target: str, tmp_path: Path) -> None:
    back = str(tmp_path / "back")
    counted = list[int]()
    done = holdfast.copy_checkpoint(source, target, report=counted.append)
    assert files(source) == files(target) and not holdfast.verify(target).damage
    data = sum(len(data) for name, data in files(source).items() if name != "MANIFEST")
    assert done.copied_bytes == data == sum(counted) and not done.kept_bytes
    holdfast.copy_checkpoint(target, back)
    assert files(back) == files(source)
    again = holdfast.copy_checkpoint(source, target)
    assert (again.copied_bytes, again.kept_bytes) == (0, data)


@pytest.mark.parametrize("codec", ["lossless", "compact"])
def test_what_is_encoded_is_copied_as_it_is(source: str, target: str, codec: str) -> None:
    holdfast.save(state(2), f"{source}-coded", codec=codec)
    holdfast.copy_checkpoint(f"{source}-coded", target)
    assert files(f"{source}-coded") == files(target)


def test_any_changed_bit_of_the_source_is_found_and_nothing_is_committed(
    source: str, target: str
) -> None:
    (file,) = Path(source).glob("data/*/*")
    whole, chance = file.read_bytes(), random.Random(5)
    for _ in range(40):
        at = chance.randrange(8 * len(whole))
        changed = bytearray(whole)
        changed[at // 8] ^= 1 << at % 8
        file.write_bytes(changed)
        with pytest.raises(CorruptError):
            holdfast.copy_checkpoint(source, target)
        with pytest.raises(NotCommittedError):
            holdfast.open(target)
    file.write_bytes(whole)
    holdfast.copy_checkpoint(source, target)
    assert files(source) == files(target)


def test_what_is_not_what_was_checked_is_found_at_the_target(
    source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no payload is checked again as it was written."""
    real = copied_files._NewFile._fill

    def wrong(self: Any, end: int) -> None:
        if self._at:
            self._write(memoryview(bytes(end - self._at)))
        real(self, end)

    monkeypatch.setattr(copied_files._NewFile, "_fill", wrong)
    with pytest.raises(StoreError, match="differs from the bytes written"):
        holdfast.copy_checkpoint(source, target)
    with pytest.raises(NotCommittedError):
        holdfast.open(target)


@pytest.mark.parametrize("after", range(5))
def test_a_copy_that_was_cut_off_goes_on(
    source: str, target: str, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Whatever was not cleaned up, as by a kill."""
    options = holdfast.Options(file_bytes=1 << 18)
    holdfast.save(state(3), f"{source}-files", options=options)
    source = f"{source}-files"
    assert len([*Path(source).glob("data/*/*")]) > 3
    finish, count = copied_files._NewFile.finish, 0

    class Cut(BaseException):
        pass

    def late(self: Any) -> int:
        nonlocal count
        count += 1
        if count > after:
            self._there.remove = lambda name: None
            self._there.remove_directory = lambda name: False
            raise Cut
        return finish(self)

    monkeypatch.setattr(copied_files._NewFile, "finish", late)
    with pytest.raises(Cut):
        holdfast.copy_checkpoint(source, target)
    monkeypatch.undo()
    with pytest.raises(NotCommittedError):
        holdfast.open(target)
    done = holdfast.copy_checkpoint(source, target)
    assert files(source) == files(target)
    assert bool(done.kept_bytes) == (after > 0)


def test_damage_in_what_was_copied_before_is_mended(
    source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not open_store(target).can_link:
        pytest.skip("what was uploaded is there whole, or not at all")

    def fail(*given: object) -> None:
        raise StoreError("no room")

    monkeypatch.setattr(transfer, "_commit", fail)
    with pytest.raises(StoreError):
        holdfast.copy_checkpoint(source, target)
    monkeypatch.undo()
    (file,) = Path(target).glob("data/*/*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert not holdfast.copy_checkpoint(source, target).kept_bytes
    assert files(source) == files(target)


def test_a_copy_that_fails_late_takes_nothing_from_one_that_has_ended(
    source: str, target: str
) -> None:
    apart = holdfast.Options(pool_bytes=32 << 20)  # the other holds the pool of all

    def late(size: int) -> None:  # as one that was frozen while another brought the same files
        if size:
            holdfast.copy_checkpoint(source, target, options=apart)
            raise StoreError("the connection is lost")

    with pytest.raises(StoreError, match="the connection is lost"):
        holdfast.copy_checkpoint(source, target, report=late)
    assert files(target) == files(source)


def test_a_copy_called_from_the_report_of_another_does_not_wait_for_ever(
    source: str, target: str
) -> None:
    def within(size: int) -> None:
        if size:
            holdfast.copy_checkpoint(source, target)

    with pytest.raises(HoldfastError, match="comes from a callback of a save, load or copy"):
        holdfast.copy_checkpoint(source, target, report=within)
    holdfast.copy_checkpoint(source, target)  # nothing is held for ever
    assert files(target) == files(source)


def test_what_is_in_the_way_stays(source: str, target: str) -> None:
    holdfast.save(state(4), target)
    before = files(target)
    with pytest.raises(AlreadyCommittedError, match="holds another checkpoint"):
        holdfast.copy_checkpoint(source, target)
    assert files(target) == before
    with pytest.raises(OptionError, match="the source itself"):
        holdfast.copy_checkpoint(source, source)
    with pytest.raises(NotCommittedError):
        holdfast.copy_checkpoint(f"{source}-none", f"{target}-none")


def test_a_delta_needs_its_base_there(source: str, target: str) -> None:
    run = str(Path(source).parent)
    holdfast.save(state(2), f"{run}/step-00000002", step=2, codec="delta")
    holdfast.save(state(3), f"{run}/step-00000003", step=3, codec="delta")
    if open_store(target).can_link:
        with pytest.raises(OptionError, match="Copy the base there first"):
            holdfast.copy_checkpoint(f"{run}/step-00000003", f"{target}/step-00000003")
        assert main(["copy", run, target]) == 0
        assert files(target) == files(run)
    else:
        with pytest.raises(OptionError, match="cannot hold chains"):
            holdfast.copy_checkpoint(f"{run}/step-00000003", f"{target}/step-00000003")


def test_a_run_is_copied_and_goes_on_there(tmp_path: Path, target: str) -> None:
    run, saved = str(tmp_path / "run"), {"n": 0, "w": torch.zeros(1000)}
    with holdfast.Checkpointer(run, every=1) as checkpointer:
        for step in (1, 2, 3):
            saved["n"] = step
            checkpointer.step(step, saved, metrics={"loss": 1.0 / step})
    assert "3 checkpoints" in copy.render(copy.copy_all(run, target))[-1]
    shutil.rmtree(Path(run, "step-00000001"))
    with holdfast.Checkpointer(target, every=1) as checkpointer:
        assert checkpointer.restore(saved) == 3 and checkpointer.metrics(2) == {"loss": 0.5}
        checkpointer.step(4, saved)
    copy.copy_all(run, target)  # newer steps there stay
    with holdfast.Checkpointer(target) as checkpointer:
        assert checkpointer.steps() == [1, 2, 3, 4]


def test_a_damaged_step_is_left_out_and_said(tmp_path: Path, target: str) -> None:
    run = str(tmp_path / "run")
    for step in (1, 2):
        holdfast.save(state(step), f"{run}/step-{step:08d}", step=step)
    (file,) = Path(run, "step-00000001").glob("data/*/*")
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    document = copy.copy_all(run, target)
    assert document["damaged"] and "left out, damaged" in copy.render(document)[0]
    assert holdfast.open(f"{target}/step-00000002")["n"] == 2
    assert not open_store(f"{target}/step-00000001").exists("MANIFEST")


def test_a_signed_checkpoint_stays_signed(source: str, target: str, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    pem = Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    key.write_bytes(Ed25519PrivateKey.generate().private_bytes(*pem))
    holdfast.sign(source, key=key)
    public = holdfast.signer(source)
    holdfast.copy_checkpoint(source, target, options=holdfast.Options(trust=public))
    assert files(source) == files(target) and holdfast.signer(target) == public
    holdfast.load(target, into=state(9), options=holdfast.Options(trust=public))


def test_the_command_line_has_no_store_in_memory(
    source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["copy", source, "memory://a/b"], ["inspect", "memory://a/b"]):
        assert main(arguments) == 2
        assert "memory:// is of one process" in capsys.readouterr().err


def test_a_full_target_keeps_no_file_open(source: str, tmp_path: Path) -> None:
    """An upload tries again and again: each time it would keep two files more."""
    with mounted(tmp_path / "disk", "300k") as disk:
        before = open_descriptors()
        for _ in range(3):
            with pytest.raises(NoSpaceError):
                holdfast.copy_checkpoint(source, disk / "copy")
        assert len(opened_since(before)) <= 1
        assert not list(disk.rglob("*.hf"))
