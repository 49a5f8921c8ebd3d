"""A small GPT trained with FSDP2 and holdfast: the loop of the demo, and an example to copy.

The lines marked `holdfast` are all that checkpointing takes. Runs alone or on several ranks, and
goes on from the newest checkpoint by itself:

    torchrun --standalone --nproc-per-node 2 -m holdfast.tools.demo_train --root runs/a --every 10
"""

import argparse
import json
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import holdfast

BATCH = 24  # sequences per step over all ranks; 1, 2 and 3 ranks share them evenly
CONTEXT = 64  # bytes per sequence
SIZES = {"small": (384, 6), "tiny": (192, 3)}  # width, layers
TEXT_BYTES = 8 << 20


class Block(nn.Module):
    """Attention and a perceptron, each with its norm and its residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return (batch, bytes, width)."""
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        widened: Tensor = self.outer(F.gelu(self.inner(self.norm2(x))))
        return x + widened


class GPT(nn.Module):
    """A byte-level language model; the embedding is tied to the head."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for table in (self.embed, self.position):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Take (batch, bytes); return scores of the next byte, (batch, bytes, 256)."""
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores


def build(size: str) -> tuple[GPT, torch.optim.AdamW]:
    """Make the model, sharded over all ranks where there are any, and its optimizer."""
    torch.manual_seed(0)
    model = GPT(*SIZES[size])
    if dist.is_initialized():
        for part in (*model.blocks, model):
            fully_shard(part)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def read_text() -> Tensor:
    """Return the first bytes of Python's own standard library, in the order of the file names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8)


def read_batch(text: Tensor, step: int, rank: int, world_size: int) -> Tensor:
    """Return this rank's sequences of a step, one byte longer than the context; a pure function."""
    draw, end = torch.Generator().manual_seed(step), len(text) - CONTEXT
    starts = torch.randint(end, (BATCH,), generator=draw, dtype=torch.int64, device="cpu").tolist()
    return torch.stack([text[i : i + CONTEXT + 1] for i in starts[rank::world_size]]).long()


def train_step(model: GPT, optimizer: torch.optim.AdamW, tokens: Tensor) -> float:
    """Do one step; return the loss over all ranks."""
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def train(arguments: argparse.Namespace, rank: int, world_size: int) -> None:
    """Restore what there is, then train to the last step."""
    text = read_text()
    model, optimizer = build(arguments.size)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    keep = holdfast.Keep.latest(2)  # holdfast
    with holdfast.Checkpointer(arguments.root, every=arguments.every, keep=keep) as checkpointer:
        start = checkpointer.restore(state) or 0  # holdfast
        record(arguments.record, rank, {"restored": start})
        for step in range(start + 1, arguments.steps + 1):
            loss = train_step(model, optimizer, read_batch(text, step, rank, world_size))
            record(arguments.record, rank, {"step": step, "loss": loss})
            state["step"] = step
            checkpointer.step(step, state)  # holdfast
            if checkpointer.stopping:  # holdfast
                break


def record(path: str, rank: int, row: dict[str, float]) -> None:
    """Show a row, and add it to a file of JSON lines."""
    if rank == 0:
        print(row, flush=True)
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Join the other ranks, if torchrun started any, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--root", required=True, help="directory of the run's checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, help="save at multiples of this step; default: never")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--record", default=os.devnull, help="file of JSON lines for the losses")
    arguments = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        train(arguments, dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
        os._exit(0)  # gloo's threads may hold a tensor yet, and abort in the end of Python
    train(arguments, 0, 1)


if __name__ == "__main__":
    main()
