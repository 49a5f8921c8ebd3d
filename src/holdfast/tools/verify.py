"""`holdfast verify`: every byte of a checkpoint, or of all the steps of a run. Changes nothing."""

import os
from typing import Any

from .. import open as open_checkpoint
from ..errors import CorruptError, HoldfastError, NotCommittedError
from ..format import spec
from ..stores.url import open_store
from .progress import Progress
from .run import disk_bytes, find_run
from .text import printable, show_bytes, show_count

Document = dict[str, Any]
Known = dict[str, Document]  # what was found, by location


def verify(path: str | os.PathLike[str], *, deep: bool = False) -> Document:
    """Check every byte of the checkpoint at ``path``, or of each committed step of a run.

    Of a link, everything that it was made from too. What one step of a run suffers from does not
    keep the others from being checked.

    Args:
        deep: also decode everything, and compare it with the digests of what was saved.

    Raises:
        NotCommittedError: there is nothing to check.
        VersionError, StoreError: a lone checkpoint cannot be read, which says nothing about it.
    """
    run = find_run(path)
    if run is None:
        store = open_store(path)
        with Progress("verify", disk_bytes(store, "")) as progress:
            found = _verify_one(store.location, progress, {}, deep=deep)
        return _document(store.location, [found], deep=deep)
    if not run.committed:
        raise NotCommittedError(
            f"{run.location} has {show_count(len(run.steps), 'step')}, none of them committed; "
            "there is nothing to verify"
        )
    known: Known = {}
    with Progress("verify", sum(step.disk_bytes for step in run.committed)) as progress:
        for step in run.committed:
            try:
                if deep or step.location not in known:
                    _verify_one(step.location, progress, known, deep=deep)
            except HoldfastError as error:
                known[step.location] = _result(step.location) | {"error": str(error)}
    return _document(run.location, [known[step.location] for step in run.committed], deep=deep)


def exit_code(document: Document) -> int:
    """Return 0 when all is whole, 1 when something is damaged, 2 when a step cannot be read."""
    if any(found["damage"] for found in document["checkpoints"]):
        return 1
    return 0 if document["good"] else 2


def render(document: Document) -> list[str]:
    """Show what was found as lines for the terminal; all damage, however much."""
    lines = []
    for found in document["checkpoints"]:
        where = printable(found["path"])
        if found["error"] is not None:
            lines.append(f"?    {where}: {printable(found['error'])}")
        elif found["damage"]:
            lines.append(f"BAD  {where}: {show_count(len(found['damage']), 'fault')}")
            lines += [f"     {printable(damage['what'])}" for damage in found["damage"]]
        else:
            size = f"{show_bytes(found['file_bytes'])} in {show_count(found['files'], 'file')}"
            count = found["below"]
            below = f", and of the {show_count(count, 'checkpoint')} below it" if count else ""
            decoded = "; all decoded" if document["deep"] else ""
            lines.append(f"good {where}: {size}, every byte checked{below}{decoded}")
    return lines


def _verify_one(location: str, progress: Progress, known: Known, *, deep: bool) -> Document:
    """Check a checkpoint, and what it was made from, unless that is known already."""
    found = _result(location)
    try:
        checkpoint = open_checkpoint(location)
    except CorruptError as error:
        where = f"{location}/{spec.MANIFEST_NAME}"
        found["damage"].append({"where": where, "tensor": None, "what": str(error)})
        return known.setdefault(location, found)
    faults = dict.fromkeys(checkpoint.verify(progress.advance, deep=deep))  # one may be found twice
    damage = [{"where": f.where, "tensor": f.tensor, "what": f.what} for f in faults]
    if checkpoint.base is not None and not damage:
        place = os.path.join(os.path.dirname(location), checkpoint.base)
        base = known.get(place) or _verify_one(place, progress, known, deep=False)
        found["below"] = base["below"] + 1
        if base["damage"]:
            what = f"{location} was made from {checkpoint.base}, which is damaged: "
            damage.append(
                {"where": place, "tensor": None, "what": what + base["damage"][0]["what"]}
            )
    found |= {
        "good": not damage,
        "step": checkpoint.step,
        "files": len(checkpoint.file_names),
        "file_bytes": sum(checkpoint.file_bytes),
        "damage": damage,
    }
    known[location] = found
    return found


def _result(location: str) -> Document:
    return {
        "path": location,
        "good": False,
        "step": None,
        "files": None,
        "file_bytes": None,
        "below": 0,
        "damage": [],
        "error": None,
    }


def _document(location: str, found: list[Document], *, deep: bool) -> Document:
    good = all(f["good"] for f in found)
    return {"path": location, "good": good, "deep": deep, "checkpoints": found}
