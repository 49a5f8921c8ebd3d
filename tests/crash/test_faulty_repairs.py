"""A repair that fails or is killed at any call harms nothing, and can be done again."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import HoldfastError
from holdfast.testing import Fault, faulty

CALLS_MAX = 300
CHANGES = ("create", "write", "sync", "sync_directory", "link", "rename", "unlink")
OPTIONS = holdfast.Options(pool_bytes=32 << 20, io="buffered")
Work = Callable[[Path], None]
STATE = {"w": torch.arange(5000.0), "v": torch.ones(3), "n": 7}


def save(path: Path) -> Path:
    holdfast.save(STATE, path)
    for file in path.rglob("*.hf"):
        os.utime(file, (1e9, 1e9))
    return path


def lose(path: Path) -> None:
    (path / "MANIFEST").unlink()


def damage(path: Path) -> None:
    content = bytearray((path / "MANIFEST").read_bytes())
    content[100] ^= 1
    (path / "MANIFEST").write_bytes(content)


def in_place(path: Path) -> None:
    holdfast.repair(path, write=True, options=OPTIONS)


def aside(path: Path) -> None:
    holdfast.repair(path, to=path.with_name("new"), options=OPTIONS)


def in_a_child(path: Path, work: Callable[[Path], None], fault: Fault) -> int:
    """Repair in a process of its own; return how it ended."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        with faulty(fault):
            work(path)
    except HoldfastError:
        os._exit(1)
    except BaseException:
        os._exit(3)
    os._exit(0)


def content_of(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*.hf")}


def check(path: Path, files: dict[str, bytes], before: bytes | None, work: Work) -> None:
    """The old checkpoint is as it was, or repaired; what is new is whole; it can be done again."""
    place, new = path / "MANIFEST", path.with_name("new")
    assert content_of(path) == files
    now = place.read_bytes() if place.exists() else None
    if now != before:  # all of it, or nothing
        assert work is in_place and holdfast.verify(path, deep=True).damage == ()
    if before is not None:
        kept = [f.read_bytes() for f in path.parent.glob("*.damaged-MANIFEST*")]
        assert before in (now, *kept)
    if (new / "MANIFEST").exists():
        assert holdfast.verify(new, deep=True).damage == ()
        shutil.rmtree(new)
    work(path)
    done = path if work is in_place else new
    assert holdfast.verify(done, deep=True).damage == ()
    assert torch.equal(holdfast.open(done).tensor("w"), STATE["w"])


def prepare(
    root: Path, harm: Callable[[Path], None]
) -> tuple[Path, dict[str, bytes], bytes | None]:
    path = save(root / "step-00000001")
    files = content_of(path)
    harm(path)
    place = path / "MANIFEST"
    return path, files, place.read_bytes() if place.exists() else None


@pytest.mark.parametrize("work", [in_place, aside])
@pytest.mark.parametrize("harm", [lose, damage])
def test_a_call_that_fails_harms_nothing(
    scratch: Path, harm: Callable[[Path], None], work: Work
) -> None:
    failed = 0
    for nth in range(1, CALLS_MAX):
        path, files, before = prepare(scratch / f"run-{nth}", harm)
        with faulty(Fault("*", nth)) as disk:
            try:
                work(path)
            except HoldfastError:
                failed += 1
        check(path, files, before, work)
        if sum(disk.calls().values()) < nth:
            break
        shutil.rmtree(path.parent)
    assert nth < CALLS_MAX - 1 and failed > 5


@pytest.mark.parametrize("work", [in_place, aside])
@pytest.mark.parametrize("harm", [lose, damage])
def test_a_kill_after_any_change_harms_nothing(
    scratch: Path, harm: Callable[[Path], None], work: Work
) -> None:
    kills = 0
    for operation in CHANGES:
        for nth in range(1, CALLS_MAX):
            path, files, before = prepare(scratch / f"{operation}-{nth}", harm)
            end = in_a_child(path, work, Fault(operation, nth, action="kill_after", argument=0))
            check(path, files, before, work)
            shutil.rmtree(path.parent)
            if end == 0:
                break
            assert end == -9
            kills += 1
    assert kills > 4
