"""`make frameworks-native`, without the frameworks: its tables, and that it sees faults."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast

from .frameworks import native

NewPath = Callable[[], Path]
RESULT = {"losses": {"3": "0x1p+0", "4": "0x1p-1"}, "digest": "a"}
PROGRAM = native.PROGRAMS["trainer-fsdp2"]


def start(place: Path, **given: object) -> native.Start:
    return dataclasses.replace(native.Start("ddp", str(place), str(place / "r")), **given)


def results(place: Path, **changed: object) -> native.Start:
    place.mkdir(exist_ok=True)
    begun = start(place)
    for rank in range(begun.ranks):
        found = RESULT | changed if rank else RESULT
        Path(f"{begun.result}.{rank}.json").write_text(json.dumps(found))
    return begun


@pytest.mark.parametrize("name", sorted({p.page for p in native.PROGRAMS.values()}))
def test_the_page_has_the_table(name: str) -> None:
    page = native.page_of(name)
    assert page.text_with(native.table(name)) == page.text()
    assert native.table(name) in page.text()


def test_each_program_is_there() -> None:
    for program in native.PROGRAMS.values():
        assert (native.HERE / program.script).is_file()
        assert program.kills or program.moves


def test_a_run_that_ends_otherwise_is_seen(new_path: NewPath) -> None:
    stock = results(new_path())
    assert native.differences(stock, results(new_path())) == []
    (text,) = native.differences(stock, results(new_path(), digest="b"))
    assert text == "rank 1 ends with other parameters or moments"
    (text,) = native.differences(stock, results(new_path(), losses={"4": "0x1p+0"}))
    assert text == "rank 1 has other losses in the steps 4"
    assert native.resumed(stock) == []
    (text,) = native.resumed(results(new_path(), losses={"1": "0x1p+0"}))
    assert text.endswith("it resumed nothing")


def test_weights_that_are_far_are_seen(new_path: NewPath) -> None:
    one, other = start(new_path()), start(new_path())
    for begun in (one, other):
        Path(begun.root).mkdir()
        torch.save({"w": torch.ones(2)}, f"{begun.result}.weights")
    assert native.near(one, other) == []
    torch.save({"w": torch.ones(2) + 1e-2}, f"{other.result}.weights")
    assert native.near(one, other)[0].startswith("w is 1.00e-02 away")
    torch.save({"v": torch.ones(2)}, f"{other.result}.weights")
    assert native.near(one, other) == ["other names: ['v', 'w']"]


def test_checkpoints_that_are_not_as_they_should_be_are_seen(new_path: NewPath) -> None:
    stock, ours = new_path(), new_path()
    (stock / "checkpoint-2").mkdir(parents=True)
    holdfast.save({"w": torch.ones(3)}, ours / "checkpoint-2")
    assert native.faults_of_files(ours, "checkpoint-*", stock) == []
    (data,) = (ours / "checkpoint-2" / "data").rglob("*.hf")
    data.write_bytes(data.read_bytes()[:-1])
    (stock / "checkpoint-4").mkdir()
    kept, cut = native.faults_of_files(ours, "checkpoint-*", stock)
    assert "keeps ['checkpoint-2', 'checkpoint-4']" in kept and "bytes" in cut


SAVER = """
import json, pathlib, sys, time
root = pathlib.Path(json.loads(sys.argv[1])["root"])
time.sleep(2)  # a save that is there when the watch begins is none that is begun
(root / "checkpoint-2" / "data" / ("0" * 32)).mkdir(parents=True)
time.sleep(600)
"""


def test_all_ranks_are_killed_in_the_middle_of_a_save(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, root = new_path(), new_path()
    here.mkdir(parents=True)
    root.mkdir()
    monkeypatch.setattr(native, "HERE", here)
    (here / "saver.py").write_text(SAVER.replace("parents=True", "parents=True, exist_ok=True"))
    with native.Ranks("saver.py", start(root)) as ranks:
        assert native.kill_in_save(ranks, root, "checkpoint-*", 1) == "checkpoint-2"
    (here / "saver.py").write_text("print('step 1')")
    with (
        native.Ranks("saver.py", start(root)) as ranks,
        pytest.raises(SystemExit, match="ended before save 2"),
    ):
        native.kill_in_save(ranks, root, "checkpoint-*", 2)
    (here / "saver.py").write_text("raise SystemExit('a fault')")
    with (
        native.Ranks("saver.py", start(root)) as ranks,
        pytest.raises(SystemExit, match="a fault"),
    ):
        ranks.wait()
