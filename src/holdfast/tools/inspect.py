"""`holdfast inspect`: what is in a checkpoint or a run, on one screen. Reads manifests alone."""

import os
import reprlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from .. import Checkpoint
from .. import open as open_checkpoint
from ..format.header import REPAIRED
from ..format.names import foreign_of, misnamed, some
from ..format.values import decode_value, encode_value
from ..stores.url import open_store
from .inspect_run import FIGURE_WIDTH, describe_run, metrics_of, render_run
from .run_listing import find_run
from .text import (
    clip,
    columns,
    cut,
    printable,
    repaired_advice,
    screen_size,
    show_bytes,
    show_count,
)
from .tree import Leaf, Node, Row, grow, rows_of

Document = dict[str, Any]

ID_SHOWN = 8  # characters of a save's id; --json has all
FORM_WIDTH = 28  # of a shape or a value; longer ones are cut
TREE_ROWS_MIN = 8
STEP_ROWS_MIN = 4
FRAME_ROWS = 9  # headings, blank lines and totals around the tree, and the prompt after it


def inspect(path: str | os.PathLike[str], *, everything: bool = False) -> Document:
    """Describe the checkpoint or run at ``path``.

    Args:
        everything: the boxes of all shards too.

    Raises:
        NotCommittedError: there is none.
        CorruptError, VersionError, StoreError: a checkpoint's MANIFEST cannot be read.
    """
    run = find_run(path)
    if run is not None:
        return describe_run(run)
    return _describe_checkpoint(open_checkpoint(path), boxes=everything)


def exit_code(document: Document) -> int:
    """Return 0 when all is there, 1 when something is damaged, 2 when a step cannot be read."""
    steps = document.get("steps", [])
    states = {step["state"] for step in steps}
    if "damaged" in states or document.get("error") or any(step.get("lacks") for step in steps):
        return 1
    return 2 if "unreadable" in states else 0


def render(document: Document, *, everything: bool = False) -> list[str]:
    """Show a description as lines for the terminal; all names with ``everything``."""
    width, lines = screen_size()
    if document["kind"] == "run":
        limit = max(lines - 4, STEP_ROWS_MIN)
        return render_run(document, None if everything else limit)
    heading = _heading(document, width)
    room = max(lines - FRAME_ROWS - len(heading), TREE_ROWS_MIN)
    root = grow(_leaves(document), join=not everything)
    rows = rows_of(root, None if everything else room)
    table = [("name", "type", "shape", "size", "stored", "lost", "shards"), *map(_cells, rows)]
    hidden = set()
    if all(tensor["codec"] == "raw" for tensor in document["tensors"]):
        hidden.add(4)
    if all(tensor["loss"] is None for tensor in document["tensors"]):
        hidden.add(5)
    table = [tuple(c for n, c in enumerate(cells) if n not in hidden) for cells in table]
    body = columns(table, right=(3, 4, 5, 6), width=width)
    return [*heading, "", *body, "", *_totals(document, width)]


