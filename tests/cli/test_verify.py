"""`holdfast verify`: damage is found, and named."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast

from .conftest import Command, data_files, flip_bit, let_everybody_in, start_python

NewPath = Callable[[], Path]

# Python's own files may be out of reach afterwards, so everything is imported before.
AS_NOBODY = """
import os, sys
import holdfast.tools.inspect, holdfast.tools.scrub, holdfast.tools.repair, holdfast.tools.verify
import holdfast.loading.checkpoint, holdfast.integrity.repair, holdfast.integrity.scrub
from holdfast.cli import main
main(["--version"])
os.setuid(65534)
sys.exit(main())
"""


def save(path: Path, step: int = 0) -> Path:
    state = {"model": {"w": torch.arange(1, 101).float(), "v": torch.arange(101, 301).float()}}
    holdfast.save(state, path, step=step)
    return path


def offset_of(file: Path, tensor: torch.Tensor) -> int:
    """Where a tensor's bytes lie in a data file."""
    data = file.read_bytes()
    assert data.count(tensor.numpy().tobytes()) == 1
    return data.index(tensor.numpy().tobytes())


def flip_in_w(path: Path) -> Path:
    (file,) = data_files(path)
    flip_bit(file, offset_of(file, torch.arange(1, 101).float()) + 17)
    return file


def test_a_good_checkpoint(new_path: NewPath, holdfast_command: Command) -> None:
    path = save(new_path())
    answer = holdfast_command("verify", path)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith(f"good {path}: ") and "in 1 file, every byte checked" in answer.out
    assert holdfast_command("verify", path, "--json").document == {
        "path": str(path),
        "good": True,
        "deep": False,
        "strict": False,
        "checkpoints": [
            {
                "path": str(path),
                "good": True,
                "step": 0,
                "files": 1,
                "file_bytes": data_files(path)[0].stat().st_size,
                "below": 0,
                "signer": None,
                "repaired": False,
                "damage": [],
                "spared": [],
                "foreign": [],
                "foreign_count": 0,
                "elsewhere": [],
                "error": None,
            }
        ],
        "unchecked": [],
    }


def test_a_flipped_bit_is_found_with_its_file_and_tensor(
    new_path: NewPath, holdfast_command: Command
) -> None:
    path = save(new_path())
    file = flip_in_w(path)
    answer = holdfast_command("verify", path)
    assert answer.code == 1
    first, fault, lost, advice = answer.out.splitlines()
    assert first == f"BAD  {path}: 1 fault"
    assert lost.split() == ["lost:", "model.w", "[0:100]"]
    assert advice == f"run 'holdfast repair {path}' to see which tensors are readable"
    assert str(file) in fault and "tensor model.w, chunk 0" in fault
    (found,) = holdfast_command("verify", path, "--json").document["checkpoints"]
    (damage,) = found["damage"]
    assert damage["where"] == str(file) and damage["tensor"] == "model.w"
    assert "checksum" in damage["what"]


def test_every_damage_is_listed(new_path: NewPath, holdfast_command: Command) -> None:
    path = save(new_path())
    file = flip_in_w(path)
    flip_bit(file, offset_of(file, torch.arange(101, 301).float()))
    flip_bit(file, 9)  # the version in the header
    flip_bit(file, file.stat().st_size - 1)  # the magic of the trailer
    (path / "data" / file.parent.name / "stray").write_bytes(b"")
    (found,) = holdfast_command("verify", path, "--json").document["checkpoints"]
    tensors = [damage["tensor"] for damage in found["damage"]]
    assert {"model.w", "model.v"} < set(tensors) and tensors.count(None) >= 2
    assert any("stray" in damage["what"] for damage in found["damage"])


@pytest.mark.parametrize("position", range(0, 2000, 53))
def test_no_flipped_bit_of_a_data_file_is_missed(
    new_path: NewPath, holdfast_command: Command, position: int
) -> None:
    path = save(new_path())
    (file,) = data_files(path)
    flip_bit(file, position % file.stat().st_size)
    assert holdfast_command("verify", path).code == 1


