"""What happens between the steps of a training loop, while a save may be in flight."""

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast

from .ambient import choose
from .episode import Episode, Leave
from .exits import WHOLE, end_soon
from .states import OPTIONS, State, make_state, train

Event = Callable[[Episode], None]
THREAD_SAVES = 2
WHOLE_ENDS = 0.2  # of forked children; the others leave out what takes longest


def _fork(episode: Episode) -> None:
    """Fork, with a save in flight; the child does one of what children do."""
    path = episode.new_path("flight")
    state = make_state(episode.rng.randrange(100), 4096)
    saved = episode.begin(path, state)
    done, handle = episode.guard(
        "save_async", lambda: holdfast.save_async(state, path, options=OPTIONS)
    )
    if not done:
        return
    name = episode.pick(CHILDREN)
    episode.say(child=name)
    episode.fork(name, lambda: CHILDREN[name](episode, handle))
    if episode.guard("result", handle.result)[0]:
        episode.acknowledge(saved)


def _child_asks(episode: Episode, handle: Any) -> None:
    for name in ("result", "wait_staged", "done", "progress", "cancel"):
        done, _ = episode.guard(name, getattr(handle, name))
        if done:
            episode.fault(f"{name} of another process's save returns in a forked child")
    repr(handle)


def _child_saves(episode: Episode, handle: Any) -> None:
    before = len(episode.acknowledged)
    state = make_state(6)
    episode.save_async(state, episode.new_path(f"child-{os.getpid()}"))
    episode.save(state, episode.new_path(f"child-{os.getpid()}"))
    if len(episode.acknowledged) < before + 2:
        episode.fault("a save fails in a forked child")
    episode.load(*episode.acknowledged[0])


def _child_leaves(episode: Episode, handle: Any) -> None:
    del handle
    gc.collect()
    if episode.has(WHOLE_ENDS, [WHOLE]):
        raise Leave(0)
    end_soon(0)


CHILDREN: dict[str, Callable[[Episode, Any], None]] = {
    "nothing": lambda episode, handle: None,
    "asks for the save": _child_asks,
    "saves": _child_saves,
    "leaves": _child_leaves,
}


def _spawn(episode: Episode) -> None:
    subprocess.run([sys.executable, "-S", "-c", "pass"], check=True, timeout=20)


def _load_data(episode: Episode) -> None:
    data = TensorDataset(torch.arange(4.0))
    state = make_state(episode.rng.randrange(100))
    path = episode.new_path("loader")
    saved = episode.begin(path, state)
    loader = iter(DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="fork"))
    done, handle = episode.guard(
        "save_async", lambda: holdfast.save_async(state, path, options=OPTIONS)
    )
    read = [float(batch.sum()) for (batch,) in loader]
    if read != [1.0, 5.0]:
        episode.fault(f"a data loader gave {read}")
    if done and episode.guard("result", handle.result)[0]:
        episode.acknowledge(saved)


def _threads(episode: Episode) -> None:
    """Save different states in two threads, and load meanwhile in a third."""
    seeds = [episode.rng.randrange(100) for _ in range(2)]
    busy = [episode.pick(["wait", "skip", "fail"]) for _ in range(2)]
    stages = [episode.pick(["eager", "lazy"]) for _ in range(2)]
    episode.say(threads=[*busy, *stages])
    start = threading.Barrier(3)

    def save(seed: int, busy: str, stage: str) -> None:
        state = make_state(seed)
        start.wait()
        for _ in range(THREAD_SAVES):
            episode.save_async(state, episode.new_path("thread"), busy=busy, stage=stage)
            train(state)
        episode.save(state, episode.new_path("thread"))

    def load() -> None:
        start.wait()
        for _ in range(THREAD_SAVES):
            episode.load(*episode.acknowledged[0])

    some = [
        threading.Thread(target=save, args=given, daemon=True)
        for given in zip(seeds, busy, stages, strict=True)
    ]
    some.append(threading.Thread(target=load, daemon=True))
    for thread in some:
        thread.start()
    episode.join(some, f"two that save, busy={busy}, stage={stages}, and one that loads")


