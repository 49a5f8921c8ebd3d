"""`holdfast scrub`: a run read from its disk at a limited rate, and on where it was stopped."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from .. import scrub as scrub_run
from ..errors import OptionError, what_is_left
from .progress import Progress
from .run_listing import find_run
from .text import printable, show_bytes, show_count, write
from .verify import describe_damage, render_damage

Document = dict[str, Any]
MB_PER_S_MIN = 0.001  # less takes years for a gigabyte, and is a slip
TERMINATED = 128 + signal.SIGTERM  # as shells report it


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


def scrub(path: str, *, mb_per_s: float) -> Document:
    """Verify a run, or what is left of a pass that was interrupted.

    Args:
        mb_per_s: at most so many million bytes a second; 0: as fast as it goes.

    Raises:
        Terminated, KeyboardInterrupt: it was interrupted, and goes on when it is called again.
    """
    if mb_per_s != 0 and not MB_PER_S_MIN <= mb_per_s < float("inf"):
        raise OptionError(
            f"--mb-per-s is {mb_per_s}; expected at least {MB_PER_S_MIN}, or 0 for no limit"
        )
    run = find_run(path)
    total = sum(step.disk_bytes for step in run.committed) if run else 0
    try:
        with Progress("scrub", total) as progress, _terminable():
            rate = mb_per_s * 1e6 or None
            done = scrub_run(path, bytes_per_s=rate, report=progress.advance)
    except KeyboardInterrupt as stop:
        for note in getattr(stop, "__notes__", ()):
            write(sys.stderr, f"holdfast: {printable(note)}\n")
        raise
    return {
        "path": done.location,
        "good": not (done.damage or done.unread),
        "started": done.started,
        "verified": done.verified,
        "read_bytes": done.read_bytes,
        "retired": done.retired,
        "unread": [{"step": step, "error": why} for step, why in done.unread],
        "damage": [{"step": step} | describe_damage(fault) for step, fault in done.damage],
    }


def exit_code(document: Document) -> int:
    """Return 0 when all is whole, 1 when something is damaged, 2 when a step cannot be read."""
    if document["damage"]:
        return 1
    return 0 if document["good"] else 2


def render(document: Document) -> list[str]:
    """Show what was found as lines for the terminal; all damage, however much."""
    lines = []
    for fault in document["damage"]:
        lines += [f"BAD  {printable(fault['step'])}", *render_damage(fault)]
    for unread in document["unread"]:
        lines.append(f"?    {printable(unread['step'])}: {printable(unread['error'])}")
    size = f"{show_count(document['verified'], 'step')}, {show_bytes(document['read_bytes'])} read"
    retired = f", {len(document['retired']):,} retired meanwhile" if document["retired"] else ""
    faults = show_count(len(document["damage"]), "fault")
    lines.append(f"{printable(document['path'])}: {size}{retired}; {faults}")
    if document["damage"]:
        lines.append(what_is_left(printable(document["path"])))
    return lines


@contextmanager
def _terminable() -> Iterator[None]:
    """Have SIGTERM do what Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
