"""A Trainer of transformers: DDP, FSDP2, FSDP1 or DeepSpeed, or adapters; alone or with holdfast.

``trainer_program.py SETTINGS``: `native.Start` as JSON.
"""

import errno
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from cpu import drive_on_cpu, shard_on_cpu
from flat_cpu import flatten_on_cpu
from results import finish_whole, say_step
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

STEPS, EVERY, BATCH = 10, 2, 6
FULL_DISK = 4  # the save of this step fails where the settings say so


class Samples(Dataset):  # type: ignore[type-arg]
    """Texts made of numbers."""

    def __len__(self) -> int:
        return 36  # training sees the end of an epoch

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        text = torch.randint(0, 64, (16,), generator=generator)
        return {"input_ids": text, "labels": text}


class Steps(TrainerCallback):  # type: ignore[misc]
    """Says each step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say it."""
        say_step(state.global_step + 1)


class FullDisk(TrainerCallback):  # type: ignore[misc]
    """Lets every write of one save fail: the disk is full."""

    def __init__(self) -> None:
        self.disk: AbstractContextManager[Any] = nullcontext()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let it be full, until the next save."""
        from holdfast.testing import Fault, faulty

        if state.global_step == FULL_DISK:
            fault = Fault("write", persistent=True, argument=errno.ENOSPC)
            self.disk = faulty(fault)
            self.disk.__enter__()
        elif state.global_step == FULL_DISK + 1:
            self.disk.__exit__(None, None, None)


def model_of(kind: str) -> Any:
    """Make the model, from a seed."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.0 if kind.endswith("exact") else 0.1,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    if "lora" in kind:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    return model


def engine_of(kind: str) -> dict[str, Any]:
    """Return DeepSpeed's configuration: optimizer and schedule are its own, or transformers'."""
    found: dict[str, Any] = {"zero_optimization": {"stage": int(kind.removeprefix("zero")[0])}}
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    found |= dict.fromkeys((*sizes, "gradient_clipping"), "auto")
    found["zero_force_ds_cpu_optimizer"] = False  # which is compiled first
    if "bf16" in kind:
        found["bf16"] = {"enabled": True}
    if "own" in kind:
        found["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
        given = ("warmup_max_lr", "warmup_num_steps", "total_num_steps")
        found["scheduler"] = {"type": "WarmupDecayLR", "params": dict.fromkeys(given, "auto")}
    return found


def main(settings: dict[str, Any]) -> None:
    """Train, as the settings say."""
    kind, ours, ranks = settings["kind"], settings["ours"], settings["ranks"]
    sharded = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "version": 1 if "fsdp1" in kind else 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
            "sync_module_states": False,
        },
    }
    if kind.startswith("zero"):
        drive_on_cpu()
        given: dict[str, Any] = {"deepspeed": engine_of(kind), "bf16": "bf16" in kind}
    else:
        given = {"use_cpu": True, "ddp_backend": "gloo" if ranks > 1 else None}
        given |= sharded if "fsdp" in kind and ranks > 1 else {}
    arguments = TrainingArguments(
        settings["root"],
        max_steps=STEPS,
        save_steps=EVERY,
        save_total_limit=2,
        learning_rate=1e-2,
        per_device_train_batch_size=BATCH // ranks,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        **given,
    )
    arguments.device  # noqa: B018  makes accelerate's state, which `shard_on_cpu` changes
    if "fsdp" in kind and ranks > 1:
        shard_on_cpu()
        flatten_on_cpu()
    base = Trainer
    if ours == "class":
        from holdfast.integrations.transformers import HoldfastTrainer as base
    elif ours == "install":
        from holdfast.integrations.adapter import install

        install("transformers")
    losses: dict[int, float] = {}

    class Own(base):  # type: ignore[misc, valid-type]
        """Keeps its losses."""

        def training_step(self, *given: Any, **more: Any) -> Any:
            """Take a step."""
            loss = super().training_step(*given, **more)
            losses[self.state.global_step + 1] = loss.item()
            return loss

    callbacks = [Steps(), *([FullDisk()] if settings["full_disk"] else [])]
    trainer = Own(
        model=model_of(kind), args=arguments, train_dataset=Samples(), callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint=settings["resume"] or None)
    held: Any = trainer.optimizer
    if kind.startswith("zero"):
        from deepspeed_native import Held

        held = Held(trainer.deepspeed)
    finish_whole(settings["result"], losses, trainer.model, [held])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
