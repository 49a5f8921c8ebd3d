"""What a program has set in torch changes no saved bit, and no address is taken that is none.

Modes, transforms and defaults are the program's own; a tensor without memory is refused by its
path, before the core sees an address.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.distributed._shard.sharded_tensor import Shard as TorchShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.masked import masked_tensor

import holdfast
from ambients import AMBIENTS, Refused, within
from holdfast.errors import HoldfastError, StateError
from holdfast.state.tensors import local_tensor

TESTS = Path(__file__).parent
NewPath = Callable[[], Path]


def training_state(seed: int) -> dict[str, Any]:
    """A model with buffers, its optimizer after a step (with seed 0: before), odd leaves."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    if seed:
        model(torch.randn(3, 6)).square().sum().backward()
        optimizer.step()
    draw = torch.randn(40, 30) if seed else torch.zeros(40, 30)
    return {
        "model": model,
        "optimizer": optimizer,
        "columns": draw[:, 3:5],
        "half": (draw[5] * 3).bfloat16(),
        "complex": torch.complex(draw[:2], draw[2:4]).conj(),
        "run": holdfast.Shard(draw[7].clone(), (5, 6), start=0),
        "frozen": nn.Parameter(draw[8].clone(), requires_grad=False),
        "random": holdfast.RandomState(),
        "step": seed,
    }


def bits(value: torch.Tensor) -> bytes:
    """The elements as they are, of a resolved copy."""
    whole = value.detach().resolve_conj().contiguous()
    return bytes(whole.reshape(-1).view(torch.uint8).numpy().tobytes())


def leaves_of(state: dict[str, Any]) -> dict[str, bytes]:
    """Every tensor of a training state as bytes."""
    tensors = dict(state["model"].state_dict())
    for number, entry in state["optimizer"].state_dict()["state"].items():
        tensors |= {f"{number}.{key}": value for key, value in entry.items()}
    tensors |= {key: state[key] for key in ("columns", "half", "complex", "frozen")}
    tensors["run"] = state["run"].data
    return {name: bits(value) for name, value in tensors.items()}


@pytest.mark.parametrize("verb", ["save", "save_async"])
@pytest.mark.parametrize("ambient", AMBIENTS)
def test_a_state_is_saved_bit_for_bit_under_every_setting(
    new_path: NewPath, ambient: str, verb: str
) -> None:
    state, path = training_state(1), new_path()
    kept, drawn = leaves_of(state), torch.get_rng_state()
    saved = within(ambient, lambda: getattr(holdfast, verb)(state, path))
    if verb == "save_async":
        saved.result()
    target = training_state(0)
    holdfast.load(path, into=target)
    assert leaves_of(target) == kept
    assert torch.equal(torch.get_rng_state(), drawn)


# A RandomState gets its tensors through load_state_dict(), as any object: see below.
@pytest.mark.parametrize("ambient", AMBIENTS)
def test_a_state_is_loaded_bit_for_bit_under_every_setting(new_path: NewPath, ambient: str) -> None:
    state, path = training_state(1), new_path()
    holdfast.save(state, path)
    target = training_state(0)
    if ambient.startswith("fake"):
        del target["random"]
    within(ambient, lambda: holdfast.load(path, into=target, partial=True))
    assert leaves_of(target) == leaves_of(state)
    assert target["step"] == 1
    for made in target["optimizer"].state.values():
        assert not any(tensor.is_inference() for tensor in made.values())
    target["model"](torch.ones(3, 6)).sum().backward()
    target["optimizer"].step()  # with what the load has made


@pytest.mark.parametrize("codec", ["lossless", "delta"])
@pytest.mark.parametrize("ambient", ["meta", "float64", "inference", "dispatch", "fake", "func"])
def test_links_of_chains_come_back_under_every_setting(
    new_path: NewPath, ambient: str, codec: str
) -> None:
    state, root = training_state(1), new_path()
    for number in range(2):
        state["columns"] += 1e-3
        within(ambient, lambda n=number: holdfast.save(state, root / f"step-{n}", codec=codec))
    target = training_state(0)
    del target["random"]
    within(ambient, lambda: holdfast.load(root / "step-1", into=target, partial=True))
    assert leaves_of(target) == leaves_of(state)


