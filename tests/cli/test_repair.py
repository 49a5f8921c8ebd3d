"""`holdfast repair`: what is left of damaged checkpoints is found, named, and can be used again."""

import contextlib
import os
import re
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from format import reader
from format.simulated_ranks import pieces, run_ranks, save_pieces
from holdfast.engine.write import DataFileWriter
from holdfast.errors import (
    AlreadyCommittedError,
    CorruptError,
    MismatchError,
    StateError,
    StoreError,
)
from holdfast.format.table import content_digest
from holdfast.saving import save as save_module
from holdfast.testing import Fault, faulty
from unit.test_chains import stepped
from unit.test_lossless import trained

from .conftest import Command, data_files, flip_bit

NewPath = Callable[[], Path]
OPTIONS = holdfast.Options(chunk_elements=5000)
MARK = "repaired by holdfast"


def weight(step: int) -> torch.Tensor:
    return torch.arange(60.0).reshape(6, 10) + step


def save_three(path: Path, step: int = 1) -> Path:
    """One tensor in three boxes, one more on each rank, a tie, values, a tensor of no elements."""
    first, second, third = pieces(weight(step), [((n, 0), (2, 10)) for n in (0, 2, 4)])
    states: list[dict[Any, Any]] = [
        {("w",): first, ("x",): torch.ones(5), ("n",): step, ("e",): torch.zeros(0, 2)},
        {("w",): second, ("y",): torch.ones(7)},
        {("w",): third, ("z",): torch.ones(9)},
    ]
    save_pieces(path, states, ties={("t",): ("x",)}, step=step)
    return path


def save_one(path: Path, step: int = 1) -> Path:
    state = {"w": weight(step), "v": torch.ones(3) * step, "n": step}
    holdfast.save(state, path, step=step)
    return path


SAVES = {1: save_one, 3: save_three}


