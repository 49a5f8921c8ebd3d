"""One save of a training loop, when the driver asks for it, and how long it held the loop up.

Knows no framework. A loop takes two steps, saves, and takes another step. It tells the driver when
the checkpoint is whole, and waits until it is asked again.
"""

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import durable
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

LIMIT_S = 120.0
POLL_S = 0.001
Until = Path | Callable[[], object]  # what a checkpoint has only when it is whole; or waits for it


class Turns:
    """The turns of one loop.

    Each tells the driver these seconds:
        call_s: that the framework's own call took.
        held_s: that hooks of the optimizer held up the step after it.
        before_s, after_s: the step before the save, and the one after it.
        written_s: from the call on, until the checkpoint is whole; with holdfast, durable.
        durable_s: the same, and an fsync of all that lies there.

    Args:
        root: where the loop saves; it is emptied after each turn.
        asked, told: file descriptors, from the driver and to it.
    """

    def __init__(self, root: Path, asked: int, told: int) -> None:
        self.root = root
        self._asked: TextIO = os.fdopen(asked)
        self._told: TextIO = os.fdopen(told, "w")
        self._found: dict[str, float] = {}
        self._called_s = self._entered_s = 0.0
        self._watch = threading.Thread()
        self._last: Any = None
        register_optimizer_step_pre_hook(self._enter)

    def begin(self, optimizer: Optimizer) -> None:
        """Wait until it is this loop's turn; at the end of all turns the process ends.

        Args:
            optimizer: the one of torch that steps; what else is hooked to it is timed.
        """
        if not self._asked.readline():
            os._exit(0)
        if self._last is not None:
            self._last.remove()
        # Hooks run in the order in which they came: this one after all others.
        self._last = optimizer.register_step_pre_hook(self._leave)
        self._found = {"held_s": 0.0}

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step: "before" the save, or "after" it; a "warm" one does not count."""
        started = time.perf_counter()
        yield
        self._found[f"{name}_s"] = time.perf_counter() - started

    def wait(self, until: Any) -> None:
        """Time what a loop has to call before a step that follows a save."""
        started = time.perf_counter()
        until()
        self._found["held_s"] += time.perf_counter() - started

    @contextlib.contextmanager
    def call(self, until: Until) -> Iterator[None]:
        """Time the save itself, and watch until it is whole."""
        self._found["held_s"] = 0.0
        self._called_s = time.perf_counter()
        yield
        self._found["call_s"] = time.perf_counter() - self._called_s
        self._watch = threading.Thread(target=self._see, args=[until], daemon=True)
        self._watch.start()

    def finish(self) -> None:
        """Wait until the checkpoint is whole; tell."""
        self._watch.join()
        started = time.perf_counter()
        durable.sync_all(self.root)
        self._found["durable_s"] = self._found["written_s"] + time.perf_counter() - started
        self._found["bytes"] = sum(f.stat().st_size for f in self.root.rglob("*") if f.is_file())
        for entry in self.root.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self._told.write(json.dumps(self._found) + "\n")
        self._told.flush()

    def _see(self, until: Until) -> None:
        if not isinstance(until, Path):
            until()
        else:
            while not until.exists():
                if time.perf_counter() > self._called_s + LIMIT_S:
                    print(f"{until} is not there after {LIMIT_S:.0f} s", flush=True)
                    os._exit(1)
                time.sleep(POLL_S)
        self._found["written_s"] = time.perf_counter() - self._called_s

    def _enter(self, *_: object) -> None:
        self._entered_s = time.perf_counter()

    def _leave(self, *_: object) -> None:
        self._found["held_s"] += time.perf_counter() - self._entered_s


def model_of(layers: int, width: int) -> Any:
    """Return a Llama, in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16_000,
            hidden_size=width,
            intermediate_size=43 * width // 16,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 64,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


TOKENS = 8  # of a batch: what is measured is not the model's speed


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences without end."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(TOKENS) * (index + 3)) % 16_000
        return {"input_ids": tokens, "labels": tokens}
