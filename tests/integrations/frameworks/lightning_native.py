"""A Trainer of Lightning with strategies and plugins of Lightning's, or of holdfast.

``lightning_native.py CHECKPOINTS RESULT KIND STOCK|HOLDFAST DROPOUT``; KIND is mp, ddp, fsdp1
or io. The
global batch is the same on any number of ranks.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from flat_cpu import flatten_on_cpu
from lightning.pytorch import strategies
from lightning.pytorch.callbacks import ModelCheckpoint
from results import finish, say_step
from torch.distributed.fsdp import fully_shard

STEPS, EVERY, ROWS = 12, 2, 12
RANKS, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])


class Batches:
    """Each rank's rows of each step; it goes on where its state says."""

    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(3)
        self.rows = torch.randn(ROWS * STEPS, 16, generator=chance)
        self.step = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.step < STEPS:
            rows = self.rows[self.step * ROWS : (self.step + 1) * ROWS]
            self.step += 1
            yield rows[RANK::RANKS]

    def __len__(self) -> int:  # of a loader without it, Lightning reads one batch ahead
        return STEPS

    def state_dict(self) -> dict[str, Any]:
        """Return how far it is."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there."""
        self.step = state["step"]


class Model(lightning.LightningModule):
    """Two layers with dropout between them; it keeps its losses."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kind = kind
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 64),
            torch.nn.ReLU(),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(64, 16),
        )
        self.losses: dict[int, float] = {}

    def configure_model(self) -> None:
        """Shard, once, where that is asked for."""
        if self.kind == "mp" and not hasattr(self.net, "unshard"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Take a step."""
        say_step(self.global_step + 1)
        loss = (self.net(batch) - batch).square().mean()
        self.losses[self.global_step + 1] = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        """Use AdamW, with a schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Flat(strategies.FSDPStrategy):  # type: ignore[misc]
    """Lightning's own strategy, which it refuses by its very type where there is no GPU."""


def arguments(kind: str, *, routed: bool) -> dict[str, Any]:
    """Return what the Trainer is given: the lines that differ."""
    sizes: dict[str, Any] = {"data_parallel_size": RANKS, "tensor_parallel_size": 1}
    gloo = {"process_group_backend": "gloo"}
    if kind == "fsdp1":
        flatten_on_cpu()
    if not routed:
        if kind == "io":
            return {}
        if kind == "fsdp1":
            return {"strategy": Flat(**gloo, state_dict_type="sharded")}
        if kind == "ddp":
            return {"strategy": strategies.DDPStrategy(**gloo)}
        return {"strategy": strategies.ModelParallelStrategy(**sizes, **gloo)}
    from holdfast.integrations import lightning as ours

    if kind == "io":
        return {
            "plugins": [ours.HoldfastCheckpointIO()],
            "callbacks": [ours.HoldfastRandomState()],
        }
    if kind == "fsdp1":
        return {"strategy": ours.HoldfastFSDPStrategy(**gloo)}
    if kind == "ddp":
        return {"strategy": ours.HoldfastDDPStrategy(**gloo)}
    stage = os.environ.get("STAGE", "eager")
    return {"strategy": ours.HoldfastModelParallelStrategy(**sizes, **gloo, stage=stage)}


def main(root: Path, result: str, kind: str, who: str, dropout: float) -> None:
    """Train, from the checkpoint that Lightning takes for the last."""
    torch.manual_seed(0)
    model = Model(kind, dropout)
    torch.manual_seed(RANK)  # dropout differs between ranks
    keep = ModelCheckpoint(
        root, every_n_train_steps=EVERY, save_top_k=2, monitor="step", mode="max", save_last=True
    )
    given = arguments(kind, routed=who == "HOLDFAST")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        max_steps=STEPS,
        callbacks=[keep, *given.pop("callbacks", [])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **given,
    )
    trainer.fit(model, Batches(), ckpt_path="last")
    finish(result, model.losses, model, trainer.optimizers)


if __name__ == "__main__":
    place, result, kind, who, dropout = sys.argv[1:]
    main(Path(place), result, kind, who, float(dropout))
