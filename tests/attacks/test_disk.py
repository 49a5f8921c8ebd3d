"""Checkpoints as a hostile archive, mount or neighbour leaves them: no way out, no wait, no flood.

What is put where a file or directory of the checkpoint should be is told by name; each is met in a
bounded time and memory, by a typed error, and nothing outside of the directory is read.
"""

import errno
import os
import socket
import stat
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from format.simulated_ranks import pieces, save_pieces
from holdfast.cli import main
from holdfast.errors import HoldfastError, NotCommittedError
from holdfast.stores.local import LocalStore

from .lies import OPTIONS, save_truth, target

NewPath = Callable[[], Path]
MEMORY_MAX = 16 << 20  # for all readers together
SECRET = b"the secret of another user\n"

Put = Callable[[Path, Path], None]  # (what is replaced, a directory outside)


def link_to_what_it_was(place: Path, outside: Path) -> None:
    place.rename(outside / "moved")
    place.symlink_to(outside / "moved")


def link_within(place: Path, outside: Path) -> None:
    place.rename(place.with_name(".manifest-moved"))
    place.symlink_to(".manifest-moved")


def link_to(target: str) -> Put:
    def put(place: Path, outside: Path) -> None:
        remove(place)
        place.symlink_to(target.format(outside=outside, name=place.name))

    return put


def links_in_a_row(place: Path, outside: Path) -> None:
    place.rename(outside / "0")
    for number in range(1, 30):
        (outside / str(number)).symlink_to(str(number - 1))
    place.symlink_to(outside / "29")


def special(kind: int, device: int = 0) -> Put:
    def put(place: Path, outside: Path) -> None:
        remove(place)
        try:
            os.mknod(place, kind | 0o666, device)
        except PermissionError:
            pytest.skip("a device file takes root")

    return put


def listening(place: Path, outside: Path) -> None:
    remove(place)
    here = os.getcwd()
    os.chdir(place.parent)  # the name of a socket has room for 107 bytes
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(place.name)
    os.chdir(here)


def hard_link(place: Path, outside: Path) -> None:
    remove(place)
    place.hardlink_to(outside / "secret")


def other_kind(place: Path, outside: Path) -> None:
    was_directory = place.is_dir()
    remove(place)
    if was_directory:
        place.write_bytes(SECRET)
    else:
        place.mkdir()


def remove(place: Path) -> None:
    """Put it away, under a name that is left alone."""
    place.rename(place.parent.parent / f"away-{place.name}")


INSTEAD: dict[str, Put] = {
    "a link to what it was, outside": link_to_what_it_was,
    "a link to what it was, inside": link_within,
    "thirty links in a row": links_in_a_row,
    "a link to nowhere": link_to("nowhere"),
    "a link to itself": link_to("{name}"),
    "a link to a secret": link_to("{outside}/secret"),
    "a link to the directory above": link_to(".."),
    "a link to the root": link_to("/"),
    "a link to /dev/zero": link_to("/dev/zero"),
    "a link to the memory of the process": link_to("/proc/self/mem"),
    "a link to an open descriptor": link_to("/proc/self/fd/0"),
    "a FIFO": special(stat.S_IFIFO),
    "/dev/zero": special(stat.S_IFCHR, os.makedev(1, 5)),
    "/dev/full": special(stat.S_IFCHR, os.makedev(1, 7)),
    "a terminal": special(stat.S_IFCHR, os.makedev(5, 0)),
    "a disk that is not there": special(stat.S_IFBLK, os.makedev(250, 250)),
    "a socket": listening,
    "a hard link to a secret": hard_link,
    "a file for a directory, or the other way round": other_kind,
}
PLACES = ("MANIFEST", "data", "data/{id}", "data/{id}/00000-0.hf", "SIGNATURE")
ATTACKS = [
    (what, place)
    for what in INSTEAD
    for place in PLACES
    if not (what == "a hard link to a secret" and place in ("data", "data/{id}"))
    if not (what == "a link to what it was, inside" and place != "MANIFEST")
]


