"""torchtitan's Trainer with its own CheckpointManager, or with that of holdfast.

``torchtitan_native.py CHECKPOINTS RESULT KIND STOCK|HOLDFAST RANDOM``; KIND is "own": the data
loader of torchtitan, or "dealt": that of holdfast, whose global batch is the same on any number of
ranks. RANDOM is 0, or the program draws a number at its end and keeps it beside the losses.
"""

import functools
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torchtitan_loop as loop
from datasets import Dataset
from results import finish, say_step

RANKS, BATCH, SEQUENCE = int(os.environ["WORLD_SIZE"]), 6, 64


def documents(_: str) -> Any:
    """Return documents of one sequence each, and a word more, which is only predicted."""
    chance = random.Random(5)
    count = SEQUENCE + 1
    lines = [" ".join(str(chance.randrange(loop.WORDS)) for _ in range(count)) for _ in range(100)]
    return Dataset.from_dict({"text": lines})


def configured(root: Path, kind: str, *, routed: bool) -> Any:
    """Return torchtitan's configuration, with the lines that differ."""
    config = loop.configured(root)
    stage = os.environ.get("STAGE", "async")
    config.checkpoint.async_mode = stage
    if kind == "dealt":
        from holdfast.integrations.torchtitan import HoldfastTextDataLoader

        own = loop.text_datasets.DatasetConfig("documents", documents, lambda each: each["text"])
        loop.text_datasets.DATASETS["documents"] = own
        config.dataloader = HoldfastTextDataLoader.Config(dataset="documents", seed=1)
        config.training.local_batch_size = BATCH // RANKS
    if routed:
        from holdfast.integrations.torchtitan import HoldfastManager

        config.checkpoint = HoldfastManager.Config(
            enable=True,
            interval=loop.EVERY,
            keep_latest_k=2,
            async_mode=stage,
            last_save_model_only=False,
            folder=str(root),
        )
    return config


def main(root: Path, result: str, kind: str, who: str, draws: str) -> None:
    """Train, from the newest step that torchtitan finds."""
    random.seed(RANKS)  # torchtitan seeds torch alone
    loop.make_tokenizer(Path(f"{root}-tokenizer"))
    trainer = configured(root, kind, routed=who == "HOLDFAST").build()
    losses = dict[int, float]()
    step, loss = trainer.train_step, trainer.forward_backward_step

    @functools.wraps(step)
    def train_step(*given: Any, **more: Any) -> Any:
        say_step(trainer.step)
        return step(*given, **more)

    @functools.wraps(loss)
    def forward_backward_step(*given: Any, **more: Any) -> Any:
        found = loss(*given, **more)
        losses[trainer.step] = found.detach().sum().item() * RANKS  # it is this rank's share
        return found

    trainer.train_step, trainer.forward_backward_step = train_step, forward_backward_step
    trainer.train()
    if float(draws):
        losses[loop.STEPS + 1] = torch.rand(1).item() + random.random()
    (module,), optimizers = trainer.model_parts, list(trainer.optimizers)
    trainer.close()
    finish(result, losses, module, optimizers)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    place, result, kind, who, draws = sys.argv[1:]
    main(Path(place), result, kind, who, draws)
