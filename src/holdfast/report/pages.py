"""The pages that `holdfast inspect --html` and `holdfast diff --html` write."""

import time
from collections.abc import Mapping
from typing import Any

from .. import Checkpoint
from .. import open as open_checkpoint
from ..tools.run_listing import find_run
from . import content_panels
from .contents import contents_of
from .data import Contents, Finding
from .difference import difference_findings, difference_panels, layers_of
from .document import page_of
from .page import page
from .panels import facts, panel
from .read import read_run, wrong_files
from .verb import write_file
from .words import show_bytes


def write_inspected(path: str, target: str) -> str:
    """Write a page of a checkpoint, or of a run; return where it is.

    Raises:
        HoldfastError: it cannot be opened, or the page cannot be written.
    """
    if find_run(path, newest=1) is not None:
        return write_file(target, page_of(read_run(path)))
    return write_file(target, checkpoint_page(open_checkpoint(path)))


def checkpoint_page(checkpoint: Checkpoint) -> str:
    """Return the page of one open checkpoint."""
    contents = contents_of(checkpoint.location.rstrip("/").rpartition("/")[2], checkpoint)
    fault = wrong_files(checkpoint) if checkpoint.kind == "holdfast" else ""
    found = [Finding("good", "well", "Its MANIFEST is whole, and all its files are there", "")]
    if fault:
        advice = f"holdfast repair {checkpoint.location}"
        found = [Finding("bad", "damage", f"{contents.name} is damaged", f"{fault}.", advice)]
    overview = panel("overview", "Overview", facts(_facts(checkpoint, contents)))
    return page(
        kind="A checkpoint",
        heading=checkpoint.location,
        found=found,
        sections=[
            ("overview", "Overview", overview),
            ("size", "Size", content_panels.sizes(contents)),
            ("shards", "Shards", content_panels.shards(contents)),
            ("tensors", "Tensors", content_panels.tensor_table(contents.tensors)),
        ],
        data={},
        made=time.time(),
    )


def _facts(checkpoint: Checkpoint, contents: Contents) -> list[tuple[str, str]]:
    size = sum(row.size_bytes for row in contents.tensors)
    found = [
        ("Step", "none" if checkpoint.step is None else str(checkpoint.step)),
        ("Ranks", f"{checkpoint.world_size:,}"),
        ("Contents", f"{len(contents.tensors):,} tensors, {contents.objects:,} values"),
        ("Elements", show_bytes(size)),
        ("In files", f"{show_bytes(sum(checkpoint.file_bytes))} in {len(checkpoint.file_names):,}"),
        ("Written by", checkpoint.written_by),
    ]
    if checkpoint.base is not None:
        found.append(("Delta of", checkpoint.base))
    if mesh := checkpoint.mesh:
        sizes = zip(mesh["names"], mesh["shape"], strict=True)
        found.append(("Mesh", " x ".join(f"{name} {size}" for name, size in sizes)))
    found += [(f"Metric {name}", f"{value:.6g}") for name, value in checkpoint.metrics.items()]
    return found


def write_difference(document: Mapping[str, Any], target: str) -> str:
    """Write a page of what `holdfast diff` found; return where it is.

    Raises:
        StoreError: it cannot be written.
    """
    return write_file(target, difference_page(document))


def difference_page(document: Mapping[str, Any]) -> str:
    """Return the page of a difference."""
    layers = layers_of(document["tensors"])
    return page(
        kind="The difference of two checkpoints",
        heading=f"{document['a']['path']} → {document['b']['path']}",
        found=difference_findings(document, layers),
        sections=difference_panels(document, layers),
        data={},
        made=time.time(),
    )
