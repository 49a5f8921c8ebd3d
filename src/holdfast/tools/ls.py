"""`holdfast ls`: the runs of a directory, the steps of a run, or what is in a checkpoint.

Of a run it opens only the steps that it shows: a run may have a million. In a store of objects it
asks of each step whether anything is left.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import NotCommittedError, OptionError, StoreError
from ..format import spec
from ..format.names import LATEST_BYTES_MAX, LATEST_NAME, step_of
from ..stores.base import Store
from ..stores.url import open_store
from .behind import behind, behind_text
from .inspect_run import describe_one, metrics_of
from .run_listing import STEP_PREFIX, Step, is_checkpoint, look_at, run_names
from .text import (
    Heads,
    columns,
    join_fitting,
    printable,
    screen_size,
    show_bytes,
    show_count,
    width_of,
)

Document = dict[str, Any]

DEPTH = 2  # how far below a directory runs are looked for
DIGITS = 4  # of a metric
PLACES_MAX = 1000  # of directories that are looked into
STEP_ROWS_MIN = 4
FRAME_ROWS = 5  # heading, heads and the prompt
_UNITS = ((86400 * 2, 86400, "d"), (3600 * 2, 3600, "h"), (120, 60, "min"))


def ls(path: str, *, everything: bool = False) -> Document | None:
    """List the directory at ``path``; None: it is a checkpoint.

    Raises:
        NotCommittedError: there are neither runs nor checkpoints.
        StoreError: it cannot be listed.
    """
    store = open_store(path)
    if not store.exists(""):
        raise NotCommittedError(
            f"{store.location} is not there; give a run, a checkpoint, or a directory of runs"
        )
    if is_checkpoint(store, ""):
        return None
    names = run_names(store)
    if not names or not (names[0].startswith(STEP_PREFIX) or _is_run(store)):
        return _directory(store)
    shown = names if everything else names[-max(screen_size()[1] - FRAME_ROWS, STEP_ROWS_MIN) :]
    looked = [step for name in shown if not (step := look_at(store, name)).is_gone]
    return {
        "kind": "run",
        "path": store.location,
        "steps": len(names) - len(shown) + len(looked),
        "latest": _latest(store),
        "shown": [_step(store, step) for step in looked],
        "behind": behind(store, [*names, *(entry.name for entry in store.list())]),
    }


def _is_run(store: Store) -> bool:
    """Whether a directory of checkpoints, none of which is named step-…, is itself a run."""
    return not any(names for _, names in _walk(store, "", 1))


def _step(store: Store, step: Step) -> Document:
    found, name = describe_one(step, _latest(store)), step.name
    kept = ("name", "state", "disk_bytes", "step", "world_size", "metrics", "codecs", "base")
    entry = {key: found[key] for key in (*kept, "unfinished")}
    error = found["error"] and found["error"].replace(f"{store.location}/{name}/", "")
    return entry | {"error": error, "durable_s": _durable_s(store, name)}


def _durable_s(store: Store, name: str) -> float | None:
    try:
        return store.modified_s(f"{name}/{spec.MANIFEST_NAME}")
    except StoreError:
        return None


def _directory(store: Store) -> Document:
    places = [_place(store, name, names) for name, names in _walk(store, "", DEPTH)]
    if not places:
        raise NotCommittedError(
            f"{store.location} has no runs and no checkpoints; give a run, a checkpoint, or a "
            "directory of runs"
        )
    return {"kind": "directory", "path": store.location, "places": places}


def _walk(store: Store, below: str, depth: int) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the runs and checkpoints below a directory; a checkpoint has no names of steps."""
    entries = store.list(below)[:PLACES_MAX]
    for entry in entries:
        if entry.kind != "directory" or entry.name.startswith("."):
            continue
        name = f"{below}/{entry.name}" if below else entry.name
        try:
            if is_checkpoint(store, name):
                yield name, ()
            elif names := run_names(store.below(name)):
                yield name, names
            elif depth > 1:
                yield from _walk(store, name, depth - 1)
        except (OptionError, StoreError):  # it cannot be looked into, or has just gone
            continue


