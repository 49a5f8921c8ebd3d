"""What `holdfast.integrations.deepspeed` knows without DeepSpeed: tags, and who holds what."""

import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import MismatchError, NotCommittedError, OptionError, StateError
from holdfast.group.base import SingleGroup
from holdfast.integrations.adapter import MARK, mark
from holdfast.integrations.deepspeed import attach, tags, zero

NewPath = Callable[[], Path]
GROUP: dict[str, Any] = {"lr": 0.5, "betas": (0.9, 0.99)}


@pytest.fixture(autouse=True)
def _no_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, groups = ModuleType("deepspeed.moe.layer"), ModuleType("deepspeed.utils.groups")
    layer.MoE = type("MoE", (torch.nn.Module,), {})  # type: ignore[attr-defined]
    groups._get_expert_parallel_rank = lambda _: 2  # type: ignore[attr-defined]
    for module in (layer, groups):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def save_tag(root: Path, tag: str, step: int, *, latest: bool = True) -> None:
    state = {"w": torch.full((3,), float(step)), "engine": {"global_steps": step}}
    holdfast.save(state | mark("deepspeed", "0.19.8", latest=latest), root / tag, step=step)


def test_without_deepspeed_the_extra_is_named() -> None:
    with pytest.raises(ImportError, match=r"holdfast-checkpoint\[deepspeed\]"):
        attach(object())


def test_another_version_of_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.17.6")
    with pytest.raises(
        OptionError, match=r"deepspeed 0\.17\.6 is installed; .* 0\.18\.0 to 0\.19\.8"
    ):
        attach(object())


def test_latest_says_which_tag_is_loaded_and_without_it_the_newest(new_path: NewPath) -> None:
    root = new_path()
    assert tags.find(str(root), None, SingleGroup())["kind"] == "none"
    save_tag(root, "a", 1)
    save_tag(root, "b", 2)
    save_tag(root, "aside", 3, latest=False)
    assert tags.find(str(root), None, SingleGroup())["tag"] == "b"
    tags.conclude(str(root / "b"), holdfast.Keep.all(), save_latest=True)
    (root / "latest").write_text("a\n")
    found = tags.find(str(root), None, SingleGroup())
    assert (found["tag"], found["kind"]) == ("a", "holdfast")


def test_a_tag_that_is_not_committed_is_refused_and_others_are_named(new_path: NewPath) -> None:
    root = new_path()
    save_tag(root, "a", 1)
    (root / "b").mkdir()
    with pytest.raises(NotCommittedError, match=r"committed tags in .*: a\. Give one as tag="):
        tags.find(str(root), "b", SingleGroup())
    (root / "b" / "mp_rank_00_model_states.pt").touch()
    assert tags.find(str(root), "b", SingleGroup())["kind"] == "deepspeed"


def test_a_policy_deletes_old_tags_but_not_the_latest_one(new_path: NewPath) -> None:
    root = new_path()
    for step in (1, 2, 3, 4):
        save_tag(root, f"t{step}", step)
    holdfast.save({"w": torch.zeros(2)}, root / "other")
    (root / "latest").write_text("t1")
    tags.conclude(str(root / "t4"), holdfast.Keep.latest(2), save_latest=False)
    assert sorted(p.name for p in root.iterdir()) == ["latest", "other", "t1", "t3", "t4"]
    tags.conclude(str(root / "t4"), holdfast.Keep.latest(1), save_latest=True)
    assert sorted(p.name for p in root.iterdir()) == ["latest", "other", "t4"]
    assert (root / "latest").read_text() == "t4"


def test_deltas_go_before_their_bases_and_a_killed_deletion_is_finished(new_path: NewPath) -> None:
    root, delta = new_path(), holdfast.codecs.Delta(every=3)
    value = torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    for step in range(1, 5):  # 2 and 3 are made from those before them; 4 is whole
        value[step] += 1.0
        state = {"w": value, "engine": {"global_steps": step}}
        holdfast.save(state | mark("deepspeed", "0.19.8"), root / f"t{step}", codec=delta)
    save_tag(root, "t0", 0)
    (root / "t0" / ".manifest-leaving-0123456789abcdef").hardlink_to(root / "t0" / "MANIFEST")
    (root / "t0" / "MANIFEST").unlink()
    tags.conclude(str(root / "t4"), holdfast.Keep.latest(1), save_latest=False)
    assert [path.name for path in root.iterdir()] == ["t4"]


def test_an_invalid_option_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.19.8")
    kept: Any = 3
    with pytest.raises(OptionError, match=r"keep is 3; expected a policy, such as keep=holdfast"):
        attach(object(), keep=kept)
    with pytest.raises(OptionError, match="codec is 'losless'; expected one of"):
        attach(object(), codec="losless")


