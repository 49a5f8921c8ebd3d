"""torchtitan's Trainer and CheckpointManager, which saves in the background and deletes old steps.

``torchtitan_loop.py CHECKPOINTS RESULT``
"""

import functools
import os
import random
import sys
from pathlib import Path
from typing import Any

import titan_cpu  # noqa: F401  before torchtitan
import torch
from datasets import Dataset
from results import finish, say_step
from tokenizers import Tokenizer, models, pre_tokenizers
from torchtitan.hf_datasets import text_datasets
from torchtitan.models.llama3 import config_registry, model_registry

STEPS, EVERY, WORDS = 10, 2, 2000


def make_tokenizer(place: Path) -> None:
    """Write a tokenizer of words that are numbers."""
    names = ["<|begin_of_text|>", "<|end_of_text|>", *map(str, range(WORDS))]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=names[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    place.mkdir(exist_ok=True)
    pending = place / f"tokenizer.{os.environ['RANK']}"
    tokenizer.save(str(pending))
    pending.replace(place / "tokenizer.json")


def texts(_: str) -> Any:
    """Return the data set."""
    chance = random.Random(5)
    lines = [" ".join(str(chance.randrange(WORDS)) for _ in range(200)) for _ in range(200)]
    return Dataset.from_dict({"text": lines})


def configured(root: Path) -> Any:
    """Return torchtitan's own configuration of its smallest Llama, for two ranks and a CPU."""
    own = text_datasets.DatasetConfig("texts", texts, lambda sample: sample["text"])
    text_datasets.DATASETS["texts"] = own
    config = config_registry.llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", attn_backend="flex")
    config.hf_assets_path, config.dump_folder = f"{root}-tokenizer", f"{root}-logs"
    config.dataloader.dataset = "texts"
    config.training.local_batch_size, config.training.seq_len = 2, 64
    config.training.steps, config.training.disable_cuda_graphs = STEPS, True
    config.training.mixed_precision_param = "float32"
    config.validator.enable, config.debug.seed = False, 1
    config.parallelism.data_parallel_shard_degree = int(os.environ["WORLD_SIZE"])
    config.parallelism.spmd_backend = "partial_dtensor"
    keeps = config.checkpoint
    keeps.enable, keeps.interval, keeps.keep_latest_k = True, EVERY, 2
    keeps.last_save_model_only, keeps.async_mode = False, "async"
    keeps.folder = os.environ.get("FOLDER") or str(root)
    return config


def main(root: Path, result: str) -> None:
    """Train, from the newest step that torchtitan finds."""
    make_tokenizer(Path(f"{root}-tokenizer"))
    trainer, losses = configured(root).build(), dict[int, float]()
    step, loss = trainer.train_step, trainer.forward_backward_step

    @functools.wraps(step)
    def train_step(*given: Any, **more: Any) -> Any:
        say_step(trainer.step)
        return step(*given, **more)

    @functools.wraps(loss)
    def forward_backward_step(*given: Any, **more: Any) -> Any:
        found = loss(*given, **more)
        losses[trainer.step] = found.detach().sum().item()
        return found

    trainer.train_step, trainer.forward_backward_step = train_step, forward_backward_step
    trainer.train()
    (module,), optimizers = trainer.model_parts, list(trainer.optimizers)
    finish(result, losses, module, optimizers)
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