@pytest.fixture
def checkpoint(new_path: NewPath) -> Path:
    path = new_path()
    save_truth(path)
    return path


@pytest.fixture
def outside(new_path: NewPath) -> Path:
    path = new_path()
    path.mkdir()
    (path / "secret").write_bytes(SECRET)
    return path


def readers(path: Path) -> dict[str, Callable[[], object]]:
    """All that looks at a checkpoint."""
    return {
        "load": lambda: holdfast.load(path, into=target(), options=OPTIONS),
        "load what is there": lambda: holdfast.load(
            path, into=target(), strict=False, options=OPTIONS
        ),
        "verify": lambda: holdfast.open(path, options=OPTIONS).verify(),
        "part": lambda: holdfast.open(path, options=OPTIONS).tensor("w", ((0, 0), (2, 4))),
        "inspect": lambda: main(["inspect", str(path)]),
        "verify, the command": lambda: main(["verify", str(path), "--deep", "--signature"]),
    }


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("what", "place"), ATTACKS, ids=[f"{w} as {p}" for w, p in ATTACKS])
def test_what_stands_in_the_place_of_a_file_is_no_way_out(
    checkpoint: Path,
    outside: Path,
    capsys: pytest.CaptureFixture[str],
    bounded: None,
    what: str,
    place: str,
) -> None:
    found = checkpoint / place.format(id=holdfast.open(checkpoint).save_id)
    if place == "SIGNATURE":
        found.write_bytes(SECRET)
    INSTEAD[what](found, outside)
    for name, read in readers(checkpoint).items():
        try:
            answer = read()
        except HoldfastError as error:
            assert SECRET.decode().strip() not in str(error)
            assert name != "inspect" or isinstance(error, NotCommittedError)
        else:
            # What reads only MANIFEST, or only its own part, may not have come by it.
            blind = place == "SIGNATURE" and name in ("load what is there", "part", "inspect")
            assert blind or answer or name == "inspect", f"{name} has seen nothing"
            if name == "verify, the command":
                assert answer in (1, 2)
            if name.startswith("load") or name == "part":
                assert blind, f"{name} has read what lies outside"
    said = capsys.readouterr()
    assert SECRET.decode().strip() not in said.out + said.err


def test_there_are_attacks_of_every_kind() -> None:
    assert len(ATTACKS) > 60


SIZES = {
    "a MANIFEST of a TiB of nothing": ("MANIFEST", 1 << 40),
    "a MANIFEST of 8 EiB of nothing": ("MANIFEST", (1 << 63) - 4096),
    "a data file of a TiB of nothing": ("data/{id}/00000-0.hf", 1 << 40),
    "a data file of 8 EiB of nothing": ("data/{id}/00001-0.hf", (1 << 63) - 4096),
    "a SIGNATURE of a TiB of nothing": ("SIGNATURE", 1 << 40),
}


@pytest.mark.parametrize("what", SIZES)
def test_a_giant_of_holes_is_not_read(
    tmp_path: Path, new_path: NewPath, bounded: None, what: str
) -> None:
    path = new_path()
    save_truth(path)
    place, size = SIZES[what]
    file = path / place.format(id=holdfast.open(path).save_id)
    file.touch()
    try:
        os.truncate(file, size)
    except OSError as error:
        assert error.errno == errno.EFBIG
        pytest.skip("the file system has no files of this size")
    for name, read in readers(path).items():
        if "what is there" in name or name == "part" or name == "inspect":
            continue
        try:
            assert read()
        except HoldfastError:
            continue


def test_a_manifest_of_a_gib_of_nothing_takes_no_more_than_itself(checkpoint: Path) -> None:
    os.truncate(checkpoint / "MANIFEST", 1 << 30)
    tracemalloc.start()
    started = time.process_time()
    with pytest.raises(holdfast.errors.CorruptError, match=r"its magic|does not fit"):
        holdfast.open(checkpoint)
    assert time.process_time() - started < 10
    assert tracemalloc.get_traced_memory()[1] < (1 << 30) + MEMORY_MAX
    tracemalloc.stop()


