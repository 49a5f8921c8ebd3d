"""Train a small language model with FSDP2; stop it at any moment, start it again, on any ranks.

torchrun --nproc-per-node 2 examples/03_fsdp.py runs/fsdp
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import holdfast

STEPS, BATCH, LENGTH, WIDTH = 60, 8, 32, 64
text = torch.tensor(list(Path(__file__).read_bytes()))  # real text: this one
windows = text.unfold(0, LENGTH + 1, 1)  # the samples


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
    return nn.Sequential(
        nn.Embedding(256, WIDTH), nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, 256)
    )


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])


def main() -> None:
    dist.init_process_group("gloo")
    model, mesh = make_model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for part in [*model[1].layers, model]:
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = holdfast.DataState(len(windows), seed=1)  # which samples have been read
    state = {"model": model, "optimizer": optimizer, "data": data}

    with holdfast.Checkpointer(sys.argv[1], every=20, stage="lazy") as checkpointer:
        step = first = checkpointer.restore(state) or 0
        batches = data.read(DataLoader(windows, BATCH, sampler=data.sampler()))
        while step < STEPS and not checkpointer.stopping:  # SIGTERM: the last save is made
            loss = loss_of(model, next(batches))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            checkpointer.step(step, state)
    if dist.get_rank() == 0:
        print(f"steps {first + 1} to {step} on {dist.get_world_size()} ranks, loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
