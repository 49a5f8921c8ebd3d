"""Save the state of one process, load it into a new model, and read a part of it.

python examples/01_save_and_load.py runs/first
"""

import sys

import torch

import holdfast

path = sys.argv[1]
torch.manual_seed(0)


def make_state() -> dict:
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "epoch": 0}


def train(state: dict) -> float:
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    loss = (state["model"](inputs) - inputs).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    return loss.item()


state = make_state()
for _ in range(10):
    train(state)
state["epoch"] = 3
holdfast.save(state, path, step=10)  # returns when the checkpoint is durable

loaded = make_state()  # other weights, and an optimizer that has made no step
holdfast.load(path, into=loaded)  # every byte is verified; a difference in shape is an error
assert loaded["epoch"] == 3
assert train(loaded) == train(state)  # training goes on the same, to the last bit
assert train(loaded) == train(state)

weights = torch.nn.Sequential(torch.nn.Linear(16, 64))  # the first layer alone
holdfast.load(path, into={"model": weights}, partial=True)

with holdfast.open(path) as checkpoint:  # reads no tensor yet
    rows = checkpoint.tensor("model.0.weight", box=((8, 0), (4, 16)))  # 4 rows, from row 8 on
    epoch = checkpoint.objects()["epoch"]
    print(f"step {checkpoint.step}, epoch {epoch}: {len(checkpoint.names())} tensors")
assert torch.equal(rows, weights[0].weight[8:12])
