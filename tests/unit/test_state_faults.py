"""States that once went wrong in silence: mixtures, wrong texts, dropped state, freed memory."""

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast
from format.simulated_ranks import run_ranks
from holdfast.errors import MismatchError, StateError
from holdfast.format.values import encode_value
from holdfast.layout import Box, Tensor
from holdfast.layout import Path as StatePath
from holdfast.plan import dedup
from holdfast.plan.local_states import encode_object
from holdfast.state.target import Source, bind
from holdfast.state.tensors import local_tensor
from holdfast.state.tree import flatten

from .training import net, same, train

NewPath = Callable[[], Path]
FLOATS = 32 << 10  # 128 KiB in f32: more than ranks compare byte by byte


class Mode(str, enum.Enum):  # noqa: UP042 - what programs have, and its str() is 'Mode.A'
    A = "a"


class Level(enum.IntEnum):
    LOW = 3


class Half(float, enum.Enum):
    HALF = 0.5


def source_of(tensors: dict[StatePath, tuple[str, tuple[int, ...]]], **objects: Any) -> Source:
    """Offer tensors by path, and the options of parameter 0 of ``optimizer``."""
    found = {path: Tensor(path, dtype, shape) for path, (dtype, shape) in tensors.items()}
    return Source(found, {("optimizer", "param_groups", 0): {"lr": 0.1} | objects})


def saved(new_path: NewPath, state: dict[str, Any]) -> Path:
    path = new_path()
    holdfast.save(state, path)
    return path


def test_one_memory_is_not_filled_from_two_tensors(new_path: NewPath) -> None:
    path = saved(new_path, {"a": torch.ones(3), "b": torch.zeros(3)})
    tied = torch.full((3,), 7.0)
    with pytest.raises(MismatchError, match="a and b share memory in the target"):
        holdfast.load(path, into={"a": tied, "b": tied})
    assert tied.tolist() == [7.0] * 3


def test_one_memory_takes_one_tensor_under_two_names(new_path: NewPath) -> None:
    one = torch.ones(3)
    path = saved(new_path, {"a": one, "b": one})
    tied = torch.zeros(3)
    holdfast.load(path, into={"a": tied, "b": tied})
    assert same(tied, one)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Mode.A, "a"),
        (Level.LOW, 3),
        (Half.HALF, 0.5),
        (np.str_("t"), "t"),
    ],
)
def test_a_value_of_a_subclass_is_saved_as_the_plain_value(value: Any, plain: Any) -> None:
    encoded = encode_value([value, {value: value}], ("v",))
    assert same(encoded, encode_value([plain, {plain: plain}], ("v",)))
    assert same(encoded[0], plain)


def test_keys_that_are_enumerations_are_plain_in_a_checkpoint(new_path: NewPath) -> None:
    def state(rate: float) -> dict[str, Any]:
        models = {Mode.A: nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)}
        optimizer = optim.SGD(
            [weight for model in models.values() for weight in model.parameters()]
        )
        return {"models": models, "optimizer": optimizer, "values": {Level.LOW: rate}}

    source, target = state(0.5), state(0.25)
    path = saved(new_path, source)
    objects = holdfast.open(path).objects()
    assert "optimizer.param_groups.models.a.weight" in objects
    assert objects["values.3"] == 0.5
    holdfast.load(path, into=target)
    assert same(target["models"][Mode.A].weight, source["models"][Mode.A].weight)
    assert target["values"] == {Level.LOW: 0.5}


def test_optimizer_state_of_no_parameter_comes_back(new_path: NewPath) -> None:
    model = net()
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, range(2))
    optimizer.state["global"] = {"count": 5, "scale": torch.ones(2)}  # type: ignore[index]
    path = saved(new_path, {"model": model, "optimizer": optimizer})
    resumed = net(seed=1)
    again = optim.Adam(resumed.parameters())
    holdfast.load(path, into={"model": resumed, "optimizer": again})
    assert same(again.state_dict(), optimizer.state_dict())
    assert again.state["global"]["count"] == 5  # type: ignore[index]


def test_state_of_no_parameter_that_the_checkpoint_lacks_is_dropped(new_path: NewPath) -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = optim.SGD([weight], 0.5)
    path = saved(new_path, {"optimizer": optimizer})
    optimizer.state["global"] = {"count": 5}  # type: ignore[index]
    holdfast.load(path, into={"optimizer": optimizer})
    assert not optimizer.state


