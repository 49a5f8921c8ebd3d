"""What an engine of DeepSpeed refuses with holdfast, in one process."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29536"}
sys.path.insert(0, str(Path(__file__).parent))
import torch
from deepspeed_cpu import deepspeed, prepare

import holdfast
from holdfast.errors import MismatchError, OptionError
from holdfast.integrations.adapter import install, mark
from holdfast.integrations.deepspeed import attach

WIDTH = 4


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    prepare()
    deepspeed.init_distributed("gloo")
    yield
    torch.distributed.destroy_process_group()


def engine_of(*sizes: int, stage: int = 1) -> Any:
    """Return an engine, of layers of these sizes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, size) for size in sizes))
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
    }
    given = {"model": model, "model_parameters": model.parameters(), "config": config}
    return deepspeed.initialize(**given)[0]


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, WIDTH)).sum())
    engine.step()


def held(engine: Any) -> list[torch.Tensor]:
    """Return the weights of this rank, which ZeRO-3 keeps apart."""
    return [getattr(p, "ds_tensor", p).detach().clone() for p in engine.module.parameters()]


def test_only_one_integration_is_active() -> None:
    engine = engine_of(WIDTH)
    attached = attach(engine)
    with pytest.raises(OptionError, match="deepspeed has holdfast installed already"):
        attach(engine)
    attached.remove()
    with install("deepspeed"), pytest.raises(OptionError, match="installed already"):
        install("deepspeed")
    attach(engine).remove()


def test_a_checkpoint_of_another_framework_is_refused(tmp_path: Path) -> None:
    engine = engine_of(WIDTH)
    attach(engine)
    state = {"model": torch.nn.Linear(2, 2), **mark("lightning", "2.6.6")}
    holdfast.save(state, tmp_path / "global_step1")
    with pytest.raises(MismatchError, match=r"saved by lightning 2\.6\.6; deepspeed cannot"):
        engine.load_checkpoint(str(tmp_path), tag="global_step1")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("sizes", [(WIDTH, 5), (WIDTH, WIDTH, WIDTH), (WIDTH,)])
def test_a_changed_model_is_refused_with_names(
    tmp_path: Path, stage: int, sizes: tuple[int, ...]
) -> None:
    engine = engine_of(WIDTH, WIDTH, stage=stage)
    attach(engine)
    step(engine)
    engine.save_checkpoint(str(tmp_path))
    changed = engine_of(*sizes, stage=stage)
    attach(changed)
    before = held(changed)
    with pytest.raises(MismatchError, match=r"[12]\.weight"):
        changed.load_checkpoint(str(tmp_path))
    assert all(map(torch.equal, before, held(changed)))
