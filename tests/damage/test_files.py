"""Damage larger than a bit: files cut, grown, swapped, lost, or something else than files."""

import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from attacks.lies import OPTIONS, save_truth, target
from format import reader
from holdfast.errors import CorruptError, NotCommittedError

NewPath = Callable[[], Path]


@pytest.fixture
def checkpoint(new_path: NewPath) -> Path:
    path = new_path()
    save_truth(path)
    return path


@pytest.fixture
def other(new_path: NewPath) -> Path:
    """The same state, saved once more: equal bytes under another save_id."""
    path = new_path()
    save_truth(path)
    return path


def data_files(path: Path) -> list[Path]:
    return sorted((path / "data").rglob("*.hf"))


def check_refused(path: Path, text: str) -> None:
    """A load, verify and the other reader all find it, and the text says where."""
    with pytest.raises(CorruptError, match=text) as caught:
        holdfast.load(path, into=target(), options=OPTIONS)
    assert str(path) in str(caught.value)
    try:
        damage = holdfast.open(path, options=OPTIONS).verify()
    except CorruptError as error:
        assert re.search(text, str(error))
    else:
        assert any(re.search(text, fault.what) for fault in damage)
    with pytest.raises(reader.Corrupt):
        reader.read(path)


def test_a_file_cut_at_any_length_is_refused(checkpoint: Path) -> None:
    for file in [checkpoint / "MANIFEST", *data_files(checkpoint)]:
        content = file.read_bytes()
        for length in range(0, len(content), 37):
            file.write_bytes(content[:length])
            check_refused(checkpoint, rf"has {length} bytes|does not fit its {length} bytes")
        file.write_bytes(content)
    holdfast.load(checkpoint, into=target(), options=OPTIONS)


def test_a_file_that_has_grown_is_refused(checkpoint: Path) -> None:
    for file in [checkpoint / "MANIFEST", *data_files(checkpoint)]:
        content = file.read_bytes()
        for more in (b"\x00", b"\x00" * 4096, content):
            file.write_bytes(content + more)
            check_refused(checkpoint, r"has \d+ bytes, MANIFEST says|does not fit its")
        file.write_bytes(content)


def test_a_zeroed_page_is_refused(checkpoint: Path) -> None:
    for file in [checkpoint / "MANIFEST", *data_files(checkpoint)]:
        content = file.read_bytes()
        for start in range(0, len(content), 128):
            end = min(start + 128, len(content))
            if any(content[start:end]):
                file.write_bytes(content[:start] + bytes(end - start) + content[end:])
                check_refused(checkpoint, "magic|checksum|preamble|header|trailer|footer")
        file.write_bytes(content)


def test_two_chunks_in_each_others_place_are_refused(checkpoint: Path) -> None:
    file = data_files(checkpoint)[0]
    content = bytearray(file.read_bytes())
    content[64:80], content[128:144] = content[128:144], content[64:80]
    file.write_bytes(content)
    check_refused(checkpoint, r"tensor w, chunk 0\): checksum [0-9a-f]{16}, MANIFEST says")


def test_a_file_of_another_rank_is_refused(checkpoint: Path) -> None:
    first, second = data_files(checkpoint)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    check_refused(checkpoint, r"00000-0\.hf: it has 628 bytes, MANIFEST says 916")


def test_a_file_of_another_save_is_refused(checkpoint: Path, other: Path) -> None:
    mine, theirs = data_files(checkpoint), data_files(other)
    for file, stale in zip(mine, theirs, strict=True):
        content = file.read_bytes()
        assert len(content) == len(stale.read_bytes())
        shutil.copy(stale, file)
        check_refused(checkpoint, r"header: byte \d+ differs")
        # Under the right header, its payloads are still those of the other save.
        file.write_bytes(content[:64] + stale.read_bytes()[64:])
        check_refused(checkpoint, "another footer checksum than MANIFEST")
        file.write_bytes(content)


def test_a_payload_of_another_save_is_refused(checkpoint: Path, other: Path) -> None:
    """Its bytes are the same, so nothing is wrong; but where they differ, the checksum does."""
    file = data_files(checkpoint)[0]
    whole, stale = file.read_bytes(), data_files(other)[0].read_bytes()
    assert whole[64:80] == stale[64:80]
    file.write_bytes(whole[:64] + b"\x01" + whole[65:])
    check_refused(checkpoint, "checksum")


def test_the_manifest_of_another_save_is_refused(checkpoint: Path, other: Path) -> None:
    shutil.copy(other / "MANIFEST", checkpoint / "MANIFEST")
    check_refused(checkpoint, r"is missing, but MANIFEST names|missing or not a regular file")


def test_a_missing_file_is_refused(checkpoint: Path) -> None:
    for file in data_files(checkpoint):
        content = file.read_bytes()
        file.unlink()
        check_refused(checkpoint, rf"{file.name} is missing or not a regular file")
        file.write_bytes(content)
    shutil.rmtree(checkpoint / "data")
    check_refused(checkpoint, "data is missing, but MANIFEST names files in it")


def test_a_missing_manifest_is_no_damage(checkpoint: Path) -> None:
    (checkpoint / "MANIFEST").unlink()
    with pytest.raises(NotCommittedError, match="data files but no MANIFEST"):
        holdfast.load(checkpoint, into=target(), options=OPTIONS)
    with pytest.raises(reader.NotACheckpoint):
        reader.read(checkpoint)


