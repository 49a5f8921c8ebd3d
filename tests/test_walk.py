"""How many calls a save and a load are stays bounded: `benchmarks/walk.py` counts all of them.

Nothing is left out: every source file of holdfast, every thread, every call. docs/walk.md has the
numbers too, beside those of other formats.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
try:
    import walk  # found above
finally:
    sys.path.remove(str(ROOT / "benchmarks"))

# What each walk is today: rooms, calls, re-entries, depth. Threads that take turns make some calls
# more, so the best of a few attempts is held to it. Bounds only fall: a change that makes a walk
# straighter lowers its row, here and in docs/walk.md, and none raises one.
BOUNDS = {
    "save": walk.Walk(24, 166, 55, 7),
    "load": walk.Walk(22, 154, 49, 6),
    "lossless save": walk.Walk(31, 246, 76, 8),
    "lazy save": walk.Walk(29, 247, 92, 8),
    "delta link": walk.Walk(36, 304, 97, 8),
    "lossless save of a layer": walk.Walk(40, 401, 106, 8),
    "lazy save of a layer": walk.Walk(41, 471, 148, 8),
    "delta link of a layer": walk.Walk(45, 474, 134, 8),
    "load of a chain of 3": walk.Walk(42, 1559, 637, 8),
}
# Calls for one more plain tensor; they only fall too.
EACH_FURTHER = {"save": 0, "load": 0, "eager save": 0, "lazy save": 0}
ATTEMPTS = 25  # on a busy machine a thread that waits may look once more than it has to


def faults(counted: walk.Counter, bound: walk.Walk) -> list[str]:
    """Say what of a bound a walk overruns."""
    found = counted.walk
    faults = []
    if found.rooms > bound.rooms:
        faults.append(f"{found.rooms} rooms: {' '.join(counted.entered)}")
    if found.calls > bound.calls:
        most = sorted(counted.entered.items(), key=lambda item: -item[1])
        faults.append(f"{found.calls} calls: {most}")
    if found.reentries > bound.reentries:
        faults.append(f"{found.reentries} re-entries: {counted.reentries}")
    if found.depth > bound.depth:
        faults.append(f"files nested {found.depth} deep")
    return faults


def faults_of(subject: Callable[[], walk.Counter], bound: walk.Walk) -> list[str]:
    """Say what every one of a few attempts overruns, if none keeps to the bound."""
    found: list[str] = []
    for _ in range(ATTEMPTS):
        if not (found := faults(subject(), bound)):
            break
    return found


@pytest.fixture
def scratch() -> Iterator[Path]:
    with walk.new_directory() as path:
        yield path


@pytest.mark.parametrize("name", BOUNDS)
def test_a_walk_keeps_to_its_bound(scratch: Path, name: str) -> None:
    assert faults_of(walk.subjects(scratch)[name], BOUNDS[name]) == []


def test_every_walk_that_is_counted_has_a_bound(scratch: Path) -> None:
    assert walk.subjects(scratch).keys() == BOUNDS.keys()


def test_a_further_tensor_costs_no_more_calls(scratch: Path) -> None:
    found = walk.each_further(scratch)
    assert {v: calls for v, calls in found.items() if round(calls) > EACH_FURTHER[v]} == {}


def test_the_page_has_the_bounds() -> None:
    page = (ROOT / "docs" / "walk.md").read_text()
    rows = walk.table({f"holdfast, {name}": bound for name, bound in BOUNDS.items()})
    assert [row for row in rows.splitlines() if row not in page] == []
    assert set(EACH_FURTHER.values()) == {0}
    assert "Each further plain tensor adds 0 calls to a save or a load" in page


class CallsBack:
    """What a writer does that asks its planner for bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def state_dict(self) -> dict[str, Any]:
        return {"w": holdfast.open(self.path).tensor("w")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


def test_a_walk_that_turns_back_overruns_the_bound(scratch: Path) -> None:
    path, names = scratch / "a", map(str, range(10**6))
    holdfast.save({"w": torch.ones(8, 8)}, path)

    def save() -> None:
        holdfast.save({"model": CallsBack(path)}, scratch / next(names))

    assert faults_of(lambda: walk.count(save, save), BOUNDS["save"]) != []


def module(path: Path, text: str) -> dict[str, Any]:
    """Run ``text`` as the file of this path; return the names in it."""
    scope: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), scope)
    return scope


def test_the_counter_sees_every_call_of_every_thread(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner.py", tmp_path / "outer.py"
    call_back = module(inner, "def f(back): return [back() for _ in range(1)]")["f"]
    called = module(outer, "def f(): return 1\ndef g(): return sum(f() for _ in range(2))")

    def action() -> None:
        call_back(called["f"])
        thread = threading.Thread(target=called["g"])
        thread.start()
        thread.join()

    counted = walk.count(action, lambda: None, tmp_path)
    # inner: f and its comprehension (until Python 3.12). outer: f that is called back; in the
    # thread g, f twice, and a generator that is resumed three times.
    assert counted.entered == {str(inner): 2 if sys.version_info < (3, 12) else 1, str(outer): 7}
    assert counted.walk.depth == 2
    assert counted.walk.reentries == 1  # the thread comes into `outer` again, and not from it
