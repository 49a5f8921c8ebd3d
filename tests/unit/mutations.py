"""Change everything as soon as a save in the background allows it; see whether it reaches a file.

``python tests/unit/mutations.py --trials 10000`` for each way of staging. ``--device cuda``: all of
it on that device.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast

STAGES = ("eager", "lazy")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)


class Subject:
    """A model, its optimizer, and tensors of all kinds beside them."""

    def __init__(self, chance: random.Random) -> None:
        torch.manual_seed(chance.randrange(1 << 30))
        sizes = [chance.randrange(1, 200) for _ in range(3)]
        norm = nn.BatchNorm1d(sizes[1])
        self.model = nn.Sequential(nn.Linear(sizes[0], sizes[1]), norm, nn.Linear(*sizes[1:]))
        kind = chance.choice([torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        self.optimizer: torch.optim.Optimizer = kind(self.model.parameters(), lr=0.5, **options)
        self.loose = {f"x{i}": _random_tensor(chance) for i in range(chance.randrange(6))}
        self.width = sizes[0]
        self.train()

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"model": self.model, "optimizer": self.optimizer, "loose": self.loose}

    def train(self) -> None:
        """Take a step, forward and backward before it."""
        self.optimizer.zero_grad()
        self.model(torch.randn(8, self.width)).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by its name in the checkpoint."""
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"optimizer.state.{name}.{key}"] = value
        return {**found, **{f"loose.{name}": tensor for name, tensor in self.loose.items()}}


def _random_tensor(chance: random.Random) -> torch.Tensor:
    shape = [chance.randrange(1, 40) for _ in range(chance.randrange(3))]
    values = torch.randint(0, 200, shape).to(chance.choice(DTYPES))
    return values.t() if values.ndim == 2 and chance.random() < 0.5 else values


def _mutate(subject: Subject, chance: random.Random) -> None:
    """Change everything there is, each tensor in a way chosen by lot."""
    with torch.no_grad():
        for tensor in subject.tensors().values():
            way = chance.randrange(4)
            if way == 0:
                tensor.zero_()
            elif way == 1:
                tensor.copy_(torch.randint(0, 2, tensor.shape))
            elif way == 2:
                tensor.data.fill_(1)
            elif tensor.numel():
                tensor.untyped_storage().resize_(0)


def mutate_and_check(directory: Path, *, trials: int, stage: str, seed: int) -> list[str]:
    """Save, change, read; return what differs from what was there at the call.

    Args:
        stage: "eager": everything changes as soon as `wait_staged` returns; "lazy": as soon as the
            optimizer has stepped, straight after the call.
    """
    chance, faults = random.Random(seed), []
    for trial in range(trials):
        subject, path = Subject(chance), directory / f"trial-{trial}"
        expected = {name: tensor.clone() for name, tensor in subject.tensors().items()}
        handle = holdfast.save_async(subject.state(), path, stage=stage)  # type: ignore[arg-type]
        if stage == "lazy":
            subject.train()
        else:
            handle.wait_staged()
        _mutate(subject, chance)
        handle.result()
        with holdfast.open(path) as checkpoint:
            found = checkpoint.tensors(checkpoint.names())
        faults += [
            f"trial {trial} of seed {seed}: {name}"
            for name in expected.keys() | found.keys()
            if name not in found or not torch.equal(found[name], expected[name].cpu())
        ]
        shutil.rmtree(path)
    return faults


def main() -> int:
    """Run many trials and say what they found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=10_000, help="for each way of staging")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--stage", choices=STAGES, nargs="+", default=STAGES)
    parser.add_argument("--device", default="cpu", help="where the tensors are")
    options = parser.parse_args()
    torch.set_default_device(options.device)
    faults = []
    for stage in options.stage:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            found = mutate_and_check(
                Path(directory), trials=options.trials, stage=stage, seed=options.seed
            )
        seconds = time.perf_counter() - started
        print(
            f"{stage}: {options.trials} saves, everything changed after each was staged; "
            f"{len(found)} faults; seed {options.seed}, {seconds:.0f} s"
        )
        faults += found
    print("\n".join(faults[:20]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
