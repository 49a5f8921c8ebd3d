"""The walk of one byte stays straight: a budget on the rooms one save and one load pass through.

A *room* is a source file that acts: holds, moves, waits. Pure rooms (layout, options, errors, the
format, codecs, plans, the fit, what is wanted and agreed, which memory tensors have, torch without
its modes: the same answer for the same arguments, and nobody called back) are the language the walk
is told in, and are not counted. A *re-entry* is a call from one room into another that was entered
before; the conductors (`saving/save`, `loading/load`, `worker`, the two pipelines), whose work is
to call the rooms in turn, make none. *Depth* is how many rooms are nested. All threads are counted,
each from its own first room.
"""

import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import holdfast

ROOT = Path(holdfast.__file__).parent
ROOMS_MAX, REENTRIES_MAX, DEPTH_MAX = 14, 15, 7
PURE = ("layout", "boxes", "options", "errors", "__init__", "arguments", "group/find")
PURE += ("loading/fit", "saving/request", "saving/agreement", "version")
PURE += ("stores/url", "format/", "codecs/", "plan/")
PURE += ("engine/ledger", "state/ambient", "state/memory", "state/overlap")
CONDUCTORS = ("saving/save.py", "loading/load.py", "worker.py", "engine/write_pipeline.py")
CONDUCTORS += ("engine/read_pipeline.py",)


def walk(action: Callable[[], object]) -> tuple[list[str], list[tuple[str, str]], int]:
    """Run ``action``; return (rooms, re-entries as (from, into), deepest nesting of rooms)."""
    rooms: list[str] = []
    stacks: dict[int, list[str]] = {}
    reentries: list[tuple[str, str]] = []
    deepest = 0

    def on_event(frame: FrameType, event: str, _: object) -> None:
        nonlocal deepest
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or not path.is_relative_to(ROOT):
            return
        room = str(path.relative_to(ROOT))
        if room.startswith(PURE) or frame.f_code.co_name.startswith("<"):
            return
        stack = stacks.setdefault(threading.get_ident(), [])
        if event == "return":
            stack.pop()
            return
        caller = stack[-1] if stack else ""
        if room in rooms and caller not in ("", room, *CONDUCTORS):
            reentries.append((caller, room))
        if room not in rooms:
            rooms.append(room)
        stack.append(room)
        nested = sum(1 for a, b in zip(["", *stack], stack, strict=False) if a != b)
        deepest = max(deepest, nested)

    threading.setprofile(on_event)
    sys.setprofile(on_event)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return rooms, reentries, deepest


def faults(action: Callable[[], object]) -> list[str]:
    """Say what of the budget an action overruns."""
    rooms, reentries, deepest = walk(action)
    found = []
    if len(rooms) > ROOMS_MAX:
        found.append(f"{len(rooms)} rooms: {' '.join(rooms)}")
    if len(reentries) > REENTRIES_MAX:
        found.append(f"{len(reentries)} re-entries: {reentries}")
    if deepest > DEPTH_MAX:
        found.append(f"rooms nested {deepest} deep")
    return found


@pytest.mark.parametrize("verb", ["save", "load"])
def test_the_walk_is_straight(tmp_path: Path, verb: str) -> None:
    state = {"model": {"w": torch.ones(8, 8)}}
    holdfast.save(state, tmp_path / "a")
    holdfast.load(tmp_path / "a", into=state)
    if verb == "save":
        assert faults(lambda: holdfast.save(state, tmp_path / "b")) == []
    else:
        assert faults(lambda: holdfast.load(tmp_path / "a", into=state)) == []


def test_a_walk_that_turns_back_overruns_the_budget(tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(8)}, tmp_path / "a")

    class CallsBack:
        """What a writer does that asks its planner for bytes."""

        def state_dict(self) -> dict[str, Any]:
            return {"w": holdfast.open(tmp_path / "a").tensor("w")}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Nothing to load."""

    assert faults(lambda: holdfast.save({"x": CallsBack()}, tmp_path / "b")) != []


class Count:
    """All that a walk enters: every file, comprehensions and generators too, in all threads."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.calls, self.reentries, self.depth = 0, 0, 0
        self.rooms: set[str] = set()
        self._stacks: dict[int, list[str]] = {}
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        try:
            action()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        room = frame.f_code.co_filename
        if event not in ("call", "return") or not room.startswith(f"{ROOT}/"):
            return
        stack = self._stacks.setdefault(threading.get_ident(), [""])
        if event == "return":
            stack.pop()
            return
        self.calls += 1
        self.reentries += room in self.rooms and stack[-1] not in ("", room)
        self.rooms.add(room)
        stack.append(room)
        changes = itertools.pairwise(stack)
        self.depth = max(self.depth, sum(one != other for one, other in changes))


def test_all_that_a_load_enters_is_bounded(tmp_path: Path) -> None:
    """Measured: 28 rooms, 231 calls, 77 re-entries, 7 deep."""
    state = {"w": torch.ones(8, 8)}
    holdfast.save(state, tmp_path / "a")
    holdfast.load(tmp_path / "a", into=state)
    found = Count(lambda: holdfast.load(tmp_path / "a", into=state))
    assert len(found.rooms) <= 28, sorted(found.rooms)
    assert found.calls <= 240
    assert found.reentries <= 80
    assert found.depth <= 10


@pytest.mark.parametrize("within", [(), ("model", "layers")])
def test_a_further_tensor_takes_a_load_no_calls(tmp_path: Path, within: tuple[str, ...]) -> None:
    calls = []
    for count in (100, 200):
        state: dict[str, Any] = {f"w{i}": torch.ones(8) for i in range(count)}
        for key in within:
            state = {key: state}
        holdfast.save(state, tmp_path / str(count))
        holdfast.load(tmp_path / str(count), into=state)
        calls.append(Count(lambda: holdfast.load(tmp_path / str(count), into=state)).calls)  # noqa: B023
    assert calls[1] - calls[0] <= 10
