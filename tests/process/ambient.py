"""What may surround a call of holdfast: each takes the call, and calls it within something.

Torch's modes, limits of memory and descriptors, interrupts, a handler that saves, a slow disk.
"""

import contextlib
import faulthandler
import gc
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import holdfast
from holdfast.testing import Fault, faulty

from .episode import Call, Episode
from .points import AGAIN_MAX, KINDS, LOCKS, WAITS, Watch
from .states import OPTIONS
from .strikes import Strike

Around = Callable[[Episode, Call], Any]
EVENTS_MAX = 30_000  # of the tracer, in a save of a small state
LOCK_EVENTS_MAX, WAIT_EVENTS_MAX = 300, 1700  # of those in the frames that wait
STRIKE_S = 0.01
HANDLED_S = 0.01


class _Passing(TorchDispatchMode):
    """Sees every operation, and collects garbage in some."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if random.random() < 0.01:
            gc.collect(0)
        return func(*args, **(kwargs or {}))


def _within(make: Callable[[], contextlib.AbstractContextManager[Any]]) -> Around:
    def around(episode: Episode, call: Call) -> Any:
        with make():
            return call()

    return around


@contextlib.contextmanager
def _doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _collected() -> Iterator[None]:
    """Collect garbage in every collection's callback, and as often as can be."""
    before = gc.get_threshold()

    def collect(phase: str, _: dict[str, int]) -> None:
        if phase == "stop":
            gc.collect(0)

    gc.callbacks.append(collect)
    gc.set_threshold(20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collect)


