"""`holdfast inspect`: what it says of a checkpoint and of a run."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast

from .conftest import Command, data_files, start_python

NewPath = Callable[[], Path]


@pytest.fixture
def path(new_path: NewPath) -> Path:
    path = new_path()
    weight = torch.zeros(6, 4)
    state = {
        "model": {"embed": weight, "head": weight, "norm": torch.ones(4, dtype=torch.bfloat16)},
        "step": 7,
        "betas": (0.9, float("nan")),
    }
    holdfast.save(state, path, step=7, metrics={"loss": 2.5, "worst": float("inf")})
    return path


def large_state(layers: int) -> dict[str, object]:
    """A state of ``3 * layers + 1`` tensors, flat as the state_dict of a module is."""
    tensors = {"embed.weight": torch.zeros(8, 2)}
    for layer in range(layers):
        tensors[f"layers.{layer}.up.weight"] = torch.zeros(2, 2)
        tensors[f"layers.{layer}.up.bias"] = torch.zeros(2)
        tensors[f"layers.{layer}.norm.weight"] = torch.zeros(2, dtype=torch.bfloat16)
    return {"model": tensors, "step": 1}


def test_it_shows_what_was_saved(path: Path, holdfast_command: Command) -> None:
    answer = holdfast_command("inspect", path)
    assert (answer.code, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert lines[0] == str(path)
    assert lines[1].startswith("  step 7   1 rank   save ")
    assert lines[2] == "  loss 2.5   worst inf"
    rows = [line.split() for line in lines]
    assert ["embed", "f32", "[6,", "4]", "96", "B", "1"] in rows
    assert ["norm", "bf16", "[4]", "8", "B", "1"] in rows
    assert ["head", "f32", "tied", "to", "model.embed", "0", "B", "0"] in rows
    assert ["betas", "tuple", "(0.9,", "nan)"] in rows
    assert ["step", "int", "7"] in rows
    assert lines[-2] == ("  2 tensors (+1 tied)   28 elements   2 objects   2 shards   1 file")
    assert "104 B of elements   104 B stored" in lines[-1]
    assert "f32 96 B   bf16 8 B" in lines[-1]


def test_json_says_all_of_it(path: Path, holdfast_command: Command) -> None:
    document = holdfast_command("inspect", path, "--json").document
    with holdfast.open(path) as checkpoint:
        assert document["save_id"] == checkpoint.save_id
        assert document["written_by"] == checkpoint.written_by
    assert document["kind"] == "checkpoint" and document["path"] == str(path)
    assert (document["step"], document["world_size"], document["mesh"]) == (7, 1, None)
    assert document["metrics"] == {"loss": 2.5, "worst": {"$float": "7ff0000000000000"}}
    assert document["totals"] == {
        "tensors": 2,
        "tied_names": 1,
        "elements": 28,
        "size_bytes": 104,
        "size_bytes_by_dtype": {"f32": 96, "bf16": 8},
        "stored_bytes": 104,
        "shards": 2,
        "objects": 2,
        "files": 1,
        "file_bytes": data_files(path)[0].stat().st_size,
    }
    assert [tensor["name"] for tensor in document["tensors"]] == [
        *("model.embed", "model.norm", "model.head"),
    ]
    assert document["tensors"][1] == {
        "name": "model.norm",
        "dtype": "bf16",
        "shape": [4],
        "elements": 4,
        "size_bytes": 8,
        "stored_bytes": 8,
        "codec": "raw",
        "shards": 1,
        "tied_to": None,
        "loss": None,
    }
    assert document["objects"][1] == {
        "name": "betas",
        "type": "tuple",
        "value": {"$tuple": [0.9, {"$float": "7ff8000000000000"}]},
    }


def test_json_with_all_lists_the_boxes(path: Path, holdfast_command: Command) -> None:
    tensors = holdfast_command("inspect", path, "--json", "--all").document["tensors"]
    assert tensors[0]["boxes"] == [{"offset": [0, 0], "shape": [6, 4]}]


def test_a_model_of_500_tensors_fits_one_screen(
    new_path: NewPath, holdfast_command: Command
) -> None:
    path = new_path()
    holdfast.save(large_state(layers=167), path)
    answer = holdfast_command("inspect", path)
    lines = answer.out.splitlines()
    assert len(lines) < 40 and max(map(len, lines)) <= 100
    rows = [line.split() for line in lines]
    # 167 biases of 2 f32 elements, joined in one row.
    assert any(row[0] == "layers.0…166" and row[1] == "(x167)" for row in rows if row)
    assert ["bias", "f32", "[2]", "1.34", "kB", "167"] in rows


def test_alike_joins_only_what_is_alike(new_path: NewPath, holdfast_command: Command) -> None:
    path = new_path()
    layers = {f"{i}": {"w": torch.zeros(3 if i == 2 else 2)} for i in range(4)}
    holdfast.save({"layers": layers}, path)
    rows = [line.split() for line in holdfast_command("inspect", path).out.splitlines()]
    assert ["0…3.w", "(x3)", "f32", "[2]", "24", "B", "3"] in rows
    assert ["2.w", "f32", "[3]", "12", "B", "1"] in rows


def test_all_shows_every_name(new_path: NewPath, holdfast_command: Command) -> None:
    path = new_path()
    holdfast.save(large_state(layers=20), path)
    lines = holdfast_command("inspect", path, "--all").out.splitlines()
    assert sum("bf16" in line and "[2]" in line for line in lines) == 20
    assert not any("…" in line for line in lines)


def test_what_does_not_fit_is_counted(new_path: NewPath, holdfast_command: Command) -> None:
    path = new_path()
    state = {name * 3: torch.zeros(1) for name in "abcdefghijklmnopqrstuvwxyz"}
    holdfast.save(state | {name * 2: 0 for name in "abcdefghijklmnopqrstuvwxyz"}, path)
    lines = holdfast_command("inspect", path).out.splitlines()
    assert len(lines) < 40
    (more,) = [line for line in lines if "more; --all shows them" in line]
    shown = sum(line.split()[1:2] in (["f32"], ["int"]) for line in lines)
    assert f"… {52 - shown} more" in more


def test_a_run_lists_its_steps(new_path: NewPath, holdfast_command: Command) -> None:
    root = new_path()
    with holdfast.Checkpointer(root) as checkpointer:
        for step in (5, 1000):
            checkpointer.save(step, {"w": torch.zeros(100)}, metrics={"loss": 1 / step})
    (root / "step-00002000" / "data" / ("0" * 32)).mkdir(parents=True)
    (root / "step-00002000" / "data" / ("0" * 32) / "00000-0.hf").write_bytes(bytes(1500))
    answer = holdfast_command("inspect", root)
    lines = answer.out.splitlines()
    assert answer.code == 0
    assert "2 committed, 1 uncommitted" in lines[1]
    assert lines[1].endswith("LATEST names step-00001000")
    assert lines[2].split()[0] == "step-00000005" and lines[2].endswith(
        "1 tensor   1 rank   loss 0.2"
    )
    assert lines[3].split()[0] == "step-00001000"
    assert "step-00002000  1.50 kB  uncommitted" in lines[4]
    document = holdfast_command("inspect", root, "--json").document
    assert document["kind"] == "run" and document["latest"] == "step-00001000"
    assert [step["state"] for step in document["steps"]] == [
        "committed",
        "committed",
        "uncommitted",
    ]
    assert [step["step"] for step in document["steps"]] == [5, 1000, None]
    assert document["steps"][2]["disk_bytes"] == 1500
    on_disk = sum(f.stat().st_size for f in (root / "step-00000005").rglob("*") if f.is_file())
    assert document["steps"][0]["disk_bytes"] == on_disk


def test_a_run_sorts_steps_by_number_and_says_when_latest_is_wrong(
    new_path: NewPath, holdfast_command: Command
) -> None:
    root = new_path()
    for step in (900, 1000):
        holdfast.save({"w": torch.zeros(1)}, root / f"step-{step}", step=step)
    (root / "LATEST").write_text("step-1100\n")
    lines = holdfast_command("inspect", root).out.splitlines()
    assert lines[1].endswith("LATEST names step-1100, which is no committed step")
    assert [line.split()[0] for line in lines[2:4]] == ["step-900", "step-1000"]
    (root / "LATEST").unlink()
    assert holdfast_command("inspect", root).out.splitlines()[1].endswith("no LATEST")


def test_a_run_shows_the_damaged_step_and_the_others(
    new_path: NewPath, holdfast_command: Command
) -> None:
    root = new_path()
    for step in (1, 2):
        holdfast.save({"w": torch.zeros(1)}, root / f"step-{step}", step=step)
    (root / "step-1" / "MANIFEST").write_bytes(b"no manifest")
    answer = holdfast_command("inspect", root)
    assert answer.code == 1
    assert (
        "step-1" in answer.out
        and "damaged: " in answer.out
        and "1 committed, 1 damaged" in answer.out
    )
    states = [
        step["state"] for step in holdfast_command("inspect", root, "--json").document["steps"]
    ]
    assert states == ["damaged", "committed"]


def test_a_long_text_does_not_cut_the_names_of_steps(
    new_path: NewPath, holdfast_command: Command
) -> None:
    root = new_path()
    for step in (1, 2):
        holdfast.save({"w": torch.zeros(1)}, root / f"step-{step:08d}-of-the-day")
    (root / "step-00000001-of-the-day" / "MANIFEST").write_bytes(b"no manifest")
    lines = holdfast_command("inspect", root).out.splitlines()
    names = [line.split()[0] for line in lines[2:4]]
    assert names == ["step-00000001-of-the-day", "step-00000002-of-the-day"]


def test_a_long_run_shows_the_newest_steps(new_path: NewPath, holdfast_command: Command) -> None:
    root = new_path()
    for step in range(60):
        (root / f"step-{step}").mkdir(parents=True)
    lines = holdfast_command("inspect", root).out.splitlines()
    assert len(lines) < 40 and lines[-1].split()[0] == "step-59"
    assert lines[2] == f"  … {60 - (len(lines) - 3)} earlier; --all shows them"
    assert len(holdfast_command("inspect", root, "--all").out.splitlines()) == 62


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_it_starts_without_torch(path: Path, verb: str) -> None:
    code = """