def _describe_checkpoint(checkpoint: Checkpoint, *, boxes: bool) -> Document:
    tensors = list(_tensors(checkpoint, boxes=boxes))
    objects = [
        {"name": name, "type": type(value).__name__, "value": encode_value(value, (name,))}
        for name, value in checkpoint.objects().items()
    ]
    wrong = misnamed(os.path.basename(checkpoint.location), checkpoint.step)
    is_ours = checkpoint.kind == "holdfast"
    foreign = foreign_of(open_store(checkpoint.location).scan() if is_ours else ())
    own = [tensor for tensor in tensors if tensor["tied_to"] is None]
    by_dtype: dict[str, int] = {}
    for tensor in own:
        by_dtype[tensor["dtype"]] = by_dtype.get(tensor["dtype"], 0) + tensor["size_bytes"]
    return {
        "kind": "checkpoint",
        "path": checkpoint.location,
        "error": wrong and f"it {wrong}",
        "step": checkpoint.step,
        "world_size": checkpoint.world_size,
        "mesh": checkpoint.mesh,
        "base": checkpoint.base,
        "metrics": encode_value(checkpoint.metrics, ("metrics",)),
        "save_id": checkpoint.save_id,
        "written_by": checkpoint.written_by,
        "repaired": REPAIRED[0] in checkpoint.objects(),
        "totals": {
            "tensors": len(own),
            "tied_names": len(tensors) - len(own),
            "elements": sum(tensor["elements"] for tensor in own),
            "size_bytes": sum(tensor["size_bytes"] for tensor in own),
            "size_bytes_by_dtype": by_dtype,
            "stored_bytes": sum(tensor["stored_bytes"] for tensor in own),
            "shards": sum(tensor["shards"] for tensor in own),
            "objects": len(objects),
            "files": len(checkpoint.file_names),
            "file_bytes": sum(checkpoint.file_bytes),
        },
        "files": [
            {"name": name, "size_bytes": size}
            for name, size in zip(checkpoint.file_names, checkpoint.file_bytes, strict=True)
        ],
        "tensors": tensors,
        "objects": objects,
        "foreign": list(foreign.names),
        "foreign_count": foreign.count,
    }


def _tensors(checkpoint: Checkpoint, *, boxes: bool) -> Iterator[Document]:
    for name in checkpoint.names():
        info = checkpoint.info(name)
        elements = 1
        for size in info.shape:
            elements *= size
        entry = {
            "name": name,
            "dtype": info.dtype,
            "shape": list(info.shape),
            "elements": elements,
            "size_bytes": info.size_bytes,
            "stored_bytes": info.stored_bytes,
            "codec": info.codec,
            "shards": len(info.shards),
            "tied_to": info.tied_to,
            "loss": None if info.loss is None else asdict(info.loss),
        }
        if boxes:
            entry["boxes"] = [
                {"offset": list(offset), "shape": list(shape)} for offset, shape in info.shards
            ]
        yield entry


def _heading(document: Document, width: int) -> list[str]:
    step, ranks = document["step"], document["world_size"]
    parts = ["no step" if step is None else f"step {step}", show_count(ranks, "rank")]
    if mesh := document["mesh"]:
        sizes = zip(mesh["names"], mesh["shape"], strict=True)
        text = " x ".join(f"{name} {size}" for name, size in sizes)
        parts.append(f"mesh {cut(printable(text), FIGURE_WIDTH)}")
    if document["save_id"]:
        parts.append(f"save {document['save_id'][:ID_SHOWN]}")
    parts.append(f"by {cut(printable(document['written_by']), FIGURE_WIDTH)}")
    if document["base"] is not None:
        parts.append(f"a delta of {cut(printable(document['base']), FIGURE_WIDTH)}")
    lines = [printable(document["path"]), *_wrapped(parts, width)]
    if document["metrics"]:
        lines += _wrapped(list(metrics_of(document["metrics"])), width)[:3]
    if document["error"] is not None:
        lines.append(f"  {printable(document['error'])}")
    if document["repaired"]:
        lines.append(f"  {repaired_advice(printable(document['path']))}")
    return lines


def _wrapped(parts: list[str], width: int) -> list[str]:
    """Put parts on lines, as many as fit, three spaces apart."""
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]}   {part}" if lines[-1] else f"  {part}"
        if len(joined) <= width or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(f"  {part}")
    return lines


