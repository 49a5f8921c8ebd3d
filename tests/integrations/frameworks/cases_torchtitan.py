"""torchtitan's last save with holdfast, in one process. Run by `make frameworks-native`."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RANK", "0")
sys.path.insert(0, str(Path(__file__).parent))
import titan_cpu  # noqa: F401  before torchtitan
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.models.llama3 import model_registry

import holdfast
from holdfast.errors import MismatchError
from holdfast.integrations import adapter
from holdfast.integrations.torchtitan import HoldfastManager

GROUP = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})
LAST = 4


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Program:
    """The smallest Llama, whose last step is saved by a manager."""

    def __init__(
        self, root: Path, kind: Any, *, seed: int = 0, wider: bool = False, **given: Any
    ) -> None:
        spec = model_registry("debugmodel", attn_backend="flex")
        self.model = spec.model.build()
        if wider:
            weight = self.model.tok_embeddings.weight
            rows = torch.zeros(len(weight) + 1, *weight.shape[1:])
            self.model.tok_embeddings.weight = torch.nn.Parameter(rows)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for value in self.model.parameters():
                value.normal_(generator=generator)
        optimizers = OptimizersContainer.Config(param_groups=[GROUP], implementation="for-loop")
        self.optimizers = optimizers.build(model_parts=[self.model])
        schedules = LRSchedulersContainer.Config()
        self.schedules = schedules.build(optimizers=self.optimizers, training_steps=10)
        assert spec.state_dict_adapter is not None
        config = kind.Config(enable=True, interval=1, folder=str(root), keep_latest_k=0, **given)
        self.manager = config.build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedules,
            states={},
            sd_adapter=spec.state_dict_adapter(spec.model, None),
        )

    def step(self) -> None:
        for value in self.model.parameters():
            value.grad = torch.ones_like(value)
        self.optimizers.step()
        self.optimizers.zero_grad()

    def train(self) -> "Program":
        for step in range(1, LAST + 1):
            self.step()
            self.manager.save(step, last_step=step == LAST)
        self.manager.maybe_wait_for_saving()
        self.manager.close()
        return self


def last_of(root: Path, kind: Any, **given: Any) -> Path:
    """Train, and return what the last save has left."""
    Program(root, kind, **given).train()
    return root / f"step-{LAST}"


def of_dcp(place: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint of DCP."""
    listed = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in listed.items()
        if hasattr(entry, "size")
    }
    assert len(found) == len(listed)
    dcp.load(found, checkpoint_id=place)
    return found


def contents(place: Path) -> dict[str, Any]:
    """Return files by their names: tensors of safetensors, whose order differs, or bytes."""
    return {
        str(path.relative_to(place)): (
            load_file(path) if path.suffix == ".safetensors" else path.read_bytes()
        )
        for path in place.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_the_last_save_has_the_weights_alone_as_torchtitan_has_them(
    tmp_path: Path, mode: str, dtype: str
) -> None:
    given = {"async_mode": mode, "export_dtype": dtype, "last_save_model_only": True}
    stock = of_dcp(last_of(tmp_path / "stock", CheckpointManager, **given))
    place = last_of(tmp_path / "ours", HoldfastManager, **given)
    assert holdfast.verify(place).damage == ()
    ours = holdfast.open(place).state(exclude="holdfast_framework")["model"]
    assert ours.keys() == stock.keys()
    assert {value.dtype for value in ours.values()} == {getattr(torch, dtype)}
    assert all(torch.equal(ours[name], value) for name, value in stock.items())
    heads = {name.partition(".")[0] for name in [*holdfast.open(place)]}
    assert heads == {"model", "holdfast_framework"}
    before = holdfast.open(tmp_path / "ours" / f"step-{LAST - 1}")
    assert {name.partition(".")[0] for name in [*before]} > {"model", "optimizer", "random"}


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_the_last_save_is_of_safetensors_as_torchtitan_writes_them(
    tmp_path: Path, mode: str
) -> None:
    given = {"async_mode": mode, "export_dtype": "bfloat16", "last_save_in_hf": True}
    stock = last_of(tmp_path / "stock", CheckpointManager, **given)
    ours = last_of(tmp_path / "ours", HoldfastManager, **given)
    one, other = contents(stock), contents(ours)
    assert one.keys() == other.keys() and any(name.endswith(".safetensors") for name in one)
    for name, value in one.items():
        if isinstance(value, bytes):
            assert value == other[name]
        else:
            assert all(torch.equal(value[key], tensor) for key, tensor in other[name].items())
    before = tmp_path / "ours" / f"step-{LAST - 1}"
    assert holdfast.verify(before).damage == ()  # it was waited for


def test_the_last_save_is_a_whole_step_where_that_is_asked_for(tmp_path: Path) -> None:
    program = Program(tmp_path, HoldfastManager, last_save_model_only=False).train()
    other = Program(tmp_path, HoldfastManager, seed=1)
    assert other.manager.load()
    for program_ in (program, other):
        program_.step()
    for one, two in zip(program.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weights_alone_begin_another_run_and_resume_none(tmp_path: Path, dtype: str) -> None:
    exported: dict[str, Any] = {"last_save_model_only": True, "export_dtype": dtype}
    program = Program(tmp_path / "a", HoldfastManager, **exported).train()
    with pytest.raises(MismatchError, match=r"step-4 holds the weights alone.*load_step"):
        Program(tmp_path / "a", HoldfastManager, seed=1).manager.load()
    given = {"initial_load_path": str(tmp_path / "a" / f"step-{LAST}")}
    other = Program(tmp_path / "b", HoldfastManager, seed=1, **given)
    assert other.manager.load()
    for one, two in zip(program.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one.to(getattr(torch, dtype)).to(two.dtype), two)
    older = Program(tmp_path / "a", HoldfastManager, seed=1)
    assert older.manager.load(step=LAST - 1)


def test_a_checkpoint_of_another_framework_is_refused(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(2, 2), **adapter.mark("lightning", "2.6.6")}
    holdfast.save(state, tmp_path / "step-3")
    with pytest.raises(MismatchError, match=r"saved by lightning 2\.6\.6; torchtitan cannot"):
        Program(tmp_path, HoldfastManager).manager.load()


def test_a_changed_model_is_refused_with_names(tmp_path: Path) -> None:
    Program(tmp_path, HoldfastManager).train()
    with pytest.raises(MismatchError, match=r"tok_embeddings\.weight"):
        Program(tmp_path, HoldfastManager, wider=True).manager.load(step=LAST - 1)
