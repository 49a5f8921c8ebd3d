"""The panels of one checkpoint as HTML and SVG: sizes as a treemap, and who wrote which part.

Knows data and words; no store.
"""

from collections.abc import Sequence

from .charts import bar_chart, legend, svg, tip
from .data import BoxRow, Contents, TensorRow
from .panels import figure, panel
from .treemap import Rectangle, grow, lay_out
from .words import short, show_bytes, shown

MAP_WIDTH, MAP_HEIGHT = 1100, 420
LABEL_WIDTH = 6.4  # of a character
RANK_COLOURS = 12
TABLE_ROWS = 200


def sizes(contents: Contents | None, more: str = "") -> str:
    """Show where the bytes are.

    Args:
        more: further figures, as HTML.
    """
    if contents is None or not contents.tensors:
        text = "There is no step whose contents can be read, or it has no tensors."
        return panel("size", "Size", f'<p class="empty">{shown(text)}</p>{more}')
    root = grow(contents.tensors)
    ratio = root.size / root.stored if root.stored else 1.0
    lead = f"{contents.name}: {show_bytes(root.size)} of elements in {root.count:,} tensors"
    lead += (
        f", stored in {show_bytes(root.stored)} ({ratio:.2f}x smaller)." if ratio > 1.005 else "."
    )
    dtypes = sorted(root.dtypes, key=lambda name: -root.dtypes[name])
    drawn = svg(
        MAP_WIDTH,
        MAP_HEIGHT,
        "".join(_rectangle(r, dtypes) for r in lay_out(root, MAP_WIDTH, MAP_HEIGHT)),
        "sizes of all tensors",
        "treemap",
    )
    choice = ""
    options = [("dtype", "dtype")]
    if any(row.stored_bytes != row.size_bytes for row in contents.tensors):
        options.append(("compression", "compression"))
    if any(row.loss for row in contents.tensors):
        options.append(("loss", "loss"))
    if len(options) > 1:
        items = "".join(f'<option value="{value}">{name}</option>' for name, value in options)
        choice = f'<label class="choice">Colour <select id="colour">{items}</select></label>'
    keys = legend(
        [(f"{d} {show_bytes(root.dtypes[d])}", f"d-{n % 6}") for n, d in enumerate(dtypes)]
    )
    body = figure("Model, layer, tensor", f'{choice}<div class="scroll">{drawn}</div>{keys}')
    return panel("size", "Size", body + more, lead)


def _rectangle(found: Rectangle, dtypes: Sequence[str]) -> str:
    branch = found.branch
    share = branch.stored / branch.size if branch.size else 1.0
    lost = branch.lost / branch.size if branch.size else 0.0
    about = f"{branch.name}: {show_bytes(branch.size)}, {', '.join(branch.dtypes)}"
    about += f", {branch.count:,} tensors" if branch.count > 1 else ""
    about += f", stored {100 * share:.1f} %" if abs(share - 1) > 0.005 else ""
    about += f", lost {100 * lost:.3g} %" if lost else ""
    css = f"leaf d-{dtypes.index(branch.dtype) % 6}" if found.is_leaf else "group"
    data = ""
    if found.is_leaf:
        data = f' data-c="{min(int(share * 8), 8)}" data-l="{_level(lost)}"'
    box = (
        f'<rect class="{css}" x="{found.x:.1f}" y="{found.y:.1f}" width="{found.width:.1f}" '
        f'height="{found.height:.1f}"{data} {tip(about)}/>'
    )
    room = int((found.width - 6) / LABEL_WIDTH)
    if (
        found.height < 15
        or room < 4
        or (not found.is_leaf and (found.height <= 40 or found.depth > 1))
    ):
        return box
    label = short(branch.name.rpartition(".")[2] if found.depth else branch.name, room)
    return (
        box
        + f'<text class="name" x="{found.x + 4:.1f}" y="{found.y + 12:.1f}">{shown(label)}</text>'
    )


def _level(lost: float) -> int:
    """Return how much is lost, from 0 (nothing) to 8 (a tenth and more)."""
    steps = (1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    return sum(lost >= least for least in steps) if lost else 0


def shards(contents: Contents | None) -> str:
    """Show how the bytes are spread over ranks, and who wrote which box."""
    if contents is None or not contents.rank_bytes:
        return ""
    sizes = [float(size) for size in contents.rank_bytes]
    mean = sum(sizes) / len(sizes)
    peak = max(sizes) / mean if mean else 1.0
    lead = f"{contents.name}: {len(sizes):,} rank{'s' * (len(sizes) != 1)} wrote it"
    lead += f"; the largest share is {peak:.2f}x the mean." if len(sizes) > 1 else "."
    drawn = bar_chart(
        [f"rank {rank}" for rank in range(len(sizes))],
        sizes,
        lambda v: show_bytes(int(v)),
        "bytes of each rank",
    )
    boxes = [figure(short(name, 60), _boxes(rows)) for name, rows in contents.boxes.items()]
    return panel(
        "shards",
        "Shards",
        f'<div class="pair">{figure("Bytes of each rank", drawn)}{"".join(boxes)}</div>',
        lead,
    )


def _boxes(rows: Sequence[BoxRow]) -> str:
    """Draw the first two dimensions of a tensor; each box has the colour of its rank."""
    wide, high = 520.0, 150.0
    ndim = len(rows[0].shape)
    ends = [max(row.offset[d] + row.shape[d] for row in rows) or 1 for d in range(ndim)]
    down = ends[0] if ndim > 1 else 1
    across = ends[1] if ndim > 1 else ends[0]
    parts = []
    for row in rows:
        top, tall = (row.offset[0], row.shape[0]) if ndim > 1 else (0, 1)
        left, broad = (row.offset[1], row.shape[1]) if ndim > 1 else (row.offset[0], row.shape[0])
        about = f"rank {row.rank}: offset {list(row.offset)}, shape {list(row.shape)}"
        parts.append(
            f'<rect class="box r-{row.rank % RANK_COLOURS}" x="{wide * left / across:.1f}" '
            f'y="{high * top / down:.1f}" width="{wide * broad / across:.1f}" '
            f'height="{high * tall / down:.1f}" {tip(about)}/>'
        )
        if wide * broad / across > 26 and high * tall / down > 13:
            x, y = wide * (left + broad / 2) / across, high * (top + tall / 2) / down + 4
            parts.append(f'<text class="axis middle" x="{x:.1f}" y="{y:.1f}">{row.rank}</text>')
    return svg(wide, high, "".join(parts), "boxes of a tensor, by rank", "boxes")


def tensor_table(rows: Sequence[TensorRow]) -> str:
    """List the largest tensors."""
    cells = "".join(
        f"<tr><td>{shown(short(row.name, 90))}</td><td>{shown(row.dtype)}</td>"
        f"<td>{shown(list(row.shape))}</td><td>{shown(row.codec)}</td>"
        f'<td class="end">{show_bytes(row.size_bytes)}</td>'
        f'<td class="end">{show_bytes(row.stored_bytes)}</td></tr>'
        for row in rows[:TABLE_ROWS]
    )
    head = (
        '<tr><th>name</th><th>dtype</th><th>shape</th><th>codec</th><th class="end">size</th>'
        '<th class="end">stored</th></tr>'
    )
    hidden = len(rows) - TABLE_ROWS
    note = f'<p class="empty">{hidden:,} smaller ones are not listed.</p>' if hidden > 0 else ""
    body = f'<div class="scroll"><table>{head}{cells}</table></div>{note}'
    return panel("tensors", "Tensors", body, "The largest first.")
