"""Open what 03_fsdp.py saved on another layout: tensor parallel x data parallel, and one process.

torchrun --nproc-per-node 4 examples/04_reshard.py runs/fsdp
"""

import importlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import holdfast

training = importlib.import_module("03_fsdp")


def main() -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    model = training.make_model()
    for layer in model[1].layers:
        halves = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
        parallelize_module(layer, mesh["tensor"], halves)
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    path = holdfast.Checkpointer(sys.argv[1]).path(training.STEPS)
    state = {"model": model, "optimizer": optimizer}
    report = holdfast.load(path, into=state, partial=True)  # all but the position in the data
    tokens = training.windows[: training.BATCH]
    loss = training.loss_of(model, tokens).detach()

    plain = training.make_model()  # the weights alone, by this process alone
    holdfast.load(path, into={"model": plain}, partial=True, group="alone")
    torch.testing.assert_close(loss, training.loss_of(plain, tokens).detach())
    training.loss_of(model, tokens).backward()  # and training goes on
    optimizer.step()
    if dist.get_rank() == 0:
        read, needed = report.bytes_read / 1e6, report.bytes_needed / 1e6
        print(f"{ranks} ranks: this one read {read:.2f} MB, holds {needed:.2f} MB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
