"""A Trainer of transformers with FSDP2, resumed from the checkpoint that is named.

``trainer_loop.py CHECKPOINTS RESULT [NAME [LAST_STEP SHIFT]]``: SHIFT changes the samples, so that
other checkpoints are written.
"""

import sys
from typing import Any

import torch
from cpu import shard_on_cpu
from results import finish, say_step
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

STEPS, EVERY = 10, 2


class Samples(Dataset):  # type: ignore[type-arg]
    """Texts made of numbers."""

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index + self.shift)
        text = torch.randint(0, 64, (16,), generator=generator)
        return {"input_ids": text, "labels": text}


class Steps(TrainerCallback):  # type: ignore[misc]
    """Says each step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say it."""
        say_step(state.global_step + 1)


class Own(Trainer):  # type: ignore[misc]
    """Keeps its losses."""

    losses: dict[int, float]

    def training_step(self, *given: Any, **more: Any) -> Any:
        """Take a step."""
        loss = super().training_step(*given, **more)
        self.losses[self.state.global_step + 1] = loss.item()
        return loss


def main(root: str, result: str, name: str = "", last: str = "", shift: str = "0") -> None:
    """Train, from the checkpoint of a name."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        root,
        max_steps=STEPS,
        save_steps=EVERY,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        logging_steps=EVERY,
        disable_tqdm=True,
        fsdp="full_shard auto_wrap",
        fsdp_config={
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
        },
    )
    arguments.device  # noqa: B018  makes accelerate's state, which `shard_on_cpu` changes
    shard_on_cpu()
    trainer = Own(
        model=model, args=arguments, train_dataset=Samples(int(shift)), callbacks=[Steps()]
    )
    trainer.losses = {}
    if last:
        trainer.add_callback(Until(int(last)))
    trainer.train(resume_from_checkpoint=f"{root}/{name}" if name else None)
    finish(result, trainer.losses, trainer.model, [trainer.optimizer])


class Until(TrainerCallback):  # type: ignore[misc]
    """Ends training early."""

    def __init__(self, last: int) -> None:
        self.last = last

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End, after the last step."""
        control.should_training_stop = state.global_step >= self.last


if __name__ == "__main__":
    main(*sys.argv[1:])