def partitions(rank: int, ranks: int) -> Any:
    """Return an engine that holds a part of two parameters as ZeRO-1 does."""
    model = torch.nn.Linear(3, 4)
    params = [model.weight, model.bias]
    size = -(-16 // ranks)
    flat = torch.arange(size * rank, size * (rank + 1), dtype=torch.float32)
    at = 0
    for param in params:
        first, end = max(at, size * rank), min(at + param.numel(), size * (rank + 1))
        inside = SimpleNamespace(start=first - at, numel=end - first)
        there = SimpleNamespace(start=first - size * rank, numel=end - first)
        found = SimpleNamespace(lp_fragment_address=inside, hp_fragment_address=there)
        param._hp_mapping = found if first < end else None  # type: ignore[attr-defined]
        at += param.numel()
    inner = SimpleNamespace(state={}, param_groups=[{**GROUP}])
    optimizer = SimpleNamespace(
        optimizer=inner, bit16_groups=[params], single_partition_of_fp32_groups=[flat]
    )
    return SimpleNamespace(module=model, optimizer=optimizer)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_pieces_of_all_ranks_make_whole_parameters(ranks: int) -> None:
    weight, bias = torch.full((12,), -1.0), torch.full((4,), -1.0)
    for rank in range(ranks):
        for piece in zero.pieces_of(partitions(rank, ranks)):
            shard: Any = piece.of(piece.flat)
            whole = {"weight": weight, "bias": bias}[piece.name]
            whole[shard.start : shard.start + len(shard.data)] = shard.data
    assert torch.equal(torch.cat([weight, bias]), torch.arange(16.0))


def test_moments_come_back_in_the_form_in_which_an_optimizer_counts() -> None:
    (piece, _) = zero.pieces_of(engine := partitions(0, 1))
    inner = engine.optimizer.optimizer
    inner.state[piece.flat] = {"step": 7, "exp_avg": piece.flat * 2}
    saved = zero.moments_of(piece, inner)
    assert saved["step"].item() == 7 and saved["exp_avg"].start == 0
    assert torch.equal(saved["exp_avg"].data, torch.arange(12.0) * 2)
    zero.put_numbers([piece], inner, {"weight": {"step": torch.tensor(9.0)}})
    assert inner.state[piece.flat]["step"] == 9 and type(inner.state[piece.flat]["step"]) is int
    inner.state[piece.flat]["step"] = torch.tensor(1.0)
    zero.put_numbers([piece], inner, {"weight": {"step": torch.tensor(9.0)}})
    assert torch.equal(inner.state[piece.flat]["step"], torch.tensor(9.0))


def test_state_that_does_not_lie_as_the_weights_is_refused() -> None:
    (piece, _) = zero.pieces_of(engine := partitions(0, 2))
    inner = engine.optimizer.optimizer
    inner.state[piece.flat] = {"row": torch.zeros(5)}
    with pytest.raises(StateError, match=r"optimizer\.state\.weight\.row has the shape \[5\]"):
        zero.moments_of(piece, inner)
    with pytest.raises(MismatchError, match=r"is saved in the shape \[5\]"):
        zero.targets_of(piece, inner, {"row": (5,)}, {"row": torch.float32})


def test_parameters_of_one_partition_with_other_steps_or_options_are_refused() -> None:
    pieces = zero.pieces_of(engine := partitions(0, 1))
    inner, one, other = engine.optimizer.optimizer, torch.tensor(1.0), torch.tensor(2.0)
    with pytest.raises(MismatchError, match=r"one state for weight and bias"):
        zero.put_numbers(pieces, inner, {"weight": {"step": one}, "bias": {"step": other}})
    with pytest.raises(MismatchError, match=r"weight and bias are in one parameter group"):
        zero.put_options(pieces, {"weight": {"lr": 1.0}, "bias": {"lr": 2.0}})
    zero.put_options(pieces, {"weight": {"lr": 1.0}, "bias": {"lr": 1.0}})
    assert inner.param_groups[0]["lr"] == 1.0


def test_missing_state_is_created_where_a_checkpoint_has_it() -> None:
    (piece, _) = zero.pieces_of(engine := partitions(1, 2))
    inner = engine.optimizer.optimizer
    inner.state[piece.flat] = {}
    shapes, dtypes = {"exp_avg": (4, 3), "step": ()}, {"exp_avg": torch.bfloat16}
    target = zero.targets_of(piece, inner, shapes, dtypes | {"step": torch.float32})
    held = inner.state[piece.flat]["exp_avg"]
    assert held.dtype is torch.bfloat16 and held.shape == piece.flat.shape
    target["exp_avg"].data.fill_(3)
    assert int(held.sum()) == 3 * piece.count


def test_experts_are_named_by_their_numbers_in_the_whole_model() -> None:
    layer: Any = sys.modules["deepspeed.moe.layer"].MoE()  # type: ignore[attr-defined]
    layer.num_local_experts, layer.expert_group_name = 3, "ep"
    layer.deepspeed_moe = torch.nn.Module()
    layer.deepspeed_moe.experts = torch.nn.Module()
    layer.deepspeed_moe.experts.deepspeed_experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    engine = SimpleNamespace(module=torch.nn.Sequential(torch.nn.Linear(2, 2), layer))
    names = [*zero.names_of(engine)]
    assert names[:2] == ["0.weight", "0.bias"]
    assert names[2] == "1.deepspeed_moe.experts.deepspeed_experts.6.weight"


def test_what_the_engine_does_not_describe_is_refused() -> None:
    engine = SimpleNamespace(
        mp_world_size=4, grid=None, module=torch.nn.Linear(1, 1), zenflow=False
    )
    with pytest.raises(OptionError, match="tensor parallelism over 4 ranks"):
        zero.check_engine(engine)


def test_the_mark_of_a_checkpoint_names_the_framework(new_path: NewPath) -> None:
    root = new_path()
    save_tag(root, "a", 1)
    assert holdfast.open(root / "a").objects()[f"{MARK}.name"] == "deepspeed"
