"""Saves and loads checkpoints as others make them: a program for any Python that has them.

Knows nothing of ours but the library itself, so that it is measured like the others.

    python rival_worker.py torch save DIRECTORY LOG STEPS PAUSE_S
    echo DIRECTORY | python rival_worker.py torch look STEPS
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

ELEMENTS = 16384  # 64 KiB of float32
Save = Callable[[str, int], None]
Load = Callable[[str], Any]


def torch_save() -> tuple[Save, Load]:
    """`torch.save` to the final name."""
    torch = importlib.import_module("torch")
    return (
        lambda path, step: torch.save({"a": torch.full((ELEMENTS,), float(step))}, path),
        lambda path: torch.load(path, weights_only=True)["a"].numpy(),
    )


def torch_rename() -> tuple[Save, Load]:
    """`torch.save` to another name, then a rename."""
    save, load = torch_save()

    def save_and_rename(path: str, step: int) -> None:
        save(f"{path}.tmp", step)
        os.replace(f"{path}.tmp", path)

    return save_and_rename, load


def safetensors_save() -> tuple[Save, Load]:
    """`safetensors.torch.save_file`."""
    torch = importlib.import_module("torch")
    library = importlib.import_module("safetensors.torch")
    return (
        lambda path, step: library.save_file({"a": torch.full((ELEMENTS,), float(step))}, path),
        lambda path: library.load_file(path)["a"].numpy(),
    )


def dcp_save() -> tuple[Save, Load]:
    """`torch.distributed.checkpoint.save`, of one rank."""
    torch = importlib.import_module("torch")
    dcp = importlib.import_module("torch.distributed.checkpoint")

    def load(path: str) -> Any:
        found = {"a": torch.zeros(ELEMENTS)}
        dcp.load(found, checkpoint_id=path, no_dist=True)
        return found["a"].numpy()

    def save(path: str, step: int) -> None:
        state = {"a": torch.full((ELEMENTS,), float(step))}
        dcp.save(state, checkpoint_id=path, no_dist=True)

    return save, load


def orbax_save() -> tuple[Save, Load]:
    """Orbax's StandardCheckpointer, until it says that it is done."""
    numpy = importlib.import_module("numpy")
    checkpointer = importlib.import_module("orbax.checkpoint").StandardCheckpointer()

    def save(path: str, step: int) -> None:
        checkpointer.save(path, {"a": numpy.full((ELEMENTS,), step, "f4")})
        checkpointer.wait_until_finished()

    def load(path: str) -> Any:
        return numpy.asarray(checkpointer.restore(path, {"a": numpy.zeros((ELEMENTS,), "f4")})["a"])

    return save, load


def holdfast_save() -> tuple[Save, Load]:
    """`holdfast.save`."""
    torch = importlib.import_module("torch")
    holdfast = importlib.import_module("holdfast")

    def load(path: str) -> Any:
        found = {"a": torch.zeros(ELEMENTS)}
        holdfast.load(path, into=found)
        return found["a"].numpy()

    return (
        lambda path, step: holdfast.save({"a": torch.full((ELEMENTS,), float(step))}, path),
        load,
    )


RIVALS = {
    "torch.save": torch_save,
    "torch.save and rename": torch_rename,
    "safetensors": safetensors_save,
    "DCP": dcp_save,
    "Orbax": orbax_save,
    "holdfast": holdfast_save,
}


def verdict(load: Load, path: str, step: int) -> str:
    """Say whether a checkpoint is "good", "absent", "unloadable" or "wrong"."""
    if not os.path.exists(path):
        return "absent"
    try:
        found = load(path)
    except BaseException:  # whatever a rival raises
        return "unloadable"
    return "good" if len(found) == ELEMENTS and bool((found == step).all()) else "wrong"


def main() -> None:
    """Save, or look at one directory after another."""
    name, verb, *rest = sys.argv[1:]
    save, load = RIVALS[name]()
    if verb == "save":
        where, log, steps, pause_s = rest
        for step in range(1, int(steps) + 1):
            save(f"{where}/step-{step}", step)
            print(step, os.path.getsize(log), flush=True)
            time.sleep(float(pause_s))
        return
    for line in sys.stdin:
        where = line.rstrip("\n")
        paths = {step: f"{where}/step-{step}" for step in range(1, int(rest[0]) + 1)}
        found = {step: verdict(load, path, step) for step, path in paths.items()}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
