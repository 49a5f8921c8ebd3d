"""Plans used again: by all ranks or by none, and never where something that counts has changed."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
import holdfast.saving.agreement
import holdfast.saving.save
from format.simulated_ranks import run_ranks
from holdfast.errors import PeerError, StateError
from holdfast.options import Options
from holdfast.plan import cached_plans
from holdfast.plan.local_states import LocalState, Values, encode_object, local_state_of
from holdfast.plan.save_plan import plan_save

from .training import same

NewPath = Callable[[], Path]


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    cached_plans.forget_all()
    yield
    cached_plans.forget_all()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grow by one, the number of ranks, whenever a rank plans."""
    made: list[int] = []
    plan_anew = holdfast.saving.agreement.plan_save

    def plan(local_states: list[LocalState], *settings: Any) -> Any:
        made.append(len(local_states))
        return plan_anew(local_states, *settings)

    monkeypatch.setattr(holdfast.saving.agreement, "plan_save", plan)
    return made


def state(rank: int, count: float) -> dict[str, Any]:
    return {
        "w": torch.arange(50_000.0) * count,
        "moments": [torch.full((300,), count), torch.full((300,), -count)],
        "running_mean": torch.full((8,), count + rank),
        "lr": 0.1 * count,
        f"reader.{rank}": {"at": count * 10 + rank},
        f"rng.{rank}": torch.full((16,), int(count) + rank, dtype=torch.uint8),
    }


def save_all(path: Path, states: Mapping[int, Any], **keywords: Any) -> None:
    def save(group: Any) -> None:
        holdfast.save(states[group.rank], path, group=group, **keywords)

    run_ranks(len(states), save)


def test_a_plan_is_used_again_and_every_value_is_new(new_path: NewPath, planned: list[int]) -> None:
    for count in (1.0, 2.0, 3.0):
        path = new_path()
        metrics = {"loss": 1 / count, "worst": float("inf")}
        save_all(path, {r: state(r, count) for r in range(3)}, step=int(count), metrics=metrics)
        checkpoint = holdfast.open(path)
        assert checkpoint.verify() == []
        assert (checkpoint.step, checkpoint.metrics) == (int(count), metrics)
        expected = state(0, count) | state(1, count) | state(2, count)
        assert checkpoint.objects() == {
            "lr": expected["lr"],
            **{f"reader.{rank}.at": count * 10 + rank for rank in range(3)},
        }
        assert same(checkpoint.tensor("w"), expected["w"])
        assert same(checkpoint.tensor("moments.1"), expected["moments"][1])
        assert checkpoint.tensor("running_mean").tolist() == [count] * 8, "that of rank 0"
        assert same(checkpoint.tensor("rng.2"), state(2, count)["rng.2"])
    assert planned == [3, 3, 3], "each rank once"


def test_one_process_uses_its_plan_again(new_path: NewPath, planned: list[int]) -> None:
    for count in (1.0, 2.0):
        path = new_path()
        holdfast.save(state(0, count), path, step=int(count))
        assert holdfast.open(path).objects()["lr"] == 0.1 * count
        assert holdfast.open(path).step == int(count)
    assert planned == [1]


def test_values_are_those_of_the_call(new_path: NewPath) -> None:
    for count in (1, 2):
        values = {"epochs": [count]}
        path = new_path()
        handle = holdfast.save_async({"log": values, "w": torch.ones(1 << 20)}, path)
        values["epochs"].append(99)
        handle.result()
        assert holdfast.open(path).objects()["log.epochs"] == [count]


