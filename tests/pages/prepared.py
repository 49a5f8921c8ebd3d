"""What pages take for granted, and what they promise: code before and after their blocks."""

BEFORE = {
    "SECURITY.md": """
import torch, holdfast
state = {"model": torch.nn.Linear(16, 16)}
holdfast.save(state, "runs/a/step-00001000", step=1000)
holdfast.save(state, "downloads/model")
""",
    "docs/reference/cli.md": """
import torch, holdfast
model = torch.nn.Linear(64, 64)
for step in (1, 2):
    holdfast.save({"model": model, "n": step}, f"runs/a/step-{step:08d}", step=step)
""",
    "docs/howto/export.md": """
import pathlib
pathlib.Path("base-model").mkdir()
pathlib.Path("base-model/config.json").write_text('{"model_type": "llama"}')
""",
    "docs/repair.md": """
import os, pathlib, time
import torch, holdfast
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 64)).sum().backward()
optimizer.step()
state = {"model": model, "optimizer": optimizer, "step": 0}
for step in (100, 200, 300):
    holdfast.save(state, f"runs/a/step-{step:08d}", step=step)
lost, damaged = pathlib.Path("runs/a/step-00000200"), pathlib.Path("runs/a/step-00000300")
(lost / "MANIFEST").unlink()
long_ago = time.time() - 7200  # of a younger one nobody knows whether its save is under way
for path in lost.rglob("*"):
    os.utime(path, (long_ago, long_ago))
(file,) = (path for path in damaged.rglob("*.hf"))
with holdfast.open(damaged) as checkpoint:
    bias = checkpoint.tensor("optimizer.state.weight.exp_avg").numpy().tobytes()
content = bytearray(file.read_bytes())
content[content.index(bias)] ^= 1
file.write_bytes(content)
""",
}

AFTER = {
    "README.md": """
assert holdfast.Checkpointer("runs/a").steps() == [50, 100, 150, 200]
with torch.no_grad():
    model.weight.zero_()
assert holdfast.Checkpointer("runs/a").restore(state) == 200
assert model.weight.count_nonzero() == model.weight.numel()
try:
    holdfast.save(state, checkpointer.path(200))
except holdfast.errors.AlreadyCommittedError:
    pass
else:
    raise AssertionError("a checkpoint is written over")
""",
    "docs/data.md": "assert (step, data.position) == (6, 48)",
    "docs/dcp.md": "import holdfast; holdfast.open('runs/dcp/second')",
}
