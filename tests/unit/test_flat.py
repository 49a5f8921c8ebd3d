"""Optimizers over flat parameters, and of which parameters the state cannot be told apart.

One process: FSDP1 shards nothing there, and has flat parameters all the same.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import holdfast
from holdfast.errors import MismatchError, StateError

from .training import net, same, train

NewPath = Callable[[], Path]
State = dict[str, Any]

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def process_group() -> Iterator[None]:
    """A default process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def flat(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        model, sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
    )


def trained(wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> State:
    model = wrap(net())
    optimizer = optim.Adam(model.parameters(), 0.01)
    train(model, optimizer, range(3))
    return {"model": model, "optimizer": optimizer}


def test_one_flat_parameter_has_the_names_of_those_within(new_path: NewPath) -> None:
    flat_path, plain_path = new_path(), new_path()
    holdfast.save(trained(flat), flat_path)
    holdfast.save(plain := trained(), plain_path)
    one, other = holdfast.open(flat_path), holdfast.open(plain_path)
    assert sorted(one.names()) == sorted(other.names())
    assert all(torch.equal(one.tensor(name), other.tensor(name)) for name in one.names())
    assert one.objects() == other.objects()
    train(plain["model"], plain["optimizer"], range(3, 4))
    holdfast.save(plain, expected := new_path())
    for path in (flat_path, plain_path):
        for state in (trained(flat), trained()):
            for parameter in state["model"].parameters():
                parameter.data.zero_()
            holdfast.load(path, into=state)
            train(state["model"], state["optimizer"], range(3, 4))
            holdfast.save(state, again := new_path())
            found, wanted = holdfast.open(again), holdfast.open(expected)
            for name in wanted.names():
                assert torch.equal(found.tensor(name), wanted.tensor(name)), name


def test_numbers_that_differ_do_not_become_one(new_path: NewPath) -> None:
    path, plain = new_path(), trained()
    plain["optimizer"].state[plain["model"][0].weight]["step"] += 1
    holdfast.save(plain, path)
    with pytest.raises(MismatchError, match=r"optimizer\.state\.0\.weight\.step is .*4.* is .*3"):
        holdfast.load(path, into=trained(flat))


def test_state_that_a_flat_parameter_has_only_in_part_is_refused(new_path: NewPath) -> None:
    path, plain = new_path(), trained()
    del plain["optimizer"].state[plain["model"][0].weight]
    holdfast.save(plain, path)
    into = trained(flat)
    before = {name: value.clone() for name, value in into["model"].named_parameters()}
    with pytest.raises(
        MismatchError, match=r"have different optimizer state.*use_orig_params=True"
    ):
        holdfast.load(path, into=into)
    assert same(dict(into["model"].named_parameters()), before)


def test_a_flat_parameter_without_state_loses_what_it_had(new_path: NewPath) -> None:
    path, plain = new_path(), trained()
    plain["optimizer"].state.clear()
    holdfast.save(plain, path)
    into = trained(flat)
    holdfast.load(path, into=into)
    assert not into["optimizer"].state


def test_state_of_no_parameters_shape_belongs_to_no_parameter(new_path: NewPath) -> None:
    path, state = new_path(), trained(flat)
    (values,) = state["optimizer"].state.values()
    values["factor"] = torch.ones(3, 3)
    with pytest.raises(StateError, match=r"factor has shape \[3, 3\].*Use .*fully_shard"):
        holdfast.save(state, path)
    plain = trained()
    plain["optimizer"].state[plain["model"][0].weight]["exp_avg"] = torch.ones(3, 3)
    holdfast.save(plain, path)
    with pytest.raises(MismatchError, match=r"exp_avg has shape \[3, 3\] in the checkpoint"):
        holdfast.load(path, into=trained(flat))


def test_flat_parameters_of_no_module_are_refused(new_path: NewPath) -> None:
    with pytest.raises(StateError, match="their module is missing in the state; add it"):
        holdfast.save({"optimizer": trained(flat)["optimizer"]}, new_path())


class Remembering(nn.Linear):
    """A module with a state of another form."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_states_and_buffers_come_back(new_path: NewPath) -> None:
    path, model = new_path(), nn.Sequential(Remembering(2, 2), nn.BatchNorm1d(2))
    state = {"model": flat(model)}
    model[0].extra = {"scale": 0.5}
    model[1].running_mean.fill_(7.0)  # type: ignore[operator]
    holdfast.save(state, path)
    model[0].extra = None
    model[1].running_mean.zero_()  # type: ignore[operator]
    holdfast.load(path, into=state)
    assert model[0].extra == {"scale": 0.5}
    assert model[1].running_mean.tolist() == [7.0, 7.0]  # type: ignore[operator]


def test_a_parameter_that_lies_otherwise_in_memory_is_refused(new_path: NewPath) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    with pytest.raises(StateError, match=r"m has 0\.weight .*expected a contiguous"):
        holdfast.save({"m": flat(model)}, new_path())


@pytest.mark.parametrize("wrap", [flat, lambda model: model])
def test_state_that_a_repair_lost_a_part_of_stays_as_it_was(
    new_path: NewPath, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    path, there, saved = new_path(), new_path(), trained()
    holdfast.save(saved, path)
    lost = saved["optimizer"].state[saved["model"][0].bias]["exp_avg"].numpy().tobytes()
    (file,) = path.glob("data/*/*.hf")
    content = bytearray(file.read_bytes())
    content[content.index(lost)] ^= 1
    file.write_bytes(content)
    holdfast.repair(path, to=there)
    model = wrap(net(1))
    state = {"model": model, "optimizer": optim.Adam(model.parameters(), 0.01)}
    report = holdfast.load(there, into=state, strict=False)
    assert report.missing == ("optimizer.state.0.bias.exp_avg",)
    assert report.unexpected == ("repaired by holdfast",)
    # A flat parameter has one state for all that are in it.
    assert len(state["optimizer"].state) == (0 if wrap is flat else 5)
    train(state["model"], state["optimizer"], range(3, 4))
