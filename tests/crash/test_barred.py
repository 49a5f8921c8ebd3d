"""A save that another job takes for dead is whole, or is not there: however the two interleave."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from crash_content import OPTIONS, load_number, make_state

import holdfast
from holdfast import worker
from holdfast.engine.retire import retire, sweep
from holdfast.errors import HoldfastError
from holdfast.stores.local import LocalStore

STEPS = ("exists", "get", "list", "create", "remove", "remove_directory", "sync_made", "revoke")
STEPS += (
    "sync_path",
    "sync_directory",
    "modified_s",
    "begin",
    "prepare",
    "_link",
    "link",
    "rename",
)
WAIT_S = 20.0
AFTER_ALL = float("inf")


@dataclass
class Actor:
    """A thread that stops before one of its calls to the store, until it is let go on."""

    action: Callable[[], object]
    stop_at: int
    begins_at: str = ""  # the first call that is counted; empty: every one is
    calls: int = 0
    error: BaseException | None = None
    arrived: threading.Event = field(default_factory=threading.Event)
    going_on: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Run up to the stop, or to the end."""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self.arrived.wait(WAIT_S)

    def finish(self) -> None:
        """Run to the end."""
        self.going_on.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def before_call(self, name: str) -> None:
        """Count a call; stop where that is due."""
        if not self.calls and self.begins_at not in ("", name):
            return
        self.calls += 1
        if self.calls == self.stop_at:
            self.arrived.set()
            assert self.going_on.wait(WAIT_S)

    def _run(self) -> None:
        _actors[threading.get_ident()] = self
        try:
            self.action()
        except HoldfastError as error:
            self.error = error
        finally:
            del _actors[threading.get_ident()]
            self.arrived.set()


_actors: dict[int, Actor] = {}


@contextmanager
def stops() -> Iterator[None]:
    """Make the store's steps stop actors."""
    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(LocalStore, name, _stopping(getattr(LocalStore, name)))
        yield


def _stopping(step: Callable[..., object]) -> Callable[..., object]:
    def stopped(*args: object, **options: object) -> object:
        actor = _actors.get(worker.place()[0])
        if actor is not None:
            actor.before_call(step.__name__)
        return step(*args, **options)

    return stopped


def remove_by_policy(path: Path) -> None:
    """Let the step go, which another job has saved meanwhile."""
    retire(LocalStore(path))


def remove_as_dead(path: Path) -> None:
    """Sweep what no manifest names, as if it were old."""
    sweep(LocalStore(path), AFTER_ALL)


def interleave(
    path: Path, other: Path, remove: Callable[[Path], None], first: int, second: int
) -> tuple[int, int]:
    """Stop a save before a call, its remover before one; let the save end, then the remover."""
    save = Actor(lambda: holdfast.save(make_state(1), path, options=OPTIONS), first)
    save.start()
    if (path / "MANIFEST").exists():  # published before anybody took it for dead
        save.finish()
        return save.calls, 0
    if remove is remove_by_policy:
        shutil.copytree(other, path, dirs_exist_ok=True)  # the other job has saved the step
    remover = Actor(lambda: remove(path), second)
    remover.start()
    save.finish()
    remover.finish()
    where = f"the save stopped before call {first}, its remover before call {second}"
    assert (path / "MANIFEST").exists() == (save.error is None), where
    if save.error is None:
        assert load_number(path) == 1, where
        with holdfast.open(path) as checkpoint:
            assert checkpoint.verify() == [], where
    return save.calls, remover.calls


@pytest.mark.parametrize("remove", [remove_by_policy, remove_as_dead])
def test_a_save_that_is_taken_for_dead_is_whole_or_not_there(
    scratch: Path, remove: Callable[[Path], None]
) -> None:
    other = scratch / "other"
    holdfast.save(make_state(2), other, options=OPTIONS)
    tried = first = 0
    calls = 1
    with stops():
        while first <= calls:
            first, second, removals = first + 1, 1, 1
            while second <= removals:
                path = scratch / f"{first}-{second}"
                calls, removals = interleave(path, other, remove, first, second)
                second, tried = second + 1, tried + 1
    assert tried > 20