def many_strays(path: Path) -> None:
    for number in range(3000):
        (path / "data" / f"stray-{number}").touch()


def many_pending(path: Path) -> None:
    for number in range(3000):
        (path / f".manifest-{number}").touch()
    (path / "data" / "stray").touch()


def deep_directories(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path / "data")
    for _ in range(500):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(here)
    (path / "data" / "stray").touch()


def odd_name(name: bytes) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        with open(os.fsencode(path) + b"/data/" + name, "wb"):
            pass

    return put


CROWDS: dict[str, Callable[[Path], None]] = {
    "3,000 strays": many_strays,
    "3,000 files of commits that died": many_pending,
    "500 directories in each other": deep_directories,
    "a name of 255 bytes": odd_name(b"x" * 255),
    "a name that is not UTF-8": odd_name(b"\xff\xfe"),
    "a name that moves the cursor": odd_name(b"\x1b[2J\x1b]0;owned\x07\n"),
    "a name of a line break": odd_name(b"good\ngood run: every byte checked"),
    "a name that looks like MANIFEST": odd_name("MANIF\u0415ST".encode()),
}


@pytest.mark.parametrize("what", CROWDS)
def test_what_lies_among_data_files_is_refused_and_shown_as_text(
    checkpoint: Path, bounded: None, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    CROWDS[what](checkpoint)
    with pytest.raises(holdfast.errors.CorruptError, match="does not belong to the checkpoint"):
        holdfast.load(checkpoint, into=target(), options=OPTIONS)
    assert holdfast.open(checkpoint).verify()
    assert main(["verify", str(checkpoint)]) == 1
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\x07" not in said
    assert not any(line.startswith("good ") for line in said.splitlines())


@pytest.mark.timeout(60)
def test_a_directory_that_is_swapped_for_a_link_is_no_way_out(new_path: NewPath) -> None:
    """Inside the data file is missing, outside is the right one: a load of it has gone out."""
    path, elsewhere = new_path(), new_path()
    first, second = pieces(torch.ones(4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4))])
    save_pieces(path, [{("w",): first}, {("w",): second}], options=OPTIONS)
    (path / "data").rename(elsewhere)
    (path / "data").mkdir()
    (path / "link").symlink_to(elsewhere)
    stop, swaps = threading.Event(), [0]

    def swap() -> None:
        while not stop.is_set():
            for one, other in (("data", "real"), ("link", "data"), ("data", "link")):
                os.rename(path / one, path / other)
            os.rename(path / "real", path / "data")
            swaps[0] += 1

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        refused, until = 0, time.process_time() + 1.5
        while time.process_time() < until or swaps[0] < 50:
            with pytest.raises(HoldfastError):
                holdfast.load(path, into={"w": torch.zeros(4, 4)}, strict=False, options=OPTIONS)
            refused += 1
    finally:
        stop.set()
        thread.join()
    assert refused > 10 and swaps[0] >= 50


def test_the_checkpoint_itself_may_be_reached_through_a_link(
    checkpoint: Path, new_path: NewPath
) -> None:
    alias = new_path()
    alias.symlink_to(checkpoint)
    holdfast.load(alias, into=target(), options=OPTIONS)
    assert holdfast.open(alias).verify() == []


def test_the_store_opens_and_lists_only_what_lies_below(checkpoint: Path, outside: Path) -> None:
    store = LocalStore(checkpoint)
    (checkpoint / "way").symlink_to(outside)
    for name in ("way/secret", "../secret", "data/../../x", "/etc/passwd", str(outside / "secret")):
        with pytest.raises(holdfast.errors.StoreError):
            store.open(name, direct=False)
        with pytest.raises(holdfast.errors.StoreError):
            store.list(name)