def test_a_missing_file_is_listed_once(new_path: NewPath, holdfast_command: Command) -> None:
    path = save(new_path())
    (file,) = data_files(path)
    file.unlink()
    answer = holdfast_command("verify", path)
    assert answer.code == 1 and answer.out.count(str(file)) == 1


def test_missing_data_directories_are_damage(new_path: NewPath, holdfast_command: Command) -> None:
    path = save(new_path())
    (file,) = data_files(path)
    file.unlink()
    file.parent.rmdir()
    file.parent.parent.rmdir()
    answer = holdfast_command("verify", path)
    assert answer.code == 1 and f"{path}/data is missing" in answer.out


def test_a_broken_manifest_is_damage(new_path: NewPath, holdfast_command: Command) -> None:
    path = save(new_path())
    flip_bit(path / "MANIFEST", 100)
    answer = holdfast_command("verify", path, "--json")
    assert answer.code == 1
    (damage,) = answer.document["checkpoints"][0]["damage"]
    assert damage["where"] == f"{path}/MANIFEST" and damage["tensor"] is None
    assert "checksum" in damage["what"]


def test_a_run_is_verified_step_by_step(new_path: NewPath, holdfast_command: Command) -> None:
    root = new_path()
    for step in (1, 2, 10):
        save(root / f"step-{step}", step)
    (root / "step-11" / "data").mkdir(parents=True)
    assert holdfast_command("verify", root).code == 0
    flip_in_w(root / "step-2")
    answer = holdfast_command("verify", root)
    lines = answer.out.splitlines()
    words = [line.split()[0] for line in lines[:-1] if not line.startswith(" ")]
    assert (answer.code, words) == (1, ["good", "BAD", "good", "not"])
    document = holdfast_command("verify", root, "--json").document
    assert not document["good"]
    assert [(c["step"], c["good"]) for c in document["checkpoints"]] == [
        *((1, True), (2, False), (10, True)),
    ]


def test_a_step_of_a_newer_version_does_not_hide_the_others(
    new_path: NewPath, holdfast_command: Command
) -> None:
    root = new_path()
    for step in (1, 2):
        save(root / f"step-{step}", step)
    with (root / "step-1" / "MANIFEST").open("r+b") as manifest:
        manifest.seek(8)
        manifest.write(b"\x02")
    answer = holdfast_command("verify", root)
    assert answer.code == 2  # unread is not damaged
    first, second = answer.out.splitlines()
    assert first.startswith("?") and "Upgrade holdfast" in first
    assert second.startswith("good")
    flip_in_w(root / "step-2")
    assert holdfast_command("verify", root).code == 1


def test_a_run_without_a_committed_step_is_no_checkpoint(
    new_path: NewPath, holdfast_command: Command
) -> None:
    root = new_path()
    (root / "step-1").mkdir(parents=True)
    answer = holdfast_command("verify", root)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("holdfast: ") and "none of them committed" in answer.err


