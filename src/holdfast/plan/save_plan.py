"""Who writes which shard of a save. Pure; knows no torch, no files.

Each rank describes what it holds (`Request`); `plan_save` merges the requests of all into one
`SavePlan`, the same on every rank.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import StateError
from ..format.names import display_names, dotted
from ..format.values import decode_path, decode_value, encode_path, encode_value, parse_json
from ..layout import Box, Path, Shape, Shard, Tensor
from .balance import assign, chosen_writers, cut_shard
from .dedup import merge_objects, merge_tensors, merge_ties

# Running means and variances of a layer are smaller (16384 features in f32), its weights larger.
STATISTICS_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True)
class Request:
    """What one rank holds.

    Attributes:
        shards: one for each tensor, in the state's order; boxes may be empty.
        ties: {further path: first path} on this rank.
        digests: {path: digest} of ordinary tensors, which this rank holds whole.
        objects: {path: JSON text of the value}.
        mesh: that of the coordinator counts.
        node: name of this rank's host, the same for all ranks there.
    """

    mesh: dict[str, Any] | None
    shards: tuple[Shard, ...]
    ties: dict[Path, Path]
    digests: dict[Path, bytes]
    objects: dict[Path, bytes]
    node: str


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Who does what, as every rank sees it.

    Attributes:
        ties: (further path, index of the tensor).
        objects: (path, first rank that holds it).
        shards: for each rank, the shards it writes, in order.
        forced: tensors of which the replicas differ, and one is kept.
    """

    mesh: dict[str, Any] | None
    tensors: tuple[Tensor, ...]
    ties: tuple[tuple[Path, int], ...]
    objects: tuple[tuple[Path, int], ...]
    shards: tuple[tuple[Shard, ...], ...]
    forced: frozenset[Path]