import sys
from holdfast.cli import main
assert main(sys.argv[1:]) == 0
print([name for name in ("torch", "rich") if name in sys.modules], file=sys.stderr)
"""
    done = start_python("-c", code, verb, path, capture_output=True)
    assert done.stderr == "[]\n", done.stderr
    assert done.stdout


def test_deltas_of_a_missing_base_keep_their_own_names(
    new_path: NewPath, holdfast_command: Command
) -> None:
    run = new_path()
    for step in range(3):
        weight = torch.arange(9000.0) + step / 64
        holdfast.save({"w": weight}, run / f"step-{step:08d}", step=step, codec="delta")
    shutil.rmtree(run / "step-00000000")
    answer = holdfast_command("inspect", run)
    assert answer.code == 1
    first, second = answer.out.splitlines()[-2:]
    assert first.split()[0] == "step-00000001" and "step-00000000, which is missing" in first
    assert second.split()[0] == "step-00000002" and "step-00000000 is missing" in second


def test_a_run_of_other_names_is_a_run_too(new_path: NewPath, holdfast_command: Command) -> None:
    """Programs that save through DCP name their directories."""
    root = new_path()
    for step in (9, 10):
        holdfast.save({"w": torch.zeros(1)}, root / f"checkpoint-{step}")
    (root / "logs").mkdir()
    answer = holdfast_command("inspect", root)
    lines = answer.out.splitlines()
    assert answer.code == 0 and "2 committed" in lines[1]
    assert [line.split()[0] for line in lines[2:4]] == ["checkpoint-9", "checkpoint-10"]
    assert "only names such as step-00001000; load checkpoint-9, checkpoint-10 by" in lines[4]
    assert lines[4].endswith("or resume with the framework that saved them")
    assert holdfast_command("verify", root).out.count("good") == 2
    holdfast.save({"w": torch.zeros(1)}, root / "step-00000011")
    (only,) = holdfast_command("inspect", root, "--json").document["steps"]
    assert only["name"] == "step-00000011"
    assert "restore()" not in holdfast_command("inspect", root).out


def test_a_run_of_pytorch_dcp_is_named_as_one(new_path: NewPath, holdfast_command: Command) -> None:
    root = new_path()
    for name in ("step-1", "step-2"):
        (root / name).mkdir(parents=True)
        (root / name / ".metadata").write_bytes(b"1")
        (root / name / "__0_0.distcp").write_bytes(b"2")
    answer = holdfast_command("inspect", root)
    lines = answer.out.splitlines()
    assert "2 of PyTorch DCP" in lines[1] and lines[2].endswith("a checkpoint of PyTorch DCP")
    assert lines[4] == f"  'holdfast convert {root}/step-2 NEW' converts one of PyTorch DCP"
    (root / "step-1").rename(root / "one")
    (root / "step-2").rename(root / "two")
    assert "2 of PyTorch DCP" in holdfast_command("inspect", root).out


def test_a_directory_of_foreign_files_alone_is_no_save(
    new_path: NewPath, holdfast_command: Command
) -> None:
    root = new_path()
    holdfast.save({"w": torch.zeros(1)}, root / "step-00000002", step=2)
    (root / "step-00000001").mkdir()
    (root / "step-00000001" / "meta.pt").write_bytes(b"meta")
    (root / "step-00000003").mkdir()
    (root / "step-00000003" / ".manifest-4c").write_bytes(b"")
    (root / "step-00000003" / "meta.pt").write_bytes(b"meta")
    lines = holdfast_command("inspect", root).out.splitlines()
    assert "1 committed, 1 uncommitted, 1 not of holdfast" in lines[1]
    assert lines[2].endswith("has no files of holdfast, only meta.pt")
    assert "uncommitted" in lines[4]
    states = [s["state"] for s in holdfast_command("inspect", root, "--json").document["steps"]]
    assert states == ["foreign", "committed", "uncommitted"]
