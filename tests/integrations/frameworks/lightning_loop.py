"""A Trainer of Lightning: ModelParallelStrategy, ModelCheckpoint with save_last=True.

``lightning_loop.py CHECKPOINTS RESULT``
"""

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from results import finish, say_step
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

STEPS, EVERY = 12, 2


class Model(lightning.LightningModule):
    """Two layers, sharded; it keeps its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16)
        )
        self.losses: dict[int, float] = {}

    def configure_model(self) -> None:
        """Shard, once."""
        if not hasattr(self.net, "unshard"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Take a step."""
        say_step(self.global_step + 1)
        loss = (self.net(batch[0]) - batch[0]).square().mean()
        self.losses[self.global_step + 1] = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        """Use AdamW, with a schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main(root: Path, result: str) -> None:
    """Train, from last.ckpt where there is one."""
    torch.manual_seed(0)
    model = Model()
    rows = torch.randn(8 * STEPS, 16, generator=torch.Generator().manual_seed(3))
    keep = ModelCheckpoint(
        root, every_n_train_steps=EVERY, save_top_k=2, monitor="step", mode="max", save_last=True
    )
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = root / "last.ckpt"
    is_there = last.is_dir() and (last / "meta.pt").exists()
    batches = StatefulDataLoader(TensorDataset(rows), batch_size=4)
    trainer.fit(model, batches, ckpt_path=str(last) if is_there else None)
    finish(result, model.losses, model, trainer.optimizers)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
