"""A training loop of accelerate: DDP, FSDP2 or FSDP1, with checkpoints that accelerate numbers.

``accelerate_program.py SETTINGS``: `native.Start` as JSON.
"""

import contextlib
import errno
import json
import sys
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import ProjectConfiguration
from cpu import shard_on_cpu
from flat_cpu import flatten_on_cpu
from results import finish_whole, say_step
from torch.utils.data import DataLoader, TensorDataset

STEPS, EVERY, BATCH = 10, 2, 6
FULL_DISK = 4


class Counter:
    """The steps that were taken, as an object of the program's own."""

    steps = 0

    def state_dict(self) -> dict[str, int]:
        """Return them."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take them."""
        self.steps = state["steps"]


def accelerator_of(settings: dict[str, Any]) -> Accelerator:
    """Make it, as the settings say."""
    project = ProjectConfiguration(
        project_dir=settings["root"], automatic_checkpoint_naming=True, total_limit=2
    )
    given: dict[str, Any] = {"cpu": True, "step_scheduler_with_optimizer": False}
    if "fsdp" in settings["kind"] and settings["ranks"] > 1:
        shard_on_cpu()
        flatten_on_cpu()
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=1 if "fsdp1" in settings["kind"] else 2,
            state_dict_type="SHARDED_STATE_DICT",
            sync_module_states=False,
            auto_wrap_policy="size_based_wrap",
            min_num_params=10,
            cpu_ram_efficient_loading=False,
        )
    return Accelerator(project_config=project, **given)


def main(settings: dict[str, Any]) -> None:
    """Train, from the newest checkpoint where the settings say so."""
    if settings["ours"]:
        from holdfast.integrations.adapter import install

        install("accelerate")
    accelerator = accelerator_of(settings)
    torch.manual_seed(0)
    dropout = torch.nn.Dropout(0.0 if settings["kind"].endswith("exact") else 0.1)
    net: Any = torch.nn.Sequential(torch.nn.Linear(16, 610), dropout, torch.nn.Linear(610, 16))
    if "fsdp1" in settings["kind"]:  # which makes other parameters of them
        net = accelerator.prepare(net)
    optimizer: Any = torch.optim.AdamW(net.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    rows = torch.randn(BATCH * STEPS, 16, generator=torch.Generator().manual_seed(3))
    order = torch.Generator().manual_seed(4)  # its own: a loader draws from it when it begins
    loader = DataLoader(TensorDataset(rows), batch_size=BATCH // settings["ranks"], generator=order)
    net, optimizer, batches, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    torch.manual_seed(9 + accelerator.process_index)
    if settings["resume"]:
        accelerator.load_state()
    losses: dict[int, float] = {}
    for (batch,) in accelerator.skip_first_batches(batches, counter.steps):
        say_step(counter.steps + 1)
        loss = (net(batch) - batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        counter.steps += 1
        losses[counter.steps] = loss.item()
        if counter.steps % EVERY == 0:
            disk: Any = contextlib.nullcontext()
            if settings["full_disk"] and counter.steps == FULL_DISK:
                from holdfast.testing import Fault, faulty

                disk = faulty(Fault("write", persistent=True, argument=errno.ENOSPC))
            with disk:
                accelerator.save_state()
    finish_whole(settings["result"], losses, net, [optimizer])
    accelerator.end_training()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
