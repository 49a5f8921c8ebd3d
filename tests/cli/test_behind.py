"""What `ls`, `inspect` and `watch` say of a local run and the store behind it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Keep
from holdfast.cli import main
from holdfast.errors import NoSpaceError, StoreError
from holdfast.format.lag import lag_of
from holdfast.format.local_room import LocalRoom, local_room
from holdfast.format.names import step_name
from holdfast.format.unfinished import unfinished
from holdfast.runs.directory import Run
from holdfast.stores.base import file_names
from holdfast.stores.url import open_store

from .conftest import Command


@pytest.fixture
def local(tmp_path: Path) -> str:
    """A local run of which step 2 has not gone up."""
    store, path = str(tmp_path / "store"), str(tmp_path / "local")
    with holdfast.Checkpointer(store, local=path, signals=()) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(1000)})
    late = holdfast.Checkpointer(
        store, local=path, signals=(), durable="local", drain_s=0.1, upload_bytes_s=100.0
    )
    late.save(2, {"w": torch.ones(1000)})
    with pytest.raises(StoreError, match="step 2"):
        late.close()
    return path


def steps_in(path: str) -> list[int]:
    return Run(path, Keep.all()).steps()


@pytest.mark.parametrize("verb", [["ls"], ["inspect"], ["watch", "--once"]])
def test_a_local_run_says_what_is_in_the_store(
    local: str, verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb, local]) == 0
    text = capsys.readouterr().out
    assert "behind it: " in text
    assert "last upload: step 1" in text
    assert "not there yet: 2" in text


def test_a_report_and_a_probe_say_how_far_the_store_is_behind(
    local: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", local, "-o", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text()
    assert "behind this disk" in page and "what is newer than step 1" in page
    assert [a.rule for a in holdfast.check_run(local, disk_saves=None, behind_min=1e-6)] == [
        "behind"
    ]
    assert holdfast.check_run(local, disk_saves=None, behind_min=60) == []
    capsys.readouterr()
    assert main(["check-run", local, "--behind-min", "0.000001"]) == 1
    assert "lacks step 2" in capsys.readouterr().out
    # A run without a store behind it is never behind.
    assert holdfast.check_run(str(tmp_path / "store"), disk_saves=None, behind_min=1e-6) == []


def test_an_alert_tells_of_a_store_that_is_behind(local: str) -> None:
    told: list[holdfast.Event] = []
    alerts = holdfast.Alerts(told.append, disk_saves=None, straggler=None, behind_min=1e-6)
    run: dict[str, Any] = {"run": local, "rank": 0, "world_size": 1}
    for kind, step in [("committed", 1), ("uploaded", 1), ("committed", 2), ("committed", 3)]:
        alerts(holdfast.Event(kind=kind, step=step, time_s=1.0, **run))
    assert [(event.rule, event.step) for event in told] == [("behind", 1), ("behind", 2)]


@pytest.mark.parametrize(
    ("seen", "oldest"),
    [
        ([], None),
        ([("save", 1)], 1),
        ([("save", 1), ("upload", 1)], None),
        ([("save", 1), ("save", 2), ("upload", 2)], None),  # step 1 need not go there any more
        ([("save", 1), ("save", 2), ("upload", 1)], 2),
        ([("save", 7), ("save", 7), ("save", 8)], 7),  # a line for each rank
        ([("save", 7), ("save", 9), ("save", 8), ("upload", 7)], 8),  # training went back
        ([("save", 7), ("upload", 7), ("save", 5)], 5),
    ],
)
def test_the_store_is_behind_since_the_first_step_that_it_lacks(
    seen: list[tuple[str, int]], oldest: int | None
) -> None:
    records = [
        {"verb": verb, "step": step, "time": f"2026-01-01T00:00:{n:02}+00:00"}
        for n, (verb, step) in enumerate(seen)
    ]
    found = lag_of([*records, {"verb": "save", "step": 99, "time": "never"}]).oldest
    assert (found and found[0]) == oldest


def test_a_step_that_is_not_committed_does_not_wait(
    local: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(local, step_name(999), "data").mkdir(parents=True)
    assert main(["ls", local]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "999" not in next(line for line in lines if "behind it" in line)


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"store": "", "jobs": []}', b"[" * 9000])
def test_a_mark_that_is_none_is_passed_over(
    local: str, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = Path(local, ".store")
    mark.unlink() if content is None else mark.write_bytes(content)
    assert main(["ls", local]) == 0
    assert "behind" not in capsys.readouterr().out


@pytest.fixture
def ahead(tmp_path: Path) -> str:
    """A local disk with steps 1 to 4, of which the store has 1 and 2."""
    store, path = str(tmp_path / "store"), str(tmp_path / "local")
    keep = Keep.local(9)
    with holdfast.Checkpointer(store, local=path, signals=(), keep=keep) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.ones(1000)})
    late = holdfast.Checkpointer(
        store, local=path, signals=(), keep=keep, durable="local", drain_s=0.1, upload_bytes_s=100.0
    )
    for step in (3, 4):
        late.save(step, {"w": torch.ones(1000)})
    with pytest.raises(StoreError, match="step 3, 4"):
        late.close()
    return path


def test_prune_deletes_no_step_that_only_the_local_disk_has(
    ahead: str, tmp_path: Path, holdfast_command: Command
) -> None:
    words = ("prune", ahead, "--keep", "latest=1")
    dry = holdfast_command(*words)
    assert dry.code == 0 and "would be deleted: 1, 2\n" in dry.out
    assert f"only this disk has 3: the store behind it, {tmp_path}/store, does not" in dry.out
    done = holdfast_command(*words, "--delete", "--json").document
    assert (done["removed"], done["kept"], done["spared"]) == ([1, 2], [3, 4], [3])
    assert steps_in(ahead) == [3, 4]
    again = holdfast_command(*words, "--delete")
    assert (
        "nothing to delete" in again.out and f"holdfast copy {ahead} {tmp_path}/store" in again.out
    )
    assert steps_in(ahead) == [3, 4]
    # What it advises brings them up; then they may go.
    assert holdfast_command("copy", ahead, tmp_path / "store").code == 0
    gone = holdfast_command(*words, "--delete")
    assert "only this disk" not in gone.out and steps_in(ahead) == [4]
    assert steps_in(str(tmp_path / "store")) == [1, 2, 3, 4]


def test_prune_keeps_a_local_step_that_is_another_checkpoint_in_the_store(
    ahead: str, tmp_path: Path
) -> None:
    holdfast.save({"n": 7}, tmp_path / "store" / step_name(3), step=3)
    assert holdfast.prune(ahead, Keep.latest(1), dry_run=False).spared == (3,)
    assert steps_in(ahead) == [3, 4]


def test_prune_of_a_local_disk_needs_its_store(
    ahead: str, tmp_path: Path, holdfast_command: Command
) -> None:
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").touch()  # which no directory can be read from
    for more in ([], ["--delete"]):
        answer = holdfast_command("prune", ahead, "--keep", "latest=1", *more)
        assert answer.code == 2, answer
        assert f"is the local disk before {tmp_path}/store, which cannot be read" in answer.err
    assert steps_in(ahead) == [1, 2, 3, 4]
    (tmp_path / "store").unlink()  # its disk is not mounted
    found = holdfast.prune(ahead, Keep.latest(1), dry_run=False)
    assert (found.removed, found.spared) == ((), (1, 2, 3))


STEP = 500_000  # elements of four bytes


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a disk of a size; give a directory on it."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mounted(size: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
        if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("only root may mount a small file system")
        return disk / "local"

    yield mounted
    subprocess.run(["umount", str(disk)], capture_output=True)


def save_steps(store: Path, local: Path, steps: range) -> None:
    keep = Keep.latest(5) | Keep.local(2)
    with holdfast.Checkpointer(store, local=local, signals=(), keep=keep) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"w": torch.full((STEP,), float(step))})


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_a_local_disk_that_makes_room_for_each_save_is_not_called_full(
    count: int,
    small_disk: Callable[[str], Path],
    tmp_path: Path,
    holdfast_command: Command,
) -> None:
    local = small_disk("5m")  # two steps and a half
    save_steps(tmp_path / "store", local, range(1, count + 1))
    assert holdfast.check_run(local) == []
    answer = holdfast_command("report", local, "-o", tmp_path / "r.html")
    assert answer.code == 0 and "good: All is well" in answer.out
    assert "room for 0 saves" not in (tmp_path / "r.html").read_text()
    save_steps(tmp_path / "store", local, range(count + 1, count + 2))  # it does fit


def test_a_local_disk_without_room_names_the_rule_of_local_disks(
    small_disk: Callable[[str], Path], tmp_path: Path, holdfast_command: Command
) -> None:
    local = small_disk("3m")  # a step and a half
    save_steps(tmp_path / "store", local, range(1, 2))
    (alert,) = holdfast.check_run(local)
    assert alert.rule == "disk" and "the next save does not fit" in alert.text
    answer = holdfast_command("report", local, "-o", tmp_path / "r.html")
    assert "bad: The disk is full" in answer.out and "Keep.local(n) needs room for" in answer.out
    with pytest.raises(NoSpaceError, match=r"Keep\.local") as caught:
        save_steps(tmp_path / "store", local, range(2, 3))
    for text in (answer.out, str(caught.value)):
        assert "Keep.latest(n)" not in text and "n + 1" not in text


def test_the_newest_local_step_makes_no_way_nor_does_one_that_may_be_going_up() -> None:
    sizes = {1: 10, 2: 200, 3: 3000, 4: 40000}
    given = {"is_shared": True, "is_delta": False}
    assert local_room(sizes, [], **given) == LocalRoom(40000, 3210, True)
    assert local_room(sizes, [2, 3, 4], **given) == LocalRoom(40000, 210, True)
    assert local_room(sizes, [1, 4], **given) == LocalRoom(40000, 3200, True)
    assert local_room({4: 7}, [4], **given) == LocalRoom(7, 0, True)
    assert local_room(sizes, [], is_shared=True, is_delta=True) == LocalRoom(40000, 0, True)
    assert local_room(sizes, [], is_shared=False, is_delta=False) == LocalRoom(40000, 0, False)
    assert local_room({}, [], is_shared=False, is_delta=False) == LocalRoom()


UPLOADING = """
import sys, torch, holdfast
store, local = sys.argv[1:]
given = {"durable": "local", "upload_bytes_s": 1e5}
checkpointer = holdfast.Checkpointer(store, local=local, signals=(), **given)
checkpointer.save(1, {"n": 1})
checkpointer.wait(tier="store")
checkpointer.save(2, {"w": torch.ones(1_000_000)})
sys.stdin.read()
"""


def test_an_interrupted_upload_is_called_one(tmp_path: Path, holdfast_command: Command) -> None:
    store, local = tmp_path / "store", tmp_path / "local"
    words = [sys.executable, "-c", UPLOADING, str(store), str(local)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as job:
        while not [*store.glob(f"{step_name(2)}/data/*/copy-*")]:
            assert job.poll() is None
        job.kill()
    why = "it is being uploaded or copied, or that was interrupted"
    for verb in ("ls", "inspect"):
        assert f"uncommitted: {why}" in holdfast_command(verb, store).out
    found = holdfast_command("repair", store)
    assert (
        found.code == 0 and f"unfinished {store}/{step_name(2)}: {why}; the next job" in found.out
    )
    assert "Use another" not in found.out
    (note,) = holdfast_command("report", store, "--json").document["findings"][:1]
    assert note["text"].startswith(f"I{why[1:]}. The next job")
    assert (
        "which a save or an upload is writing or has left" in holdfast_command("verify", store).out
    )
    for verb in ("inspect", "repair"):
        assert why in holdfast_command(verb, store / step_name(2)).err
    # The next job does as they say.
    with holdfast.Checkpointer(store, local=local, signals=()) as checkpointer:
        assert checkpointer.restore({"w": torch.zeros(1_000_000)}) == 2
        checkpointer.save(3, {"n": 3})
    assert "uncommitted" not in holdfast_command("ls", store).out
    assert steps_in(str(store)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("names", "tells", "words"),
    [
        (["data/save/00000-0.hf"], True, "being written, or a save died"),
        (["data/save/00000-0.hf"], False, "being saved or uploaded"),
        (["data/save/"], True, "being saved or uploaded"),
        (["data/save/00000-0.hf", "data/save/copy-00001-0.hf"], True, "being uploaded or copied"),
        ([f".manifest-{'0' * 32}.copy-{'1' * 16}"], True, "being uploaded or copied"),
    ],
)
def test_a_step_without_manifest_says_no_more_than_its_files_tell(
    tmp_path: Path, names: list[str], tells: bool, words: str
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    assert words in unfinished(file_names(open_store(tmp_path)), tells=tells)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_a_limit_that_is_none_is_named_as_it_was_given(
    local: str, value: str, holdfast_command: Command
) -> None:
    answer = holdfast_command("check-run", local, f"--behind-min={value}")
    assert answer.code == 2
    assert answer.err == f"holdfast: --behind-min is {value}; expected a number above 0\n"
