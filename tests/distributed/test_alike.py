"""What ranks have to give and find alike: where it differs, all of them are told who has what."""

import enum
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast import Checkpointer, Keep, Options
from holdfast.errors import HoldfastError

from .ranks import run_ranks
from .test_reshard import dense

Told = tuple[str, str]  # kind and text of an error; "" and "": none
OWN_DIRECTORY = "/proc/self/cwd/run"  # one path on all ranks, and another directory on each


def weights(seed: int, step: int) -> torch.Tensor:
    return torch.randn(256, 64, generator=torch.Generator().manual_seed(seed)) + step * 1e-4


def save_steps(root: Path, seed: int, codec: str = "raw", steps: int = 2) -> list[str]:
    """Save a run in this process; return the paths of its steps."""
    with Checkpointer(root, codec=codec) as checkpointer:
        for step in range(1, steps + 1):
            checkpointer.save(step, {"w": weights(seed, step), "own": {"step": step}})
        return [checkpointer.path(step) for step in checkpointer.steps()]


def target(sharded: bool) -> dict[str, Any]:
    zeros = torch.zeros(256, 64)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    own = {"step": 0}
    return {"w": distribute_tensor(zeros, mesh, [Shard(0)]) if sharded else zeros, "own": own}


def told(call: Any) -> Told:
    try:
        call()
    except HoldfastError as error:
        return type(error).__name__, str(error)
    return "", ""


def load_all(rank: int, pairs: list[tuple[str, str]], sharded: bool) -> list[tuple[Told, bool]]:
    """Load a path of its own on each rank; return the errors, and whether nothing was filled."""
    found = []
    for paths in pairs:
        state = target(sharded)
        error = told(lambda paths=paths, state=state: holdfast.load(paths[rank], into=state))
        found.append((error, not dense(state["w"]).any() and state["own"] == {"step": 0}))
    return found


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("codec", ["raw", "lossless", "delta"])
def test_ranks_that_find_different_checkpoints_load_nothing(
    tmp_path: Path, codec: str, sharded: bool
) -> None:
    one, two = save_steps(tmp_path / "a", 1, codec)
    other = save_steps(tmp_path / "b", 2, codec)[1]
    save_ids = [holdfast.open(path).save_id[:8] for path in (two, one, other)]
    assert holdfast.open(two).base == ("step-00000001" if codec == "delta" else None)

    first, second = run_ranks(2, load_all, [(two, one), (two, other)], sharded)

    assert first == second, "all ranks are told the same"
    for path, step, save_id, ((kind, text), untouched) in zip(
        (one, other), (1, 2), save_ids[1:], first, strict=True
    ):
        assert kind == "MismatchError" and untouched
        assert f"{two} (step 2, save {save_ids[0]}" in text and "on rank 0" in text
        assert f"{path} (step {step}, save {save_id}" in text and "on rank 1" in text


def test_a_base_that_differs_between_ranks_is_refused(tmp_path: Path) -> None:
    """The link itself is the same; its base has the same elements, but was saved another time."""
    two = save_steps(tmp_path / "a", 1, "delta")[1]
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    base = tmp_path / "b" / "step-00000001"
    shutil.rmtree(base)
    holdfast.save({"w": weights(1, 1), "own": {"step": 9}}, base, step=1, codec="delta")
    other = str(tmp_path / "b" / "step-00000002")

    (((kind, text), untouched),), second = run_ranks(2, load_all, [(two, other)], True)

    assert second == [((kind, text), untouched)]
    assert kind == "MismatchError" and untouched and ", bases " in text


def test_ranks_load_copies_of_one_checkpoint_together(tmp_path: Path) -> None:
    (path,) = save_steps(tmp_path / "a", 1, steps=1)
    shutil.copytree(path, tmp_path / "copy")
    for found in run_ranks(2, load_all, [(path, str(tmp_path / "copy"))], True):
        assert found == [(("", ""), False)]


class Opened:
    """A value whose state is asked for when the checkpoint has been opened."""

    def __init__(self) -> None:
        self.calls, self.step = 0, 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        if self.calls == 1 and dist.get_rank() == 0:
            dist.barrier()
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class RebasedFirst(os.PathLike[str]):
    """A path at which a checkpoint is rebased when rank 0 has opened it, and before this rank."""

    def __init__(self, path: str, rebased: str) -> None:
        self.path, self.rebased = path, rebased

    def __fspath__(self) -> str:
        if self.rebased:
            rebased, self.rebased = self.rebased, ""
            dist.barrier()
            assert holdfast.rebase(rebased)
        return self.path


def load_rebased(rank: int, path: str, rebased: str, sharded: bool) -> tuple[torch.Tensor, int]:
    state = target(sharded) | {"own": Opened()}
    holdfast.load(RebasedFirst(path, rebased) if rank == 1 else path, into=state)
    assert state["own"].calls == 2, "opened again, once"
    return dense(state["w"]), state["own"].step


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("rebased", [1, 2], ids=["its base", "itself"])
def test_a_checkpoint_rebased_between_the_reads_of_two_ranks_is_loaded(
    tmp_path: Path, rebased: int, sharded: bool
) -> None:
    paths = save_steps(tmp_path / "run", 1, "delta", steps=3)
    results = run_ranks(2, load_rebased, paths[2], paths[rebased], sharded)
    for loaded, step in results:
        assert torch.equal(loaded, weights(1, 3)) and step == 3