def test_hooks_of_an_optimizer_are_called(new_path: NewPath) -> None:
    def hooked() -> tuple[optim.Optimizer, list[Any]]:
        optimizer, extra = optim.SGD([torch.ones(2)], 0.5), []
        optimizer.register_state_dict_post_hook(lambda _, state: state | {"extra": 3})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: extra.append(state["extra"]))
        return optimizer, extra

    path = saved(new_path, {"optimizer": hooked()[0]})
    target, extra = hooked()
    holdfast.load(path, into={"optimizer": target})
    assert extra == [3]


def test_hooks_are_not_given_state_by_names(new_path: NewPath) -> None:
    path = saved(new_path, {"optimizer": optim.SGD([torch.ones(2)], 0.5)})
    target = optim.SGD([torch.ones(2)], 0.5)
    target.register_load_state_dict_pre_hook(lambda _, state: None)
    with pytest.raises(MismatchError, match="optimizer was saved by its parameters' names"):
        holdfast.load(path, into={"optimizer": target})


def test_options_that_are_no_dict_are_not_taken(new_path: NewPath) -> None:
    path = saved(new_path, {"optimizer": {"param_groups": {0: 5}}})
    with pytest.raises(
        MismatchError, match=r"missing in the checkpoint: optimizer\.param_groups\.0"
    ):
        holdfast.load(path, into={"optimizer": optim.SGD([torch.ones(2)], 0.5)})


def test_a_group_without_parameters_keeps_its_options(new_path: NewPath) -> None:
    def groups(rate: float) -> optim.Optimizer:
        return optim.SGD([{"params": [torch.ones(2)]}, {"params": [], "lr": rate}], 0.5)

    path = saved(new_path, {"optimizer": groups(0.25)})
    target = groups(0.75)
    holdfast.load(path, into={"optimizer": target})
    assert target.param_groups[1]["lr"] == 0.25


def test_state_of_a_tensor_in_no_group_is_refused() -> None:
    optimizer = optim.SGD([torch.ones(2)], 0.5)
    optimizer.state[torch.ones(3)] = {"momentum_buffer": torch.ones(3)}
    with pytest.raises(StateError, match=r"optimizer holds state of tensors .* \[3\]"):
        flatten({"optimizer": optimizer})


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float64), (torch.float32, torch.bfloat16)]
)
def test_cast_optimizer_state_takes_a_step(
    new_path: NewPath, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    before, after = dtypes
    model = nn.Linear(4, 2, dtype=before)
    optimizer = optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.ones(1, 4, dtype=before)).sum().backward()
    optimizer.step()
    path = saved(new_path, {"model": model, "optimizer": optimizer})
    resumed = nn.Linear(4, 2, dtype=after)
    again = optim.AdamW(resumed.parameters(), amsgrad=True)
    holdfast.load(path, into={"model": resumed, "optimizer": again}, cast=True)
    state = again.state[resumed.weight]
    assert (state["exp_avg"].dtype, state["step"].dtype) == (after, torch.float32)
    resumed(torch.ones(1, 4, dtype=after)).sum().backward()
    again.step()


def test_moments_of_another_dtype_than_their_parameter_keep_it() -> None:
    model = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    weight, moment = ("model", "weight"), ("optimizer", "state", "weight", "exp_avg")
    source = source_of({weight: ("bf16", (2, 2)), moment: ("f32", (2, 2))})
    source.objects["optimizer", "param_groups", "weight"] = {"lr": 0.1}  # type: ignore[index]
    target = bind({"model": model, "optimizer": optim.Adam(model.parameters())}, source)
    assert target.tensors[moment].data.dtype == torch.float32


@pytest.mark.parametrize("capturable", [True, False])
def test_the_step_counter_lies_where_the_loaded_options_want_it(capturable: bool) -> None:
    weight = torch.ones(3, device="meta")
    optimizer = optim.Adam([weight], capturable=not capturable)
    step = ("optimizer", "state", 0, "step")
    source = source_of({step: ("f32", ())}, capturable=capturable)
    if capturable:  # on the parameter's device, which here is one that has no elements
        with pytest.raises(StateError, match="meta device"):
            bind({"optimizer": optimizer}, source)
    else:
        optimizer.state[weight] = {"step": torch.zeros((), device="meta")}
        assert bind({"optimizer": optimizer}, source).tensors[step].data.device.type == "cpu"


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"])
def test_a_moment_of_another_shape_than_its_parameter_does_not_fit(key: str) -> None:
    moment = ("optimizer", "state", 0, key)
    target = bind({"optimizer": optim.SGD([torch.ones(3)])}, source_of({moment: ("f32", (4,))}))
    assert target.conflicts == [
        f"optimizer.state.0.{key} has shape [4] in the checkpoint, "
        "and its parameter [3] in the target"
    ]


