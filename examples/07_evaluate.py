"""Evaluate the newest checkpoint of a run, its weights alone, while training writes the run.

python examples/07_evaluate.py runs/rollback
"""

import sys

import torch

import holdfast

model = torch.nn.Linear(16, 1)
checkpointer = holdfast.Checkpointer(sys.argv[1])
step = checkpointer.restore({"model": model}, partial=True)  # writes nothing to the run
if step is None:
    sys.exit(f"{sys.argv[1]} has no checkpoint yet")

inputs = torch.randn(100, 16, generator=torch.Generator().manual_seed(1))
with torch.no_grad():
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().item()
print(f"step {step}: loss {loss:.4f}")
