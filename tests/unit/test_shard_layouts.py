"""Layouts of frameworks, told by `holdfast.Shard`: FSDP2-like boxes, ZeRO-1, -2 and -3, N → M.

Ranks are simulated. What they hold is cut from one trained net and its optimizer; every checkpoint
also loads into a real module and a real optimizer, and training goes on as if it had not stopped.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import holdfast

from .test_shards import blank, flattened, joined, load, save
from .training import net, train

NewPath = Callable[[], Path]
State = dict[str, Any]
Dense = dict[str, torch.Tensor]
Layout = Callable[[Dense, int], list[State]]
COUNTS = range(1, 9)


def trained() -> tuple[nn.Module, optim.Optimizer]:
    model = net()
    optimizer = optim.AdamW(model.parameters(), 0.01)
    train(model, optimizer, range(3))
    return model, optimizer


def dense_state(model: nn.Module, optimizer: optim.Optimizer) -> tuple[Dense, State]:
    """Return the tensors that frameworks shard, by name, and all else, which every rank has."""
    parameters = dict(model.named_parameters())
    sharded = {f"model.{name}": value.detach() for name, value in parameters.items()}
    rest = {f"model.{name}": value for name, value in model.named_buffers()}
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    for name, parameter in parameters.items():
        rest[f"optimizer.param_groups.{name}"] = options
        for key, value in optimizer.state[parameter].items():
            part = rest if key == "step" else sharded
            part[f"optimizer.state.{name}.{key}"] = value
    return sharded, rest


def rows(dense: Dense, ranks: int) -> list[State]:
    """As FSDP2: rows of every tensor, as many for each rank, less for the last ones."""
    states: list[State] = [{} for _ in range(ranks)]
    for name, tensor in dense.items():
        count = -(-len(tensor) // ranks)
        for rank, state in enumerate(states):
            part, first = tensor[rank * count : (rank + 1) * count], min(rank * count, len(tensor))
            offset = (first, *(0 for _ in tensor.shape[1:]))
            state[name] = holdfast.Shard(part.clone(), tensor.shape, offset=offset)
    return states


def zero_1(dense: Dense, ranks: int) -> list[State]:
    """Parameters whole on every rank; of the optimizer's state, flattened, a run."""
    model = {name: value for name, value in dense.items() if name.startswith("model.")}
    moments = {name: value for name, value in dense.items() if name not in model}
    copies = [{name: value.clone() for name, value in model.items()} for _ in range(ranks)]
    return [mine | runs for mine, runs in zip(copies, flattened(moments, ranks), strict=True)]


def zero_3(dense: Dense, ranks: int) -> list[State]:
    """Of every tensor by itself, flattened, a run; the last ranks may have nothing."""
    each = [flattened({name: tensor}, ranks) for name, tensor in dense.items()]
    return [{k: v for states in each for k, v in states[rank].items()} for rank in range(ranks)]


LAYOUTS: dict[str, Layout] = {"FSDP2": rows, "ZeRO-1": zero_1, "ZeRO-3": zero_3}


def nested(flat: State) -> State:
    """Open the names as holdfast does those of modules and optimizers; parameters' have dots."""
    state: State = {"model": {}, "optimizer": {"state": {}, "param_groups": {}}}
    for name, value in flat.items():
        room, _, rest = name.partition(".")
        if room == "model":
            state["model"][rest] = value
        elif rest.startswith("param_groups."):
            state["optimizer"]["param_groups"][rest.removeprefix("param_groups.")] = value
        else:
            parameter, _, key = rest.removeprefix("state.").rpartition(".")
            state["optimizer"]["state"].setdefault(parameter, {})[key] = value
    return state


def check_load(path: Path, sharded: Dense, rest: State, layout: str, ranks: int) -> None:
    """Load on so many ranks of a layout; compare every tensor with the dense one."""
    into = blank(LAYOUTS[layout](sharded, ranks))
    counters = {name: torch.zeros_like(v) for name, v in rest.items() if hasattr(v, "shape")}
    load(path, [nested(state | rest | counters) for state in into])
    for name, tensor in sharded.items():
        whole = not isinstance(into[0][name], holdfast.Shard)
        found = [state[name] for state in into] if whole else [joined(into, name, tensor)]
        assert all(torch.equal(value, tensor) for value in found), (layout, ranks, name)
    assert all(torch.equal(value, rest[name]) for name, value in counters.items())


@pytest.mark.parametrize("writers", COUNTS)
def test_every_number_of_ranks_loads_what_any_other_has_saved(
    new_path: NewPath, writers: int
) -> None:
    path = new_path()
    sharded, rest = dense_state(*trained())
    save([nested(state | rest) for state in rows(sharded, writers)], path)
    for readers in COUNTS:
        check_load(path, sharded, rest, "FSDP2", readers)


@pytest.mark.parametrize(("layout", "writers"), [("ZeRO-1", 3), ("ZeRO-3", 5), ("FSDP2", 7)])
def test_the_stages_of_zero_load_each_other_and_a_real_optimizer(
    new_path: NewPath, layout: str, writers: int
) -> None:
    path, model = new_path(), trained()
    sharded, rest = dense_state(*model)
    save([nested(state | rest) for state in LAYOUTS[layout](sharded, writers)], path)
    for other, readers in [("FSDP2", 2), ("ZeRO-1", 4), ("ZeRO-3", 3), ("ZeRO-3", 8)]:
        check_load(path, sharded, rest, other, readers)

    resumed = net(seed=1)
    again = optim.AdamW(resumed.parameters(), 0.5)
    holdfast.load(path, into={"model": resumed, "optimizer": again})
    train(*model, range(3, 5))
    train(resumed, again, range(3, 5))
    for name, value in model[0].state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