def _place(store: Store, name: str, names: Sequence[str]) -> Document:
    newest = names[-1] if names else None
    return {
        "name": name,
        "kind": "run" if names else "checkpoint",
        "steps": len(names),
        "newest": newest,
        "durable_s": _durable_s(store, f"{name}/{newest}" if newest else name),
    }


def _latest(store: Store) -> str | None:
    try:
        return store.get(LATEST_NAME, LATEST_BYTES_MAX).decode(errors="replace").strip()
    except StoreError:
        return None


def render(document: Document) -> list[str]:
    """Show a line for each run, or for each step."""
    width = screen_size()[0]
    now_s = time.time()
    if document["kind"] == "directory":
        places = [("name", "steps", "newest", "durable")]
        for place in document["places"]:
            steps = f"{place['steps']:,}" if place["kind"] == "run" else ""
            newest = place["newest"] or "a checkpoint"
            age = _age(place["durable_s"], now_s)
            places.append((printable(place["name"]), steps, printable(newest), age))
        heads, *lines = columns(places, right=(1,), width=width)
        return [printable(document["path"]), Heads(heads), *lines]
    steps = document["shown"]
    hidden = document["steps"] - len(steps)
    rows: list[tuple[str, ...]] = [("step", "durable", "size", "ranks", "what")]
    rows += [_cells(step, now_s) for step in steps]
    room = width - sum(max(width_of(row[n]) + 2 for row in rows) for n in range(4))
    # What is wrong with a step is said in full, in several lines if need be.
    cells = [
        (*row[:4], join_fitting(row[4:], max(room, 20), "  ") if len(row) > 5 else "".join(row[4:]))
        for row in rows
    ]
    heads, *lines = columns(cells, right=(2, 3), width=None)
    more = [f"… {hidden:,} earlier; --all shows them"] if hidden else []
    count = show_count(document["steps"], "step")
    above = [f"{printable(document['path'])}: {count}", *behind_text(document["behind"])]
    return [*above, Heads(heads), *more, *lines]


def _cells(step: Document, now_s: float) -> tuple[str, ...]:
    """Return a cell for each column; what there is to say of the step follows in parts."""
    ranks = "" if step["world_size"] is None else f"{step['world_size']:,}"
    if step["error"] is not None:
        what = [f"{step['state']}: {printable(step['error'])}"]
    elif step["state"] != "committed":
        why = step["unfinished"]
        what = [f"{step['state']}: {why}" if why else step["state"]]
    else:
        codecs = [codec for codec in step["codecs"] if codec != "raw"]
        base = f"on {_short(step['base'])}" if step["base"] else ""
        kind = " ".join(filter(None, [", ".join(codecs), base]))
        what = [*filter(None, [kind]), *metrics_of(step["metrics"], DIGITS)]
    age = _age(step["durable_s"], now_s) if step["state"] == "committed" else ""
    return printable(step["name"]), age, show_bytes(step["disk_bytes"]), ranks, *what


def _short(name: str) -> str:
    """Show a base by its number, where it has one: ``step-00001200`` → ``1200``."""
    number = step_of(name)
    return printable(name) if number is None else str(number)


def _age(then_s: float | None, now_s: float) -> str:
    """Show how long ago: 125 seconds → ``2 min ago``; a clock that is ahead: the time itself."""
    if then_s is None:
        return ""
    age_s = now_s - then_s
    if age_s < -1:
        try:
            return time.strftime("%Y-%m-%d %H:%M", time.gmtime(then_s))
        except (ValueError, OverflowError, OSError):  # a year with too many digits
            return "in the future"
    for least, unit, name in _UNITS:
        if age_s >= least:
            return f"{age_s / unit:.0f} {name} ago"
    return f"{max(age_s, 0):.0f} s ago"