def restore_own(rank: int, directories: list[str], options: dict[str, Any]) -> Told:
    os.chdir(directories[rank])
    state = target(True)
    with Checkpointer(OWN_DIRECTORY) as checkpointer:
        found = told(lambda: checkpointer.restore(state, **options))
    assert not dense(state["w"]).any(), "no older step was taken"
    return found


@pytest.mark.parametrize("step", [None, 2])
def test_a_restore_of_different_copies_fails_and_takes_no_older_step(
    tmp_path: Path, step: int | None
) -> None:
    save_steps(tmp_path / "a" / "run", 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / "run" / "step-00000002")
    directories = [str(tmp_path / "a"), str(tmp_path / "b")]

    if step is None:  # it is not there
        kinds, texts = zip(*run_ranks(2, restore_own, directories, {}), strict=True)
        assert set(kinds) == {"MismatchError"} and len(set(texts)) == 1
        assert f"rank 0 finds step 2 in {OWN_DIRECTORY}, but another rank does not" in texts[0]

    holdfast.save(
        {"w": weights(5, 2), "own": {"step": 2}},
        tmp_path / "b" / "run" / "step-00000002",
        step=2,
    )  # another one is there
    kinds, texts = zip(*run_ranks(2, restore_own, directories, {"step": step}), strict=True)
    assert set(kinds) == {"MismatchError"} and len(set(texts)) == 1
    assert "the ranks found different checkpoints" in texts[0]


class Colour(enum.Enum):
    """What one rank alone gives as types."""

    RED = 1


def load_with(rank: int, path: str, pairs: list[tuple[Any, Any]]) -> list[Told]:
    found = []
    for pair in pairs:
        state = target(False)
        options = pair[rank]
        found.append(told(lambda o=options, s=state: holdfast.load(path, into=s, **o)))
        assert not state["w"].any()
    return found


def load_and_restore(rank: int, root: str, path: str, loading: int) -> Told:
    state = target(False)
    if rank == loading:
        return told(lambda: holdfast.load(path, into=state))
    return told(lambda: Checkpointer(root).restore(state))


@pytest.mark.parametrize("loading", [0, 1])
def test_ranks_that_load_and_restore_at_once_are_told_so(tmp_path: Path, loading: int) -> None:
    (path,) = save_steps(tmp_path / "run", 1, steps=1)
    calls = ["'load' on rank 0; 'restore' on rank 1", "'restore' on rank 0; 'load' on rank 1"]
    for kind, text in run_ranks(2, load_and_restore, str(tmp_path / "run"), path, loading):
        assert kind == "OptionError" and f"call: {calls[loading]}" in text


def test_options_of_a_load_that_differ_between_ranks_are_named(tmp_path: Path) -> None:
    (path,) = save_steps(tmp_path / "run", 1, steps=1)
    names = ["strict", "partial", "cast"]
    pairs = [({name: False}, {name: True}) for name in names]
    pairs.append(({}, {"types": [Colour]}))
    first, second = run_ranks(2, load_with, path, pairs)
    assert first == second
    kind, text = first.pop()
    assert kind == "OptionError" and f"types: [] on rank 0; ['{__name__}.Colour'] on rank 1" in text
    for name, (kind, text) in zip(names, first, strict=True):
        assert kind == "OptionError" and f"{name}: False on rank 0; True on rank 1" in text


SAVES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "codec": (
        {"codec": "raw"},
        {"codec": "lossless"},
        "codec: 'raw' on rank 0; 'lossless' on rank 1",
    ),
    "step": ({"step": 1}, {"step": 2}, "step: 1 on rank 0; 2 on rank 1"),
    "path": ({"path": "here"}, {"path": "there"}, "/here' on rank 0; "),
    "metrics": ({"metrics": {"a": 1}}, {"metrics": {"b": 1}}, "['a'] on rank 0; ['b'] on rank 1"),
    "metrics of one": ({}, {"metrics": {"b": 1}}, "metrics: [] on rank 0; ['b'] on rank 1"),
    "chunks": (
        {"options": Options(chunk_elements=1000)},
        {},
        "chunk_elements: 1000 on rank 0; 1048576 on rank 1",
    ),
    "files": ({"options": Options(file_bytes=1 << 20)}, {}, "file_bytes: 1048576 on rank 0"),
    "the call": ({"call": "save"}, {"call": "save_async"}, "call: 'save' on rank 0; 'save_async'"),
    "stage": (
        {"call": "save_async", "stage": "eager"},
        {"call": "save_async", "stage": "lazy"},
        "stage: 'eager' on rank 0; 'lazy' on rank 1",
    ),
    "replace": ({"replace": True}, {}, "replace: True on rank 0; False on rank 1"),
    "busy": (
        {"call": "save_async", "busy": "skip"},
        {"call": "save_async", "busy": "fail"},
        "busy: 'skip' on rank 0; 'fail' on rank 1",
    ),
}