def _leaves(document: Document) -> Iterator[tuple[str, Leaf]]:
    for tensor in document["tensors"]:
        if tensor["tied_to"] is not None:
            form = f"tied to {printable(tensor['tied_to'])}"
            yield tensor["name"], Leaf(tensor["dtype"], cut(form, FORM_WIDTH), tensors=1)
            continue
        yield (
            tensor["name"],
            Leaf(
                tensor["dtype"],
                cut(str(tensor["shape"]), FORM_WIDTH),
                tensors=1,
                size_bytes=tensor["size_bytes"],
                stored_bytes=tensor["stored_bytes"],
                shards=tensor["shards"],
                lost=tensor["loss"]["squared_error"] if tensor["loss"] else 0.0,
                energy=tensor["loss"]["energy"] if tensor["loss"] else 0.0,
            ),
        )
    for entry in document["objects"]:
        value = printable(reprlib.repr(decode_value(entry["value"])))
        yield entry["name"], Leaf(entry["type"], clip(value, FORM_WIDTH), objects=1)


def _cells(row: Row) -> tuple[str, ...]:
    indent = "  " * row.depth
    if row.hidden:
        return (f"{indent}… {row.hidden:,} more; --all shows them", "", "", "", "", "", "")
    node = row.node
    leaves = list(node.leaves())
    size = sum(leaf.size_bytes for leaf in leaves)
    shards = sum(leaf.shards for leaf in leaves)
    tensors = sum(leaf.tensors for leaf in leaves)
    label = f"{indent}{printable(node.key) or repr('')}"
    if node.alike > 1:
        label += f" (x{node.alike:,})"
    share = f"{100 * sum(leaf.stored_bytes for leaf in leaves) / size:.1f} %" if size else ""
    energy = sum(leaf.energy for leaf in leaves)
    lost = f"{100 * sum(leaf.lost for leaf in leaves) / energy:.3g} %" if energy else ""
    figures = (show_bytes(size), share, lost, f"{shards:,}") if tensors else ("", "", "", "")
    if node.leaf is not None and not node.children:
        return (label, node.leaf.kind, node.leaf.form, *figures)
    if row.is_open:
        return (label, "", "", *figures)
    return (label, _kinds(leaves), _content(node), *figures)


def _kinds(leaves: list[Leaf]) -> str:
    kinds = {leaf.kind: None for leaf in leaves if leaf.tensors}  # in order of appearance
    return ", ".join(kinds) if len(kinds) <= 2 else f"{len(kinds)} types"


def _content(node: Node) -> str:
    tensors = sum(leaf.tensors for leaf in node.leaves())
    objects = sum(leaf.objects for leaf in node.leaves())
    counts = [show_count(n, what) for n, what in ((tensors, "tensor"), (objects, "object")) if n]
    return ", ".join(counts)


def _totals(document: Document, width: int) -> list[str]:
    totals = document["totals"]
    tied = totals["tied_names"]
    counts = [
        show_count(totals["tensors"], "tensor") + (f" (+{tied:,} tied)" if tied else ""),
        show_count(totals["elements"], "element"),
        show_count(totals["objects"], "object"),
        show_count(totals["shards"], "shard"),
        show_count(totals["files"], "file"),
    ]
    dtypes = sorted(totals["size_bytes_by_dtype"].items(), key=lambda item: (-item[1], item[0]))
    sizes = [
        f"{show_bytes(totals['size_bytes'])} of elements",
        f"{show_bytes(totals['stored_bytes'])} stored{_ratio(document)}",
        f"{show_bytes(totals['file_bytes'])} in files",
        *(f"{dtype} {show_bytes(size)}" for dtype, size in dtypes),
    ]
    names = [printable(name) for name in document["foreign"]]
    named = some(names, document["foreign_count"])
    foreign = [f"not written by holdfast: {named}"] if names else []
    return [*_wrapped(counts, width), *_wrapped(sizes, width), *foreign]


def _ratio(document: Document) -> str:
    """Say how many times smaller it is than its elements, and by which codecs."""
    totals = document["totals"]
    codecs = {tensor["codec"]: None for tensor in document["tensors"]}
    if not set(codecs) - {"raw"} or not totals["stored_bytes"]:
        return ""
    return f" ({totals['size_bytes'] / totals['stored_bytes']:.2f}x smaller, {', '.join(codecs)})"
