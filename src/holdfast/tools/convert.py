"""Convert a checkpoint into another format, with a progress bar. Knows no format itself."""

from typing import Any

from ..integrations.dcp.convert import plan_conversion
from .progress import Progress
from .text import printable, show_bytes, show_count


def convert(source: str, target: str, *, pickled: bool) -> dict[str, Any]:
    """Convert; return what was done as a JSON document."""
    conversion = plan_conversion(source, target, pickled=pickled)
    with Progress("convert", conversion.size_bytes) as progress:
        conversion.run(progress.advance)
    return {
        "source": conversion.source,
        "target": conversion.target,
        "into": conversion.into,
        "tensors": conversion.tensors,
        "values": conversion.values,
        "bytes": conversion.size_bytes,
    }


def render(document: dict[str, Any]) -> list[str]:
    """Say what was done, in one line."""
    what = f"{show_count(document['tensors'], 'tensor')}, {show_count(document['values'], 'value')}"
    kind = {"dcp": "a checkpoint of DCP", "holdfast": "a checkpoint of holdfast"}[document["into"]]
    size = show_bytes(document["bytes"])
    return [f"{printable(document['target'])} is {kind}: {what}, {size}"]
