"""What saves that died left behind is swept when it is old, and nothing else is."""

import os
import time
from pathlib import Path

import pytest
from crash_content import OPTIONS, load_number, make_state

import holdfast

DAY_S = 24 * 3600.0


@pytest.fixture
def root(scratch: Path) -> Path:
    """A run with step 1, in which step 2 died at every moment that leaves something."""
    root = scratch / "run"
    holdfast.Checkpointer(root, options=OPTIONS).save(1, make_state(1))
    for name in (
        "step-00000001/data/{0}/00000-0.hf",  # lost the race for step 1
        "step-00000001/.manifest-{0}",
        "step-00000002/data/{0}/00000-0.hf",  # before its manifest
        "step-00000002/.manifest-{0}",
        "step-00000003/data/{0}/00001-0.hf",  # on another rank
        ".latest-{0}",  # after its acknowledgement
    ):
        path = root / name.format("ab" * 16)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    (root / f"step-00000003/.manifest-{'cd' * 16}").mkdir()  # while it was removed itself
    (root / "step-00000004").mkdir()  # while its directories were made, or removed
    return root


def make_old(path: Path, age_s: float) -> None:
    moment = time.time() - age_s
    for entry in [path, *path.rglob("*")]:
        os.utime(entry, (moment, moment), follow_symlinks=False)


def names_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_what_a_dead_save_left_is_swept_when_it_is_old(root: Path) -> None:
    make_old(root, 2 * DAY_S)
    run = holdfast.Checkpointer(root, options=OPTIONS)
    run.save(5, make_state(5))
    run.close()  # its progress file, which a slow machine may have seen, is gone
    assert sorted(path.name for path in root.iterdir()) == [
        ".epoch-00000001",
        "LATEST",
        "metrics.jsonl",
        "step-00000001",
        "step-00000005",
    ]
    assert not [name for name in names_below(root) if "ab" * 16 in name]
    for step in (1, 5):
        with holdfast.open(run.path(step)) as checkpoint:
            assert checkpoint.verify() == []
        assert load_number(Path(run.path(step))) == step


def test_what_may_be_a_save_in_progress_is_left_alone(root: Path) -> None:
    make_old(root, DAY_S / 2)
    before = names_below(root)
    holdfast.Checkpointer(root, options=OPTIONS).save(5, make_state(5))
    assert before <= names_below(root)


def test_what_is_young_is_left_alone_by_a_machine_whose_clock_is_ahead(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, right = names_below(root), time.time
    monkeypatch.setattr(time, "time", lambda: right() + 2 * DAY_S)
    holdfast.Checkpointer(root, options=OPTIONS).save(5, make_state(5))
    assert before <= names_below(root)


def test_a_young_file_keeps_the_old_ones_beside_it(root: Path) -> None:
    make_old(root, 2 * DAY_S)
    young = root / "step-00000003" / "data" / ("ab" * 16) / "00000-0.hf"
    young.write_bytes(b"still written")
    holdfast.Checkpointer(root, options=OPTIONS).save(5, make_state(5))
    assert young.exists() and young.with_name("00001-0.hf").exists()


def test_the_mark_of_a_step_that_was_to_go_stays_with_it(root: Path) -> None:
    marks = []
    for step, is_there in (("step-00000001", True), ("step-00000006", False)):
        marks.append(root / step / ".manifest-leaving-0123456789abcdef")
        marks[-1].parent.mkdir(exist_ok=True)
        marks[-1].write_bytes((root / "step-00000001" / "MANIFEST").read_bytes())
        assert (marks[-1].with_name("MANIFEST")).exists() == is_there
    make_old(root, 2 * DAY_S)
    run = holdfast.Checkpointer(root, options=OPTIONS, codec="delta")
    run.save(8, make_state(8))
    assert marks[0].exists() and not marks[1].parent.exists()
    with holdfast.open(run.path(8)) as checkpoint:
        assert checkpoint._manifest.table.header.base is None  # not made from what may go
    run.retire_after(0)
    assert not list(root.glob("step-*/MANIFEST")) and not marks[0].parent.exists()


@pytest.mark.parametrize("link", ["data", "data/save"])
def test_neither_sweeping_nor_retiring_follows_a_link(root: Path, scratch: Path, link: str) -> None:
    outside = scratch / "outside"
    (outside / "save").mkdir(parents=True)
    (outside / "save" / "precious").write_bytes(b"of somebody else")
    for step in (6, 7):
        place = root / f"step-0000000{step}" / link
        place.parent.mkdir(parents=True)
        place.symlink_to(outside if link == "data" else outside / "save")
    (root / "step-00000006" / "MANIFEST").write_bytes(b"makes it a step that is retired")
    make_old(root, 2 * DAY_S)
    make_old(outside, 2 * DAY_S)
    run = holdfast.Checkpointer(root, keep=holdfast.Keep.latest(1), options=OPTIONS)
    run.save(8, make_state(8))
    assert (outside / "save" / "precious").read_bytes() == b"of somebody else"
    assert load_number(root / "step-00000008") == 8
