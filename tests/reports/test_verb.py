"""`holdfast report` as a command: what it writes and says, where it reads, and what it refuses."""

import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Checkpointer, Keep, Options
from holdfast.cli import main
from holdfast.report import read
from holdfast.report.data import TensorRow
from holdfast.report.difference import exploded, layer_of, layers_of
from holdfast.report.document import page_of
from holdfast.report.read import read_run
from holdfast.report.treemap import LEAVES_MAX, grow, lay_out
from holdfast.report.verb import default_name

from .simulated_run import lines_of, write_metrics

NewPath = Callable[[], Path]
SMALL = Options(pool_bytes=48 << 20)
ESCAPES = "\x1b[31mred\x1b[0m"


def make_run(run: "Path | str", steps: int = 3, **how: Any) -> None:
    with Checkpointer(run, every=1, options=SMALL, **how) as checkpointer:
        for step in range(1, steps + 1):
            weights = torch.arange(40_000.0).sin()
            weights[step] = 7.0
            state = {"model": {"w": weights}, "b": torch.ones(3)}
            checkpointer.step(step, state, metrics={"loss": 1 / step})


@pytest.fixture
def run(new_path: NewPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = new_path() / "a run"
    make_run(made)
    monkeypatch.chdir(tmp_path)
    return made


def test_it_writes_a_page_and_says_what_the_page_says_first(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(run) and lines[1] == "  good: All is well"
    assert lines[-1].startswith(f"wrote {tmp_path / 'a-run.html'}, ")
    assert "All is well" in (tmp_path / "a-run.html").read_text()
    assert os.listdir(tmp_path) == ["a-run.html"]


def test_json_holds_everything_and_writes_no_page(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [step["name"] for step in document["steps"]] == [f"step-0000000{n}" for n in (1, 2, 3)]
    assert [save["step"] for save in document["timing"]["saves"]] == [1, 2, 3]
    record = document["timing"]["saves"][-1]["records"][0]
    assert {span["phase"] for span in record["spans"]} >= {"plan", "stage", "write", "commit"}
    assert document["findings"][0]["kind"] == "well"
    assert document["contents"]["tensors"][0]["name"] == "model.w"
    assert os.listdir(tmp_path) == [] and document["written"] == []


def test_a_trace_has_a_process_for_each_host_and_a_thread_for_each_rank(
    new_path: NewPath, tmp_path: Path
) -> None:
    run = new_path()
    write_metrics(run, 2, 16)
    assert main(["report", str(run), "--trace", str(tmp_path / "t.json")]) == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["node-000", "node-001"]
    assert sum(e["name"] == "thread_name" for e in events) == 16
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in spans} >= {"plan", "stage", "write", "sync", "wait", "commit"}
    assert all(e["dur"] >= 0 and e["ts"] > 1e15 for e in spans)
    written = [e for e in spans if e["name"] == "write" and e["tid"] == 9]
    assert sum(e["args"]["bytes"] for e in written) == 2 * (2_000_000_000 // 6) * 6
    assert os.listdir(tmp_path) == ["t.json"]


def test_a_run_in_a_store_is_read_as_one_on_a_disk() -> None:
    place = "memory://tests/report-of-a-run"
    make_run(place, keep=Keep.latest(2))
    found = read_run(place)
    assert [step.state for step in found.steps] == ["committed", "committed"]
    assert found.timing.steps_saved == 3 and found.free_bytes is None
    assert found.findings[0].kind == "well" and found.contents is not None
    assert "All is well" in page_of(found)


def test_the_command_refuses_a_store_of_another_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["report", "memory://tests/x"]) == 2
    assert "memory://" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["nothing", "empty", "checkpoint"])
def test_what_is_no_run_is_refused(
    new_path: NewPath, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    path = new_path()
    if what == "empty":
        path.mkdir()
    if what == "checkpoint":
        holdfast.save({"w": torch.ones(3)}, path)
    assert main(["report", str(path), "--json"]) == 2
    said = json.loads(capsys.readouterr().out)["error"]
    assert said["type"] == "NotCommittedError"
    wanted = "one checkpoint, not a run" if what == "checkpoint" else "there is no run at"
    assert wanted in said["message"]


def test_where_nothing_can_be_written_the_error_says_so(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run), "-o", str(tmp_path / "no" / "x.html")]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert main(["report", str(run), "-o", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_what_is_no_regular_file_is_written_to_and_stays(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    assert main(["report", str(run), "-o", str(pipe)]) == 0
    reader.join()
    assert "All is well" in read[0] and pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {pipe}"


@pytest.mark.parametrize("option", ["-o", "--trace"])
def test_a_device_is_written_to_and_stays(run: Path, tmp_path: Path, option: str) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.write_text("may be opened")
    except PermissionError:
        pytest.skip("no devices can be made or opened here")
    assert main(["report", str(run), option, str(device)]) == 0
    assert device.is_char_device() and os.listdir(tmp_path) == ["null"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_is_followed_and_stays(
    run: Path, tmp_path: Path, new_path: NewPath, is_there: bool
) -> None:
    link, target = tmp_path / "newest.html", new_path() / "page.html"
    target.parent.mkdir()
    if is_there:
        target.write_text("old")
    link.symlink_to(target)
    assert main(["inspect", str(run), "--html", str(link)]) == 0
    assert link.is_symlink() and "<html" in target.read_text()
    assert os.listdir(target.parent) == ["page.html"] and os.listdir(tmp_path) == ["newest.html"]


def test_an_open_file_is_written_to_where_it_stands(run: Path, tmp_path: Path) -> None:
    """As `-o /dev/stdout >> page.html` is."""
    (page := tmp_path / "page.html").write_text("before\n")
    with page.open("a") as file:
        (tmp_path / "out").symlink_to(f"/proc/self/fd/{file.fileno()}")
        assert main(["report", str(run), "-o", str(tmp_path / "out")]) == 0
        file.write("after\n")
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "<html" in text


def test_a_link_that_leads_nowhere_is_an_error(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert main(["report", str(run), "-o", str(tmp_path / "loop")]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["loop"]


def test_a_report_changes_nothing_in_the_run(run: Path, tmp_path: Path) -> None:
    def everything() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}

    before = everything()
    main(["report", str(run), "-o", str(tmp_path / "x.html")])
    assert everything() == before


def test_a_run_that_is_being_written_is_reported_on(new_path: NewPath) -> None:
    run = new_path()
    make_run(run, 1)
    stop = threading.Event()

    def train() -> None:
        with Checkpointer(run, keep=Keep.latest(2), options=SMALL, signals=()) as checkpointer:
            step = 1
            while not stop.is_set():
                step += 1
                checkpointer.save(step, {"w": torch.full((1000,), float(step))})

    writer = threading.Thread(target=train)
    writer.start()
    try:
        for _ in range(10):
            found = read_run(run)
            assert found.timing.saves
            assert "damage" not in {finding.kind for finding in found.findings}
    finally:
        stop.set()
        writer.join()


def test_an_uncommitted_step_is_no_damage(run: Path) -> None:
    (run / "step-00000009" / "data" / "x").mkdir(parents=True)
    (run / "step-00000009" / "data" / "x" / "00000-0.hf").write_bytes(b"x" * 5000)
    found = read_run(run)
    assert [f.kind for f in found.findings] == ["uncommitted", "well"]
    assert "written" in page_of(found)


def test_of_very_many_steps_the_newest_are_opened(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "STEPS_MAX", 4)
    run = new_path()
    make_run(run, 9, codec="delta")
    found = read_run(run)
    assert [step.step for step in found.steps] == [6, 7, 8, 9]
    assert found.earlier_steps == 5
    kinds = {finding.kind for finding in found.findings}
    # Where other programs work, a save may have taken long.
    assert kinds == ({"many", "stall"} if "stall" in kinds else {"many", "well"})


def test_a_delta_without_its_base_is_damaged(new_path: NewPath) -> None:
    run = new_path()
    make_run(run, 3, codec="delta")
    (run / "step-00000001" / "MANIFEST").unlink()
    kinds = [(f.kind, f.title) for f in read_run(run).findings if f.level == "bad"]
    assert kinds and all(kind == "damage" for kind, _ in kinds)


def test_terminal_escapes_do_not_reach_the_terminal(
    new_path: NewPath, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_path() / ESCAPES
    run.mkdir(parents=True)
    with (run / "metrics.jsonl").open("w") as file:
        for row in lines_of(1, 4, host=ESCAPES, slow={2: {"write": 9.0}}):
            file.write(json.dumps(row) + "\n")
    assert main(["report", str(run), "-o", str(tmp_path / "x.html")]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert "\x1b" not in (tmp_path / "x.html").read_text()


def test_default_names_are_names() -> None:
    assert default_name("/data/runs/a/") == "a.html"
    assert default_name("s3://bucket/runs/../..") == "run.html"
    assert default_name("/x/" + "ä\x1b" * 200).endswith(".html")
    assert "/" not in default_name("/x/.." + ESCAPES)


def test_layers_are_joined_by_their_first_number() -> None:
    assert layer_of("model.layers.3.attn.w") == "model.layers.3"
    assert layer_of("optimizer.state.layers.3.w.exp_avg") == "optimizer.state.layers.3"
    assert layer_of("model.embed.weight") == "model.embed"
    assert layer_of("w") == "w" and layer_of("values.3") == "values"


def entry(name: str, change: float) -> dict[str, Any]:
    squares = [1.0, 1.0, 1.0, change**2]
    figures = {"elements": 10, "differing": 10, "not_finite": 0, "max_abs": change}
    return {"name": name, "squares": squares, "mean_abs": change / 2, **figures}


def test_a_layer_explodes_beside_others_and_not_by_itself_alone() -> None:
    calm = [entry(f"layers.{n}.w", 0.01 * (1 + n / 10)) for n in range(12)]
    assert exploded(layers_of(calm)) == []
    assert [x.name for x in exploded(layers_of([*calm, entry("layers.12.w", 5.0)]))] == [
        "layers.12"
    ]
    assert exploded(layers_of([entry("a.w", 0.5), entry("b.w", 0.001)])) == []
    assert [x.name for x in exploded(layers_of([entry("a.w", 3.0), entry("b.w", 0.001)]))] == ["a"]


def test_a_treemap_fills_its_picture_and_stays_small() -> None:
    rows = [
        TensorRow(f"m.layers.{n}.{part}", "f32", (n + 1,), 4 * (n + 1), 4, "raw", None)
        for n in range(3000)
        for part in ("a", "b")
    ]
    found = lay_out(grow(rows), 1000.0, 400.0)
    leaves = [r for r in found if r.is_leaf]
    assert len(leaves) <= LEAVES_MAX or all(r.depth <= 1 for r in leaves)
    outer = [r for r in found if r.depth == 0]
    assert sum(r.width * r.height for r in outer) == pytest.approx(400_000, rel=1e-6)
    for r in found:
        assert r.x >= -1e-6 and r.x + r.width <= 1000 + 1e-6
        assert r.y >= -1e-6 and r.y + r.height <= 400 + 1e-6


def test_the_newest_step_without_its_manifest_is_damaged(new_path: NewPath) -> None:
    run = new_path()
    make_run(run, 3)
    (run / "step-00000003" / "MANIFEST").unlink()
    found = read_run(run)
    assert found.findings[0].title == "step-00000003 is damaged"
    assert "restore() takes step-00000002 instead" in found.findings[0].text
