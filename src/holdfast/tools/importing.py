"""Import a checkpoint of another format, with a progress bar. Knows no format itself."""

import os
from typing import Any

from ..convert.importing import plan_import
from ..convert.kinds import find_kind
from ..errors import OptionError
from .convert import convert
from .export import DCP, document_of
from .progress import Progress
from .text import printable, show_bytes, show_count


def import_(
    source: str, target: str, *, kind: str | None, under: str, pickled: bool
) -> dict[str, Any]:
    """Import; return what was done as a JSON document."""
    place = os.path.expanduser(source)
    if kind is None and os.path.isdir(place):
        kind = find_kind(os.path.abspath(place)).name
    if kind == DCP:
        if under:
            raise OptionError(f"--under has no meaning for a checkpoint of {DCP}; leave it out")
        document = convert(source, target, pickled=pickled)
        return {"kind": DCP, "to": "holdfast", "ties": 0, "left_out": [], "files": []} | document
    if pickled:
        raise OptionError(f"--pickled is for checkpoints of {DCP} alone; leave it out")
    planned = plan_import(source, target, kind=kind, under=under)
    try:
        with Progress("import", planned.result.size_bytes) as progress:
            planned.run(progress.advance)
    finally:
        planned.close()
    return document_of(planned.result) | {"advice": list(planned.advice)}


def render(document: dict[str, Any]) -> list[str]:
    """Say what was done, and what was left out."""
    counts = [show_count(document["tensors"], "tensor"), show_bytes(document["bytes"])]
    if document["ties"]:
        counts.insert(1, show_count(document["ties"], "tied name"))
    what = f"{document['target']} is a checkpoint of holdfast, from {document['kind']}"
    line = f"{printable(what)}: {', '.join(counts)}"
    return [line, *map(printable, document.get("advice", []))]
