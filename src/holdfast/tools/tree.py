"""Dotted names → a tree that fits one screen: alike siblings joined, branches closed for room.

Knows names, kinds and sizes; not where they come from.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

DEPTH_MAX = 32  # a hostile name may have thousands of dots; what lies deeper stays one key
PARTIAL_ROWS_MIN = 3  # fewer rows of a branch that does not fit tell nothing
_KEY = re.compile(r"(?:\\.|[^.\\])*", re.DOTALL)  # up to a dot that no backslash escapes
_NUMBERED = re.compile(r"(\D*)(\d+)(\D*)", re.DOTALL)

Signature = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor or object, or several alike.

    Attributes:
        kind: dtype, or type of the object.
        form: shape, or value; empty when those of joined leaves differ.
        tensors, objects: how many it stands for.
        size_bytes, stored_bytes: of all of them, as elements and in the files.
        shards: of all of them.
        lost, energy: squared errors of all of them, and the energy of what was coded.
    """

    kind: str
    form: str
    tensors: int = 0
    objects: int = 0
    size_bytes: int = 0
    stored_bytes: int = 0
    shards: int = 0
    lost: float = 0.0
    energy: float = 0.0


@dataclass(slots=True)
class Node:
    """A key and what lies under it: ``alike`` siblings of one structure are one node."""

    key: str
    leaf: Leaf | None = None
    children: list["Node"] = field(default_factory=list)
    alike: int = 1

    def leaves(self) -> Iterator[Leaf]:
        """Yield every leaf from here on."""
        if self.leaf is not None:
            yield self.leaf
        for child in self.children:
            yield from child.leaves()


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a tree: a node, or so many ``hidden`` ones after it."""

    depth: int
    node: Node
    is_open: bool
    hidden: int = 0


def split_name(name: str) -> list[str]:
    """Cut a dotted name at its dots: ``a.b\\.c.0`` → ``a``, ``b\\.c``, ``0``."""
    keys: list[str] = []
    at = 0
    while len(keys) < DEPTH_MAX - 1:
        match = _KEY.match(name, at)
        end = match.end() if match else len(name)
        keys.append(name[at:end])
        if end >= len(name):
            return keys
        at = end + 1
    return [*keys, name[at:]]


def grow(leaves: Iterable[tuple[str, Leaf]], *, join: bool) -> Node:
    """Make a tree of named leaves, in their order.

    Args:
        join: make one node of siblings whose names differ in a number alone and that hold the same.
    """
    root = Node("")
    known: dict[tuple[int, str], Node] = {}  # by identity of the parent, and key
    for name, leaf in leaves:
        node = root
        for key in split_name(name):
            child = known.get((id(node), key))
            if child is None:
                child = known[id(node), key] = Node(key)
                node.children.append(child)
            node = child
        node.leaf = leaf
    if join:
        _join(root)
    root.children = [_shortened(child) for child in root.children]
    return root


def _join(node: Node) -> Signature:
    """Join alike siblings from the leaves upwards; return what makes this node alike to another."""
    groups: dict[object, list[Node]] = {}
    content: list[Signature] = []
    for child in node.children:
        signature = _join(child)
        match = _NUMBERED.fullmatch(child.key)
        # A key without exactly one number is a group of its own.
        name = (match[1], match[3]) if match else child.key
        groups.setdefault((name, signature), []).append(child)
        content.append((child.key, signature))
    node.children = [_joined(nodes) for nodes in groups.values()]
    leaf = node.leaf
    own = None if leaf is None else (leaf.kind, leaf.form if leaf.tensors else "")
    return (own, *content)


def _joined(nodes: list[Node]) -> Node:
    if len(nodes) == 1:
        return nodes[0]
    first, last = (_NUMBERED.fullmatch(node.key) for node in (nodes[0], nodes[-1]))
    assert first and last, "only numbered keys are joined"
    return _merged(f"{first[1]}{first[2]}…{last[2]}{first[3]}", nodes, len(nodes))


def _merged(key: str, nodes: Sequence[Node], alike: int) -> Node:
    columns = zip(*(node.children for node in nodes), strict=True)
    children = [_merged(column[0].key, column, column[0].alike) for column in columns]
    leaves = [node.leaf for node in nodes if node.leaf is not None]
    return Node(key, _sum(leaves) if leaves else None, children, alike)


def _sum(leaves: list[Leaf]) -> Leaf:
    first = leaves[0]
    return Leaf(
        first.kind,
        first.form if all(leaf.form == first.form for leaf in leaves) else "",
        sum(leaf.tensors for leaf in leaves),
        sum(leaf.objects for leaf in leaves),
        sum(leaf.size_bytes for leaf in leaves),
        sum(leaf.stored_bytes for leaf in leaves),
        sum(leaf.shards for leaf in leaves),
        sum(leaf.lost for leaf in leaves),
        sum(leaf.energy for leaf in leaves),
    )


def _shortened(node: Node) -> Node:
    """Write a chain of only children as one node; two counts of alike nodes stay apart."""
    while len(node.children) == 1 and node.leaf is None:
        child = node.children[0]
        if node.alike > 1 and child.alike > 1:
            break
        key = f"{node.key}.{child.key}"
        node = Node(key, child.leaf, child.children, node.alike * child.alike)
    node.children = [_shortened(child) for child in node.children]
    return node


def rows_of(root: Node, limit: int | None) -> list[Row]:
    """Open the tree level by level as far as ``limit`` rows reach; None: all of it."""
    room = limit if limit is not None else sum(1 for _ in _every(root))
    shown: dict[int, int] = {}  # by identity of the node: how many of its children
    closed: list[Node] = []
    level = deque([root])
    while level:
        node = level.popleft()
        if len(node.children) <= room:
            shown[id(node)] = len(node.children)
            room -= len(node.children)
            level.extend(child for child in node.children if child.children)
        else:
            closed.append(node)
    for node in closed:
        if room >= PARTIAL_ROWS_MIN:
            shown[id(node)] = room - 1
            room = 0
    return list(_rows(root, 0, shown))


def _rows(node: Node, depth: int, shown: dict[int, int]) -> Iterator[Row]:
    count = shown.get(id(node), 0)
    for child in node.children[:count]:
        yield Row(depth, child, id(child) in shown)
        yield from _rows(child, depth + 1, shown)
    if 0 < count < len(node.children):
        yield Row(depth, node, False, len(node.children) - count)


def _every(node: Node) -> Iterator[Node]:
    for child in node.children:
        yield child
        yield from _every(child)