@contextlib.contextmanager
def _limited(which: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(which)
    resource.setrlimit(which, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def _short_of_memory(episode: Episode, call: Call) -> Any:
    episode.limited = True
    episode.say(limited=True)
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    gc.collect()
    with _limited(resource.RLIMIT_AS, mapped + episode.rng.randrange(40 << 20)):
        return call()


def _short_of_descriptors(episode: Episode, call: Call) -> Any:
    episode.limited = True
    episode.say(limited=True)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    with _limited(resource.RLIMIT_NOFILE, used + episode.rng.randrange(8)):
        return call()


def _in_grad(episode: Episode, call: Call) -> Any:
    found: list[Any] = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        found.append(call())
        return (x * x).sum()

    torch.func.grad(loss)(torch.ones(2))
    return found[0]


def _in_vmap(episode: Episode, call: Call) -> Any:
    found: list[Any] = []

    def each(x: torch.Tensor) -> torch.Tensor:
        found.append(call())
        return x * 2

    torch.func.vmap(each)(torch.ones(2, 1))
    return found[0]


def _slow(episode: Episode, call: Call) -> Any:
    operation = episode.rng.choice(["sync", "write", "link", "sync_directory"])
    delay_ms = episode.rng.choice([1, 5, 20])
    with faulty(Fault(operation, persistent=True, action="delay", argument=delay_ms)):
        return call()


def _failing(episode: Episode, call: Call) -> Any:
    operation = episode.rng.choice(["sync", "write", "link", "create", "make_directory"])
    with faulty(Fault(operation, nth=episode.rng.randrange(1, 4))):
        return call()


@contextlib.contextmanager
def _without_faulthandler() -> Iterator[None]:
    faulthandler.disable()
    yield


@contextlib.contextmanager
def _with_faulthandler() -> Iterator[None]:
    faulthandler.enable()
    yield


def _event(episode: Episode) -> int:
    """Return when to interrupt: few events come in a thread that waits, many in a state's hooks."""
    rng = episode.rng
    return rng.choice([rng.randrange(1, EVENTS_MAX), int(EVENTS_MAX ** rng.random())])


def _injected(episode: Episode, call: Call) -> Any:
    return _interrupted(episode, Watch(_event(episode), episode.rng.choice(KINDS)), call)


def _injected_in_waits(episode: Episode, call: Call) -> Any:
    within, events_max = episode.rng.choice([(LOCKS, LOCK_EVENTS_MAX), (WAITS, WAIT_EVENTS_MAX)])
    at, kind = episode.rng.randrange(1, events_max), episode.rng.choice(KINDS)
    return _interrupted(episode, Watch(at, kind, within=within), call)


def _injected_twice(episode: Episode, call: Call) -> Any:
    kind, again = episode.rng.choice(KINDS), episode.rng.randrange(1, AGAIN_MAX)
    return _interrupted(episode, Watch(_event(episode), kind, again=again), call)


def _struck(episode: Episode, call: Call) -> Any:
    return _interrupted(episode, Strike(episode.rng, STRIKE_S), call)


def _struck_twice(episode: Episode, call: Call) -> Any:
    return _interrupted(episode, Strike(episode.rng, STRIKE_S, twice=True), call)


def _interrupted(episode: Episode, watch: Watch | Strike, call: Call) -> Any:
    episode.interrupted = True
    lost: list[Any] = []  # what Python cannot raise where it came, in a finalizer
    before, sys.unraisablehook = sys.unraisablehook, lost.append
    autograd = torch.is_grad_enabled()
    try:
        result = watch.call(call)
    finally:
        sys.unraisablehook = before
        if watch.is_twice:  # the second may come as a `with` of the first call ends
            torch.set_grad_enabled(autograd)
        episode.say(interrupted=str(watch.hit))
    if watch.hit is not None and not lost:
        episode.fault(f"swallowed: what was raised at {watch.hit}")
    return result


def _handled(episode: Episode, call: Call) -> Any:
    """Let a signal handler save, in the middle of the call perhaps."""
    state = episode.spare
    way = episode.rng.choice(["save", "save_async", "Checkpointer"])
    path = episode.new_path("handled")

    def handle(number: int, frame: Any) -> None:
        if way == "save":
            episode.save(state, path)
        elif way == "save_async":
            episode.save_async(state, path)
        else:
            run = holdfast.Checkpointer(path, signals=(), options=OPTIONS)
            saved = episode.begin(path / "step-00000001", state)
            if episode.guard("Checkpointer.save", lambda: run.save(1, state))[0]:
                episode.acknowledge(saved)
            episode.guard("close", run.close)

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, episode.rng.uniform(1e-6, HANDLED_S))
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# At most one of the first: they come in the middle of the call, whatever surrounds it.
SUDDEN: dict[str, Around] = {
    "injected": _injected,
    "injected in waits": _injected_in_waits,
    "injected twice": _injected_twice,
    "struck": _struck,
    "struck twice": _struck_twice,
    "handled": _handled,
}
MODES = ("fake", "dispatch", "func.grad", "func.vmap", "inference")
AROUND: dict[str, Around] = {
    "meta": _within(lambda: torch.device("meta")),
    "doubles": _within(_doubles),
    "inference": _within(torch.inference_mode),
    "no grad": _within(torch.no_grad),
    "autocast": _within(lambda: torch.autocast("cpu")),
    "fake": _within(lambda: FakeTensorMode(allow_non_fake_inputs=True)),
    "dispatch": _within(_Passing),
    "func.grad": _in_grad,
    "func.vmap": _in_vmap,
    "collected": _within(_collected),
    "short of memory": _short_of_memory,
    "short of descriptors": _short_of_descriptors,
    "slow disk": _slow,
    "failing disk": _failing,
    "faulthandler": _within(_with_faulthandler),
    "no faulthandler": _within(_without_faulthandler),
}


def choose(episode: Episode) -> tuple[str, Callable[[Call], Any]]:
    """Choose what surrounds a call; return its name, and what calls it so."""
    rng = episode.rng
    names = rng.sample(list(AROUND), rng.choice([0, 1, 1, 2]))
    names = [name for name in AROUND if name in episode.only] or names
    sudden = episode.pick([*SUDDEN, None])
    if sudden is not None and sudden.endswith("twice"):
        names = [
            name for name in names if name not in MODES
        ]  # a `with` of ours may not put it back
    arounds = [AROUND[name] for name in names] + ([SUDDEN[sudden]] if sudden else [])

    def call_within(call: Call) -> Any:
        for around in reversed(arounds):
            call = _wrapped(around, episode, call)
        return call()

    return " + ".join([*names, *([sudden] if sudden else [])]) or "nothing", call_within


def _wrapped(around: Around, episode: Episode, call: Call) -> Call:
    return lambda: around(episode, call)
