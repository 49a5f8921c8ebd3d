"""Import a checkpoint of another format, with a progress bar. Knows no format itself."""

import os
from typing import Any

from ..convert.importing import plan_import
from ..errors import OptionError
from ..format.names import DCP_METADATA_NAME
from ..format.spec import MANIFEST_NAME
from .convert import convert
from .export import DCP, document_of
from .progress import Progress
from .text import printable, show_bytes, show_count


def import_(
    source: str, target: str, *, kind: str | None, under: str, pickled: bool
) -> dict[str, Any]:
    """Import; return what was done as a JSON document."""
    names = {name for name in (DCP_METADATA_NAME, MANIFEST_NAME) if _is_there(source, name)}
    if kind == DCP or (kind is None and names == {DCP_METADATA_NAME}):
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
    return document_of(planned.result)


def _is_there(directory: str, name: str) -> bool:
    return os.path.lexists(os.path.join(os.path.expanduser(directory), name))


def render(document: dict[str, Any]) -> list[str]:
    """Say what was done, in one line."""
    counts = [show_count(document["tensors"], "tensor"), show_bytes(document["bytes"])]
    if document["ties"]:
        counts.insert(1, show_count(document["ties"], "tied name"))
    what = f"{document['target']} is a checkpoint of holdfast, from {document['kind']}"
    return [f"{printable(what)}: {', '.join(counts)}"]
