"""What each rank holds, told to the others: columns and JSON texts. Pure; knows no torch, no files.

Of many ranks most hold the same names, replicas the same boxes too: whatever is the same on several
ranks is decoded once, and is one object on all of them.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from ..boxes import I64
from ..format.fields import parse_json
from ..format.values import (
    decode_path,
    decode_paths,
    decode_value,
    encode_value,
    path_text,
    write_json,
)
from ..layout import Box, Path, Tensor

_LENGTHS = struct.Struct("<QQQQ")
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Names:
    """What a rank holds parts of, whatever parts.

    Attributes:
        tensors: in the state's order, each once.
        ties: {further path: first path}.
        mesh: that of the coordinator counts.
    """

    tensors: tuple[Tensor, ...]
    ties: dict[Path, Path]
    mesh: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Values:
    """What has to be equal wherever it is held.

    Attributes:
        digests: {path: digest} of ordinary tensors, which this rank holds whole.
        objects: {path: JSON text of the value}.
        exact: tensors that differ by mistake, however small they are: an optimizer's state.
    """

    digests: dict[Path, bytes]
    objects: dict[Path, bytes]
    exact: frozenset[Path] = frozenset()


@dataclass(frozen=True, slots=True)
class LocalState:
    """What one rank holds.

    Attributes:
        boxes: how many boxes are held of each tensor, a byte each; and offset and shape of every
            box, which may be empty: little-endian 64-bit integers.
        node: name of this rank's host, the same for all ranks there.
    """

    names: Names
    boxes: tuple[bytes, bytes]
    values: Values
    node: str

    @property
    def counts(self) -> I64:
        """The number of boxes of each tensor."""
        return np.frombuffer(self.boxes[0], np.uint8).astype(np.int64)

    @property
    def numbers(self) -> I64:
        """Offsets and shapes of the boxes."""
        return np.frombuffer(self.boxes[1], "<i8")


def local_state_of(
    held: Iterable[tuple[Tensor, Sequence[Box]]],
    ties: dict[Path, Path],
    mesh: dict[str, Any] | None,
    values: Values,
    node: str,
) -> LocalState:
    """Put together what a rank holds.

    Args:
        held: each tensor, in the state's order, and the disjoint boxes held of it: at most
            `HELD_BOXES_MAX`, and they may be empty.
    """
    held = tuple(held)
    numbers = [n for _, boxes in held for box in boxes for n in (*box.offset, *box.shape)]
    names = Names(tuple(tensor for tensor, _ in held), ties, mesh)
    boxes = bytes([len(boxes) for _, boxes in held]), np.array(numbers, "<i8").tobytes()
    return LocalState(names, boxes, values, node)


def encode_local_state(local_state: LocalState) -> bytes:
    """Write a local_state as bytes for the other ranks."""
    names, values = local_state.names, local_state.values
    ties = [f"[{path_text(path)},{path_text(target)}]" for path, target in names.ties.items()]
    digests = [f'[{path_text(path)},"{found.hex()}"]' for path, found in values.digests.items()]
    objects = [
        f"[{path_text(path)},{write_json(text.decode())}]" for path, text in values.objects.items()
    ]
    exact = map(path_text, sorted(values.exact, key=str))
    tensors = [
        f'[{path_text(t.path)},"{t.dtype}",[{",".join(map(str, t.shape))}]]' for t in names.tensors
    ]
    named = f'{{"tensors":[{",".join(tensors)}],"ties":[{",".join(ties)}]'
    named += f',"mesh":{write_json(names.mesh)}}}'
    valued = f'{{"digests":[{",".join(digests)}],"objects":[{",".join(objects)}]'
    valued += f',"exact":[{",".join(exact)}]}}'
    parts = [named.encode(), valued.encode(), *local_state.boxes]
    return b"".join([_LENGTHS.pack(*map(len, parts)), *parts, local_state.node.encode()])


def decode_local_states(encoded: Sequence[bytes]) -> list[LocalState]:
    """Read the local_states of all ranks."""
    names: dict[bytes, Names] = {}
    values: dict[bytes, Values] = {}
    boxes: dict[tuple[bytes, bytes], tuple[bytes, bytes]] = {}
    local_states = []
    for data in encoded:
        ends = np.cumsum([_LENGTHS.size, *_LENGTHS.unpack_from(data)]).tolist()
        named, valued, *held = (data[a:b] for a, b in pairwise(ends))
        if named not in names:
            names[named] = _decode_names(named)
        if valued not in values:
            values[valued] = _decode_values(valued)
        counts, numbers = held
        same = boxes.setdefault((counts, numbers), (counts, numbers))
        local_states.append(
            LocalState(names[named], same, values[valued], data[ends[4] :].decode())
        )
    return local_states


def _decode_names(data: bytes) -> Names:
    found = parse_json(data)
    paths, dtypes, shapes = [*zip(*found["tensors"], strict=True)] or [(), (), ()]
    return Names(
        tuple(map(Tensor, decode_paths(paths), dtypes, map(tuple, shapes))),
        {decode_path(path): decode_path(target) for path, target in found["ties"]},
        found["mesh"],
    )


def _decode_values(data: bytes) -> Values:
    found = parse_json(data)
    return Values(
        {decode_path(path): bytes.fromhex(digest) for path, digest in found["digests"]},
        {decode_path(path): text.encode() for path, text in found["objects"]},
        frozenset(decode_path(path) for path in found["exact"]),
    )


def distinct(parts: Iterable[Part]) -> list[tuple[Part, list[int]]]:
    """Return what is one object on several ranks once, with those ranks; in the order of ranks."""
    found: dict[int, tuple[Part, list[int]]] = {}
    for rank, part in enumerate(parts):
        found.setdefault(id(part), (part, []))[1].append(rank)
    return list(found.values())


def encode_object(value: Any, path: Path) -> bytes:
    """Write a value as JSON text: equal values have equal texts, but for the order of their keys.

    Raises:
        StateError: it is of a type that a state cannot hold.
    """
    return write_json(encode_value(value, path)).encode()


def decode_object(text: bytes) -> Any:
    """Return the value."""
    return decode_value(parse_json(text))
