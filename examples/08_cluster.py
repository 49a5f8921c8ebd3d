"""Train on machines that a cluster takes back; examples/cluster has scripts that start this.

torchrun --nproc-per-node 2 examples/08_cluster.py runs/cluster 200
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import holdfast

root, steps = sys.argv[1], int(sys.argv[2])
pause_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
BATCH = 12  # of all ranks together, however many they are

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(600, 16)
model = DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = holdfast.DataState(len(inputs), seed=1)
loader = DataLoader(TensorDataset(inputs), BATCH // ranks, sampler=data.sampler())
state = {"model": model, "optimizer": optimizer, "data": data}

keep = holdfast.Keep.latest(2)
with holdfast.Checkpointer(root, every=20, keep=keep) as checkpointer:
    step = checkpointer.restore(state) or 0  # on any number of ranks
    batches = data.read(loader)
    while step < steps:
        (batch,) = next(batches)
        optimizer.zero_grad()
        (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        step += 1
        if rank == 0:
            print(f"step {step} on {ranks} ranks", flush=True)
        time.sleep(pause_s)
        checkpointer.step(step, state)
        if checkpointer.stopping:  # a signal came to some rank; this step is durable
            break
    else:
        checkpointer.save(steps, state)
dist.destroy_process_group()