Change = Callable[[dict[str, Any]], None]
REFUSED: dict[str, tuple[Change, str]] = {
    "a value": (lambda s: s.update(lr=0.3), r"lr is 0\.3 on rank 1, 0\.2 before"),
    "a large replica": (lambda s: s["w"].add_(1), "different values of w"),
    "replicas that changed places": (lambda s: s["moments"].reverse(), ""),
    "a shape": (lambda s: s.update(w=torch.zeros(3)), r"w is f32 \[3\] on rank 1"),
    "a kind": (lambda s: s.update(lr=torch.zeros(3)), "lr"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_ranks_that_come_to_disagree_are_told_so(
    new_path: NewPath, planned: list[int], change: str
) -> None:
    save_all(new_path(), {r: state(r, 1.0) for r in range(2)})
    states = {r: state(r, 2.0) for r in range(2)}
    spoil, text = REFUSED[change]
    spoil(states[1])
    path = new_path()
    if text:
        with pytest.raises(StateError, match=text):
            save_all(path, states)
        assert not path.exists()
    else:  # small floating-point replicas are statistics: rank 0's are kept, once looked at
        save_all(path, states)
        assert same(holdfast.open(path).tensor("moments.0"), states[0]["moments"][0])
    assert len(planned) > 2


def test_what_a_plan_depends_on_makes_a_new_one(new_path: NewPath, planned: list[int]) -> None:
    states = {r: state(r, 1.0) for r in range(2)}
    more = {r: {**s, "more": torch.ones(3)} for r, s in states.items()}
    tied = {r: {**s, "tied": s["w"]} for r, s in states.items()}
    chunks = Options(chunk_elements=1 << 16)
    for variant, keywords in [
        (states, {}),
        (more, {}),
        (tied, {}),
        (states, {"options": chunks}),
        (states, {"options": Options(writers=1)}),
    ]:
        save_all(new_path(), variant, **keywords)
    assert len(planned) == 2 * 5
    for variant in (tied, more):  # those of several states are kept side by side
        path = new_path()
        save_all(path, variant)
        assert holdfast.open(path).verify() == []
    assert len(planned) == 2 * 5


def test_all_plan_when_one_has_to(new_path: NewPath, planned: list[int]) -> None:
    states = {r: state(r, 1.0) for r in range(2)}
    save_all(new_path(), states)
    cached_plans._cached[:] = [kept for kept in cached_plans._cached if kept.key[0] != 1]
    path = new_path()
    save_all(path, states)
    assert planned == [2] * 4
    assert holdfast.open(path).verify() == []


def test_a_word_that_is_too_long_is_told_in_full(new_path: NewPath, planned: list[int]) -> None:
    metrics = {f"metric {i}": float(i) for i in range(100)}
    for _ in range(2):
        path = new_path()
        save_all(path, {r: state(r, 1.0) for r in range(2)}, metrics=metrics)
        assert holdfast.open(path).metrics == metrics
    assert planned == [2] * 4


def test_the_plan_of_a_save_that_failed_is_not_used_again(
    new_path: NewPath, planned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(holdfast.engine.commit.Commit, "publish", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save_all(new_path(), {r: state(r, 1.0) for r in range(2)})
    save_all(new_path(), {r: state(r, 1.0) for r in range(2)})
    assert planned == [2] * 4


def test_a_rank_that_fails_with_a_plan_at_hand_fails_all(new_path: NewPath) -> None:
    save_all(new_path(), {r: state(r, 1.0) for r in range(2)})
    errors: dict[int, BaseException] = {}

    def save(group: Any) -> None:
        odd = {**state(group.rank, 2.0), "lr": object()} if group.rank else state(0, 2.0)
        try:
            holdfast.save(odd, path, group=group)
        except BaseException as error:
            errors[group.rank] = error

    path = new_path()
    run_ranks(2, save)
    assert isinstance(errors[1], StateError)
    assert isinstance(errors[0], PeerError)
    assert errors[0].rank == 1


def test_proofs_add_up_only_where_all_ranks_hold_the_same() -> None:
    chance = random.Random(5)
    for _ in range(200):
        ranks = chance.randint(2, 6)
        values = {(f"v{i}",): i for i in range(chance.randint(1, 8))}
        holders = {p: chance.sample(range(ranks), chance.randint(1, ranks)) for p in values}
        local_states = [
            local_state_of(
                [],
                {},
                None,
                Values(
                    {p: chance.randbytes(16) for p in [("own", rank)]},
                    {p: encode_object(v, p) for p, v in values.items() if rank in holders[p]},
                ),
                "node",
            )
            for rank in range(ranks)
        ]
        plan = plan_save(local_states, 9, 9, "rank")
        made = [
            cached_plans.cacheable((), plan, {}, local_states, rank, [b"all"])
            for rank in range(ranks)
        ]
        assert cached_plans.settled(sums(made, local_states))
        said = [chance.randbytes(9)] * (ranks - 1)
        assert cached_plans.settled(sums(made, local_states, [*said, said[0]]))
        assert not cached_plans.settled(sums(made, local_states, [*said, b"another"]))
        path = chance.choice(list(values))
        rank = chance.choice(holders[path])
        local_states[rank].values.objects[path] = b'"another"'
        assert cached_plans.settled(sums(made, local_states)) == (len(holders[path]) == 1)
        other = cached_plans.cacheable((), plan, {}, local_states, 0, [b"others"])
        assert not cached_plans.settled(sums([other, *made[1:]], local_states))


def sums(
    made: list[cached_plans.CachedPlan],
    local_states: list[LocalState],
    arguments: Sequence[bytes] = (),
) -> list[int]:
    given = arguments or [b""] * len(made)
    said = [
        cached_plans.numbers(k, r, a, {}, busy=False)
        for k, r, a in zip(made, local_states, given, strict=True)
    ]
    return [sum(column) for column in zip(*(numbers or [] for numbers in said), strict=True)]
