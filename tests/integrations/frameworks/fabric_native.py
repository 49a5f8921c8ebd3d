"""A loop of Lightning Fabric over FSDP2, with Fabric's strategy or with that of holdfast.

``fabric_native.py CHECKPOINTS RESULT KIND STOCK|HOLDFAST DROPOUT``; it saves to one path again and
again. The global batch is the same on any number of ranks.
"""

import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric import strategies
from results import finish, say_step
from torch.distributed.fsdp import fully_shard

STEPS, EVERY, ROWS = 12, 2, 12
RANKS, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])


def shard(module: Any, mesh: Any) -> Any:
    """Shard over all ranks."""
    return fully_shard(module, mesh=mesh["data_parallel"])


def strategy(*, routed: bool) -> Any:
    """Return the line that differs."""
    given = {"data_parallel_size": RANKS, "tensor_parallel_size": 1}
    given |= {"process_group_backend": "gloo"}
    if not routed:
        return strategies.ModelParallelStrategy(shard, **given)
    from holdfast.integrations.fabric import HoldfastModelParallelStrategy

    return HoldfastModelParallelStrategy(shard, **given)


def main(root: Path, result: str, who: str, dropout: float) -> None:
    """Train, from the checkpoint if there is one."""
    routed = who == "HOLDFAST"
    fabric = lightning.Fabric(accelerator="cpu", devices=RANKS, strategy=strategy(routed=routed))
    fabric.launch()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 64), torch.nn.Dropout(dropout), torch.nn.Linear(64, 16)]
    rows = torch.randn(ROWS * STEPS, 16, generator=torch.Generator().manual_seed(3))
    module = fabric.setup_module(torch.nn.Sequential(*layers))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), 1e-2))
    torch.manual_seed(RANK)
    state: dict[str, Any] = {"model": module, "optimizer": optimizer, "step": 0}
    if routed:
        import holdfast

        state["random"] = holdfast.RandomState()
    place, losses = root / "last", dict[int, float]()
    if fabric.broadcast(place.exists()):
        left = fabric.load(place, state)
        assert left == {"note": "kept"}, left
    for step in range(state["step"] + 1, STEPS + 1):
        say_step(step)
        batch = rows[(step - 1) * ROWS : step * ROWS][RANK::RANKS]
        loss = (module(batch) - batch).square().mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        losses[step] = loss.item()
        state["step"] = step
        if step % EVERY == 0:
            fabric.save(place, state | {"note": "kept"})
    if routed:
        fabric.strategy.wait()
    finish(result, losses, module.module, [optimizer.optimizer])


if __name__ == "__main__":
    place, result, _, who, dropout = sys.argv[1:]
    main(Path(place), result, who, float(dropout))