def _move(episode: Episode) -> None:
    """Save to a relative path, and go to another directory, or delete this one."""
    place = episode.new_path("cwd")
    place.mkdir()
    os.chdir(place)
    try:
        state = make_state(8)
        saved = episode.begin(place / "relative", state)
        done, handle = episode.guard(
            "save_async", lambda: holdfast.save_async(state, "relative", options=OPTIONS)
        )
        os.chdir(episode.place)
        if done and episode.guard("result", handle.result)[0]:
            episode.acknowledge(saved)
        gone = episode.new_path("cwd")
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()
        episode.save(state, episode.new_path("absolute"))
        done, _ = episode.guard("save", lambda: holdfast.save(state, "nowhere", options=OPTIONS))
        if done:
            episode.fault("a save to a deleted working directory is acknowledged")
    finally:
        os.chdir(episode.place)


class _Collecting:
    """Collects garbage whenever it is asked for its state, and lets a Checkpointer go."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode

    def state_dict(self) -> dict[str, Any]:
        """Return a value, after a collection that finds something of holdfast's."""
        dropped = holdfast.Checkpointer(self._episode.place / "dropped", options=OPTIONS)
        cycle: list[Any] = [dropped]
        cycle.append(cycle)
        del dropped, cycle
        gc.collect(0)
        return {"count": 3}

    def load_state_dict(self, given: dict[str, Any]) -> None:
        """Take nothing."""
        gc.collect(0)


def _collect(episode: Episode) -> None:
    path, state = episode.new_path("collected"), {"collects": _Collecting(episode)}
    done, handle = episode.guard(
        "save_async", lambda: holdfast.save_async(state, path, options=OPTIONS)
    )
    if done and episode.guard("result", handle.result)[0]:
        episode.guard("load", lambda: holdfast.load(path, into=state, options=OPTIONS))


def _load(episode: Episode) -> None:
    """Load what was acknowledged, within whatever surrounds it."""
    name, around = choose(episode)
    episode.say(load_within=name)
    episode.load(*episode.rng.choice(episode.acknowledged), around=around)


def _overlap(episode: Episode) -> None:
    """Load into targets that share bytes: refused, or both as they were saved."""
    path = episode.new_path("plain")
    given = {"a": torch.arange(4.0), "b": torch.arange(4.0) + 10}
    if not episode.guard("save", lambda: holdfast.save(given, path, options=OPTIONS))[0]:
        return
    base = torch.zeros(6)
    target = {"a": base[:4], "b": base[2:]}
    done, _ = episode.guard("load", lambda: holdfast.load(path, into=target, options=OPTIONS))
    if done and not all(torch.equal(given[name], target[name]) for name in given):
        episode.fault("overlapping targets are filled, and one holds the other's bits")


def _lazily(change: Callable[[State], None]) -> Event:
    """Change a parameter behind torch's back during a lazy save: it fails, or has the old bits."""

    def event(episode: Episode) -> None:
        state = make_state(episode.rng.randrange(100), episode.rng.choice([8, 4096, 1 << 16]))
        saved = episode.begin(episode.new_path("changed"), state)
        done, handle = episode.guard(
            "save_async",
            lambda: holdfast.save_async(state, saved[0], stage="lazy", options=OPTIONS),
        )
        if not done:
            return
        time.sleep(episode.rng.choice([0, 0, 1e-4, 1e-3]))
        change(state)
        if episode.guard("result", handle.result)[0]:
            episode.acknowledge(saved)

    return event


def _write_through_numpy(state: State) -> None:
    state["model"][0].weight.detach().numpy()[...] = 9


def _write_through_data(state: State) -> None:
    state["model"][0].weight.data.fill_(9)


def _free(state: State) -> None:
    state["model"][0].weight.untyped_storage().resize_(0)


EVENTS: dict[str, Event] = {
    "fork": _fork,
    "spawn": _spawn,
    "loader": _load_data,
    "threads": _threads,
    "move": _move,
    "collect": _collect,
    "load": _load,
    "overlap": _overlap,
    "numpy": _lazily(_write_through_numpy),
    "data": _lazily(_write_through_data),
    "free": _lazily(_free),
}
# Each says what a Python program may do with one call, and is much slower than the others.
WEIGHTS = {"spawn": 1, "loader": 1}
ALL_EVENTS = [name for name in EVENTS for _ in range(WEIGHTS.get(name, 3))]


def happen(episode: Episode) -> None:
    """Let one event happen."""
    name = episode.pick(ALL_EVENTS)
    episode.say(event=name)
    EVENTS[name](episode)