READERS: dict[str, Callable[[Path, Path], Any]] = {
    "tensor": lambda last, _: holdfast.open(last).tensor("a"),
    "state": lambda last, _: holdfast.open(last).state()["a"],
    "verify": lambda last, _: holdfast.verify(last, deep=True),
    "try_codecs": lambda last, _: holdfast.try_codecs(last),
    "recompress": lambda last, new: holdfast.recompress(last, new / last.name, codec="lossless"),
    "rebase": lambda last, _: holdfast.rebase(last),
}


@pytest.mark.parametrize("verb", READERS)
@pytest.mark.parametrize("ambient", ["meta", "float64", "inference", "dispatch", "fake", "func"])
def test_whatever_reads_a_checkpoint_reads_the_same_under_every_setting(
    new_path: NewPath, ambient: str, verb: str
) -> None:
    root, new = new_path(), new_path()
    state = {"a": torch.randn(100), "b": {"c": torch.randn(20, 10).bfloat16()}}
    for step in (1, 2):
        state["a"] += 1
        holdfast.save(state, root / f"step-0000000{step}", step=step, codec="delta")
    last = root / "step-00000002"
    found = within(ambient, lambda: READERS[verb](last, new))
    if isinstance(found, torch.Tensor):
        assert not found.is_inference()
        assert torch.equal(found, state["a"])
    elif verb == "verify":
        assert found.damage == ()
    for place in (root, new) if verb == "recompress" else (root,):
        with holdfast.open(place / last.name) as checkpoint:
            assert torch.equal(checkpoint.tensor("a"), state["a"])
            assert checkpoint.verify(deep=True) == []


class CallsTorch(nn.Module):
    """A module whose own hooks make tensors: they run with the settings of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def get_extra_state(self) -> Any:
        return {"made": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        self.given = state["made"]


def test_hooks_of_users_see_the_settings_of_their_program(new_path: NewPath) -> None:
    path = new_path()
    within("float64", lambda: holdfast.save({"model": CallsTorch()}, path))
    with holdfast.open(path) as checkpoint:
        assert checkpoint.info("model._extra_state.made").dtype == "f64"
    model = CallsTorch()
    with pytest.raises(StateError, match=r"model\._extra_state\.made is on the meta device"):
        within("meta", lambda: holdfast.save({"model": model}, new_path()))
    with pytest.raises(StateError, match=r"_extra_state\.made is a FakeTensor.*FakeTensorMode"):
        within("fake", lambda: holdfast.save({"model": model}, new_path()))


@pytest.mark.parametrize("ambient", ["fake", "fake, with real ones"])
def test_a_load_whose_hooks_would_copy_nothing_is_refused(new_path: NewPath, ambient: str) -> None:
    model, path = CallsTorch(), new_path()
    holdfast.save({"model": model, "random": holdfast.RandomState()}, path)
    model.weight.data.zero_()
    for into in ({"model": model}, {"random": holdfast.RandomState()}):
        with pytest.raises(StateError, match="changes nothing; leave that mode before the load"):
            within(ambient, lambda target=into: holdfast.load(path, into=target, partial=True))
    assert model.weight.tolist() == [0, 0, 0]


class Wrapper(torch.Tensor):
    """A subclass that has a shape, and its elements in another tensor, as those of torchao."""

    elements: torch.Tensor

    @staticmethod
    def __new__(cls, elements: torch.Tensor) -> "Wrapper":
        made = torch.Tensor._make_wrapper_subclass(cls, elements.shape, dtype=elements.dtype)
        made.elements = elements
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:  # which state_dict() of a module calls
            return cls(args[0].elements)
        raise AssertionError(f"holdfast has called {func}")


class Flattened(Wrapper):
    """The same, of the kind that torch.compile can take apart."""

    def __tensor_flatten__(self) -> Any:
        return ["elements"], None


class Owner(torch.Tensor):
    """A plain subclass, which has memory of its own."""


class Strict(torch.Tensor):
    """One with memory of its own that refuses every function of torch."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"holdfast has called {func}")


