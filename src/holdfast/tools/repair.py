"""`holdfast repair`: what a damaged run or checkpoint still offers; written where that is asked."""

import os
from typing import Any

from .. import repair as repair_one
from ..errors import HoldfastError, NotCommittedError, OptionError
from ..stores.url import open_store
from .progress import Progress
from .run_listing import Step, disk_bytes, find_run, why_unfinished
from .text import printable, repaired_advice, show_count
from .verify import describe_damage, describe_lost, render_damage, render_lost

Document = dict[str, Any]
SHOWN_MAX = 20  # tensors in lines for people; --json has all
_NEXT_JOB = "the next job that saves or uploads here goes on with it, or removes it"
MANIFEST_WHOLE = "MANIFEST is whole, and --write rebuilds nothing else; nothing was written"


def repair(path: str | os.PathLike[str], *, to: str | None = None, write: bool = False) -> Document:
    """Say what can be recovered of a checkpoint, or of each step of a run; recover it.

    Args:
        to: new directory for the whole tensors of a checkpoint.
        write: rebuild a MANIFEST in its place.

    Raises:
        NotCommittedError: there is nothing at ``path``.
        CorruptError: what was asked for cannot be done; nothing was written.
        OptionError: a run was given, and something to write.
    """
    run = find_run(path)
    if run is None:
        store = open_store(path)
        with Progress("repair", disk_bytes(store, "")) as progress:
            found = _describe(repair_one(path, to=to, write=write, report=progress.advance))
        if write and found["written"] is None:
            found["refused"] = [MANIFEST_WHOLE]
        return _document(store.location, [found], is_run=False)
    if to is not None or write:
        raise OptionError(
            f"{run.location} is a run; expected one checkpoint with --to or --write, such as "
            f"{run.steps[-1].location}"
        )
    known: dict[str, Any] = {}
    with Progress("repair", sum(step.disk_bytes for step in run.steps)) as progress:
        steps = [_look_at(step, progress, known) for step in run.steps]
    found_steps = [step for step in steps if step is not None]
    if not found_steps:
        raise NotCommittedError(f"{run.location} has no step with files; give a run with steps")
    return _document(run.location, found_steps, is_run=True)


def exit_code(document: Document) -> int:
    """Return 0 when nothing is damaged, or it was written; 1 when something is; 2 unread.

    Of a save that never ended nothing is expected.
    """
    states = {found["state"] for found in document["checkpoints"]}
    whole = {"good", "repaired", "written", "unfinished"}
    if states <= whole:
        return 0
    return 2 if states <= whole | {"unread"} else 1


def render(document: Document) -> list[str]:
    """Say what was found, a few lines for each checkpoint that is not whole."""
    lines = [line for found in document["checkpoints"] for line in _render_one(found)]
    if document["run"]:
        lines += _first(document)
        newest = document["newest_good"]
        good = sum(found["state"] == "good" for found in document["checkpoints"])
        lines.append(
            f"{good:,} of {show_count(len(document['checkpoints']), 'step')} good; "
            + (f"newest good: {printable(newest)}" if newest else "none is good")
        )
    return lines


def _first(document: Document) -> list[str]:
    """Say which steps to rebuild first: the bases that have lost no more than their MANIFEST."""
    lines, checkpoints = [], document["checkpoints"]
    for base in (found["path"] for found in checkpoints if found["state"] == "rebuildable"):
        needy = [
            found
            for found in checkpoints
            if found["path"] != base and any(d["where"] == base for d in found["damage"])
        ]
        if needy:
            where, again = printable(base), printable(document["path"])
            lines.append(
                f"first run 'holdfast repair {where} --write': without it "
                f"{show_count(len(needy), 'other step')} cannot be read. "
                f"Then run 'holdfast repair {again}' again"
            )
    return lines