def test_steps_that_are_not_checked_are_named(new_path: NewPath, holdfast_command: Command) -> None:
    root = new_path()
    for step in (1, 2, 3):
        save(root / f"step-{step}", step)
    (root / "step-1" / "MANIFEST").unlink()
    (root / "step-2" / "MANIFEST").unlink()
    dcp.save({"w": torch.ones(5)}, checkpoint_id=root / "step-4", no_dist=True)
    answer = holdfast_command("verify", root)
    assert answer.code == 0
    good, *others = answer.out.splitlines()
    assert good.startswith(f"good {root}/step-3: ")
    assert others == [
        "not checked: 2 steps without MANIFEST, which a save or an upload is writing or has left: "
        "step-1, step-2",
        "not checked: 1 step that PyTorch DCP wrote: step-4",
    ]
    assert holdfast_command("verify", root, "--json").document["unchecked"] == [
        {"name": "step-1", "why": "no MANIFEST"},
        {"name": "step-2", "why": "no MANIFEST"},
        {"name": "step-4", "why": "dcp"},
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take its rights away")
def test_a_checkpoint_that_may_only_be_read_is_verified(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint")
    let_everybody_in(path)
    done = start_python("-c", AS_NOBODY, "verify", path, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", ["verify", "scrub", "inspect"])
def test_a_step_that_latest_names_has_lost_its_manifest(
    new_path: NewPath, holdfast_command: Command, verb: str
) -> None:
    """Other steps without MANIFEST may be saves under way: they are no damage."""
    root = new_path()
    with holdfast.Checkpointer(root) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": torch.zeros(100)})
    (root / "step-00000002" / "MANIFEST").unlink()
    assert holdfast_command(verb, root).code == 0
    (root / "step-00000003" / "MANIFEST").unlink()
    answer = holdfast_command(verb, root)
    assert answer.code == 1
    told = f"{root}/step-00000003 has data files but no MANIFEST, though LATEST names it"
    assert answer.out.count(told) == 1 and "step-00000002 has data" not in answer.out
    (root / "step-00000001" / "MANIFEST").unlink()  # none is committed any more
    assert holdfast_command(verb, root).code == 1
    assert holdfast_command("verify", root / "step-00000003").code == 1
    assert holdfast_command("verify", root / "step-00000002").code == 2
    shutil.rmtree(root / "step-00000003" / "data")
    assert told not in holdfast_command(verb, root).out


@pytest.mark.parametrize("verb", ["verify", "scrub", "inspect"])
def test_a_step_under_the_name_of_another_is_a_fault(
    new_path: NewPath, holdfast_command: Command, verb: str
) -> None:
    root = new_path()
    save(root / "step-00000004", 4)
    save(root / "step-00000005", 5).rename(root / "step-00000006")
    answer = holdfast_command(verb, root)
    told = "is named step 6, but holds step 5: it was renamed, or copied to the wrong place"
    assert answer.code == 1 and answer.out.count(told) == 1 and "lost:" not in answer.out
    if verb != "scrub":
        alone = holdfast_command(verb, root / "step-00000006")
        assert alone.code == 1 and alone.out.count(told) == 1
    (root / "step-00000006").rename(root / "step-00000005")
    assert holdfast_command(verb, root).code == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take its rights away")
@pytest.mark.parametrize("verb", ["verify", "scrub", "inspect", "repair"])
def test_a_step_that_may_not_be_looked_at_does_not_hide_the_others(
    tmp_path: Path, verb: str
) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        save(run / f"step-{step}", step)
    let_everybody_in(run)
    run.chmod(0o777)
    (run / "step-2").chmod(0)
    done = start_python("-c", AS_NOBODY, verb, run, capture_output=True)
    assert done.returncode == 2 and done.stderr == "", done.stderr
    assert "Permission denied" in done.stdout and done.stdout.count("step-2") >= 1
    if verb == "scrub":
        assert "2 steps, " in done.stdout
    else:
        assert all(f"step-{n}" in done.stdout for n in (1, 3))


@pytest.mark.parametrize(
    "damage", ["a flipped bit", "a short file", "no file", "no directory", "a broken MANIFEST"]
)
def test_what_tells_of_damage_says_what_to_do(
    new_path: NewPath, holdfast_command: Command, damage: str
) -> None:
    path = save(new_path())
    (file,) = data_files(path)
    if damage == "a flipped bit":
        flip_in_w(path)
    elif damage == "a short file":
        os.truncate(file, 200)
    elif damage == "no file":
        file.unlink()
    elif damage == "no directory":
        shutil.rmtree(path / "data")
    else:
        flip_bit(path / "MANIFEST", 100)
    advice = f"run 'holdfast repair {path}' to see which tensors are readable"
    with pytest.raises(holdfast.errors.CorruptError) as caught:
        holdfast.open(path).state()
    assert f"; {advice}" in str(caught.value)
    answer = holdfast_command("verify", path)
    assert answer.code == 1 and answer.out.count(advice) == 1 == answer.out.count("\nrun '")
    assert "to see which tensors" not in holdfast_command("repair", path).out