class Dispatched(torch.Tensor):
    """One with memory of its own that refuses every operation."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"holdfast has called {func}")


def fake(*shape: int) -> torch.Tensor:
    return FakeTensorMode().from_tensor(torch.ones(shape or (3,)))


def functional() -> torch.Tensor:
    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(torch.ones(3))


@pytest.mark.filterwarnings("ignore")
def masked() -> torch.Tensor:
    return masked_tensor(torch.ones(3), torch.tensor([True, False, True]))


WITHOUT_MEMORY: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "fake": (fake, "is a FakeTensor, .* outside of FakeTensorMode"),
    "a fake parameter": (lambda: nn.Parameter(fake()), "is a FakeTensor"),
    "fake and empty": (lambda: fake(0, 3), "is a FakeTensor"),
    "functional": (functional, "is a FunctionalTensor"),
    "functional, of no class": (
        lambda: torch._to_functional_tensor(torch.ones(3)),
        "is a Tensor without memory of its own",
    ),
    "masked": (masked, "is a MaskedTensor"),
    "a wrapper": (lambda: Wrapper(torch.ones(3)), "is a Wrapper without memory of its own"),
    "a flattened wrapper": (lambda: Flattened(torch.ones(3)), "is a Flattened, which wraps"),
    "zeros of autograd": (lambda: torch._efficientzerotensor((3,)), "is a Tensor|needs 12 bytes"),
}


def in_a_module(value: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("w", value)
    return module


def in_an_optimizer(value: torch.Tensor) -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight])
    optimizer.state[weight] = {"momentum_buffer": value}
    return optimizer


PLACES: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a leaf": (lambda value: value, r"deep\.leaf "),
    "in a list": (lambda value: [1, value], r"deep\.leaf\.1 "),
    "a Shard": (
        lambda value: holdfast.Shard(value, value.shape, offset=(0,) * value.ndim),
        r"deep\.leaf ",
    ),
    "in a module": (in_a_module, r"deep\.leaf\.w "),
    "in an optimizer": (in_an_optimizer, r"deep\.leaf\.state\.0\.momentum_buffer "),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_a_tensor_without_memory_is_neither_saved_nor_filled(
    new_path: NewPath, kind: str, place: str
) -> None:
    (make, text), (put, where) = WITHOUT_MEMORY[kind], PLACES[place]
    if torch.__version__.startswith(("2.9.", "2.10.", "2.11.", "2.12.")) and (kind, place) == (
        "functional",
        "in a module",
    ):
        pytest.skip("state_dict() of such a module raises an error of torch's own")
    with pytest.raises(StateError, match=where + f".*({text})"):
        holdfast.save({"deep": {"leaf": put(make())}}, new_path())
    path = new_path()
    elements = torch.zeros(0, 3) if "empty" in kind else torch.ones(3)
    holdfast.save({"deep": {"leaf": put(elements)}}, path)
    with pytest.raises(StateError, match=where + f".*({text})"):
        holdfast.load(path, into={"deep": {"leaf": put(make())}})


@pytest.mark.parametrize("ambient", ["func", "vmap", "jvp"])
def test_a_tensor_of_a_transform_is_neither_saved_nor_filled(
    new_path: NewPath, ambient: str
) -> None:
    path = new_path()
    holdfast.save({"x": torch.ones(2)}, path)
    told = []

    def call(x: torch.Tensor) -> torch.Tensor:
        for verb in (
            lambda: holdfast.save({"x": x}, new_path()),
            lambda: holdfast.load(path, into={"x": x}),
        ):
            with pytest.raises(StateError, match=r"x is a tensor within a torch\.func transform"):
                verb()
            told.append(verb)
        return x.sum()

    one = torch.ones(2, 2) if ambient == "vmap" else torch.ones(2)
    if ambient == "jvp":
        torch.func.jvp(call, (one,), (one,))
    else:
        {"func": torch.func.grad, "vmap": torch.func.vmap}[ambient](call)(one)
    assert len(told) == 2


@pytest.fixture
def one_rank() -> Any:
    """Have a process group and a mesh, of this process alone."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_parts_of_sharded_tensors_have_memory_too(one_rank: Any, new_path: NewPath) -> None:
    sharded = DTensor.from_local(fake(), one_rank, [Replicate()], run_check=False)
    with pytest.raises(StateError, match=r"m\.w is a FakeTensor"):
        holdfast.save({"m": {"w": sharded}}, new_path(), group="alone")
    part = TorchShard.from_tensor_and_offsets(fake(2, 3), [0, 0], 0)
    old = ShardedTensor._init_from_local_shards([part], 2, 3)
    with pytest.raises(StateError, match=r"m\.w is a FakeTensor"):
        holdfast.save({"m": {"w": old}}, new_path(), group="alone")


