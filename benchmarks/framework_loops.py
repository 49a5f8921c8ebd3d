"""Training loops of frameworks, each in a process of its own, which save when they are asked to.

``framework_loops.py FRAMEWORK HOW ROOT LAYERS ASKED TOLD`` is started by `frameworks.py`. HOW is a
stage of holdfast, or how the framework saves by itself. Frameworks that do not train on CPUs by
themselves are told to as in the tests.
"""

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from framework_turns import Samples, Turns, Until, model_of
from torch.utils.data import DataLoader

WIDTH, RATE = 512, 1e-4
STEPS = ("warm", "before", "after")  # of a turn; the save is between the last two
OWN = ("own", "own-async")  # no stages of holdfast
SHIMS = Path(__file__).parents[1] / "tests" / "integrations" / "frameworks"


def trainer(turns: Turns, how: str, layers: int) -> None:
    """Hugging Face Trainer."""
    import transformers

    from holdfast.integrations.transformers import Saving, trainer_of

    stage = "" if how in OWN else how
    kind: Any = transformers.Trainer
    if stage:
        kind = trainer_of(kind, Saving(stage=stage))

    class Timed(kind):  # type: ignore[misc]
        def _save_checkpoint(self, *given: Any, **more: Any) -> None:
            last = turns.root / f"checkpoint-{self.state.global_step}" / "trainer_state.json"
            with turns.call(self._holdfast_wait if stage else last):
                super()._save_checkpoint(*given, **more)

        def _holdfast_wait(self) -> None:
            self._holdfast.wait()

    class Asked(transformers.TrainerCallback):  # type: ignore[misc]
        """Saves after the second of the three steps of each turn."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.name = STEPS[state.global_step % 3]
            if self.name == STEPS[0]:
                turns.begin(given["optimizer"].optimizer)
            self.step = turns.step(self.name)
            self.step.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.step.__exit__(None, None, None)
            control.should_save = self.name == STEPS[1]
            if self.name == STEPS[2]:
                turns.finish()

    arguments = transformers.TrainingArguments(
        str(turns.root),
        max_steps=1_000_000,
        save_strategy="no",
        logging_strategy="no",
        learning_rate=RATE,
        per_device_train_batch_size=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    Timed(
        model=model_of(layers, WIDTH),
        args=arguments,
        train_dataset=Samples(),
        callbacks=[Asked()],
    ).train()


def accelerate(turns: Turns, how: str, layers: int) -> None:
    """Hugging Face accelerate."""
    from accelerate import Accelerator

    from holdfast.integrations.adapter import install

    stage = "" if how in OWN else how
    if stage:
        install("accelerate", stage=stage)
    accelerator = Accelerator(cpu=True)
    model = model_of(layers, WIDTH)
    optimizer: Any = torch.optim.AdamW(model.parameters(), RATE)
    net, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Samples()))
    batches = iter(loader)

    def step() -> None:
        accelerator.backward(net(**next(batches)).loss)
        optimizer.step()
        optimizer.zero_grad()

    place = turns.root / "checkpoint"
    last = place / "random_states_0.pkl"
    _take_turns(
        turns,
        optimizer.optimizer,
        step,
        save=lambda _: accelerator.save_state(str(place)),
        until=lambda _: accelerator.end_training if stage else last,
    )


def lightning(turns: Turns, how: str, layers: int) -> None:
    """Lightning's Trainer and ModelCheckpoint, on one device."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from holdfast.integrations.lightning import HoldfastCheckpointIO, HoldfastSingleDeviceStrategy

    stage = "" if how in OWN else how.removesuffix("-io")
    given: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
    if how == "own-async":
        given["plugins"] = [AsyncCheckpointIO()]
    elif how.endswith("-io"):
        given["plugins"] = [HoldfastCheckpointIO(stage=stage)]
    elif stage:
        given = {"strategy": HoldfastSingleDeviceStrategy(device="cpu", stage=stage)}

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model_of(layers, WIDTH)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), RATE)

    keep = ModelCheckpoint(turns.root, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    runner = pl.Trainer(
        **given,
        max_steps=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[_each_third(turns), keep],
    )
    stock = runner.save_checkpoint
    saving = runner.strategy.checkpoint_io if how.endswith("-io") else runner.strategy
    saves = saving._saves if stage else None

    def save_checkpoint(path: str, *given: Any, **more: Any) -> None:
        with turns.call(saves.wait if saves else Path(path)):
            stock(path, *given, **more)

    runner.save_checkpoint = save_checkpoint
    runner.fit(Net(), DataLoader(Samples()))


def _each_third(turns: Turns) -> Any:
    """Return a callback of Lightning: each turn is three batches, and is saved in the second."""
    import lightning.pytorch as pl

    class Asked(pl.Callback):
        """ModelCheckpoint saves after every third batch: those are the second of each turn."""

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            self.name = STEPS[(index + 2) % 3]
            if self.name == STEPS[0]:
                turns.begin(trainer.optimizers[0])
            self.step = turns.step(self.name)
            self.step.__enter__()

        def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
            self.step.__exit__(None, None, None)
            if self.name == STEPS[2] and trainer.global_step > 1:
                turns.finish()

    return Asked()


def torchtitan(turns: Turns, how: str, layers: int) -> None:
    """torchtitan's CheckpointManager and OptimizersContainer, in a loop like its Trainer's."""
    sys.path.insert(0, str(SHIMS))
    import titan_cpu  # noqa: F401  before torchtitan
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.optimizer import (
        LRSchedulersContainer,
        OptimizersContainer,
        ParamGroupConfig,
    )

    from holdfast.integrations.torchtitan import HoldfastManager

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    # "async_with_pinned_mem" asks for an accelerator.
    modes = {"own": "disabled", "own-async": "async", "sync": "disabled", "eager": "async"}
    kind = CheckpointManager if how in OWN else HoldfastManager
    model = model_of(layers, WIDTH)
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": RATE})
    optimizers = OptimizersContainer.Config(param_groups=[group], implementation="foreach").build(
        model_parts=[model]
    )
    schedules = LRSchedulersContainer.Config().build(optimizers=optimizers, training_steps=10**6)
    given = kind.Config(
        enable=True,
        interval=1,
        keep_latest_k=0,
        folder=str(turns.root),
        async_mode=modes[how],
        initial_load_model_only=False,
    )
    manager = given.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedules,
        states={},
        sd_adapter=None,
    )
    batches = iter(DataLoader(Samples()))

    def step() -> None:
        model(**next(batches)).loss.backward()
        turns.wait(manager.maybe_wait_for_staging)
        optimizers.step()
        schedules.step()
        optimizers.zero_grad()

    _take_turns(
        turns,
        optimizers.optimizers[0],
        step,
        save=manager.save,
        until=lambda number: (
            turns.root / f"step-{number}" / ".metadata" if how in OWN else manager._saves.wait
        ),
    )


