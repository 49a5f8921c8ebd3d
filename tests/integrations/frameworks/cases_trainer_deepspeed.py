"""The Trainer over DeepSpeed with holdfast, in one process. Run by `make frameworks-native`."""

import os
import socket
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from cases_transformers import BEST, Samples, Scores, Until, losses, new_model, steps_in
from cases_transformers import new_trainer as new_plain_trainer
from transformers import Trainer, TrainingArguments

import holdfast
from holdfast.errors import MismatchError, OptionError
from holdfast.integrations.deepspeed.engine import NEWEST_TESTED, OLDEST
from holdfast.integrations.directories import Saving
from holdfast.integrations.transformers import HoldfastTrainer, trainer_of

RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


@pytest.fixture(scope="module", autouse=True)
def driven() -> Iterator[None]:
    from cpu import drive_on_cpu

    stock, patch = PartialState._prepare_backend, pytest.MonkeyPatch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    for name, value in {**RANK, **place, "ACCELERATE_TORCH_DEVICE": "cpu"}.items():
        patch.setenv(name, value)
    drive_on_cpu()
    yield
    patch.undo()
    PartialState._prepare_backend = stock
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    dist.destroy_process_group()


def new_trainer(
    root: Path, kind: str, *, base: Any = HoldfastTrainer, last: int = 0, **given: Any
) -> Any:
    from trainer_program import engine_of

    model = given.pop("model", None)
    arguments = {"max_steps": 8, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2}
    arguments |= {"per_device_train_batch_size": 4, "report_to": [], "disable_tqdm": True}
    arguments |= {"deepspeed": engine_of(kind), "bf16": "bf16" in kind, "max_grad_norm": 0.5}
    arguments = TrainingArguments(str(root), **arguments | given)
    return base(
        model=model or new_model(),
        args=arguments,
        train_dataset=Samples(),
        eval_dataset=Samples(100),
        callbacks=[Until(last)] if last else [],
    )


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the master weights."""
    from deepspeed.utils import safe_get_full_fp32_param

    named = trainer.deepspeed.module.named_parameters()
    return {name: safe_get_full_fp32_param(value).clone() for name, value in named}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("kind", ["zero1-bf16", "zero2", "zero2-own", "zero3-bf16-own", "zero3"])
def test_it_resumes_bit_for_bit_beside_the_trainer_alone(tmp_path: Path, kind: str) -> None:
    whole = new_trainer(tmp_path / "stock", kind, base=Trainer)
    whole.train()
    new_trainer(tmp_path / "ours", kind, last=6, save_total_limit=2).train()
    assert steps_in(tmp_path / "ours") == [4, 6]
    (tmp_path / "ours" / "checkpoint-6" / "MANIFEST").unlink()
    trainer = new_trainer(tmp_path / "ours", kind, save_total_limit=2)
    trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), weights(whole)) and losses(trainer) == losses(whole)
    assert steps_in(tmp_path / "ours") == [6, 8]
    place = tmp_path / "ours" / "checkpoint-8"
    assert holdfast.verify(place).damage == ()
    plain = new_model(seed=5)
    holdfast.load(place, into={"model": plain}, include="model")
    named = dict(plain.named_parameters())
    assert all(torch.equal(value, named[name]) for name, value in weights(trainer).items())


@pytest.mark.parametrize("stage", ["sync", "lazy"])
def test_other_stages_resume_alike(tmp_path: Path, stage: Any) -> None:
    whole = new_trainer(tmp_path / "stock", "zero2", base=Trainer)
    whole.train()
    ours = trainer_of(Trainer, Saving(stage=stage))
    new_trainer(tmp_path / "ours", "zero2", base=ours, last=5).train()
    trainer = new_trainer(tmp_path / "ours", "zero2", base=ours)
    trainer.train(resume_from_checkpoint=True)
    assert same(weights(trainer), weights(whole)) and losses(trainer) == losses(whole)


def test_with_and_without_deepspeed_do_not_mix(tmp_path: Path) -> None:
    new_trainer(tmp_path / "a", "zero2", last=2).train()
    del os.environ["ACCELERATE_USE_DEEPSPEED"]  # accelerate sets it, for good
    plain = new_plain_trainer(tmp_path / "a")
    with pytest.raises(MismatchError, match=r"saved with DeepSpeed.*trains without.*include="):
        plain.train(resume_from_checkpoint=True)
    new_plain_trainer(tmp_path / "b", last=2).train()
    trainer = new_trainer(tmp_path / "b", "zero2")
    with pytest.raises(MismatchError, match=r"saved without DeepSpeed.*trains with DeepSpeed"):
        trainer.train(resume_from_checkpoint=True)


def test_the_best_is_loaded_at_the_end(tmp_path: Path) -> None:
    given: dict[str, Any] = BEST | {"load_best_model_at_end": True, "save_total_limit": 1}
    trainer = new_trainer(tmp_path / "a", "zero2", base=Scores, **given)
    trainer.train()
    assert steps_in(tmp_path / "a") == [4]
    at_four = new_trainer(tmp_path / "b", "zero2", last=4)
    at_four.train()
    assert same(weights(trainer), weights(at_four))
    module = dict(trainer.deepspeed.module.named_parameters())
    assert all(torch.equal(module[name], value) for name, value in weights(trainer).items())


def test_weights_alone_are_saved_where_the_trainer_says_so(tmp_path: Path) -> None:
    new_trainer(tmp_path, "zero2", save_only_model=True, last=2).train()
    heads = {name.split(".")[0] for name in holdfast.open(tmp_path / "checkpoint-2")}
    assert heads == {"model", "files", "holdfast_framework"}


def test_a_checkpoint_of_the_trainer_alone_is_resumed(tmp_path: Path) -> None:
    whole = new_trainer(tmp_path / "stock", "zero2", base=Trainer)
    whole.train()
    trainer = new_trainer(tmp_path / "ours", "zero2")
    trainer.train(resume_from_checkpoint=str(tmp_path / "stock" / "checkpoint-4"))
    assert same(weights(trainer), weights(whole))
    assert steps_in(tmp_path / "ours") == [6, 8]


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_an_adapter_is_saved_without_its_base_and_refuses_another(
    tmp_path: Path, kind: str
) -> None:
    new_trainer(tmp_path, kind, model=new_model(adapted=True), last=4).train()
    place = tmp_path / "checkpoint-4"
    names = [name for name in holdfast.open(place) if name.startswith("model.")]
    assert len(names) == 4 and all(".lora_" in name for name in names)
    trainer = new_trainer(tmp_path, kind, model=new_model(adapted=True))
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 8
    other = new_trainer(tmp_path, kind, model=new_model(seed=1, adapted=True))
    with pytest.raises(MismatchError, match=r"adapter of the base model .* digest"):
        other.train(resume_from_checkpoint=True)


def test_an_unknown_version_of_deepspeed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = metadata.version
    trainer = new_trainer(tmp_path, "zero2")
    fake = lambda name: "0.99.0" if name == "deepspeed" else found(name)  # noqa: E731
    monkeypatch.setattr(metadata, "version", fake)
    known = rf"deepspeed 0\.99\.0 is installed.* {OLDEST} to {NEWEST_TESTED}\."
    with pytest.raises(OptionError, match=known):
        trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))
