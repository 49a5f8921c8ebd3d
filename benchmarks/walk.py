"""How many calls a save and a load are, beside other formats: rooms, calls, re-entries, depth.

Of one package, everything is counted: all its source files, all threads, comprehensions and resumed
generators too (in Python 3.11 each of them is a call).

- rooms: source files that are entered.
- calls: Python functions that are called, or resumed.
- re-entries: calls into a file that was entered before, from another one. A thread's first call
  comes from another one too.
- depth: most files nested in one thread, one on the other.

Each subject runs once before it is counted: imports, pools and what is kept of a plan are there.

    make bench-peers    # installs the other formats; who is not there is skipped
    python benchmarks/walk.py
"""

import gc
import importlib
import os
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import holdfast

HOLDFAST = Path(holdfast.__file__).parent
MORE = 100  # tensors, for what each further one costs
PEERS = ("DCP", "torchsnapshot", "Orbax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Orbax reads it when it is imported

Action = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Walk:
    """What was counted, as the module says."""

    rooms: int
    calls: int
    reentries: int
    depth: int


class Counter:
    """Follows every call into the files below ``root``; counts those while `counting`."""

    def __init__(self, root: Path) -> None:
        self._prefix = f"{root}{os.sep}"
        self._stacks: dict[int, list[str]] = {}
        self.counting = False
        self.entered: dict[str, int] = {}  # room → calls into it
        self.reentries: dict[tuple[str, str], int] = {}  # (from, into) → how often
        self.depth = 0

    @property
    def walk(self) -> Walk:
        """Return the four numbers."""
        calls, reentries = sum(self.entered.values()), sum(self.reentries.values())
        return Walk(len(self.entered), calls, reentries, self.depth)

    def on_event(self, frame: FrameType, event: str, _: object) -> None:
        """Take one event of `sys.setprofile`, of any thread."""
        room = frame.f_code.co_filename
        if not room.startswith(self._prefix) or event not in ("call", "return"):
            return
        stack = self._stacks.setdefault(threading.get_ident(), [])
        if event == "return":
            if stack:  # else it was called before anything was followed
                stack.pop()
            return
        if self.counting:
            self._count(stack[-1] if stack else "", room)
        stack.append(room)
        if self.counting:
            changes = sum(one != other for one, other in pairwise(stack))
            self.depth = max(self.depth, 1 + changes)

    def _count(self, caller: str, room: str) -> None:
        if room in self.entered and caller != room:
            arrow = (caller, room)
            self.reentries[arrow] = self.reentries.get(arrow, 0) + 1
        self.entered[room] = self.entered.get(room, 0) + 1


def count(action: Action, before: Action, root: Path = HOLDFAST) -> Counter:
    """Run ``before``, then ``action``, and count the second.

    Threads that ``before`` starts, and that stay, are followed too.
    """
    counter = Counter(root)
    threading.setprofile(counter.on_event)
    sys.setprofile(counter.on_event)
    try:
        before()
        gc.collect()  # what ends objects is no part of the walk
        counter.counting = True
        action()
        counter.counting = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return counter


def subjects(scratch: Path) -> dict[str, Callable[[], Counter]]:
    """Return what counts each walk of holdfast, by name.

    Of one tensor; those of a layer, and of a chain, are of one `Linear` with its AdamW.
    """
    one = {"model": {"w": torch.ones(8, 8)}}
    new = _Names(scratch)

    def change() -> None:
        one["model"]["w"][0, 0] += 0.5  # the rest is the base's

    def layer_link() -> Counter:
        state = linear_and_adamw()
        return linked(state, new(), lambda: train(state))

    return {
        "save": lambda: saved(one, new),
        "load": lambda: loaded(one, new),
        "lossless save": lambda: saved(one, new, codec="lossless"),
        "lazy save": lambda: saved_lazily(one, new),
        "delta link": lambda: linked(one, new(), change),
        "lossless save of a layer": lambda: saved(linear_and_adamw(), new, codec="lossless"),
        "lazy save of a layer": lambda: saved_lazily(linear_and_adamw(), new),
        "delta link of a layer": layer_link,
        "load of a chain of 3": lambda: loaded_chain(linear_and_adamw(), new()),
    }


def saved(state: Any, new: Callable[[], Path], **options: Any) -> Counter:
    """Count a save."""

    def act() -> None:
        holdfast.save(state, new(), **options)

    return count(act, act)


def saved_lazily(state: Any, new: Callable[[], Path]) -> Counter:
    """Count a lazy save, until it is committed."""

    def act() -> None:
        holdfast.save_async(state, new(), stage="lazy").result()

    return count(act, act)


def loaded(state: Any, new: Callable[[], Path]) -> Counter:
    """Count a load in place."""
    path = new()
    holdfast.save(state, path)
    return count(lambda: holdfast.load(path, into=state), lambda: holdfast.load(path, into=state))


def linked(state: Any, run: Path, change: Callable[[], object]) -> Counter:
    """Count the fourth link of a run, of which ``change`` has changed the state."""

    def act(number: int) -> None:
        holdfast.save(state, run / f"step-{number:08d}", step=number, codec="delta")
        change()

    act(1)
    act(2)
    return count(lambda: act(4), lambda: act(3))


def loaded_chain(state: Any, run: Path) -> Counter:
    """Count the load of a link with two checkpoints below."""
    for number in (1, 2, 3):
        path = run / f"step-{number:08d}"
        holdfast.save(state, path, step=number, codec="delta")
        train(state)
    return count(lambda: holdfast.load(path, into=state), lambda: holdfast.load(path, into=state))


def each_further(scratch: Path) -> dict[str, float]:
    """Return the calls that one more plain tensor costs each raw save, and a raw load."""
    new = _Names(scratch)

    def calls(tensors: int) -> dict[str, int]:
        state = {f"w{i}": torch.full((8, 8), float(i)) for i in range(tensors)}
        stepped, path = moments(tensors), new()
        holdfast.save(state, path)
        actions: dict[str, Action] = {
            "save": lambda: holdfast.save(state, new()),
            "load": lambda: holdfast.load(path, into=state),
            "eager save": lambda: holdfast.save_async(state, new()).result(),
            "lazy save": lambda: holdfast.save_async(stepped, new(), stage="lazy").result(),
        }
        return {verb: count(act, act).walk.calls for verb, act in actions.items()}

    few, many = calls(MORE), calls(2 * MORE)
    return {verb: (many[verb] - few[verb]) / MORE for verb in few}


def moments(tensors: int) -> dict[str, Any]:
    """Return a parameter with so many moments, which are copied later by a lazy save."""
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {f"m{i}": torch.full((8, 8), float(i)) for i in range(tensors)}
    return {"model": model, "optimizer": optimizer}


def linear_and_adamw() -> dict[str, Any]:
    """Return a model of one layer and its optimizer, after one step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    train(state)
    return state


def train(state: dict[str, Any]) -> None:
    """Take one step."""
    state["optimizer"].zero_grad()
    state["model"](torch.ones(1, 8)).square().mean().backward()
    state["optimizer"].step()


def peer(name: str, scratch: Path) -> dict[str, Counter]:
    """Count a save and a load of one tensor by another format, in its own package."""
    module = importlib.import_module(f"compare.{name.lower()}")
    package = {"DCP": "torch.distributed.checkpoint", "Orbax": "orbax.checkpoint"}.get(name, name)
    file = importlib.import_module(package).__file__
    if file is None:
        raise ImportError(f"{package} is no package with files")
    found, root = module.peers()[0], Path(file).parent
    state, new = {"model": {"w": torch.ones(8, 8)}}, _Names(scratch)
    path = new()
    found.save(state, path)

    def save() -> None:
        found.save(state, new())

    def load() -> None:
        found.load(path, state)

    return {"save": count(save, save, root), "load": count(load, load, root)}


@contextmanager
def new_directory() -> Iterator[Path]:
    """Give an empty directory that is removed.

    At the same depth for all who count: a save syncs every directory above that is young, a few
    calls for each.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as made:
        yield Path(made)


class _Names:
    """Paths that do not exist yet."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch

    def __call__(self) -> Path:
        return self._scratch / f"checkpoint-{uuid.uuid4().hex}"


def table(walks: dict[str, Walk]) -> str:
    """Return Markdown."""
    lines = ["| | rooms | calls | re-entries | depth |", "|---|---|---|---|---|"]
    for name, walk in walks.items():
        cells = [f"{n:,}" for n in (walk.rooms, walk.calls, walk.reentries, walk.depth)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    walks: dict[str, Walk] = {}
    with new_directory() as scratch:
        for name, subject in subjects(scratch).items():
            walks[f"holdfast, {name}"] = subject().walk
        for name in PEERS:
            try:
                found = peer(name, scratch)
            except ImportError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                continue
            walks |= {f"{name}, {verb}": counter.walk for verb, counter in found.items()}
        print(table(walks))
        for verb, calls in each_further(scratch).items():
            print(f"\nEach further plain tensor, {verb}: {calls:.2f} calls.")


if __name__ == "__main__":
    main()
