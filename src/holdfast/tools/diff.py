"""`holdfast diff`: what two checkpoints do not share. Reads slabs of both: memory is bounded."""

import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from .. import Checkpoint
from .. import open as open_checkpoint
from ..convert.names import Choice
from ..errors import OptionError
from ..format.names import display_names
from ..format.values import decode_value, encode_value
from ..layout import Path, Shape, batches
from .families import join_families, join_figures
from .progress import Progress
from .text import columns, cut, printable, screen_size, show_count

if TYPE_CHECKING:
    from .compare import Distance

Document = dict[str, Any]
Pair = tuple[str, str]  # the names of one tensor in A and in B, which may be tied otherwise
Row = tuple[str, str, str]

SLAB_BYTES = 64 << 20  # of a tensor in memory, of each side; many chunks, so few are read twice
FORM_WIDTH = 22  # of a dtype with its shape, or a value; longer ones are cut
ROWS_MIN = 4
FRAME_ROWS = 6  # the two paths, blank lines, the summary, and the prompt after it


class _Side:
    """An open checkpoint, by the typed keys that both sides share."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.tensors = {checkpoint.path_of(name): name for name in checkpoint.names()}
        self.objects = {
            checkpoint.path_of(name): value for name, value in checkpoint.objects().items()
        }

    def paths(self) -> list[Path]:
        return [*self.tensors, *self.objects]

    def form(self, path: Path) -> Document:
        """Say what is at a path: a tensor of this dtype and shape, or an object."""
        if path not in self.tensors:
            return {"kind": "object", "dtype": None, "shape": None}
        info = self.checkpoint.info(self.tensors[path])
        return {"kind": "tensor", "dtype": info.dtype, "shape": list(info.shape)}

    def own_name(self, path: Path) -> str:
        """Return the name that elements are stored under, which ties share."""
        info = self.checkpoint.info(self.tensors[path])
        return info.tied_to or info.name

    def summary(self) -> Document:
        return {"path": self.checkpoint.location, "step": self.checkpoint.step}


def diff(
    path_a: str | os.PathLike[str],
    path_b: str | os.PathLike[str],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    tolerance: float | None = None,
    with_angle: bool = False,
) -> Document:
    """Compare two checkpoints: names, dtypes, shapes, every element, every object.

    Args:
        include, exclude: which names are compared, as for `holdfast.load`.
        tolerance: tensors that are nowhere further apart are the same; None: to the bit.
        with_angle: also add up the squares of floating-point tensors, which takes longer.

    Raises:
        OptionError: the tolerance is negative.
        MismatchError: a pattern fits no name.
        NotCommittedError: there is no checkpoint at one of the paths.
        CorruptError, VersionError, StoreError: one cannot be read.
    """
    if tolerance is not None and not tolerance >= 0:
        raise OptionError(f"the tolerance is {tolerance:g}; expected a number from 0")
    a, b = _Side(open_checkpoint(path_a)), _Side(open_checkpoint(path_b))
    names = _names(a, b, Choice(include, exclude))
    in_a, in_b = set(a.paths()), set(b.paths())
    only_a = [name for path, name in names.items() if path not in in_b]
    only_b = [name for path, name in names.items() if path not in in_a]
    changed, alike = [], []
    for path in (path for path in names if path in in_a and path in in_b):
        forms = a.form(path), b.form(path)
        if forms[0] != forms[1]:
            changed.append({"name": names[path], "a": forms[0], "b": forms[1]})
            continue
        alike.append(path)
    tensors = _judged(_tensor_figures(a, b, alike, names, with_angle=with_angle), tolerance)
    objects = list(_object_changes(a, b, [p for p in alike if p in a.objects], names))
    differing = [entry for entry in tensors if not entry["same"]]
    return {
        "a": a.summary(),
        "b": b.summary(),
        "tolerance": tolerance,
        "same": not (only_a or only_b or changed or differing or objects),
        "only_in_a": only_a,
        "only_in_b": only_b,
        "changed": changed,
        "tensors": tensors,
        "objects": objects,
        "summary": {
            "tensors_compared": len(tensors),
            "tensors_differing": len(differing),
            "objects_compared": sum(path in a.objects for path in alike),
            "objects_differing": len(objects),
            "changed": len(changed),
            "only_in_a": len(only_a),
            "only_in_b": len(only_b),
            "max_abs": max((entry["max_abs"] for entry in differing), default=0.0),
        },
    }


def _names(a: _Side, b: _Side, choice: Choice) -> dict[Path, str]:
    """Return the names that are compared, by path: those of A, and then those of B alone."""
    names = display_names(list(dict.fromkeys([*a.paths(), *b.paths()])))
    where = f"{a.checkpoint.location} and {b.checkpoint.location}"
    kept = {*choice.names([*names.values()], where)}
    return {path: name for path, name in names.items() if name in kept}


def _judged(entries: Iterable[Document], tolerance: float | None) -> list[Document]:
    """Say of each tensor whether it is the same."""
    return [e | {"same": not e["differing"] or _is_within(e, tolerance)} for e in entries]


def _is_within(entry: Document, tolerance: float | None) -> bool:
    """Whether two tensors are as close as they have to be; None: to the bit."""
    is_finite = not entry["not_finite"]
    return tolerance is not None and is_finite and bool(entry["max_abs"] <= tolerance)


def _tensor_figures(
    a: _Side, b: _Side, paths: list[Path], names: dict[Path, str], *, with_angle: bool
) -> Iterator[Document]:
    """Compare tensors; what is tied on both sides is read once for all its names."""
    paths = [path for path in paths if path in a.tensors]
    pairs = {path: (a.own_name(path), b.own_name(path)) for path in paths}
    sizes = {pair: a.checkpoint.info(pair[0]).size_bytes for pair in pairs.values()}
    found: dict[Pair, Document] = {}
    with Progress("diff", 2 * sum(sizes.values())) as progress:
        for batch in batches(sizes, sizes.__getitem__, SLAB_BYTES):
            for pair, distance in _distances(
                a.checkpoint, b.checkpoint, batch, progress, with_angle=with_angle
            ):
                found[pair] = distance
    for path in paths:
        info = a.checkpoint.info(a.tensors[path])
        form = {"dtype": info.dtype, "shape": list(info.shape)}
        yield {"name": names[path], **form, **found[pairs[path]]}


def _distances(
    a: Checkpoint,
    b: Checkpoint,
    batch: list[Pair],
    progress: Progress,
    *,
    with_angle: bool,
) -> Iterator[tuple[Pair, Document]]:
    from .compare import Distance  # imports torch, which takes longer than all before it

    info = a.info(batch[0][0])
    if info.size_bytes > SLAB_BYTES:
        distance = Distance(with_angle=with_angle)
        for box in slabs(info.shape, info.size_bytes, SLAB_BYTES):
            distance.add(a.tensor(batch[0][0], box), b.tensor(batch[0][1], box))
            progress.advance(2 * info.size_bytes * prod(box[1]) // prod(info.shape))
        yield batch[0], _figures(distance)
        return
    in_a, in_b = a.tensors(name for name, _ in batch), b.tensors(name for _, name in batch)
    for pair in batch:
        distance = Distance(with_angle=with_angle)
        distance.add(in_a[pair[0]], in_b[pair[1]])
        progress.advance(2 * a.info(pair[0]).size_bytes)
        yield pair, _figures(distance)


def _figures(distance: "Distance") -> Document:
    angle = {"squares": [float(value) for value in distance.squares]}
    return {
        "elements": distance.elements,
        "differing": distance.differing,
        "not_finite": distance.not_finite,
        "max_abs": distance.max_abs,
        "mean_abs": distance.mean_abs,
        **(angle if distance.with_angle else {}),
    }


def slabs(shape: Shape, size_bytes: int, limit_bytes: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a tensor into boxes (offset, shape) of at most ``limit_bytes``, in row-major order."""
    elements = prod(shape)
    if not elements:
        return
    if not shape:
        yield (), ()
        return
    limit = max(limit_bytes * elements // size_bytes, 1)
    # Cut along the first dimension whose rows fit; of those before it take one index at a time.
    d = next(d for d in range(len(shape)) if prod(shape[d + 1 :]) <= limit)
    inner = shape[d + 1 :]
    rows = limit // prod(inner)
    for outer in range(prod(shape[:d])):
        index = _index(outer, shape[:d])
        for first in range(0, shape[d], rows):
            count = min(rows, shape[d] - first)
            yield (*index, first, *(0 for _ in inner)), (*(1 for _ in index), count, *inner)


def _index(position: int, shape: Shape) -> Shape:
    """Turn a row-major position into an index."""
    index = []
    for size in reversed(shape):
        position, at = divmod(position, size)
        index.append(at)
    return tuple(reversed(index))


def _object_changes(
    a: _Side, b: _Side, paths: list[Path], names: dict[Path, str]
) -> Iterator[Document]:
    """Compare values by their stored form, which tells 1 from 1.0 and one NaN from another."""
    for path in paths:
        values = [encode_value(side.objects[path], path) for side in (a, b)]
        texts = {json.dumps(_unordered(value), sort_keys=True) for value in values}
        if len(texts) > 1:
            yield {"name": names[path], "a": values[0], "b": values[1]}


def _unordered(value: Any) -> Any:
    """Sort the pairs of dicts with other keys than strings: order is no difference in any dict."""
    if isinstance(value, list):
        return [_unordered(item) for item in value]
    if not isinstance(value, dict):
        return value
    inner = {key: _unordered(item) for key, item in value.items()}
    return {"$dict": sorted(inner["$dict"], key=json.dumps)} if "$dict" in inner else inner


def render(document: Document, *, everything: bool = False) -> list[str]:
    """Show the differences as lines, the largest first; with ``everything`` all of them."""
    width, lines = screen_size()
    differing = [entry for entry in document["tensors"] if not entry["same"]]
    rows = _rows(document, differing)
    limit = len(rows) if everything else max(lines - FRAME_ROWS, ROWS_MIN)
    if len(rows) > limit:
        rows = join_families(_rows(document, join_figures(differing)))
    body = columns(rows[:limit], right=(), width=width)
    if len(rows) > limit:
        body.append(f"… {len(rows) - limit:,} more; --all shows them")
    sides = [(side, document[side.lower()]) for side in "AB"]
    heading = [f"{side}  {printable(found['path'])}{_step(found)}" for side, found in sides]
    return [*heading, *(["", *body, ""] if body else []), _summary(document["summary"])]


def _rows(document: Document, differing: list[Document]) -> list[Row]:
    return [
        *((printable(name), "only in A", "") for name in document["only_in_a"]),
        *((printable(name), "only in B", "") for name in document["only_in_b"]),
        *(_change_cells(entry) for entry in document["changed"]),
        *(_figure_cells(entry) for entry in sorted(differing, key=_gravity)),
        *(_object_cells(entry) for entry in document["objects"]),
    ]


def _gravity(entry: Document) -> tuple[int, float]:
    return -entry["not_finite"], -entry["max_abs"]


def _step(found: Document) -> str:
    return "" if found["step"] is None else f"  (step {found['step']})"


def _change_cells(entry: Document) -> Row:
    return printable(entry["name"]), "changed", f"{_form(entry['a'])} → {_form(entry['b'])}"


def _form(form: Document) -> str:
    if form["kind"] == "object":
        return "object"
    return cut(f"{form['dtype']} {form['shape']}", FORM_WIDTH)


def _figure_cells(entry: Document) -> Row:
    differing, elements = entry["differing"], entry["elements"]
    share = f"all {elements:,}" if differing == elements else f"{differing:,} of {elements:,}"
    if entry["not_finite"]:
        share += f", {entry['not_finite']:,} not finite"
    figures = f"max {entry['max_abs']:.3g}  mean {entry['mean_abs']:.3g}"
    return printable(entry["name"]), "differs", f"{figures}  {share}"


def _object_cells(entry: Document) -> Row:
    values = [printable(reprlib.repr(decode_value(entry[side]))) for side in "ab"]
    return printable(entry["name"]), "differs", " → ".join(cut(v, FORM_WIDTH) for v in values)


def _summary(counts: Document) -> str:
    parts = [
        f"{counts['tensors_differing']:,} of {show_count(counts['tensors_compared'], 'tensor')} "
        f"and {counts['objects_differing']:,} of "
        f"{show_count(counts['objects_compared'], 'object')} differ"
    ]
    for key, text in (
        ("changed", "changed in form"),
        ("only_in_a", "only in A"),
        ("only_in_b", "only in B"),
    ):
        if counts[key]:
            parts.append(f"{counts[key]:,} {text}")
    if not counts["tensors_differing"] and not counts["objects_differing"] and len(parts) == 1:
        tensors = show_count(counts["tensors_compared"], "tensor")
        return f"the same: {tensors} and {show_count(counts['objects_compared'], 'object')}"
    return ", ".join(parts)