def plan_save(
    requests: list[Request], file_bytes: int, chunk_elements: int, writers: str | int
) -> SavePlan:
    """Merge what all ranks hold: every element is written once, by a rank that holds it.

    Args:
        file_bytes: largest data file; larger boxes are cut, since a shard lies in one file.
        chunk_elements, writers: as in `Options`.

    Raises:
        StateError: the ranks disagree about a tensor's dtype or shape, or about a value.
    """
    tensors = merge_tensors([request.shards for request in requests])
    ties = merge_ties([(request.shards, request.ties) for request in requests])
    objects = merge_objects([request.objects for request in requests])
    known = tensors.keys() | objects.keys()
    both = tensors.keys() & objects.keys()
    both |= {path[:n] for path in known for n in range(1, len(path)) if path[:n] in known}
    if both:
        names = ", ".join(sorted(dotted(path) for path in both))
        raise StateError(f"some ranks have values where others have tensors or more: {names}")
    forced = _forced_writers(requests)
    shards = assign(
        [[s for s in request.shards if s.tensor.path not in ties] for request in requests],
        forced,
        chosen_writers(writers, [request.node for request in requests]),
        chunk_elements,
    )
    kept = tuple(tensor for path, tensor in tensors.items() if path not in ties)
    index = {tensor.path: i for i, tensor in enumerate(kept)}
    return SavePlan(
        requests[0].mesh,
        kept,
        tuple((path, index[target]) for path, target in ties.items()),
        tuple(objects.items()),
        tuple(
            tuple(piece for shard in mine for piece in cut_shard(shard, file_bytes // 2))
            for mine in shards
        ),
        frozenset(forced),
    )


def _forced_writers(requests: list[Request]) -> dict[Path, int]:
    """Find replicas that differ: rank 0's statistics are kept, others are mistakes.

    Small floating-point ones are per-rank statistics (BatchNorm under DDP), of which training
    frameworks keep rank 0's. Integers and bytes are counters and random states, large ones are
    parts of something: to keep one of them silently would be wrong.
    """
    holders: dict[Path, list[tuple[int, bytes]]] = {}
    tensors = {s.tensor.path: s.tensor for request in requests for s in request.shards}
    for rank, request in enumerate(requests):
        for path, digest in request.digests.items():
            holders.setdefault(path, []).append((rank, digest))
    differing = {p: found for p, found in holders.items() if len({d for _, d in found}) > 1}
    large = [path for path in differing if tensors[path].size_bytes > STATISTICS_BYTES_MAX]
    if large:
        names = ", ".join(sorted(display_names(large).values()))
        raise StateError(
            f"the ranks hold different values of {names}; an ordinary tensor of this size must be "
            "equal on all. Where each rank holds a part of one tensor, it must give its part as a "
            "DTensor; what belongs to one rank needs a name of its own"
        )
    exact = [path for path in differing if not _is_statistic(tensors[path].dtype)]
    if exact:
        names = ", ".join(sorted(display_names(exact).values()))
        raise StateError(
            f"the ranks hold different values of {names}; a replicated tensor must be equal on "
            "all. Give what belongs to one rank a name of its own, such as "
            f'state[f"rng.{{rank}}"]'
        )
    return {path: found[0][0] for path, found in differing.items()}


def _is_statistic(dtype: str) -> bool:
    return dtype[0] in "fbc" and dtype != "bool"


def encode_request(request: Request) -> bytes:
    """Write a request as bytes for the other ranks: a line with the node, one with the rest.

    The rest of ranks that hold the same is the same, and is decoded once.
    """
    values = {
        "mesh": request.mesh,
        "shards": [
            [encode_path(s.tensor.path), s.tensor.dtype, s.tensor.shape, s.box.offset, s.box.shape]
            for s in request.shards
        ],
        "ties": [[encode_path(p), encode_path(target)] for p, target in request.ties.items()],
        "digests": [[encode_path(p), digest.hex()] for p, digest in request.digests.items()],
        "objects": [[encode_path(p), text.decode()] for p, text in request.objects.items()],
    }
    own = json.dumps({"node": request.node}).encode()
    return own + b"\n" + json.dumps(values, separators=(",", ":")).encode()


def decode_requests(encoded: Sequence[bytes]) -> list[Request]:
    """Read the requests of all ranks; those that hold the same share it in memory."""
    known: dict[bytes, Request] = {}
    requests = []
    for data in encoded:
        own, _, rest = data.partition(b"\n")
        if rest not in known:
            known[rest] = _decode_rest(rest)
        requests.append(replace(known[rest], **parse_json(own)))
    return requests


def _decode_rest(data: bytes) -> Request:
    values = parse_json(data)
    return Request(
        values["mesh"],
        tuple(_shard(*entry) for entry in values["shards"]),
        {decode_path(p): decode_path(target) for p, target in values["ties"]},
        {decode_path(p): bytes.fromhex(digest) for p, digest in values["digests"]},
        {decode_path(p): text.encode() for p, text in values["objects"]},
        "",
    )


def encode_object(value: Any, path: Path) -> bytes:
    """Write a value as JSON text: equal values have equal texts, but for the order of their keys.

    Raises:
        StateError: it is of a type that a state cannot hold.
    """
    return json.dumps(encode_value(value, path), separators=(",", ":")).encode()


def encode_objects(plan: SavePlan, rank: int, held: dict[Path, bytes]) -> bytes:
    """Write the values that the coordinator has from this rank: those that it is first to hold."""
    return json.dumps(
        [held[path].decode() for path, first in plan.objects if first == rank]
    ).encode()


def decode_objects(plan: SavePlan, encoded: Sequence[bytes]) -> tuple[tuple[Path, Any], ...]:
    """Return the values of all ranks, in the plan's order."""
    texts = [iter(parse_json(data)) for data in encoded]
    return tuple(
        (path, decode_value(parse_json(next(texts[rank]).encode()))) for path, rank in plan.objects
    )


def _shard(path: Any, dtype: str, shape: Shape, offset: Shape, box: Shape) -> Shard:
    return Shard(Tensor(decode_path(path), dtype, tuple(shape)), Box(tuple(offset), tuple(box)))
