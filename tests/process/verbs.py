"""One call of each public verb, ready to be interrupted, and the judgement of what it left.

Knows nothing of how the interrupt came.
"""

import itertools
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import holdfast
from descriptors import open_descriptors
from holdfast.errors import HoldfastError

from .states import (
    OPTIONS,
    Content,
    State,
    content_of,
    is_committed,
    load_content,
    make_state,
    same,
    train,
)

LATER_S = 1.0  # a save of these few bytes, after the interrupt
SETTLE_S = 2.0  # until what was in flight has ended
WATCHED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_numbers = itertools.count()


@dataclass
class Scene:
    """What one call is made with, and what has to hold after it."""

    place: Path
    old: Path  # acknowledged before
    old_content: Content
    state: State
    content: Content = field(init=False)
    new: Path = field(init=False)  # what the call may make visible
    target: State | None = None
    before: Content | None = None  # of the target
    checkpointer: holdfast.Checkpointer | None = None
    wants: bool = False  # the call ends only when ``new`` is durable

    def __post_init__(self) -> None:
        self.content = content_of(self.state)
        self.new = self.place / "new"


Act = Callable[[], Any]


def _save(scene: Scene) -> Act:
    scene.wants = True
    return lambda: holdfast.save(scene.state, scene.new, options=OPTIONS)


def _save_async(scene: Scene) -> Act:
    scene.wants = True
    return lambda: holdfast.save_async(scene.state, scene.new, options=OPTIONS).result()


def _save_lazy(scene: Scene) -> Act:
    scene.wants = True

    def act() -> None:
        handle = holdfast.save_async(scene.state, scene.new, stage="lazy", options=OPTIONS)
        train(scene.state)
        handle.result()

    return act


def _run(scene: Scene) -> holdfast.Checkpointer:
    scene.checkpointer = holdfast.Checkpointer(scene.place / "run", every=1, options=OPTIONS)
    scene.new = Path(scene.checkpointer.path(2))
    return scene.checkpointer


def _step(scene: Scene) -> Act:
    checkpointer = _run(scene)
    scene.wants = True

    def act() -> None:
        checkpointer.step(2, scene.state)
        checkpointer.wait()

    return act


def _close(scene: Scene) -> Act:
    checkpointer = _run(scene)
    checkpointer.step(2, scene.state)
    scene.wants = True
    return checkpointer.close


def _restore(scene: Scene) -> Act:
    checkpointer = _run(scene)
    checkpointer.save(2, scene.state)
    scene.target = make_state(99)
    return lambda: checkpointer.restore(scene.target or {})


def _load(scene: Scene) -> Act:
    scene.target = make_state(99)
    return lambda: holdfast.load(scene.old, into=scene.target or {}, options=OPTIONS)


VERBS: dict[str, Callable[[Scene], Act]] = {
    "save": _save,
    "save_async": _save_async,
    "save_lazy": _save_lazy,
    "step": _step,
    "close": _close,
    "restore": _restore,
    "load": _load,
}


def prepare(verb: str, place: Path, old: Path, old_content: Content) -> tuple[Scene, Act]:
    """Make all that a call needs; return it, and the call."""
    place.mkdir()
    scene = Scene(place, old, old_content, make_state(7))
    act = VERBS[verb](scene)
    if scene.target is not None:
        scene.before = content_of(scene.target)
    return scene, act


def threads() -> list[str]:
    """Name the threads of this process: Python's, and those of the kernel that are not its own.

    What io_uring runs in comes and goes as the kernel likes.
    """
    found = [thread.name for thread in threading.enumerate()]
    for task in os.listdir("/proc/self/task"):
        try:
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
        except OSError:  # it has ended meanwhile
            continue
        if not name.startswith("iou-"):
            found.append(f"{name} of the kernel's")
    return sorted(found)


def descriptors() -> list[str]:
    """Say where this process's descriptors lead."""
    return sorted(what.split(":[")[0] for what in open_descriptors().values())


def judge(scene: Scene, error: BaseException | None, kind: type[BaseException]) -> Iterator[str]:
    """Yield what is wrong after the call, which has ended with this error."""
    if error is not None and not isinstance(error, (kind, HoldfastError)):
        yield f"wrong exception: {said_of(error)}"
    if error is not None and scene.target is not None and scene.before is not None:
        found = content_of(scene.target)
        is_whole = same(found, scene.old_content if scene.checkpointer is None else scene.content)
        if not is_whole and not same(scene.before, found) and not says_filled(error):
            yield "not noted: a part of the target is filled, and the exception does not say so"
    yield from _closes(scene, kind)
    yield from _saves_on(scene)
    settled = _settles(scene)
    yield from _visible(scene, acknowledged=error is None and scene.wants)
    if not settled:
        yield f"thread left: {', '.join(threads())}"


def _closes(scene: Scene, kind: type[BaseException]) -> Iterator[str]:
    if scene.checkpointer is None:
        return
    try:
        scene.checkpointer.close()
    except (HoldfastError, kind):
        pass
    except BaseException as error:
        yield f"close fails: {said_of(error)}"


def _saves_on(scene: Scene) -> Iterator[str]:
    """Save in the background and in the foreground, each within a second, and load both."""
    state = make_state(next(_numbers))
    ways: dict[str, Callable[[Path], object]] = {
        "save_async": lambda path: holdfast.save_async(state, path, options=OPTIONS).result(),
        "save": lambda path: holdfast.save(state, path, options=OPTIONS),
    }
    for name, way in ways.items():
        path, started = scene.place / f"later-{name}", time.perf_counter()
        try:
            way(path)
            took_s = time.perf_counter() - started
            if not same(load_content(path), content_of(state)):
                yield f"later {name}: other bits than were saved"
        except BaseException as error:
            yield f"later {name} fails: {said_of(error)}"
            continue
        if took_s > LATER_S:
            yield f"later {name} takes {took_s:.1f} s"


def _settles(scene: Scene) -> bool:
    """Wait until no save is in flight; return whether that came."""
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        if not any(name.startswith("holdfast-save") for name in threads()):
            return True
        time.sleep(0.001)
    return False


def _visible(scene: Scene, *, acknowledged: bool) -> Iterator[str]:
    if not same(load_content(scene.old), scene.old_content):
        yield "old harmed: what was acknowledged before has other bits"
    if is_committed(scene.new):
        try:
            if not same(load_content(scene.new), scene.content):
                yield "visible but wrong: other bits than were saved"
        except HoldfastError as error:
            yield f"visible but wrong: {said_of(error)}"
        return
    if acknowledged:
        yield "acknowledged, and not there"
    if left := [path for path in scene.new.rglob("*") if path.is_file()]:
        names = ", ".join(str(path.relative_to(scene.new)) for path in left[:3])
        yield f"file left: {names}"


def says_filled(error: BaseException) -> bool:
    """Return whether the error of a load says that its target has changed."""
    notes = " ".join(getattr(error, "__notes__", []))
    return "fill" in notes or bool(getattr(error, "filled", ()))


def said_of(error: BaseException) -> str:
    """Return an error in a line, with the line of the code that raised it."""
    where = traceback.extract_tb(error.__traceback__)
    last = f" at {os.path.basename(where[-1].filename)}:{where[-1].lineno}" if where else ""
    return f"{type(error).__name__}: {str(error)[:160]}{last}"