EXTRA = ["data/stray.hf", "data/{id}/00000-1.hf", "data/{id}/x"]
EXTRA += ["data/{id}/00000-0.hf~", "data/{id}/0-0.hf"]


@pytest.mark.parametrize("name", EXTRA)
def test_a_file_that_nobody_named_is_refused(checkpoint: Path, name: str) -> None:
    save_id = holdfast.open(checkpoint).save_id
    extra = checkpoint / name.format(id=save_id)
    extra.write_bytes(b"x")
    check_refused(checkpoint, f"{re.escape(extra.name)} is a file that does not belong")


def test_a_directory_that_nobody_named_is_refused(checkpoint: Path) -> None:
    (checkpoint / "data" / holdfast.open(checkpoint).save_id / "more").mkdir()
    with pytest.raises(CorruptError, match="more is a directory that does not belong"):
        holdfast.load(checkpoint, into=target(), options=OPTIONS)


def test_remains_of_dead_saves_are_no_damage(checkpoint: Path, other: Path) -> None:
    (checkpoint / f".manifest-{'ab' * 16}").write_bytes(b"half a manif")
    dead = checkpoint / "data" / ("cd" * 16)
    shutil.copytree(data_files(other)[0].parent, dead)
    os.mkfifo(dead / "pipe")
    holdfast.load(checkpoint, into=target(), options=OPTIONS)
    assert holdfast.open(checkpoint).verify() == []
    assert len(reader.read(checkpoint)["tensors"]) == 3


def test_a_checkpoint_without_elements_is_checked_for_strays_too(new_path: NewPath) -> None:
    path = new_path()
    holdfast.save({"v": 1}, path)
    for name in ("data/stray", f"data/{holdfast.open(path).save_id}/00000-0.hf"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"x")
        with pytest.raises(CorruptError, match="is a file that does not belong"):
            holdfast.load(path, into={"v": 0})
        assert holdfast.open(path).verify() != []
        with pytest.raises(reader.Corrupt):
            reader.read(path)
        (path / name).unlink()
    holdfast.load(path, into={"v": 0})


def link(path: Path) -> None:
    root = next(parent for parent in path.parents if parent.name.startswith("checkpoint-"))
    whole = path.rename(root.parent / "elsewhere")
    path.symlink_to(whole)


def listen(path: Path) -> None:
    # The name of a socket has room for 107 bytes, so it is made in its directory.
    here = os.getcwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(path.name)
    os.chdir(here)


INSTEAD: dict[str, Callable[[Path], object]] = {
    "a symbolic link to it": link,
    "a broken link": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a socket": listen,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("which", ["a data file", "MANIFEST"])
@pytest.mark.parametrize("what", INSTEAD)
def test_what_is_no_regular_file_is_refused_without_waiting(
    checkpoint: Path, which: str, what: str
) -> None:
    file = checkpoint / "MANIFEST" if which == "MANIFEST" else data_files(checkpoint)[0]
    if what != "a symbolic link to it":
        file.unlink()
    INSTEAD[what](file)
    check_refused(checkpoint, f"{file.name} is (missing or )?not a (regular )?file|belong")
    if which != "MANIFEST":
        with pytest.raises(CorruptError, match="not a regular file"):
            holdfast.load(checkpoint, into=target(), strict=False, options=OPTIONS)


@pytest.mark.parametrize("place", ["data", "data/{id}"])
def test_a_link_is_no_directory(checkpoint: Path, new_path: NewPath, place: str) -> None:
    directory = checkpoint / place.format(id=holdfast.open(checkpoint).save_id)
    elsewhere = new_path()
    directory.rename(elsewhere)
    directory.symlink_to(elsewhere)
    check_refused(checkpoint, f"{directory.name} is a link or special file")


def test_a_manifest_larger_than_a_gibibyte_is_refused_before_it_is_read(checkpoint: Path) -> None:
    os.truncate(checkpoint / "MANIFEST", (1 << 30) + 1)
    check_refused(checkpoint, "MANIFEST is not a regular file of at most 1 GiB")


def test_a_file_that_shrinks_while_it_is_read_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.loading import load as load_module

    read_shards = load_module.read_shards

    def shrink(*arguments: object) -> None:
        os.truncate(data_files(checkpoint)[0], 100)
        read_shards(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(load_module, "read_shards", shrink)
    with pytest.raises(CorruptError, match="ends at byte 100, within its data"):
        holdfast.load(checkpoint, into=target(), options=OPTIONS)


def test_a_read_behind_the_end_says_where_the_end_is(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    holdfast.save({"x": torch.zeros(5000, 1000)}, path)
    with holdfast.open(path) as checkpoint:
        os.truncate(data_files(path)[0], 100)
        with pytest.raises(CorruptError, match="ends at byte 100, within its data"):
            checkpoint.tensor("x", ((4999, 0), (1, 1000)))


def test_verify_names_every_damaged_file(checkpoint: Path) -> None:
    first, second = data_files(checkpoint)
    for file in (first, second):
        content = bytearray(file.read_bytes())
        content[64] ^= 1
        file.write_bytes(content)
    (checkpoint / "data" / "stray").write_bytes(b"")
    damage = holdfast.open(checkpoint, options=OPTIONS).verify()
    assert [fault.where for fault in damage] == [str(checkpoint), str(first), str(second)]
    checked: list[int] = []
    holdfast.open(checkpoint, options=OPTIONS).verify(checked.append)
    assert sum(checked) >= 54
