"""Judges what one process told, how it ended, and what it left on the disk.

Runs in a process of its own for each episode: what the judged one broke cannot reach it.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import holdfast
from holdfast.errors import HoldfastError

from .exits import ENDINGS
from .states import OPTIONS, content_of, digest_of, load_content, make_state

NO_THREAD_DATA, THREAD_DATA = 127, "cannot allocate memory for thread-local data"  # glibc's
EXIT_S = 5.0  # after the end of the save in flight, which takes less than a second
SWEPT = re.compile(r"(.*/)?(data/[0-9a-f]{32}/[^/]+|\.manifest-[0-9a-f]+)$")
Said = dict[str, Any]


@dataclass
class Played:
    """What is known of an episode when its process has ended."""

    said: list[Said]
    status: int
    exit_s: float  # from the word of its ending to its end
    hung: str  # a dump of its threads, when its own watch ended it
    errors: str  # its stderr
    faults: list[str] = field(default_factory=list)

    @property
    def ending(self) -> str | None:
        """Return how it was to end, if it came so far."""
        return next((line["ending"] for line in self.said if "ending" in line), None)

    @property
    def lacked_memory(self) -> bool:
        """Whether the C library ended it, under a limit: as it does without room for thread data.

        Nobody can answer that; what is on the disk is judged as after a kill.
        """
        limited = any(line.get("limited") for line in self.said)
        return limited and self.status == NO_THREAD_DATA and THREAD_DATA in self.errors

    def script(self) -> str:
        """Return what happened, in a line."""
        left_out = {"begin", "ack", "raised", "fault", "broken", "digest"}
        kept = (line for line in self.said if not left_out & line.keys())
        return "; ".join(" ".join(f"{k} {v}" for k, v in line.items()) for line in kept)


def judge_process(played: Played) -> Iterator[str]:
    """Yield what is wrong with how it went, and how it ended."""
    for line in played.said:
        if "fault" in line:
            yield line["fault"]
        if "broken" in line:
            yield f"the episode broke: {line['broken']}"
    ending = ENDINGS.get(played.ending or "")
    if played.hung:
        yield f"hang {'at its end' if ending else 'in an episode'}: {played.hung}"
    elif ending is None and not played.lacked_memory:
        yield f"ended with {played.status} before its end: {played.errors[-300:]}"
    elif ending is not None and played.status != ending.status:
        yield f"ended with {played.status}, not {ending.status}: {played.errors[-300:]}"
    elif ending is not None and played.exit_s > EXIT_S:
        yield f"took {played.exit_s:.1f} s to end"


def judge_disk(place: Path, played: Played) -> Iterator[str]:
    """Yield what is wrong on the disk."""
    begun: dict[str, set[str]] = defaultdict(set)
    widths: dict[str, int] = {}
    acknowledged: dict[str, str] = {}
    ending = ENDINGS.get(played.ending or "")
    for line in played.said:
        if "begin" in line:
            begun[line["begin"]].add(line["digest"])
            widths[line["begin"]] = line["width"]
        elif "ack" in line:
            acknowledged[line["ack"]] = line["digest"]
        elif "flight" in line and ending is not None and ending.is_graceful:
            acknowledged[line["flight"]] = line["digest"]
    for path, width in widths.items():
        may_be = {acknowledged[path]} if path in acknowledged else begun[path]
        if not (Path(path) / "MANIFEST").exists():
            if path in acknowledged:
                yield f"{Path(path).name} was acknowledged, and is not there"
            continue
        try:
            found = digest_of(load_content(Path(path), width))
        except HoldfastError as error:
            yield f"{Path(path).name} is visible, and does not load: {error}"
            continue
        if found not in may_be:
            kind = "acknowledged" if path in acknowledged else "visible"
            yield f"{kind} with other bits than were saved: {Path(path).name}"
    yield from _left(place, played)
    yield from _goes_on(place, widths)


def _left(place: Path, played: Played) -> Iterator[str]:
    """Yield files that nobody removes, or that nobody should have left."""
    ending = ENDINGS.get(played.ending or "")
    may_leave = ending is None or ending.may_leave or any("limited" in one for one in played.said)
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        is_run = path.parent.name in ("run", "dropped") or path.parent.name.startswith("handled")
        if not path.is_file() or is_run or any((up / "MANIFEST").exists() for up in path.parents):
            continue
        if not (may_leave and SWEPT.match(name)):
            yield f"file left: {name}"


def _goes_on(place: Path, widths: dict[str, int]) -> Iterator[str]:
    """Restore the run in a new job, and save on."""
    root = place / "run"
    steps = [width for path, width in widths.items() if Path(path).parent == root]
    if not steps:
        return
    target = make_state(1, steps[0])
    with holdfast.Checkpointer(root, options=OPTIONS) as run:
        try:
            last = run.restore(target) or 0
            saved = digest_of(content_of(target))
            run.save(last + 1, target)
        except HoldfastError as error:
            yield f"a new job cannot go on: {type(error).__name__}: {error}"
            return
    if digest_of(load_content(Path(run.path(last + 1)), steps[0])) != saved:
        yield "a new job saves other bits than it restored"


def parse(told: bytes) -> list[Said]:
    """Return what was told, line by line; what a killed process wrote half is left out."""
    found = []
    for line in told.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