@pytest.mark.parametrize("kind", [Owner, Strict, Dispatched])
def test_a_subclass_with_memory_of_its_own_is_saved_and_filled(
    new_path: NewPath, kind: type[torch.Tensor]
) -> None:
    def make(value: float) -> torch.Tensor:
        plain = torch.full((3,), value)
        return torch.Tensor._make_subclass(kind, plain)

    def read(tensor: torch.Tensor) -> list[float]:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            result: list[float] = tensor.detach().tolist()
        return result

    path, target = new_path(), make(0.0)
    holdfast.save({"w": make(2.5), "s": holdfast.Shard(make(7.0), (3,), start=0)}, path)
    part = make(0.0)
    holdfast.load(path, into={"w": target, "s": holdfast.Shard(part, (3,), start=0)})
    assert (read(target), read(part), type(target)) == ([2.5] * 3, [7.0] * 3, kind)


def test_state_that_a_load_makes_for_a_subclass_is_of_that_class(new_path: NewPath) -> None:
    def make() -> torch.optim.Optimizer:
        weight = nn.Parameter(torch.ones(3).as_subclass(Owner))
        return torch.optim.Adam([weight])

    optimizer, path, target = make(), new_path(), make()
    (weight,) = optimizer.param_groups[0]["params"]
    weight.sum().backward()
    optimizer.step()
    holdfast.save({"o": optimizer}, path)
    holdfast.load(path, into={"o": target})
    (made,) = target.state.values()
    assert type(made["exp_avg"]) is Owner
    assert torch.equal(made["exp_avg"], optimizer.state[weight]["exp_avg"])


@pytest.mark.parametrize("layout", ["plain", "strided", "cast"])
@pytest.mark.parametrize("ambient", ["inference", "grad"])
def test_an_inference_tensor_is_filled_inside_and_outside_of_inference_mode(
    new_path: NewPath, ambient: str, layout: str
) -> None:
    with torch.inference_mode():
        target = torch.zeros(6, 2, dtype=torch.float64 if layout == "cast" else torch.float32)
    source, path = torch.randn(6, 2), new_path()
    into = target.T if layout == "strided" else target
    holdfast.save({"w": source.T if layout == "strided" else source}, path)
    within(ambient, lambda: holdfast.load(path, into={"w": into}, cast=True))
    assert torch.equal(target.float(), source)


@pytest.mark.parametrize("verb", ["save", "load"])
def test_dcp_refuses_a_tensor_without_memory_too(new_path: NewPath, verb: str) -> None:
    import torch.distributed.checkpoint as dcp

    from holdfast.integrations.dcp import HoldfastReader, HoldfastWriter

    path = new_path()
    dcp.save({"w": torch.ones(3)}, storage_writer=HoldfastWriter(path), no_dist=True)
    with pytest.raises((HoldfastError, dcp.api.CheckpointException), match="w is a FakeTensor"):
        if verb == "save":
            writer = HoldfastWriter(new_path())
            dcp.save({"w": fake()}, storage_writer=writer, no_dist=True)
        else:
            dcp.load({"w": fake()}, storage_reader=HoldfastReader(path), no_dist=True)


SUITES = ("test_round_trip.py", "test_shards.py", "test_optimizers.py", "test_random.py")
SUITES += (
    "test_save_async.py::test_busy_waits_skips_or_fails",
    "test_chains.py::test_what_the_base_lacks_stands_by_itself",
)
# Hooks of a user's optimizer, which make other tensors under a setting; ranks that are threads, and
# train while others have set the dtype of all; measurements of time.
NOT_THESE = "not overrides_the_protocol and not between_ranks and not quadratic and not deepest"


@pytest.mark.parametrize("ambient", ["meta", "float64", "inference", "func", "dispatch"])
def test_what_holds_without_a_setting_holds_under_it(ambient: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [str(TESTS / suite) for suite in SUITES]
    command += ["-k", NOT_THESE, "-m", "not hypothesis and not long", "--ambient", ambient]
    done = subprocess.run(
        command, cwd=TESTS.parent.parent, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_the_modes_that_refuse_see_what_holdfast_calls() -> None:
    with pytest.raises(Refused, match=r"in memory\.py:\d+ calls torch under a mode"):
        within("dispatch", lambda: local_tensor(torch.ones(3), ("w",)))
