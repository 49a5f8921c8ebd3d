"""Export a checkpoint with a progress bar. Knows no format itself."""

import os
from typing import Any

from ..convert.export import Conversion, Request, plan_export
from ..convert.names import Choice
from ..convert.targets import FORMATS, format_of
from ..errors import OptionError, shown
from ..format.spec import MANIFEST_NAME
from .convert import convert
from .convert import render as render_conversion
from .progress import Progress
from .text import printable, show_bytes, show_count

DCP = "dcp"  # written by its own classes, which the rest need not import
NAMED_MAX = 3
_ONLY_ELSEWHERE = ("include", "exclude", "strip", "rename", "dtype", "shard_size", "files_from")


def export(source: str, target: str, *, to: str | None, **given: Any) -> dict[str, Any]:
    """Export; return what was done as a JSON document.

    Args:
        given: the other arguments of `holdfast.export_checkpoint`; renames as ``REGEX=TO``, and
            ``kind``, as ``--from`` has it.
    """
    if to == DCP:
        for name in _ONLY_ELSEWHERE:
            if given.get(name):
                raise OptionError(
                    f"{name} has no meaning for --to {DCP}, which takes everything as it is; leave "
                    "it out"
                )
        document = convert(source, target, pickled=False)
        return {"kind": "holdfast", "to": DCP, "ties": 0, "left_out": [], "files": []} | document
    include, exclude = given.pop("include", ()) or (), given.pop("exclude", ()) or ()
    pairs = [_pair(text) for text in given.pop("rename", ()) or ()]
    choice = Choice(include, exclude, given.pop("strip", "") or "", pairs or None)
    planned = plan_export(Request(source, target, to=to, choice=choice, **given))
    try:
        with Progress("export", planned.read_bytes) as progress:
            planned.run(progress.advance)
    finally:
        planned.close()
    return document_of(planned.result)


def document_of(result: Conversion) -> dict[str, Any]:
    """Return a result as a JSON document."""
    return {
        "source": result.source,
        "target": result.target,
        "kind": result.kind,
        "to": result.to,
        "tensors": result.tensors,
        "ties": result.ties,
        "left_out": list(result.left_out),
        "bytes": result.size_bytes,
        "files": list(result.files),
    }


def convert_any(source: str, target: str, *, pickled: bool) -> dict[str, Any]:
    """Do what `holdfast convert` does: DCP and back; a file with a suffix is an export."""
    is_ours = os.path.lexists(os.path.join(os.path.expanduser(source), MANIFEST_NAME))
    suffixes = tuple(suffix for form in FORMATS for suffix in form.suffixes)
    # What no format has is refused there; a directory for our own may have a dot in its name.
    if target.endswith(suffixes) or (is_ours and format_of(target, None)[1]):
        if pickled:
            raise OptionError("--pickled is for checkpoints of DCP alone; leave it out")
        return export(source, target, to=None)
    if os.path.isfile(os.path.expanduser(source)):
        raise OptionError(
            f"{source} is a file; expected the directory of a checkpoint of DCP or holdfast. Run "
            f"'holdfast import {source} {target}' to convert a file of another format"
        )
    return convert(source, target, pickled=pickled)


def _pair(text: str) -> tuple[str, str]:
    """``"REGEX=TO"`` → ``("REGEX", "TO")``."""
    pattern, sign, replacement = text.rpartition("=")
    if not sign or not pattern:
        raise OptionError(f"--rename is {shown(text)}; expected REGEX=TO, such as '^gpt\\.=model.'")
    return pattern, replacement


def render(document: dict[str, Any]) -> list[str]:
    """Say what was done."""
    if "into" in document and "kind" not in document:
        return render_conversion(document)
    counts = [show_count(document["tensors"], "tensor"), show_bytes(document["bytes"])]
    if document["ties"]:
        counts.insert(1, show_count(document["ties"], "tied name"))
    files = len(document["files"])
    where = f"{document['target']} is {document['to']}"
    lines = [f"{printable(where)}: {', '.join(counts)}, {show_count(files, 'file')}"]
    if document["to"] == DCP:
        lines = [f"{printable(where)}: {', '.join(counts)}"]
    if left := document["left_out"]:
        names = ", ".join(map(printable, left[:NAMED_MAX]))
        more = f" and {len(left) - NAMED_MAX:,} more" if len(left) > NAMED_MAX else ""
        lines.append(f"left out, as the format has no place for them: {names}{more}")
    return lines
