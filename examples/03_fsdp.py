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

import holdfast

STEPS, LENGTH, WIDTH = 60, 32, 64
text = torch.tensor(list(Path(__file__).read_bytes()))  # real text: this one


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
    return nn.Sequential(
        nn.Embedding(256, WIDTH), nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, 256)
    )


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH - 1, (8,), generator=chance)
    tokens = torch.stack([text[start : start + LENGTH + 1] for start in starts])
    return nn.functional.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])


def main() -> None:
    dist.init_process_group("gloo")
    model, mesh = make_model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for part in [*model[1].layers, model]:
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    state = {"model": model, "optimizer": optimizer}

    with holdfast.Checkpointer(sys.argv[1], every=20, stage="lazy") as checkpointer:
        first = checkpointer.restore(state) or 0
        for step in range(first + 1, STEPS + 1):
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step(step, state)
            if checkpointer.stopping:  # SIGTERM: the last save is made
                break
    if dist.get_rank() == 0:
        print(f"steps {first + 1} to {step} on {dist.get_world_size()} ranks, loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
