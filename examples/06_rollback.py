"""After a loss spike: go back to an earlier step, leave out the data that made it, train on.

python examples/06_rollback.py runs/rollback
"""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast

STEPS, EVERY, BATCH = 60, 10, 8
SPIKE = 100.0  # a loss far above what training has seen for long
MARGIN = 5 * BATCH  # left out beyond the spike: what made it may go on for a while

torch.manual_seed(0)
inputs = torch.randn(1000, 16)
targets = inputs.sum(1, keepdim=True)
targets[280:310] += 1e4  # the data that nobody has looked at

model = torch.nn.Linear(16, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = holdfast.DataState(len(inputs), shuffle=False)
loader = DataLoader(TensorDataset(inputs, targets), BATCH, sampler=data.sampler())
state = {
    "model": model,
    "optimizer": optimizer,
    "data": data,
    "random": holdfast.RandomState(),
}


def train(batch: list[torch.Tensor]) -> float:
    optimizer.zero_grad()
    loss = (model(batch[0]) - batch[1]).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


with holdfast.Checkpointer(sys.argv[1], every=EVERY) as checkpointer:
    step = checkpointer.restore(state) or 0
    batches = data.read(loader)
    while step < STEPS:
        loss = train(next(batches))
        step += 1
        if loss > SPIKE and step > EVERY:
            read, good = data.position, (step - 2) // EVERY * EVERY
            print(f"step {step}: loss {loss:.0f}; back to step {good}, ", end="")
            step = checkpointer.restore(state, step=good)
            checkpointer.retire_after(good)  # else what they hold would stay the newest
            print(f"without the data from {data.position} to {read + MARGIN}")
            data.skip(data.position, read + MARGIN)
            batches = data.read(loader)
        else:
            checkpointer.step(step, state)
print(f"step {step}: loss {loss:.4f}, position {data.position}")
