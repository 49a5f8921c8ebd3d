"""`make frameworks`, without the frameworks: its table, and that it sees faults."""

import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast.integrations.dcp import HoldfastWriter

from .frameworks import play

pytestmark = pytest.mark.filterwarnings("ignore")
NewPath = Callable[[], Path]
PROGRAM = play.PROGRAMS["lightning"]
RESULT = {"losses": {"3": "0x1p+0", "4": "0x1p-1"}, "digest": "a"}


def test_the_page_has_the_table() -> None:
    text = play.PAGE.text()
    assert play.PAGE.text_with(play.table()) == text
    assert text.count("| the same bits") == len(play.PROGRAMS)


@pytest.mark.parametrize("path", sorted(play.HERE.glob("*_loop.py")), ids=lambda path: path.name)
def test_the_programs_know_nothing_of_holdfast(path: Path) -> None:
    text = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
    assert "holdfast" not in text.lower()


def results(place: Path, **changed: object) -> Path:
    for rank in range(play.RANKS):
        found = RESULT | changed if rank else RESULT
        Path(f"{place}.{rank}.json").write_text(json.dumps(found))
    return place


def test_a_run_that_ends_otherwise_is_seen(new_path: NewPath) -> None:
    stock = new_path()
    stock.parent.mkdir(exist_ok=True)
    all_steps = {str(step): "0x1p+0" for step in range(1, 4)} | {"4": "0x1p-1"}
    results(stock)
    assert play.differences(PROGRAM, stock, results(new_path())) == []
    for changed, text in (
        ({"digest": "b"}, "rank 1 ends with other parameters or moments"),
        ({"losses": {"4": "0x1p+0"}}, "rank 1 has other losses in the steps 4"),
    ):
        assert play.differences(PROGRAM, stock, results(new_path(), **changed)) == [text]
    again = results(stock, losses=all_steps)
    (text,) = play.differences(PROGRAM, again, results(new_path(), losses=all_steps))
    assert text == "rank 1 began with step 1: it resumed nothing"


def test_checkpoints_that_are_not_as_they_should_be_are_seen(new_path: NewPath) -> None:
    stock, ours = new_path(), new_path()
    dcp.save({"w": torch.ones(3)}, checkpoint_id=stock / "a")
    dcp.save({"w": torch.ones(3)}, storage_writer=HoldfastWriter(ours / "a"))
    assert play.faults_of_files(stock, ours) == []
    (data,) = (ours / "a" / "data").rglob("*.hf")
    data.write_bytes(data.read_bytes()[:-1])
    (ours / "a" / ".metadata").unlink()
    cut, unmarked = play.faults_of_files(stock, ours)
    assert "bytes" in cut and unmarked.endswith("has no marker")
    assert play.faults_of_files(stock, stock)[0].endswith(".distcp is DCP's own")
    assert "it kept []" in play.faults_of_files(stock, new_path())[0]


SAVER = """
import json, pathlib, sys, time
place = pathlib.Path(sys.argv[1]) / "a"
place.mkdir()
print("step 1", flush=True)
(place / ".manifest-dcp").write_text(json.dumps({"save_id": "0" * 32}))
time.sleep(600)
"""


def test_all_ranks_are_killed_in_the_middle_of_a_save(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, root = new_path(), new_path()
    here.mkdir(parents=True)
    root.mkdir()
    (here / "saver_loop.py").write_text(SAVER.replace(".mkdir()", ".mkdir(exist_ok=True)"))
    monkeypatch.setattr(play, "HERE", here)
    saver = dataclasses.replace(PROGRAM, starts=())
    monkeypatch.setitem(play.PROGRAMS, "saver", saver)
    killed = play.start("saver", play.Start("save", 1), root, root, routed=True)
    assert killed == "killed in the save of a"
    assert play.start("saver", play.Start("step", 1), root, root, routed=True).startswith("killed")
    (here / "saver_loop.py").write_text("print('step 1')")
    for kill in ("save", "step"):
        with pytest.raises(SystemExit, match="the program ended before"):
            play.start("saver", play.Start(kill, 2), root, root, routed=True)
    (here / "saver_loop.py").write_text("raise SystemExit('a fault')")
    with pytest.raises(SystemExit, match="a fault"):
        play.start("saver", play.Start(), root, root, routed=True)


def test_each_program_stands_by_its_name() -> None:
    for name, program in play.PROGRAMS.items():
        assert (play.HERE / f"{program.script or name}_loop.py").is_file()
        assert all(package in play.pinned() for package in program.versions)
        assert any(each.kill == "save" for each in program.starts)
        assert not program.starts[-1].kill
    assert os.path.isabs(sys.executable)
