"""`holdfast recompress`, `rebase`, `verify --deep`, and what `inspect` says of links."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast

NewPath = Callable[[], Path]
Command = Any


@pytest.fixture
def run(new_path: NewPath) -> Path:
    """Three raw steps of a parameter and its moments."""
    root = new_path()
    torch.manual_seed(1)
    weight = torch.randn(128, 160) / 50
    for step in range(3):
        weight = weight + 1e-4 * torch.randn(128, 160)
        square = torch.rand(128, 1) * torch.rand(160) * 1e-8
        moments = {"exp_avg": square.sqrt() * torch.randn(128, 160), "exp_avg_sq": square}
        state = {"model": {"w": weight}, "optimizer": {"w": moments}, "n": step}
        holdfast.save(state, root / f"step-{step:08d}", step=step)
    return root


def bits(path: Path) -> dict[str, bytes]:
    with holdfast.open(path) as checkpoint:
        return {n: checkpoint.tensor(n).numpy().tobytes() for n in checkpoint.names()}


def test_a_run_is_recompressed_and_its_links_rebased(
    run: Path, new_path: NewPath, holdfast_command: Command
) -> None:
    other, names = new_path(), [f"step-{step:08d}" for step in range(3)]
    answer = holdfast_command("recompress", run, other, "--codec", "delta")
    assert answer.code == 0 and "smaller than the elements" in answer.out
    assert [bits(other / name) for name in names] == [bits(run / name) for name in names]
    answer = holdfast_command("inspect", other / names[2])
    assert "made from step-00000001" in answer.out and "lost" not in answer.out
    answer = holdfast_command("verify", "--deep", other)
    assert answer.code == 0 and answer.out.count("good") == 3
    answer = holdfast_command("rebase", other / names[2])
    assert answer.code == 0 and "needs no other checkpoint now" in answer.out
    (other / names[1]).rename(other / "away")
    assert bits(other / names[2]) == bits(run / names[2])
    answer = holdfast_command("rebase", other / names[2], "--json")
    assert answer.code == 0 and json.loads(answer.out)["changed"] is False
    (other / "away").rename(other / names[1])
    (other / names[0]).rename(other / "away")
    for how in ((), ("--deep",)):
        answer = holdfast_command("verify", *how, other / names[1])
        assert answer.code == 1 and "made from step-00000000" in answer.out
    answer = holdfast_command("inspect", other)
    assert "lossless on step-00000000, which is missing" in answer.out


def test_inspect_names_what_a_chain_lacks_for_every_link_above(
    run: Path, new_path: NewPath, holdfast_command: Command
) -> None:
    other = new_path()
    assert holdfast_command("recompress", run, other, "--codec", "delta").code == 0
    (other / "step-00000000").rename(other / "away")
    answer = holdfast_command("inspect", other)
    assert "lossless on step-00000000, which is missing" in answer.out
    assert "lossless; step-00000000 below it is missing" in answer.out


def test_what_is_lost_is_shown(run: Path, new_path: NewPath, holdfast_command: Command) -> None:
    other = new_path()
    answer = holdfast_command("recompress", run, other, "--codec", "compact:small", "--json")
    sizes = [found["to_bytes"] for found in json.loads(answer.out)["checkpoints"]]
    assert max(sizes[1:]) < sizes[0] / 10
    answer = holdfast_command("inspect", other / "step-00000002")
    assert "lost" in answer.out and "100 %" in answer.out  # first moments are
    answer = holdfast_command("inspect", other / "step-00000002", "--json")
    losses = {t["name"]: t["loss"] for t in json.loads(answer.out)["tensors"]}
    weight = losses["model.w"]
    assert 0.1 < weight["squared_error"] / weight["energy"] < 0.7
    answer = holdfast_command("inspect", other / "step-00000000", "--json")
    assert {t["loss"] for t in json.loads(answer.out)["tensors"]} == {None}


def test_what_cannot_be(run: Path, new_path: NewPath, holdfast_command: Command) -> None:
    answer = holdfast_command("recompress", run, new_path(), "--codec", "zip")
    assert answer.code == 2 and "there are raw, lossless, delta, delta:replay" in answer.err
    answer = holdfast_command("recompress", run / "none", new_path())
    assert answer.code == 2 and "does not exist" in answer.err
    assert holdfast_command("recompress", run, run).code == 2
    assert holdfast_command("rebase", run).code == 2


def test_bench_says_what_codecs_would_make_of_a_step(run: Path, holdfast_command: Command) -> None:
    step, files = run / "step-00000002", sorted(run.rglob("*"))
    answer = holdfast_command("bench", "--codecs", step)
    assert answer.code == 0 and "links are made from step-00000001" in answer.out
    lines = {line.split()[0]: line for line in answer.out.splitlines()[3:]}
    assert set(lines) >= {"codec", "lossless", "delta", "excp", "compact:high", "compact:tiny"}
    assert all(len(line) <= 100 for line in lines.values())
    document = json.loads(
        holdfast_command("bench", "--codecs", step, run / "step-00000000", "--json").out
    )
    assert document["base"] == "step-00000000" and len(document["trials"]) == 8
    assert "were left out" in holdfast_command("bench", "--codecs", run / "step-00000000").out
    assert sorted(run.rglob("*")) == files
    assert holdfast_command("bench", step, step).code == 2
    answer = holdfast_command("bench", "--codecs", step, "--gib", "nan")
    assert answer.code == 2 and "--gib is nan" in answer.err
    assert holdfast_command("bench", "--codecs", run / "none").code == 2


def test_what_a_link_was_made_from_is_verified_too(
    run: Path, new_path: NewPath, holdfast_command: Command
) -> None:
    other, names = new_path(), [f"step-{step:08d}" for step in range(3)]
    holdfast_command("recompress", run, other, "--codec", "delta")
    answer = holdfast_command("verify", other / names[2])
    assert "every byte checked, and of the 2 checkpoints below it" in answer.out
    assert "decoded" in holdfast_command("verify", "--deep", other).out
    data = next(p for p in (other / names[0] / "data").rglob("*") if p.is_file())
    content = bytearray(data.read_bytes())
    content[len(content) // 3] ^= 1
    data.write_bytes(content)
    answer = holdfast_command("verify", other)
    assert answer.code == 1 and answer.out.count("BAD") == 3
    assert answer.out.count("which is damaged") == 3  # of the last, two deep
    assert holdfast_command("verify", other / names[2]).code == 1


def test_nothing_is_left_where_it_fails(run: Path, new_path: NewPath) -> None:
    other, names = new_path(), [f"step-{step:08d}" for step in range(3)]
    data = next(p for p in (run / names[1] / "data").rglob("*") if p.is_file())
    content = bytearray(data.read_bytes())
    content[len(content) // 3] ^= 1
    data.write_bytes(content)
    with pytest.raises(holdfast.errors.CorruptError):
        holdfast.recompress(run / names[1], other / names[1], codec="lossless")
    assert not (other / names[1]).exists()
