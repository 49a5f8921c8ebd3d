"""Train, be killed, start again: the same losses as if nothing had happened.

python examples/02_resume.py runs/resume 35    # kills itself after step 35, as a crash would
python examples/02_resume.py runs/resume       # goes on from the newest checkpoint
"""

import os
import signal
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast

STEPS, EVERY, BATCH = 60, 10, 8
killed_at = int(sys.argv[2]) if len(sys.argv) > 2 else None

torch.manual_seed(0)
inputs = torch.randn(100, 16)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = holdfast.DataState(len(inputs), seed=1)
loader = DataLoader(TensorDataset(inputs), BATCH, sampler=data.sampler())
state = {
    "model": model,
    "optimizer": optimizer,
    "data": data,  # which samples have been read
    "random": holdfast.RandomState(),  # what dropout draws next
}

keep = holdfast.Keep.latest(2)
with holdfast.Checkpointer(sys.argv[1], every=EVERY, keep=keep) as checkpointer:
    step = first = checkpointer.restore(state) or 0  # None in a new run
    batches = data.read(loader)
    while step < STEPS:
        (batch,) = next(batches)
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        step += 1
        checkpointer.step(step, state)  # copies the state when it is due, and writes meanwhile
        if step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if checkpointer.stopping:  # SIGTERM: this step is durable
            break
print(f"steps {first + 1} to {step}, loss {loss.item().hex()}")
