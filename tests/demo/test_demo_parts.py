"""The parts of the demo: each claim fails when what it claims is not so, the kill leaves nobody."""

import copy
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.cli import main as holdfast_command
from holdfast.errors import PeerError
from holdfast.tools import demo, demo_picture, demo_train
from holdfast.tools.demo_report import align, brief, tables, write_markdown
from holdfast.tools.demo_results import Flip, Results, Timing, judge
from holdfast.tools.demo_run import Kill, SaveWatch, kill_all, wait

LOSSES = {step: 5.0 / step for step in range(1, 14)}


def good_results() -> Results:
    """Results of a demo whose claims all hold."""
    return Results(
        size="tiny",
        steps=13,
        every=2,
        machine="a machine",
        unbroken=dict(LOSSES),
        killed={step: LOSSES[step] for step in range(1, 9)},
        kill=Kill(8, 3, 0.1, [0.2, 0.3], {"data/ab/00000-0.hf": 9000}, 4096, committed=False),
        kept=[4, 6],
        refusal="NotCommittedError: no MANIFEST",
        restored=6,
        resumed={step: LOSSES[step] for step in range(7, 14)},
        final_step=12,
        equal_tensors=5,
        tensors=5,
        parameters=1000,
        state_bytes=12000,
        next_losses={1: LOSSES[13], 3: LOSSES[13] + 1e-7},
        flip=Flip("data/ab/00000-0.hf", 4500, 4, "CorruptError: x", ["data/ab/00000-0.hf: x"]),
        timings=[Timing("holdfast.save", [0.1, 0.2, 0.3], 12100), Timing("DCP", [0.4], 12200)],
    )


def break_committed(results: Results) -> None:
    kill = results.kill
    assert kill is not None
    results.kill = Kill(8, 3, 0.1, [0.2, 0.3], {**kill.files, "MANIFEST": 9}, 4096, committed=True)


def break_last_bit(results: Results) -> None:
    results.resumed[9] = math.nextafter(results.resumed[9], math.inf)


def break_missing_step(results: Results) -> None:
    del results.resumed[13]


def break_killed(results: Results) -> None:
    results.killed[3] = math.nextafter(results.killed[3], 0)


def break_load(results: Results) -> None:
    results.flip = Flip("data/ab/00000-0.hf", 4500, 4, None, ["data/ab/00000-0.hf: x"])


def break_verify(results: Results) -> None:
    results.flip = Flip("data/ab/00000-0.hf", 4500, 4, "CorruptError: x", [])


def set_to(name: str, value: object) -> Callable[[Results], None]:
    return lambda results: setattr(results, name, value)


BROKEN: dict[str, tuple[Callable[[Results], None], str]] = {
    "the save was committed": (break_committed, "SIGKILL"),
    "no save was hit": (set_to("kill", None), "SIGKILL"),
    "the killed save opens": (set_to("refusal", None), "killed save"),
    "an older step was restored": (set_to("kept", [4, 6, 7]), "last committed"),
    "one bit of a loss before the kill": (break_killed, "until the kill"),
    "one bit of a loss after the resume": (break_last_bit, "after the resume"),
    "a step is missing": (break_missing_step, "after the resume"),
    "a tensor differs": (set_to("equal_tensors", 4), "final checkpoints"),
    "no tensors": (set_to("tensors", 0), "final checkpoints"),
    "3 processes are off": (set_to("next_losses", {1: LOSSES[13], 3: 0.4}), "1 and 3"),
    "a loss is NaN": (set_to("next_losses", {1: LOSSES[13], 3: math.nan}), "1 and 3"),
    "1 process is missing": (set_to("next_losses", {3: LOSSES[13]}), "1 and 3"),
    "load took the copy": (break_load, "load refuses"),
    "verify found nothing": (break_verify, "verify names"),
}


def test_all_claims_hold_of_good_results() -> None:
    assert [claim.text for claim in judge(good_results()) if not claim.holds] == []


@pytest.mark.parametrize("what", BROKEN)
def test_a_claim_fails_when_it_is_not_so(what: str) -> None:
    spoil, claim_text = BROKEN[what]
    results = good_results()
    spoil(results)
    failed = [claim.text for claim in judge(results) if not claim.holds]
    assert len(failed) == 1 and claim_text in failed[0]


def tell(results: Results) -> Callable[..., None]:
    """Return what fills in results instead of running anything."""

    def fill(plan: object, target: Results, screen: object) -> None:
        for name in Results.__slots__:
            setattr(target, name, copy.copy(getattr(results, name)))

    return fill