def _look_at(step: Step, progress: Progress, known: dict[str, Any]) -> Document | None:
    try:
        return _describe(repair_one(step.location, report=progress.advance, known=known))
    except NotCommittedError:  # retired meanwhile, or nothing was ever written
        return None
    except HoldfastError as error:
        if step.committed:
            return _result(step.location) | {"state": "unread", "error": str(error)}
        why = why_unfinished(open_store(step.location))
        return _result(step.location) | {"state": "unfinished", "error": f"{why}; {_NEXT_JOB}"}


def _describe(found: Any) -> Document:
    lost = [describe_lost(name, boxes) for name, boxes in found.lost.items()]
    state = "damaged" if found.damage else "repaired" if found.repaired else "good"
    if found.rebuilt:
        state = "damaged" if found.refused else "rebuildable"
    return _result(found.location) | {
        "state": "written" if found.written else state,
        "damage": [describe_damage(damage) for damage in found.damage],
        "whole": list(found.whole),
        "lost": lost,
        "rebuilt": found.rebuilt,
        "not_recovered": list(found.not_recovered),
        "refused": list(found.refused),
        "written": found.written,
        "kept": found.kept,
    }


def _result(location: str) -> Document:
    return {
        "path": location,
        "state": "good",
        "damage": [],
        "whole": [],
        "lost": [],
        "rebuilt": False,
        "not_recovered": [],
        "refused": [],
        "written": None,
        "kept": None,
        "error": None,
    }


def _document(location: str, found: list[Document], *, is_run: bool) -> Document:
    good = [one["path"] for one in found if one["state"] == "good"]
    return {
        "path": location,
        "run": is_run,
        "newest_good": good[-1] if good else None,
        "checkpoints": found,
    }


def _render_one(found: Document) -> list[str]:
    where = printable(found["path"])
    if found["error"] is not None:
        return [f"{found['state']} {where}: {printable(found['error'])}"]
    refused = [f"  not in its place: {printable(why)}" for why in found["refused"]]
    if found["state"] == "good":
        tensors = show_count(len(found["whole"]), "tensor")
        return [f"good {where}: {tensors}, all whole", *refused]
    if found["state"] == "repaired":
        tensors = show_count(len(found["whole"]), "tensor")
        lost = "'inspect --all' lists the lost tensors"
        told = [f"repaired {where}: {tensors}, all whole; {lost}"]
        return [*told, f"  {repaired_advice(where)}", *refused]
    lines = [f"{found['state']} {where}: {show_count(len(found['damage']), 'fault')}"]
    lines += [render_damage(damage)[0] for damage in found["damage"]]
    count = len(found["whole"]) + len(found["lost"])
    lines.append(f"  whole: {len(found['whole']):,} of {show_count(count, 'tensor')}")
    lines += [f"  {render_lost(lost)}" for lost in found["lost"][:SHOWN_MAX]]
    if len(found["lost"]) > SHOWN_MAX:
        lines.append(f"  lost: {len(found['lost']) - SHOWN_MAX:,} more; --json has all")
    lines += [f"  not recovered: {printable(what)}" for what in found["not_recovered"]]
    if found["rebuilt"] and not found["not_recovered"]:
        lines.append("  MANIFEST can be put back to the bit: its own checksum proves it")
    return [*lines, *_advice(found, refused)]


def _advice(found: Document, refused: list[str]) -> list[str]:
    """Say what was done, or what can be."""
    where = printable(found["path"])
    if found["written"] == found["path"]:
        kept = f"; the damaged one is {printable(found['kept'])}" if found["kept"] else ""
        return [f"  MANIFEST was rebuilt in its place{kept}"]
    if found["written"]:
        return [f"  all whole tensors were written to {printable(found['written'])}"]
    lines = [*refused]
    if found["state"] == "rebuildable":
        lines.append(f"  'holdfast repair {where} --write' rebuilds MANIFEST in its place")
    if found["whole"]:
        lines.append(f"  'holdfast repair {where} --to NEW' writes all whole tensors to NEW")
    return lines
