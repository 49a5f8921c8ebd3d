"""What DCP does with states, as its documentation says and frameworks use it."""

import dataclasses
import enum
import io
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import (
    _load_state_dict,
    _load_state_dict_from_keys,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from .stage import NAMED, REFUSED, Stage, behaviour

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8]
DTYPES += [torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2]


def weights() -> dict[str, Any]:
    return {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(4, dtype=torch.bfloat16)}


def zeros(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: zeros(value)
        if isinstance(value, dict)
        else torch.zeros_like(value)
        if isinstance(value, torch.Tensor)
        else None
        for key, value in state.items()
    }


class Net(nn.Module):
    """A model with a buffer, and a name in two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(batch))


def trained(steps: int) -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    torch.manual_seed(9)
    for _ in range(steps):
        model(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
    return model, optimizer


class Counter:
    """A Stateful of the user's."""

    def __init__(self, count: int) -> None:
        self.count, self.calls = count, [""][:0]

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("state_dict")
        return {"count": self.count, "history": torch.arange(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")
        self.count = state["count"]


@behaviour("tensors are filled in place, bit for bit")
def in_place(stage: Stage) -> Any:
    state = weights()
    stage.save(state)
    into = zeros(state)
    before = {key: value.data_ptr() for key, value in into.items()}
    stage.load(into)
    return into, [into[key].data_ptr() == before[key] for key in into]


@behaviour("every dtype comes back")
def dtypes(stage: Stage) -> Any:
    state = {str(dtype): torch.arange(5).to(dtype) for dtype in DTYPES}
    stage.save(state)
    return stage.load(zeros(state))


@behaviour("nested dicts and lists, scalars and tensors without elements")
def nested(stage: Stage) -> Any:
    state = {
        "a": {"b": [torch.ones(2), {"c": torch.tensor(2.5)}], "empty": torch.zeros(0, 3)},
        "list": [1, [2, "three"]],
    }
    stage.save(state)
    into = {
        "a": {"b": [torch.zeros(2), {"c": torch.zeros(())}], "empty": torch.zeros(0, 3)},
        "list": [None, [None, None]],
    }
    return stage.load(into)


@behaviour("plain values replace those of the state: None, bool, int, float, text, bytes, tuple")
def plain_values(stage: Stage) -> Any:
    state = {
        **{"none": None, "yes": True, "n": 7, "big": 1 << 70, "x": 0.1, "nan": float("nan")},
        **{"text": "é", "bytes": b"\0\xff", "pair": (1, (2.5, "x")), "c": 1 + 2j, "list": [1, 2]},
    }
    stage.save(state)
    return stage.load(dict.fromkeys(state, "old"))


@behaviour("keys that are integers, or have dots")
def odd_keys(stage: Stage) -> Any:
    state = {"opt": {0: torch.ones(2), 1: {"a.b": torch.ones(1), "n": 5}}, "x.y": torch.ones(3)}
    stage.save(state)
    into = {"opt": {0: torch.zeros(2), 1: {"a.b": torch.zeros(1), "n": 0}}, "x.y": torch.zeros(3)}
    return stage.load(into)


@behaviour("targets that are transposed, strided or views")
def strided(stage: Stage) -> Any:
    state = {"t": torch.arange(12.0).reshape(3, 4), "v": torch.arange(5.0)}
    stage.save({"t": state["t"].t().contiguous().t(), "v": torch.arange(10.0)[::2] / 2})
    whole = torch.zeros(4, 3)
    return stage.load({"t": whole.t(), "v": torch.zeros(10)[::2]}), whole


@behaviour("parameters that require gradients are filled")
def parameters(stage: Stage) -> Any:
    model, _ = trained(2)
    stage.save({"model": model.state_dict()})
    other = Net()
    stage.load({"model": other.state_dict()})
    return dict(other.named_parameters()), dict(other.named_buffers())


@behaviour("one tensor under two names comes back under both")
def tied(stage: Stage) -> Any:
    shared = torch.arange(4.0)
    stage.save({"a": shared, "b": shared})
    return stage.load({"a": torch.zeros(4), "b": torch.zeros(4)})


@behaviour("a Stateful is asked for its state, and given it back")
def stateful(stage: Stage) -> Any:
    saved, loaded = Counter(41), Counter(0)
    stage.save({"counter": saved})
    stage.load({"counter": loaded})
    return saved.calls, loaded.calls, loaded.count


@behaviour("a model and its optimizer resume by get_state_dict and set_state_dict")
def resumes(stage: Stage) -> Any:
    model, optimizer = trained(3)
    parts = get_state_dict(model, optimizer)
    stage.save({"model": parts[0], "optim": parts[1]})
    other, fresh = trained(0)
    parts = get_state_dict(other, fresh)
    state = stage.load({"model": parts[0], "optim": parts[1]})
    set_state_dict(other, fresh, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return other.state_dict(), fresh.state_dict()


@behaviour("the same with flatten_optimizer_state_dict")
def resumes_flat(stage: Stage) -> Any:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = trained(3)
    parts = get_state_dict(model, optimizer, options=options)
    stage.save({"model": parts[0], "optim": parts[1]})
    other, fresh = trained(0)
    parts = get_state_dict(other, fresh, options=options)
    state = stage.load({"model": parts[0], "optim": parts[1]})
    set_state_dict(
        other,
        fresh,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=options,
    )
    return other.state_dict(), fresh.state_dict()


@behaviour("a part of the state is loaded by itself")
def partial(stage: Stage) -> Any:
    stage.save({"model": weights(), "optim": {"m": torch.ones(2)}, "n": 1})
    return stage.load({"model": {"w": torch.zeros(3, 4)}})


@behaviour("a key that the checkpoint lacks is an error")
def missing_key(stage: Stage) -> Any:
    stage.save(weights())
    return stage.load({"other": torch.zeros(2)})


@behaviour("allow_partial_load leaves what the checkpoint lacks as it is")
def allow_partial(stage: Stage) -> Any:
    stage.save(weights())
    into = {"w": torch.zeros(3, 4), "other": torch.full((2,), 3.0), "n": 5}
    return stage.load(into, planner=DefaultLoadPlanner(allow_partial_load=True))


@behaviour("a tensor of another shape is an error")
def other_shape(stage: Stage) -> Any:
    stage.save(weights())
    return stage.load({"w": torch.zeros(4, 4)})


@behaviour(
    "a tensor of another dtype is converted without a word",
    REFUSED,
    why="MismatchError; `cast` converts",
)
def other_dtype(stage: Stage) -> Any:
    stage.save(weights())
    return stage.load({"w": torch.zeros(3, 4, dtype=torch.float64)})


@behaviour("the same with `cast`", options={"cast": True})
def other_dtype_cast(stage: Stage) -> Any:
    stage.save(weights())
    return stage.load({"w": torch.zeros(3, 4, dtype=torch.float64)})


class Odd:
    """A class of the user's, which only a pickle keeps."""

    def __init__(self) -> None:
        self.a = 1

    def __repr__(self) -> str:
        return f"Odd({self.a})"


@behaviour(
    "objects of other classes are pickled",
    REFUSED,
    why="StateError that names them; `pickled` keeps them as pickles",
)
def objects(stage: Stage) -> Any:
    stage.save({"w": torch.ones(2), "odd": Odd()})
    return stage.load({"w": torch.zeros(2), "odd": None})


@behaviour("the same with `pickled`", options={"pickled": True})
def objects_pickled(stage: Stage) -> Any:
    stage.save({"w": torch.ones(2), "odd": Odd()})
    return stage.load({"w": torch.zeros(2), "odd": None})


PLAIN = [
    *(bytearray(b"ab"), torch.Size([2]), torch.bfloat16, torch.device("cpu"), {1, 2}),
    *(frozenset("a"), range(3), deque([1], 4), OrderedDict(b=1), defaultdict(list, {"a": [1]})),
    *(PosixPath("a/b"), datetime(2024, 1, 2), date(2024, 1, 2), timedelta(1), Decimal("1.5")),
    *(Fraction(1, 3), Namespace(a=1), np.float64(0.1), np.arange(4)),
]


@behaviour("plain data of Python, numpy and torch: sets, dates, paths, sizes, arrays, …")
def plain_data(stage: Stage) -> Any:
    state = {"w": torch.ones(2), **{type(value).__name__: value for value in PLAIN}}
    stage.save(state)
    return stage.load({"w": torch.zeros(2), **dict.fromkeys(list(state)[1:], "old")})


class Colour(enum.Enum):
    """An enumeration of the user's."""

    RED = "r"


class Pair(NamedTuple):
    """A tuple of the user's."""

    a: int
    b: str


@behaviour(
    "members of enumerations, and dataclasses",
    NAMED,
    why="`Tagged`, but for classes given as `types`; exact with `pickled`",
)
def members(stage: Stage) -> Any:
    stage.save({"w": torch.ones(2), "colour": Colour.RED})
    return stage.load({"w": torch.zeros(2), "colour": None})


@behaviour("the same with `types`", options={"types": (Colour,)})
def members_given(stage: Stage) -> Any:
    stage.save({"w": torch.ones(2), "colour": Colour.RED})
    return stage.load({"w": torch.zeros(2), "colour": None})


@behaviour("subclasses of plain types, such as a NamedTuple", NAMED, why="their base type")
def subclasses(stage: Stage) -> Any:
    stage.save({"w": torch.ones(2), "pair": Pair(1, "x")})
    return stage.load({"w": torch.zeros(2), "pair": None})


@behaviour("an empty planner loads the whole checkpoint")
def whole(stage: Stage) -> Any:
    stage.save({"model": weights(), "list": [torch.ones(2), {"n": 5}], "n": 1})
    state: dict[str, Any] = {}
    reader = dcp.FileSystemReader(stage.path())
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    return state


@behaviour(
    "an empty planner returns keys in the order of the state",
    NAMED,
    why="tensors first, each by name",
)
def order(stage: Stage) -> Any:
    stage.save({"z": 1, "b": torch.ones(1), "a": torch.ones(1)})
    return list(_load_state_dict_from_keys(checkpoint_id=stage.path()))


@behaviour("an empty planner loads the keys that it is given")
def from_keys(stage: Stage) -> Any:
    stage.save({"model": weights(), "optim": {"m": torch.ones(2)}, "n": 1})
    return _load_state_dict_from_keys({"model"}, checkpoint_id=stage.path())


class Renaming(DefaultSavePlanner):
    """That of DCP's documentation: adds a prefix to all keys."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        renamed = {f"foo_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class Halving(DefaultSavePlanner):
    """That of DCP's documentation: saves floats as float16."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        return found if isinstance(found, io.BytesIO) else found.to(torch.float16)


class Stripping(DefaultLoadPlanner):
    """That of DCP's documentation: finds keys under another prefix."""

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        self.original = state_dict
        renamed = {f"foo_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, metadata, is_coordinator)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn.removeprefix("foo_")
        self.original[key] = torch.load(value, weights_only=False)


@behaviour("planners that rename keys, as in DCP's documentation")
def renamed(stage: Stage) -> Any:
    stage.save({**weights(), "n": 3}, planner=Renaming())
    return stage.load({**zeros(weights()), "n": 0}, planner=Stripping())


@behaviour("a planner that saves another dtype, as in DCP's documentation")
def halved(stage: Stage) -> Any:
    stage.save({"w": torch.arange(6.0), "n": 3}, planner=Halving())
    return stage.load({"w": torch.zeros(6, dtype=torch.float16), "n": 0})


@behaviour("a planner that adds a value to the plan, as in DCP's documentation")
def extra(stage: Stage) -> Any:
    class Adding(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            return plans, dataclasses.replace(metadata)

    stage.save(weights(), planner=Adding() if stage.way != "process" else None)
    return stage.load(zeros(weights()))


@behaviour("flatten_state_dict=False keeps dicts as values", ways=("sync", "thread"))
def unflattened(stage: Stage) -> Any:
    state = {"w": torch.ones(3), "hyper": {"lr": 0.1, "betas": [0.9, 0.95]}}
    stage.save(state, planner=DefaultSavePlanner(flatten_state_dict=False))
    into = {"w": torch.zeros(3), "hyper": {}}
    return stage.load(into, planner=DefaultLoadPlanner(flatten_state_dict=False))


@behaviour("plans are cached, and used again at the next save")
def cached(stage: Stage) -> Any:
    found = []
    for number in range(3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        stage.save(
            {"w": torch.full((4,), float(number)), "n": number}, f"{number}", planner=planner
        )
        found.append(stage.load({"w": torch.zeros(4), "n": None}, f"{number}"))
    return found


@behaviour("dedup_save_to_lowest_rank")
def lowest(stage: Stage) -> Any:
    stage.save(weights(), planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    return stage.load(zeros(weights()))


@behaviour("DTensors are saved by shards, and loaded into another layout")
def resharded(stage: Stage) -> Any:
    mesh = init_device_mesh("cpu", (stage.ranks,))
    whole_tensor = torch.arange(35.0).reshape(7, 5)
    stage.save({"w": distribute_tensor(whole_tensor, mesh, [Shard(0)])})
    by_column = distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)])
    everywhere = distribute_tensor(torch.zeros(7, 5), mesh, [Replicate()])
    found = [stage.load({"w": into})["w"] for into in (by_column, everywhere, torch.zeros(7, 5))]
    return [type(each) is DTensor for each in found], found


@behaviour("each rank has keys of its own", ranks=(2,))
def own_keys(stage: Stage) -> Any:
    mine = f"rank{stage.rank}"
    stage.save({"w": torch.ones(2), mine: torch.full((3,), float(stage.rank))})
    return stage.load({"w": torch.zeros(2), mine: torch.zeros(3)})


@behaviour("a model's state is gathered from, and given to, a wrapped model")
def model_only(stage: Stage) -> Any:
    model, _ = trained(1)
    stage.save({"app": {"model": get_model_state_dict(model)}})
    return stage.load({"app": {"model": zeros(get_model_state_dict(Net()))}})
