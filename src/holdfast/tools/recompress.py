"""`holdfast recompress` and `holdfast rebase`: checkpoints under another codec, or without a base.

Changes nothing at the source but, for rebase, how it is stored.
"""

import os
from typing import Any

from .. import open, rebase, recompress
from ..errors import NotCommittedError
from ..stores.url import open_store
from .progress import Progress
from .run import elements_bytes, find_run
from .text import printable, show_bytes

Document = dict[str, Any]


def recompress_all(source: str, target: str, codec: str) -> Document:
    """Write a checkpoint, or every step of a run, again under a codec.

    Args:
        codec: a name.

    Raises:
        NotCommittedError: there is nothing at ``source``.
        AlreadyCommittedError: a step is at ``target`` already; those before it were written.
    """
    run = find_run(source)
    if run is None:
        places = [(source, target)]
    elif run.committed:
        places = [(step.location, os.path.join(target, step.name)) for step in run.committed]
    else:
        raise NotCommittedError(f"{run.location} has no committed step; there is nothing to do")
    total = sum(elements_bytes(place) for place, _ in places)
    with Progress("recompress", total) as progress:
        for here, there in places:
            recompress(here, there, codec=codec, report=progress.advance)
    steps = [
        {"path": open_store(there).location, "from_bytes": _files(here), "to_bytes": _files(there)}
        for here, there in places
    ]
    return {"codec": codec, "size_bytes": total, "checkpoints": steps}


def rebase_one(path: str) -> Document:
    """Make a link need no other checkpoint."""
    before = _files(path)
    with Progress("rebase", elements_bytes(path)) as progress:
        changed = rebase(path, report=progress.advance)
    location = open_store(path).location
    return {"path": location, "changed": changed, "from_bytes": before, "to_bytes": _files(path)}


def render_recompress(document: Document) -> list[str]:
    """Say what was written, a line for each checkpoint and one for all."""
    found = document["checkpoints"]
    lines = [
        f"{printable(c['path'])}: {show_bytes(c['from_bytes'])} → {show_bytes(c['to_bytes'])}"
        for c in found
    ]
    after = sum(c["to_bytes"] for c in found)
    ratio = document["size_bytes"] / after if after else 0.0
    return [*lines, f"{show_bytes(after)} in all, {ratio:.2f}x smaller than the elements"]


def render_rebase(document: Document) -> list[str]:
    """Say what was done, in one line."""
    where = printable(document["path"])
    if not document["changed"]:
        return [f"{where} needs no other checkpoint; nothing was changed"]
    sizes = f"{show_bytes(document['from_bytes'])} → {show_bytes(document['to_bytes'])}"
    return [f"{where} needs no other checkpoint now: {sizes}"]


def _files(path: str) -> int:
    with open(path) as checkpoint:
        return sum(checkpoint.file_bytes)