def test_a_failed_claim_makes_the_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = good_results()
    break_last_bit(results)
    monkeypatch.setattr(demo, "_tell", tell(results))
    assert demo.main(["--quick", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "NOT EVERY CLAIM HOLDS" in shown
    assert re.search(r"NO: after the resume,[^:]*\(6\s+of 7", shown)
    report = (tmp_path / "report.md").read_text()
    assert "NO: after the resume" in report and "bit for bit (6 of 7" in report
    assert "Killed while saving" not in report


def test_without_matplotlib_there_is_a_report_and_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_tell", tell(good_results()))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / "demo.png").write_bytes(b"of an earlier demo")
    assert demo.main(["--quick", "--out", str(tmp_path)]) == 0
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.md", "results.json"]
    assert "![" not in (tmp_path / "report.md").read_text()


def test_a_run_that_breaks_makes_the_exit_code_1_and_leaves_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise PeerError("a run ended with 9", rank=-1, cause="")

    monkeypatch.setattr(demo, "_tell", fail)
    assert demo.main(["--quick", "--out", str(tmp_path)]) == 1
    assert "a run ended with 9" in capsys.readouterr().out
    assert len(list(tmp_path.glob("runs-*"))) == 1


def test_an_interrupted_demo_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_tell", interrupt)
    assert holdfast_command(["demo", "--quick", "--out", str(tmp_path)]) == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--steps", "3"], ["--fast"], ["--steps", "many"]])
def test_bad_arguments_are_a_usage_error(arguments: list[str], tmp_path: Path) -> None:
    assert holdfast_command(["demo", "--out", str(tmp_path), *arguments]) == 2
    assert list(tmp_path.iterdir()) == []


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert demo_picture.draw(good_results(), "a title", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_tables_line_up_and_the_report_holds_them() -> None:
    results = good_results()
    report = write_markdown(results, judge(results), picture=None)
    for table in tables(results).values():
        lines = align(table)
        assert len({len(line) for line in lines}) == 1
        assert "\n".join(lines) in report


def test_paths_are_shortened_and_nothing_else() -> None:
    name = "data/" + 8 * "0a1b" + "/00000-0.hf"
    scratch = Path("/a b/runs-x")
    assert brief(f"Error: /a b/runs-x/flipped/{name}: at /a b", scratch) == (
        "Error: flipped/data/…/00000-0.hf: at /a b"
    )
    assert brief("runs/step-1: data/ab/00000-0.hf", scratch) == "runs/step-1: data/ab/00000-0.hf"


def test_killing_a_run_leaves_nobody_not_even_in_another_session() -> None:
    script = "setsid sh -c 'echo $$; sleep 60' & wait"
    process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.stdout.close()
    assert os.getsid(pid) != os.getsid(process.pid)
    assert kill_all(process) >= 2
    assert kill_all(process) == 0
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    assert process.returncode == -9


def test_a_run_that_fails_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("first line\nValueError: what went wrong\n")
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(PeerError, match=r"(?s)ended with 3.*what went wrong"):
        wait(process, log, lambda: None)


def test_a_save_is_seen_when_data_is_written_and_not_when_space_is_reserved(
    tmp_path: Path,
) -> None:
    watch = SaveWatch(tmp_path)
    place = tmp_path / "step-00000008"
    file = place / "data" / "ab" / "00000-0.hf"
    file.parent.mkdir(parents=True)
    assert watch.look() is None
    with file.open("wb") as data:
        data.truncate(1 << 20)  # a hole, as reserved space is to readers
        assert watch.look() is None
        assert place in watch.begun_s
        data.write(b"x" * 5000)
        data.flush()
        assert watch.look() == place
    assert watch.saves_s == []
    (place / "MANIFEST").write_bytes(b"")
    assert watch.look() is None
    assert len(watch.saves_s) == 1 and watch.saves_s[0] > 0


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_ranks_share_a_batch_without_gap_or_overlap(world_size: int) -> None:
    text = demo_train.read_text()
    whole = demo_train.read_batch(text, 5, 0, 1)
    parts = [demo_train.read_batch(text, 5, rank, world_size) for rank in range(world_size)]
    assert len({len(part) for part in parts}) == 1
    rows = sorted(row for part in parts for row in part.tolist())
    assert rows == sorted(whole.tolist())


def test_the_example_fits_150_lines() -> None:
    assert demo_train.__file__ is not None
    assert len(Path(demo_train.__file__).read_text().splitlines()) <= 150
