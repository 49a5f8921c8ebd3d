"""What the training programs here say of themselves: each step, and how it ended, to the bit."""

import hashlib
import json
import os
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel


def say_step(step: int) -> None:
    """Print that a step is about to be taken, and give who kills programs the time to do so."""
    print(f"step {step}", flush=True)
    time.sleep(0.1)


def digest_of(module: torch.nn.Module, optimizers: Iterable[Any]) -> str:
    """Return the digest of every bit that this rank holds of parameters, buffers and moments."""
    digest = hashlib.sha256()
    for name, value in tensors_of(module).items():
        _add(digest, name, value)
    for optimizer in optimizers:
        for number, state in optimizer.state_dict()["state"].items():
            for key, value in sorted(state.items()):
                _add(digest, f"{number}.{key}", value)
    return digest.hexdigest()


def tensors_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the tensors of a module by name; whole where FSDP1 has made its parameters flat."""
    parts = (
        module.modules() if isinstance(module, torch.nn.Module) else ()
    )  # Megatron's are several
    if not any(isinstance(part, FullyShardedDataParallel) for part in parts):
        return dict(module.state_dict())
    with FullyShardedDataParallel.summon_full_params(module, writeback=False):
        named = [(name, value.detach().clone()) for name, value in module.named_parameters()]
    return {name.replace("_fsdp_wrapped_module.", ""): value for name, value in named}


def _add(digest: Any, name: str, value: Any) -> None:
    held = value.to_local() if hasattr(value, "to_local") else value
    data = held.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest.update(f"{name} {held.dtype} {[*held.shape]} ".encode() + data.numpy().tobytes())


def finish(
    result: str,
    losses: dict[int, float],
    module: torch.nn.Module,
    optimizers: Iterable[Any],
) -> None:
    """Write what this rank ends with: losses by step, each to the bit, and the digest."""
    found = {
        "losses": {step: float(loss).hex() for step, loss in losses.items()},
        "digest": digest_of(module, optimizers),
    }
    with open(f"{result}.{os.environ['RANK']}.json", "w") as file:
        json.dump(found, file)


def finish_whole(
    result: str,
    losses: dict[int, float],
    module: torch.nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
) -> None:
    """Write what `finish` does, and every parameter whole, for other numbers of ranks."""
    os.environ.setdefault("RANK", "0")
    finish(result, losses, module, optimizers)
    named = tensors_of(module).items()
    whole = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in named}
    if os.environ["RANK"] == "0":
        cpu = {name: value.detach().cpu().clone() for name, value in whole.items()}
        torch.save(cpu, f"{result}.weights")


def unlike(stock: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[str]:
    """Say where the ends of two runs differ, or losses of steps that the second one took last."""
    found = []
    for rank, (one, other) in enumerate(zip(stock, ours, strict=True)):
        if one["digest"] != other["digest"]:
            found.append(f"rank {rank} ends with other parameters or moments")
        wrong = [step for step, loss in other["losses"].items() if one["losses"][step] != loss]
        if wrong:
            found.append(f"rank {rank} has other losses in the steps {', '.join(wrong)}")
    return found