def test_factors_may_have_shapes_of_their_own() -> None:
    factor = ("optimizer", "state", 0, "row_var")
    target = bind({"optimizer": optim.SGD([torch.ones(3)])}, source_of({factor: ("f32", (4,))}))
    assert not target.conflicts


@pytest.fixture
def two_ranks() -> Any:
    """Be rank 0 of two, of which the other never answers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def _hooked(*weights: torch.Tensor) -> optim.Optimizer:
    optimizer = optim.Adam(weights)
    optimizer.register_load_state_dict_pre_hook(lambda _, state: None)
    return optimizer


def test_state_that_an_optimizer_loads_itself_is_sharded_as_its_parameter(two_ranks: Any) -> None:
    sharded = distribute_tensor(torch.ones(4, 2), two_ranks, [Shard(0)])
    moment = ("optimizer", "state", 0, "exp_avg")
    source = Source({moment: Tensor(moment, "f32", (4, 2))}, {("optimizer", "param_groups"): []})
    target = bind({"optimizer": _hooked(sharded)}, source)
    assert tuple(target.tensors[moment].data.shape) == (2, 2)


def test_state_of_one_of_several_shardings_is_refused_unless_it_is_told_which(
    two_ranks: Any,
) -> None:
    one = distribute_tensor(torch.ones(4, 2), two_ranks, [Shard(0)])
    other = distribute_tensor(torch.ones(4, 2), two_ranks, [Replicate()])
    moment = ("optimizer", "moments", "first")
    source = Source({moment: Tensor(moment, "f32", (4, 2))}, {("optimizer", "param_groups"): []})
    with pytest.raises(StateError, match=r"optimizer\.moments\.first has shape \[4, 2\]"):
        bind({"optimizer": _hooked(one, other)}, source)


def test_flat_parameters_need_their_module_beside_the_optimizer(two_ranks: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    optimizer = optim.SGD(module.parameters())
    with pytest.raises(StateError, match="their module is missing in the state; add it"):
        flatten({"optimizer": optimizer})
    leaves = flatten({"model": module, "optimizer": optimizer})
    held = {path: leaf.boxes for path, leaf in leaves.tensors.items()}
    assert held[("model", "weight")] == (Box((0, 0), (2, 4)), Box((2, 0), (1, 2)))
    assert held[("model", "bias")] == ()
    assert leaves.objects.keys() == {("optimizer", "param_groups", n) for n in ("weight", "bias")}


def test_a_class_that_loads_its_own_values_is_asked_to(new_path: NewPath) -> None:
    class Counting(nn.Linear):
        loaded, version, _version = 0, None, 4

        def _load_from_state_dict(self, state: Any, prefix: str, local: Any, *rest: Any) -> None:
            super()._load_from_state_dict(state, prefix, local, *rest)
            self.loaded, self.version = self.loaded + 1, local.get("version")

    path = saved(new_path, {"model": nn.Sequential(Counting(2, 2))})
    target = nn.Sequential(Counting(2, 2))
    holdfast.load(path, into={"model": target})
    assert (target[0].loaded, target[0].version) == (1, 4)


def test_freed_memory_is_refused_rather_than_read(new_path: NewPath) -> None:
    path = saved(new_path, {"deep": {"w": torch.ones(100)}})
    freed = torch.ones(100)
    freed.untyped_storage().resize_(0)
    with pytest.raises(StateError, match=r"deep\.w needs 400 bytes of its storage, which holds 0"):
        holdfast.save({"deep": {"w": freed}}, new_path(), group="alone")
    with pytest.raises(StateError, match=r"deep\.w needs 400 bytes"):
        holdfast.load(path, into={"deep": {"w": freed}})


def test_memory_counts_up_to_the_last_element_of_a_view() -> None:
    base = torch.arange(40.0)
    assert local_tensor(base.view(4, 10)[1:, ::3].t(), ("w",)).data.numel() == 12
    view = base[20:]
    base.untyped_storage().resize_(100)
    with pytest.raises(StateError, match="needs 160 bytes of its storage, which holds 100"):
        local_tensor(view, ("w",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_large_ordinary_tensors_that_differ_are_refused(
    new_path: NewPath, dtype: torch.dtype
) -> None:
    path = new_path()
    parts = [torch.arange(FLOATS, dtype=dtype), torch.arange(FLOATS, dtype=dtype) + 1]

    def save(group: Any) -> None:
        holdfast.save({"flat": parts[group.rank]}, path, group=group)

    with pytest.raises(StateError, match=r"values of flat.*part of a tensor as a DTensor"):
        run_ranks(2, save)
    parts[1] = parts[0].clone()
    run_ranks(2, save)
    assert holdfast.open(path).verify() == []


def test_samples_are_of_elements_in_their_order_whatever_the_strides() -> None:
    def digest(tensor: torch.Tensor) -> bytes | None:
        return local_tensor(tensor, ("w",)).digest()

    rows = torch.arange(4 * FLOATS, dtype=torch.float64).reshape(4, FLOATS)
    columns = rows.t().contiguous().t()
    assert not columns.is_contiguous()
    assert digest(rows) == digest(columns)
    for place in (0, -1):
        changed = rows.clone()
        changed.view(-1)[place] = 0.5
        assert digest(changed) != digest(rows)
    imaginary = torch.complex(rows, rows)
    assert digest(imaginary) != digest(imaginary.conj())
    assert digest(imaginary.conj()) == digest(imaginary.conj().resolve_conj())


def test_an_empty_dict_takes_the_values_of_one_that_grew(new_path: NewPath) -> None:
    history = {"a": 1, "b": {"c": [2, (3, None)]}}
    path = saved(new_path, {"h": history, "n": 1})
    target: dict[str, Any] = {"h": {}, "n": 0}
    holdfast.load(path, into=target)
    assert target == {"h": history, "n": 1}


def test_an_empty_dict_has_no_place_for_tensors(new_path: NewPath) -> None:
    path = saved(new_path, {"h": {"a": 1, "w": torch.ones(2), "l": [torch.ones(1), 5]}})
    with pytest.raises(MismatchError, match=r"3 are missing in the target: h\.l\.0, h\.l\.1, h\.w"):
        holdfast.load(path, into={"h": {}})


def test_equal_values_of_many_ranks_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"betas": (0.9, 0.99), "names": ["a", b"b", None], "on": True, "zeros": [0, 0.0]}
    encoded: list[Any] = []
    monkeypatch.setattr(dedup, "_sorted", lambda text: encoded.append(text) or str(text))
    copies = [{("v",): encode_object(value, ("v",))} for _ in range(50)]
    assert dedup.merge_objects(copies) == {("v",): 0}
    assert encoded == []


def test_the_order_of_keys_is_no_difference() -> None:
    one, other = ({("v",): encode_object(v, ("v",))} for v in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert one != other
    assert dedup.merge_objects([one, other]) == {("v",): 0}


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), ({1: 2}, {True: 2})])
def test_values_that_python_calls_equal_may_differ(one: Any, other: Any) -> None:
    with pytest.raises(StateError, match="different values"):
        dedup.merge_objects([{("v",): encode_object(v, ("v",))} for v in (one, other)])


def test_options_that_are_no_number_are_equal_to_themselves(new_path: NewPath) -> None:
    optimizer = optim.SGD([torch.ones(2), torch.ones(3)], 0.5)
    optimizer.param_groups[0]["limit"] = float("nan")
    path = saved(new_path, {"optimizer": optimizer})
    target = optim.SGD([torch.ones(2), torch.ones(3)], 0.25)
    holdfast.load(path, into={"optimizer": target})
    assert target.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("shape", [(1 << 61, 0), (0, 1 << 61), (1 << 31, 0, 1 << 31)])
def test_an_empty_tensor_whose_shape_no_reader_takes_is_not_saved(
    new_path: NewPath, shape: tuple[int, ...]
) -> None:
    path, nothing = new_path(), torch.empty(shape)
    given = (nothing, holdfast.Shard(torch.empty(0), shape=shape, offset=(0,) * len(shape)))
    for value in given:
        with pytest.raises(StateError, match=r"^z has no elements, but its shape \[.*spans 2\^63"):
            holdfast.save({"w": torch.ones(3), "z": value}, path)
    assert not path.exists()
    most = torch.empty((1 << 60, 0))
    holdfast.save({"z": most}, path)
    assert holdfast.load(path, into={"z": torch.empty((1 << 60, 0))}).missing == ()
