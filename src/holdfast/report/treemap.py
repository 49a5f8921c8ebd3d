"""Names with sizes → rectangles that fill a picture, grouped as the names are. Pure.

Squarified: Bruls, Huizing and van Wijk, "Squarified Treemaps", 2000.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .data import TensorRow

LEAVES_MAX = 700
DEPTH_MAX = 6


@dataclass(slots=True)
class Branch:
    """A part of the names, with all below it."""

    name: str
    size: int = 0
    stored: int = 0
    count: int = 0
    lost: float = 0.0  # squared error, as a share of `size`, weighted by size
    dtypes: dict[str, int] = field(default_factory=dict)
    children: "dict[str, Branch]" = field(default_factory=dict)

    def add(self, row: TensorRow) -> None:
        """Count a tensor."""
        self.size += row.size_bytes
        self.stored += row.stored_bytes
        self.count += 1
        self.lost += (row.loss or 0.0) * row.size_bytes
        self.dtypes[row.dtype] = self.dtypes.get(row.dtype, 0) + row.size_bytes

    @property
    def dtype(self) -> str:
        """The dtype of most of its bytes."""
        return max(self.dtypes, key=lambda name: self.dtypes[name], default="")


@dataclass(frozen=True, slots=True)
class Rectangle:
    """One branch in the picture; ``depth`` 0 is the outermost, and a leaf shows its colour."""

    branch: Branch
    x: float
    y: float
    width: float
    height: float
    depth: int
    is_leaf: bool


def grow(rows: Sequence[TensorRow]) -> Branch:
    """Make the tree of the names: model, layer, tensor."""
    root = Branch("")
    for row in rows:
        root.add(row)
        node, prefix = root, ""
        keys = row.name.split(".")
        if len(keys) > DEPTH_MAX:
            keys = [*keys[: DEPTH_MAX - 1], ".".join(keys[DEPTH_MAX - 1 :])]
        for key in keys:
            prefix = f"{prefix}.{key}" if prefix else key
            node = node.children.setdefault(key, Branch(prefix))
            node.add(row)
    return root


def parts_of(root: Branch, count: int) -> list[str]:
    """Name the parts that a state is made of, the largest first: branches, opened by size."""
    found = sorted(root.children.values(), key=_size, reverse=True)
    while found and len(found) < count:
        branch = next((b for b in found if 0 < len(b.children) <= count - len(found) + 1), None)
        if branch is None:
            break
        found.remove(branch)
        found = sorted([*found, *branch.children.values()], key=_size, reverse=True)
    return [branch.name for branch in found[:count]]


def lay_out(root: Branch, width: float, height: float) -> list[Rectangle]:
    """Return rectangles, parents before children, at most so many leaves."""
    opened, leaves = {id(root)}, 1
    waiting = sorted(root.children.values(), key=_size, reverse=True)
    leaves = len(waiting)
    while waiting and leaves < LEAVES_MAX:
        waiting.sort(key=_size)
        branch = waiting.pop()
        if not branch.children:
            continue
        if leaves + len(branch.children) - 1 > LEAVES_MAX:
            continue
        opened.add(id(branch))
        leaves += len(branch.children) - 1
        waiting.extend(branch.children.values())
    return list(_place(root, 0.0, 0.0, width, height, 0, opened))


def _size(branch: Branch) -> int:
    return branch.size


def _place(
    branch: Branch, x: float, y: float, width: float, height: float, depth: int, opened: set[int]
) -> Iterator[Rectangle]:
    children = sorted((c for c in branch.children.values() if c.size), key=_size, reverse=True)
    while len(children) == 1 and children[0].children and id(children[0]) in opened:
        children = sorted(children[0].children.values(), key=_size, reverse=True)
        children = [child for child in children if child.size]
    boxes = squarify([child.size for child in children], x, y, width, height)
    for child, (left, top, wide, high) in zip(children, boxes, strict=True):
        is_open = id(child) in opened and bool(child.children) and min(wide, high) > 6
        yield Rectangle(child, left, top, wide, high, depth, not is_open)
        if is_open:
            head = 15.0 if high > 40 and wide > 50 and depth < 2 else 1.0
            inner = (left + 1, top + head, max(wide - 2, 0.5), max(high - head - 1, 0.5))
            yield from _place(child, *inner, depth + 1, opened)


def squarify(
    sizes: Sequence[float], x: float, y: float, width: float, height: float
) -> list[tuple[float, float, float, float]]:
    """Fill a rectangle with areas in proportion to sizes, which are descending; keep the order."""
    total = sum(sizes)
    if not total or width <= 0 or height <= 0:
        return [(x, y, 0.0, 0.0) for _ in sizes]
    areas = [size * width * height / total for size in sizes]
    boxes: list[tuple[float, float, float, float]] = []
    start = 0
    while start < len(areas):
        side = min(width, height)
        end, row = start + 1, areas[start]
        while end < len(areas):
            grown = row + areas[end]
            if _worst(areas[start : end + 1], grown, side) > _worst(areas[start:end], row, side):
                break
            row, end = grown, end + 1
        thick = row / side if side else 0.0
        at = y if width >= height else x
        for area in areas[start:end]:
            length = area / thick if thick else 0.0
            if width >= height:
                boxes.append((x, at, thick, length))
            else:
                boxes.append((at, y, length, thick))
            at += length
        if width >= height:
            x, width = x + thick, max(width - thick, 0.0)
        else:
            y, height = y + thick, max(height - thick, 0.0)
        start = end
    return boxes


def _worst(areas: Sequence[float], total: float, side: float) -> float:
    if not total or not side or not areas[-1]:
        return float("inf")
    square = side * side / (total * total)
    return max(square * areas[0], 1 / (square * areas[-1]))