def deepspeed(turns: Turns, how: str, layers: int) -> None:
    """DeepSpeed's engine, ZeRO-1."""
    sys.path.insert(0, str(SHIMS))
    import deepspeed_cpu

    from holdfast.integrations.deepspeed import attach

    deepspeed_cpu.prepare()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    stage = "" if how in OWN else how
    config: dict[str, Any] = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
    }
    model = model_of(layers, WIDTH)
    engine, inner, *_ = deepspeed_cpu.deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    attached = attach(engine, stage=stage) if stage else None
    batches = iter(DataLoader(Samples()))

    def step() -> None:
        engine.backward(engine(**next(batches)).loss)
        engine.step()

    last = turns.root / "latest"
    _take_turns(
        turns,
        inner.optimizer,
        step,
        save=lambda number: engine.save_checkpoint(str(turns.root), tag=f"step-{number}"),
        until=lambda _: attached.wait if attached else last,
    )


def megatron(turns: Turns, how: str, layers: int) -> None:
    """Megatron-Core's dist_checkpointing, of the model and AdamW's moments."""
    sys.path.insert(0, str(SHIMS))
    import megatron_cpu

    megatron_cpu.prepare()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    from holdfast.integrations.adapter import install

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    if how not in OWN:
        install("megatron")
    is_async = how in ("own-async", "eager")
    model = model_of(layers, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    queue = AsyncCallsQueue()
    batches = iter(DataLoader(Samples()))

    def step() -> None:
        model(**next(batches)).loss.backward()
        turns.wait(queue.maybe_finalize_async_calls)
        optimizer.step()
        optimizer.zero_grad()

    def save(number: int) -> None:
        tensors = {}
        for name, parameter in model.named_parameters():
            tensors[name] = parameter.detach()
            for kind in ("exp_avg", "exp_avg_sq"):
                tensors[f"{kind}.{name}"] = optimizer.state[parameter][kind]
        state: dict[str, Any] = {
            key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()
        }
        place = turns.root / f"iter_{number:07}"
        place.mkdir()
        given = {"async_sharded_save": is_async}
        request = dist_checkpointing.save({**state, "step": number}, str(place), **given)
        if is_async:
            queue.schedule_async_request(request)

    _take_turns(
        turns,
        optimizer,
        step,
        save=save,
        until=lambda number: turns.root / f"iter_{number:07}" / "metadata.json",
        end=lambda: queue.maybe_finalize_async_calls(blocking=True),
    )


def _take_turns(
    turns: Turns,
    optimizer: Any,
    step: Callable[[], object],
    save: Callable[[int], object],
    until: Callable[[int], Until],
    end: Callable[[], object] = lambda: None,
) -> None:
    """Train until no more turns are asked for; ``end`` is what the loop calls between steps."""
    for number in itertools.count(1):
        turns.begin(optimizer)
        for name in STEPS[:2]:
            with turns.step(name):
                step()
        with turns.call(until(number)):
            save(number)
        with turns.step(STEPS[2]):
            step()
        end()
        turns.finish()


LOOPS = {
    "transformers": trainer,
    "accelerate": accelerate,
    "lightning": lightning,
    "torchtitan": torchtitan,
    "deepspeed": deepspeed,
    "megatron-core": megatron,
}


def main(framework: str, how: str, root: str, layers: str, asked: str, told: str) -> None:
    """Train, and save when it is this loop's turn."""
    LOOPS[framework](Turns(Path(root), int(asked), int(told)), how, int(layers))


if __name__ == "__main__":
    main(*sys.argv[1:])
