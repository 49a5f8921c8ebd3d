"""`holdfast recompress`, `rebase`, `verify --deep`, and what `inspect` says of links."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.format.manifest import decode_manifest, encode_manifest

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
    assert "a delta of step-00000001" in answer.out and "lost" not in answer.out
    answer = holdfast_command("verify", "--deep", other)
    assert answer.code == 0 and answer.out.count("good") == 3
    answer = holdfast_command("rebase", other / names[2])
    assert answer.code == 0 and "is a full checkpoint now" in answer.out
    (other / names[1]).rename(other / "away")
    assert bits(other / names[2]) == bits(run / names[2])
    answer = holdfast_command("rebase", other / names[2], "--json")
    assert answer.code == 0 and json.loads(answer.out)["changed"] is False
    (other / "away").rename(other / names[1])
    (other / names[0]).rename(other / "away")
    for how in ((), ("--deep",)):
        answer = holdfast_command("verify", *how, other / names[1])
        assert answer.code == 1 and "a delta of step-00000000" in answer.out
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
    assert "lossless; its base step-00000000 is missing" in answer.out
    assert answer.code == 1
    (other / "away").rename(other / "step-00000000")
    assert holdfast_command("inspect", other).code == 0
    (other / "step-00000000" / "MANIFEST").write_bytes(b"no manifest")
    answer = holdfast_command("inspect", other)
    assert "lossless on step-00000000, which is damaged" in answer.out


def test_inspect_names_a_link_that_is_made_from_itself(
    run: Path, new_path: NewPath, holdfast_command: Command
) -> None:
    other = new_path()
    assert holdfast_command("recompress", run, other, "--codec", "delta").code == 0
    manifest = other / "step-00000001" / "MANIFEST"
    table = decode_manifest(manifest.read_bytes(), "").table
    base = dataclasses.replace(table.header.base, name="step-00000001")
    header = dataclasses.replace(table.header, base=base)
    manifest.write_bytes(encode_manifest(dataclasses.replace(table, header=header)))
    answer = holdfast_command("inspect", other)
    assert answer.code == 1
    assert "lossless on step-00000001, which is its own base" in answer.out
    assert "lossless on step-00000000" not in answer.out


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
    assert answer.code == 2 and "expected one of raw, lossless, delta, delta:replay" in answer.err
    answer = holdfast_command("recompress", run / "none", new_path())
    assert answer.code == 2 and "does not exist" in answer.err
    assert holdfast_command("recompress", run, run).code == 2
    assert holdfast_command("rebase", run).code == 2


def test_bench_says_what_codecs_would_make_of_a_step(run: Path, holdfast_command: Command) -> None:
    step, files = run / "step-00000002", sorted(run.rglob("*"))
    answer = holdfast_command("bench", "--codecs", step)
    assert answer.code == 0 and "deltas are of step-00000001" in answer.out
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
    assert "every byte checked, and of its 2 bases" in answer.out
    assert "decoded" in holdfast_command("verify", "--deep", other).out
    with holdfast.open(other / names[0]) as checkpoint:
        whole = dict(chunk_places(checkpoint))
    (data,) = (p for p in (other / names[0] / "data").rglob("*") if p.is_file())
    content = data.read_bytes()
    flip(data, whole["optimizer.w.exp_avg"])  # which no link refers to
    for how in ((), ("--deep",)):
        answer = holdfast_command("verify", *how, other)
        assert answer.code == 1 and answer.out.count("BAD") == 1
        assert answer.out.count("damaged in a base, but not used here") == 2
        answer = holdfast_command("verify", *how, other / names[2])
        assert answer.code == 0 and "damaged in a base, but not used here" in answer.out
    assert holdfast.open(other / names[2]).tensor("optimizer.w.exp_avg").shape == (128, 160)
    data.write_bytes(content)
    flip(data, whole["model.w"])
    for how in ((), ("--deep",)):
        answer = holdfast_command("verify", *how, other)
        assert answer.code == 1 and answer.out.count("BAD") == answer.out.count("1 fault") == 3
        assert answer.out.count("is a delta of damaged data") == 2  # of the last, two deep
        assert answer.out.count("lost: model.w [0:128, 0:160]") == 3
        assert "Tensors filled" not in answer.out
        assert holdfast_command("verify", *how, other / names[2]).code == 1
    (data.parent / "stray").write_bytes(b"")  # nothing that a load of a link looks at
    data.write_bytes(content)
    answer = holdfast_command("verify", other)
    assert answer.code == 1 and answer.out.count("BAD") == 1


def test_a_base_of_a_newer_version_is_newer_not_damaged(
    run: Path, new_path: NewPath, holdfast_command: Command
) -> None:
    other = new_path()
    holdfast_command("recompress", run, other, "--codec", "delta")
    with (other / "step-00000000" / "MANIFEST").open("r+b") as manifest:
        manifest.seek(8)
        manifest.write(b"\x02")
    for how in ((), ("--deep",)):
        answer = holdfast_command("verify", *how, other)
        assert answer.code == 2 and answer.out.count("Upgrade holdfast") == 3
        assert "BAD" not in answer.out
        answer = holdfast_command("verify", *how, other / "step-00000001")
        assert answer.code == 2 and "Upgrade holdfast" in answer.err


def chunk_places(checkpoint: Any) -> Any:
    """(name, offset of its first payload in its file) of each tensor."""
    manifest, names = checkpoint._manifest, checkpoint.names()
    for shard, row in enumerate(manifest.shard_first_row.tolist()):
        yield names[int(manifest.table.shard_tensor[shard])], int(manifest.chunk_start[row])


def flip(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def test_a_damaged_step_is_left_out_and_the_rest_goes_on(
    run: Path, new_path: NewPath, holdfast_command: Command
) -> None:
    other, names = new_path(), [f"step-{step:08d}" for step in range(3)]
    with holdfast.open(run / names[1]) as checkpoint:
        place = dict(chunk_places(checkpoint))["model.w"]
    (data,) = (p for p in (run / names[1] / "data").rglob("*") if p.is_file())
    flip(data, place)
    answer = holdfast_command("recompress", run, other, "--codec", "delta")
    assert answer.code == 1 and f"left out, damaged: {run / names[1]}: " in answer.out
    assert sorted(p.name for p in other.iterdir()) == [names[0], names[2]]
    assert bits(other / names[2]) == bits(run / names[2])
    assert holdfast_command("verify", "--deep", other).code == 0
    flip(data, place)  # it was mended: only this step is written now
    before = {n: (other / n / "MANIFEST").read_bytes() for n in (names[0], names[2])}
    answer = holdfast_command("recompress", run, other, "--codec", "delta")
    assert answer.code == 0 and answer.out.count("was there already") == 2
    assert before == {n: (other / n / "MANIFEST").read_bytes() for n in (names[0], names[2])}
    assert [bits(other / name) for name in names] == [bits(run / name) for name in names]


def test_a_run_is_not_mixed_with_another(
    run: Path, new_path: NewPath, holdfast_command: Command
) -> None:
    other = new_path()
    holdfast.save({"else": torch.ones(3)}, other / "step-00000001", step=1)
    answer = holdfast_command("recompress", run, other)
    assert answer.code == 2 and "with other contents than" in answer.err


def test_nothing_is_left_where_it_fails(run: Path, new_path: NewPath) -> None:
    other, names = new_path(), [f"step-{step:08d}" for step in range(3)]
    data = next(p for p in (run / names[1] / "data").rglob("*") if p.is_file())
    content = bytearray(data.read_bytes())
    content[len(content) // 3] ^= 1
    data.write_bytes(content)
    with pytest.raises(holdfast.errors.CorruptError):
        holdfast.recompress(run / names[1], other / names[1], codec="lossless")
    assert not (other / names[1]).exists()
