"""A training loop of accelerate: FSDP2, save_state every other step, load_state at the start.

``accelerate_loop.py CHECKPOINTS RESULT``
"""

import shutil
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from cpu import shard_on_cpu
from results import finish, say_step
from torch.utils.data import DataLoader, TensorDataset

STEPS, EVERY = 12, 2
WHOLE = "whole"  # a file beside what save_state wrote: it writes many, one after the other


class Counter:
    """The steps that were taken, as an object of the program's own."""

    steps = 0

    def state_dict(self) -> dict[str, int]:
        """Return them."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take them."""
        self.steps = state["steps"]


def main(root: Path, result: str) -> None:
    """Train, from the newest checkpoint that is whole."""
    shard_on_cpu()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="size_based_wrap",
        min_num_params=10,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 61), torch.nn.Dropout(0.1), torch.nn.Linear(61, 16)]
    net = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    rows = torch.randn(8 * STEPS, 16, generator=torch.Generator().manual_seed(3))
    order = torch.Generator().manual_seed(4)  # its own: a loader draws from it when it begins
    batches = DataLoader(TensorDataset(rows), batch_size=4, generator=order)
    net, optimizer, batches, schedule = accelerator.prepare(net, optimizer, batches, schedule)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    torch.manual_seed(9 + accelerator.process_index)
    found = sorted(root.glob(f"*/{WHOLE}"))
    if found:
        accelerator.load_state(str(found[-1].parent))
    losses = {}
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
            place = root / f"step-{counter.steps:02d}"
            if accelerator.is_main_process:
                shutil.rmtree(place, ignore_errors=True)
            accelerator.wait_for_everyone()
            accelerator.save_state(str(place))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (place / WHOLE).touch()
    finish(result, losses, net, [optimizer])
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