def training() -> dict[str, Any]:
    """Return a model and its optimizer after a step."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def age(path: Path) -> None:
    """Make files as old as those of no save that is under way."""
    for file in data_files(path):
        os.utime(file, (1e9, 1e9))


def lose_manifest(path: Path) -> bytes:
    content = (path / "MANIFEST").read_bytes()
    (path / "MANIFEST").unlink()
    age(path)
    return content


def tensors(path: Path) -> dict[str, bytes]:
    with holdfast.open(path) as checkpoint:
        return {n: checkpoint.tensor(n).numpy().tobytes() for n in checkpoint.names()}


@pytest.mark.parametrize("ranks", SAVES)
def test_a_lost_manifest_is_rebuilt(
    ranks: int, new_path: NewPath, holdfast_command: Command
) -> None:
    path = SAVES[ranks](new_path())
    before, files = tensors(path), sorted(path.rglob("*"))
    lose_manifest(path)
    answer = holdfast_command("repair", path)
    assert (
        answer.code == 1 and "but no MANIFEST" in answer.out and "--write' rebuilds" in answer.out
    )
    assert not (path / "MANIFEST").exists()  # it was only said
    answer = holdfast_command("repair", path, "--write")
    assert answer.code == 0 and "MANIFEST was rebuilt in its place" in answer.out
    assert sorted(path.rglob("*")) == files
    after = tensors(path)
    assert after == {name: before[name] for name in before if name != "e"}
    assert holdfast.open(path).verify(deep=True) == []
    assert len(reader.read(path)["tensors"]) == len(after) - (ranks == 3)  # without the tie
    with holdfast.open(path) as checkpoint:
        assert checkpoint.step == 1 and checkpoint.world_size == ranks
        (told,) = checkpoint.objects().values()
    assert "values" in told["not_recovered"][0] and told["lost"] == []
    answer = holdfast_command("repair", path)
    assert answer.code == 0 and answer.out.startswith("repaired")


def test_a_rebuilt_checkpoint_is_not_taken_for_the_whole_state(
    new_path: NewPath, holdfast_command: Command
) -> None:
    path = save_one(new_path())
    lose_manifest(path)
    holdfast_command("repair", path, "--write")
    target = {"w": torch.zeros(6, 10), "v": torch.zeros(3), "n": 0}
    with pytest.raises(MismatchError, match=f"(?s)missing in the checkpoint: n.*{MARK}"):
        holdfast.load(path, into=target)
    weights = {"w": torch.zeros(6, 10), "v": torch.zeros(3)}
    holdfast.load(path, into=weights, partial=True)
    assert torch.equal(weights["w"], weight(1))


def test_a_run_steps_over_what_was_repaired_without_its_values(
    new_path: NewPath, holdfast_command: Command
) -> None:
    run = holdfast.Checkpointer(new_path())
    for step in (1, 2):
        run.save(step, {"w": weight(step), "v": torch.ones(3) * step, "n": step})
    lose_manifest(Path(run.path(2)))
    assert holdfast_command("repair", run.path(2), "--write").code == 0
    state = {"w": torch.zeros(6, 10), "v": torch.zeros(3), "n": 0}
    assert holdfast.Checkpointer(run.root).restore(state) == 1 and state["n"] == 1
    with pytest.raises(MismatchError, match="was repaired, and lacks the lost tensors"):
        holdfast.Checkpointer(run.root).restore(state, step=2)
    weights = {"w": torch.zeros(6, 10)}
    assert holdfast.Checkpointer(run.root).restore(weights, partial=True) == 2
    assert torch.equal(weights["w"], weight(2))


def test_the_moments_of_a_rebuilt_checkpoint_go_into_an_optimizer(
    new_path: NewPath, holdfast_command: Command
) -> None:
    path, state = new_path(), training()
    holdfast.save(state, path)
    lose_manifest(path)
    holdfast_command("repair", path, "--write")
    fresh = {"model": torch.nn.Linear(4, 4)}
    fresh["optimizer"] = torch.optim.AdamW(fresh["model"].parameters(), lr=0.5)
    report = holdfast.load(path, into=fresh, strict=False)
    assert report.missing and all("param_groups" in name for name in report.missing)
    assert fresh["optimizer"].param_groups[0]["lr"] == 0.5
    for old, new in zip(
        state["optimizer"].state.values(), fresh["optimizer"].state.values(), strict=True
    ):
        assert old.keys() == new.keys() and all(torch.equal(old[k], new[k]) for k in old)


def test_of_what_has_no_whole_tensor_nothing_is_written(
    new_path: NewPath, holdfast_command: Command
) -> None:
    path, there = save_one(new_path()), new_path()
    for file in data_files(path):
        file.unlink()
    answer = holdfast_command("repair", path, "--to", there)
    assert answer.code == 1 and "no tensor of" in answer.err and not there.exists()


def test_a_link_shows_that_what_was_rebuilt_is_its_base(
    new_path: NewPath, holdfast_command: Command
) -> None:
    root = new_path()
    for step in range(3):
        state = {"w": torch.arange(5000.0) + step / 64, "n": step}
        holdfast.save(state, root / f"step-{step:08d}", step=step, codec="delta")
    base, link = root / "step-00000001", root / "step-00000002"
    before, digest = tensors(link), content_digest(holdfast.open(base)._manifest.table)
    lose_manifest(base)
    document = holdfast_command("repair", root, "--json").document
    states = {Path(c["path"]).name: c["state"] for c in document["checkpoints"]}
    assert states == {
        "step-00000000": "good",
        "step-00000001": "rebuildable",
        "step-00000002": "damaged",
    }
    assert document["newest_good"] == str(root / "step-00000000")
    with pytest.raises(CorruptError, match=f"no MANIFEST.*Run 'holdfast repair {base}'"):
        tensors(link)
    first = f"first run 'holdfast repair {base} --write': without it 1 other step cannot be read. "
    assert first in holdfast_command("repair", root).out
    answer = holdfast_command("repair", base, "--write", "--json")
    assert answer.code == 0
    told = answer.document["checkpoints"][0]["not_recovered"]
    assert not any("elements" in what or "order" in what for what in told)  # the digest says so
    assert content_digest(holdfast.open(base)._manifest.table) == digest
    assert tensors(link) == before and holdfast_command("verify", "--deep", root).code == 0
    assert "first run" not in holdfast_command("repair", root).out


def test_a_damaged_manifest_is_replaced_and_kept(
    new_path: NewPath, holdfast_command: Command
) -> None:
    path = save_three(new_path())
    before = tensors(path)
    flip_bit(path / "MANIFEST", 150)  # in the JSON header
    damaged = (path / "MANIFEST").read_bytes()
    answer = holdfast_command("repair", path, "--write", "--json")
    assert answer.code == 0
    (found,) = answer.document["checkpoints"]
    assert Path(found["kept"]).read_bytes() == damaged
    assert Path(found["kept"]).parent == path.parent
    assert tensors(path) == {name: before[name] for name in before if name != "e"}
    assert holdfast_command("verify", path).code == 0
    flip_bit(path / "MANIFEST", 150)
    again = holdfast_command("repair", path, "--write", "--json").document["checkpoints"][0]
    assert again["kept"] != found["kept"] and Path(found["kept"]).read_bytes() == damaged


@pytest.mark.parametrize("ranks", SAVES)
def test_a_manifest_damaged_beside_its_header_comes_back_to_the_bit(
    ranks: int, new_path: NewPath
) -> None:
    """Each byte of its own: the columns and the preamble are in the footers too."""
    path = SAVES[ranks](new_path())
    content = (path / "MANIFEST").read_bytes()
    (text_bytes,) = struct.unpack_from("<Q", content, 24)
    whole, rebuilt = 0, 0
    for place in [*range(12, 72, 5), *range(72, len(content), 7)]:
        flip_bit(path / "MANIFEST", place)
        found = holdfast.repair(path, write=True)
        assert found.kept is not None
        Path(found.kept).unlink()
        is_mended = (path / "MANIFEST").read_bytes() == content
        assert is_mended == (not found.not_recovered)
        assert is_mended == (not 72 <= place < 72 + text_bytes and place < len(content) - 16)
        whole, rebuilt = whole + is_mended, rebuilt + (not is_mended)
        (path / "MANIFEST").write_bytes(content)
    assert whole > 10 and rebuilt > 10


def test_what_a_commit_that_died_was_to_publish_is_published(new_path: NewPath) -> None:
    path = save_three(new_path())
    content = lose_manifest(path)
    pending = path / f".manifest-{data_files(path)[0].parent.name}"
    pending.write_bytes(content)
    assert holdfast.repair(path, write=True).not_recovered == ()
    assert (path / "MANIFEST").read_bytes() == content
    (path / "MANIFEST").unlink()
    pending.write_bytes(content[:-1])  # it died earlier
    assert holdfast.repair(path).not_recovered != ()


def test_links_of_every_codec_are_rebuilt(new_path: NewPath) -> None:
    """Three ranks, groups of tensors spread over files: the header comes back as it was."""
    for codec in ("raw", "lossless", "delta", "delta:replay", "compact:high", "excp"):
        root, state = new_path(), trained(3)
        for step in range(2):
            state = stepped(state, step)

            save = partial(
                holdfast.save, state, root / f"step-{step}", codec=codec, options=OPTIONS
            )
            run_ranks(3, lambda group, save=save: save(group=group))  # type: ignore[misc]
        path = root / "step-1"
        before = holdfast.open(path)._manifest.table
        lose_manifest(path)
        assert holdfast.repair(path, write=True).written == str(path)
        after = holdfast.open(path)._manifest.table
        assert content_digest(after) == content_digest(before)
        assert after.header.codecs == before.header.codecs
        assert holdfast.verify(path, deep=True).damage == ()


def test_a_save_that_may_be_under_way_is_left_alone(
    new_path: NewPath, holdfast_command: Command
) -> None:
    path = save_one(new_path())
    (path / "MANIFEST").unlink()
    answer = holdfast_command("repair", path, "--write")
    assert answer.code == 2 and "save may still run" in answer.err
    assert not (path / "MANIFEST").exists()
    with pytest.raises(StateError):
        holdfast.repair(path, write=True)
    assert holdfast_command("repair", path, "--to", new_path()).code == 0


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_lost_file_of_one_rank_costs_what_it_held(
    rank: int, new_path: NewPath, holdfast_command: Command
) -> None:
    path, other = save_three(new_path()), new_path()
    before = tensors(path)
    data_files(path)[rank].unlink()
    own = {"x": {"x", "t"}, "y": {"y"}, "z": {"z"}}["xyz"[rank]]
    answer = holdfast_command("repair", path, "--json")
    (found,) = answer.document["checkpoints"]
    assert answer.code == 1 and found["state"] == "damaged"
    lost = {part["tensor"]: part["boxes"] for part in found["lost"]}
    assert lost == {
        "w": [{"offset": [2 * rank, 0], "shape": [2, 10]}],
        "xyz"[rank]: [{"offset": [0], "shape": [(5, 7, 9)[rank]]}],
    }
    answer = holdfast_command("repair", path, "--to", other)
    assert answer.code == 0 and "lost: w" in answer.out
    assert tensors(other) == {n: before[n] for n in before if n not in own | {"w"}}
    values = holdfast.open(other).objects()
    assert values.pop(MARK)["lost"] == sorted(["w", "xyz"[rank]])
    assert values == {"n": 1}  # MANIFEST was whole
    assert holdfast_command("verify", "--deep", other).code == 0


@pytest.mark.parametrize("beside", [False, True])
def test_without_manifest_a_lost_file_is_never_passed_over(
    beside: bool, new_path: NewPath, holdfast_command: Command
) -> None:
    """Of a rank without a file nobody can tell whether it had one."""
    root = new_path()
    path = root / "step-00000001"
    states: list[dict[Any, Any]] = [{("x",): torch.ones(5)}, {("y",): torch.ones(7)}]
    for step in (1, 2) if beside else (1,):
        save_pieces(root / f"step-{step:08d}", states, step=step)
    lose_manifest(path)
    data_files(path)[1].unlink()
    (found,) = holdfast_command("repair", path, "--json").document["checkpoints"]
    assert found["state"] == "damaged" and found["whole"] == ["x"] and found["refused"]
    told = "; ".join(found["not_recovered"])
    assert ("step-00000002 beside it has y" if beside else "whether rank 1 was written") in told
    answer = holdfast_command("repair", path, "--write")
    assert answer.code == 1 and "is not rebuilt" in answer.err
    assert not (path / "MANIFEST").exists()
    other = new_path()
    assert holdfast_command("repair", path, "--to", other).code == 0
    assert list(tensors(other)) == ["x"]


def test_damage_of_a_base_costs_its_links_what_refers_to_it(
    new_path: NewPath, holdfast_command: Command
) -> None:
    root, options = new_path(), holdfast.Options(chunk_elements=1000)
    draw = torch.Generator().manual_seed(1)
    still, moving = torch.randn(4000, generator=draw), torch.randn(4000, generator=draw)
    for step in range(3):
        state = {"still": still, "moving": moving + 1e-4 * step, "new": still * step, "n": step}
        path = root / f"step-{step:08d}"
        holdfast.save(state, path, step=step, codec="delta", options=options)
    base, link = root / "step-00000000", root / "step-00000002"
    before = tensors(link)
    manifest = holdfast.open(base)._manifest
    rows = {manifest.shard(i).tensor.path: r for i, r in enumerate(manifest.shard_first_row)}
    flip_bit(data_files(base)[0], int(manifest.chunk_start[rows["moving",] + 2]) + 9)
    document = holdfast_command("repair", root, "--json").document
    assert document["newest_good"] is None
    for found in document["checkpoints"]:
        (lost,) = found["lost"]
        assert lost == {"tensor": "moving", "boxes": [{"offset": [2000], "shape": [1000]}]}
    other = root / "salvaged"
    assert holdfast_command("repair", link, "--to", other).code == 0
    shutil.rmtree(base)
    assert tensors(other) == {name: before[name] for name in ("still", "new")}
    assert holdfast.open(other).objects()["n"] == 2
    # With the base gone altogether, what the link has of its own is left.
    found = holdfast_command("repair", link, "--json").document["checkpoints"][0]
    assert {part["tensor"] for part in found["lost"]} >= {"still", "moving"}


def test_footers_of_two_saves_are_not_mixed(new_path: NewPath, holdfast_command: Command) -> None:
    path, other = save_three(new_path()), save_three(new_path(), step=2)
    lose_manifest(path)
    mine, theirs = data_files(path), data_files(other)
    content = mine[1].read_bytes()
    shutil.copy(theirs[1], mine[1])  # under the name of this save
    answer = holdfast_command("repair", path, "--write")
    assert answer.code == 1 and "cannot be read" in answer.err
    mine[1].write_bytes(content)
    age(path)
    shutil.copytree(theirs[0].parent, path / "data" / theirs[0].parent.name)
    answer = holdfast_command("repair", path, "--write")
    assert answer.code == 1 and "data files of 2 saves" in answer.err
    assert not (path / "MANIFEST").exists()
    (path / "data" / theirs[0].parent.name / theirs[2].name).unlink()  # now only one is complete
    assert holdfast_command("repair", path, "--write").code == 0
    assert holdfast.open(path).save_id == mine[0].parent.name


def test_a_damaged_payload_is_no_reason_to_publish(
    new_path: NewPath, holdfast_command: Command
) -> None:
    path = save_one(new_path())
    lose_manifest(path)
    file = data_files(path)[0]
    flip_bit(file, file.read_bytes().index(weight(1).numpy().tobytes()) + 8)
    age(path)
    answer = holdfast_command("repair", path, "--write")
    assert answer.code == 1 and "payloads are damaged" in answer.err
    other = new_path()
    assert holdfast_command("repair", path, "--to", other).code == 0
    assert list(tensors(other)) == ["v"]


def test_a_good_manifest_is_never_replaced(new_path: NewPath, holdfast_command: Command) -> None:
    path = save_one(new_path())
    before = (path / "MANIFEST").read_bytes()
    answer = holdfast_command("repair", path, "--write")
    assert answer.code == 0 and "all whole" in answer.out
    assert (path / "MANIFEST").read_bytes() == before
    other = save_one(new_path())
    with pytest.raises(AlreadyCommittedError):
        holdfast.repair(path, to=other)
    with pytest.raises(CorruptError):
        data_files(path)[0].unlink()
        (path / "MANIFEST").unlink()
        holdfast.repair(path, to=new_path())


def test_a_sector_that_cannot_be_read_costs_one_chunk(new_path: NewPath) -> None:
    """The n-th read and the one after it fail with EIO, for every n: a read, and its retry."""
    path = new_path()
    state = {name: torch.randn(1 << 16) for name in "abcd"}
    holdfast.save(state, path, options=holdfast.Options(chunk_elements=1 << 16))
    lost: list[set[str]] = []
    for nth in range(1, 40):
        with (
            faulty(Fault("read", nth=nth), Fault("read", nth=nth + 1)) as disk,
            contextlib.suppress(StoreError, CorruptError),  # of MANIFEST, and of every footer
        ):
            found = holdfast.repair(path, options=holdfast.Options(io="buffered"))
            lost.append(set(found.lost))
            assert not found.lost or any("Input/output error" in d.what for d in found.damage)
        if disk.calls().get("read", 0) < nth:
            break
    assert lost[-1] == set() and {len(names) for names in lost} >= {0, 1}, lost


def test_a_run_is_not_written_as_one(new_path: NewPath, holdfast_command: Command) -> None:
    root = new_path()
    save_one(root / "step-00000001")
    for arguments in (["--write"], ["--to", new_path()]):
        answer = holdfast_command("repair", root, *arguments)
        assert answer.code == 2 and "expected one checkpoint with --to or --write" in answer.err
    answer = holdfast_command("repair", root)
    assert answer.code == 0 and "1 of 1 step good; newest good: " in answer.out
    assert holdfast_command("repair", root, "--write", "--to", "x").code == 2
    died = save_one(root / "step-00000002")
    lose_manifest(died)
    data_files(died)[0].write_bytes(data_files(died)[0].read_bytes()[:-9])
    answer = holdfast_command("repair", root)
    assert answer.code == 0 and f"unfinished {died}: " in answer.out
    assert holdfast_command("repair", new_path()).code == 2


@pytest.mark.parametrize("damaged", [False, True])
def test_write_says_so_where_there_is_no_manifest_to_rebuild(
    new_path: NewPath, holdfast_command: Command, damaged: bool
) -> None:
    path = save_one(new_path())
    if damaged:
        flip_bit(data_files(path)[0], 9)
    before = (path / "MANIFEST").read_bytes()
    answer = holdfast_command("repair", path, "--write")
    assert answer.code == int(damaged) and (path / "MANIFEST").read_bytes() == before
    assert answer.out.count("MANIFEST is whole, and --write rebuilds nothing else") == 1
    assert "MANIFEST is whole" not in holdfast_command("repair", path).out


def test_inspect_verify_and_repair_say_that_restore_skips_a_repaired_step(
    new_path: NewPath, holdfast_command: Command
) -> None:
    run, old = new_path(), new_path()
    holdfast.save({"w": torch.ones(3), "v": torch.ones(4)}, run / "step-00000001", step=1)
    holdfast.save({"w": torch.full((3,), 2.0), "v": torch.arange(4.0)}, old, step=2)
    (file,) = data_files(old)
    flip_bit(file, file.read_bytes().index(torch.arange(4.0).numpy().tobytes()))
    new = run / "step-00000002"
    assert holdfast_command("repair", old, "--to", new).code == 0
    state = {"w": torch.zeros(3), "v": torch.zeros(4)}
    assert holdfast.Checkpointer(run).restore(state) == 1
    told = f'restore() skips it; holdfast.load("{new}", into=state, strict=False)'
    for verb in ("inspect", "verify", "repair"):
        for place in (run, new):
            answer = holdfast_command(verb, place)
            assert answer.code == 0 and answer.out.count(told) == 1, answer.out
        assert told not in holdfast_command(verb, run / "step-00000001").out
    (line,) = [one for one in holdfast_command("inspect", run).out.splitlines() if "0002  " in one]
    assert line.endswith("repaired: restore() skips it")
    holdfast.load(new, into=state, strict=False)  # as it says
    assert state["w"].tolist() == [2, 2, 2] and state["v"].tolist() == [1, 1, 1, 1]


def test_a_repaired_step_takes_no_name_of_another(
    new_path: NewPath, holdfast_command: Command
) -> None:
    path, run = save_one(new_path(), step=7), new_path()
    answer = holdfast_command("repair", path, "--to", run / "step-00000008")
    assert answer.code == 2 and not run.exists()
    assert "step-00000008 is the name of another step" in answer.err
    assert "ends in step-00000007" in answer.err
    for name in ("step-00000007", "salvaged"):
        assert holdfast_command("repair", path, "--to", run / name).code == 0


def test_the_example_in_the_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parents[2] / "docs" / "repair.md"
    (code,) = re.findall(r"```python\n(import holdfast\n.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "a" / "step-00000300"
    holdfast.save({"w": torch.arange(90.0), "v": torch.ones(30)}, path, step=300)
    (file,) = data_files(path)
    flip_bit(file, file.read_bytes().index(torch.arange(90.0).numpy().tobytes()))
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["found"].damage and names["left"].whole == ("v",)
    assert names["done"].damage[0][0] == "step-00000300"
    assert holdfast.open("runs/c").names() == ["v"] and "checksum" in capsys.readouterr().out


def test_what_a_dead_replace_was_to_publish_is_not_taken_for_a_damaged_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands whole before the data that it names is durable."""
    path = tmp_path / "a"
    holdfast.save({"w": torch.ones(4)}, path)

    def die(writer: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(DataFileWriter, "finish", die)
        patched.setattr(DataFileWriter, "abandon", lambda writer: None)
        patched.setattr(save_module, "discard", lambda *given: None)
        with pytest.raises(RuntimeError):
            holdfast.save({"w": torch.zeros(4)}, path, replace=True)
    assert list(path.glob(".manifest-*"))
    flip_bit(path / "MANIFEST", 100)
    flip_bit(path / "MANIFEST", 200)
    with pytest.raises(CorruptError, match="2 saves"):
        holdfast.repair(path, write=True)