def save_with(state: Any, root: str, *, call: str = "save", path: str = "c", **options: Any) -> Any:
    if call == "save":
        return holdfast.save(state, f"{root}/{path}", **options)
    return holdfast.save_async(state, f"{root}/{path}", **options).result()


def save_all(rank: int, root: str, is_planned: bool) -> list[Told]:
    """Save with the options of each pair; with ``is_planned`` when such a save was planned."""
    state, found = {"w": weights(1, 1), "own": {"step": 1}}, []
    for number, pair in enumerate(SAVES.values()):
        for own in (0, 1) if is_planned else ():
            save_with(state, root, **pair[own] | {"path": f"good-{number}-{own}"})
        found.append(told(lambda o=pair[rank]: save_with(state, root, **o)))
    return found


@pytest.mark.parametrize("is_planned", [False, True], ids=["new", "planned before"])
def test_options_of_a_save_that_differ_between_ranks_are_named(
    tmp_path: Path, is_planned: bool
) -> None:
    first, second = run_ranks(2, save_all, str(tmp_path), is_planned)
    assert first == second
    for (kind, text), (_, _, expected) in zip(first, SAVES.values(), strict=True):
        assert kind == "OptionError" and expected in text
    assert [name for name in os.listdir(tmp_path) if not name.startswith("good")] == []


def save_with_metrics(rank: int, root: str) -> list[float]:
    deadlines = []
    for number in range(3):
        handle = holdfast.save_async(
            {"w": weights(1, 1)},
            f"{root}/{number}",
            metrics={"loss": rank + 0.5} if rank < 2 else None,
            deadline_s=1800.0 - 600 * rank,
            options=Options(pool_bytes=(32 + 16 * rank) << 20, queue_depth=4 + rank),
        )
        deadlines.append(handle.deadline - time.monotonic())
        handle.result()
    return deadlines


def test_what_a_rank_may_choose_itself_may_differ(tmp_path: Path) -> None:
    """Values of metrics are the coordinator's; the first deadline of any rank is that of all."""
    results = run_ranks(3, save_with_metrics, str(tmp_path))
    assert all(500 < deadline <= 600 for found in results for deadline in found)
    for number in range(3):
        with holdfast.open(tmp_path / str(number)) as checkpoint:
            assert checkpoint.metrics == {"loss": 0.5} and checkpoint.verify() == []


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "root": ({"root": "a"}, {"root": "b"}, "/a' on rank 0; "),
    "keep": ({"keep": Keep.latest(2)}, {}, "keep: 'Keep.latest(2)' on rank 0; 'Keep.all()' on"),
    "every": ({"every": 5}, {"every": 7}, "every: 5 on rank 0; 7 on rank 1"),
    "auto": ({"every": "auto"}, {}, "every: 'auto' on rank 0; None on rank 1"),
    "stage": ({"stage": "sync"}, {"stage": "lazy"}, "stage: 'sync' on rank 0; 'lazy' on rank 1"),
    "busy": ({"busy": "skip"}, {}, "busy: 'skip' on rank 0; 'wait' on rank 1"),
    "codec": ({"codec": "delta"}, {}, "codec: 'delta' on rank 0; 'raw' on rank 1"),
    "signals": ({"signals": ()}, {}, "signals: 'not given' on rank 0; 'given' on rank 1"),
    "the end": ({"ends_in_s": 9e9}, {}, "ends_in_s: 'given' on rank 0; 'not given' on rank 1"),
    "emergency": ({"emergency": True}, {}, "emergency: 'given' on rank 0; 'not given' on rank 1"),
    "the call": ({"call": "step"}, {"call": "restore"}, "call: 'step' on rank 0; 'restore' on"),
    "the step": ({"step": 3}, {"step": 4}, "step: 3 on rank 0; 4 on rank 1"),
}


def run_with(
    place: str, calls: list[str], *, root: str = "a", call: str = "", step: int = 1, **options: Any
) -> list[Told]:
    """Use a new Checkpointer for each call; return the errors."""
    found, state = [], {"w": torch.ones(8)}
    for name in [call] if call else calls:
        with Checkpointer(f"{place}/{root}", **options) as made:
            verbs: dict[str, Any] = {
                "step": lambda made=made: made.step(step, state),
                "save": lambda made=made: made.save(step, state),
                "restore": lambda made=made: made.restore(state, step=step),
                "retire_after": lambda made=made: made.retire_after(step),
            }
            found.append(told(verbs[name]))
    return found


def run_all(rank: int, place: str, calls: list[str]) -> list[list[Told]]:
    return [run_with(place, calls, **pair[rank]) for pair in RUNS.values()]


def test_arguments_of_a_checkpointer_that_differ_between_ranks_are_named(tmp_path: Path) -> None:
    calls = ["step", "save", "restore", "retire_after"]
    first, second = run_ranks(2, run_all, str(tmp_path), calls)
    assert first == second
    for errors, (_, _, expected) in zip(first, RUNS.values(), strict=True):
        assert all(kind == "OptionError" and expected in text for kind, text in errors)
    assert list(tmp_path.iterdir()) == []
