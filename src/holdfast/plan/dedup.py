"""What several ranks hold in common, once. Pure; knows no torch, no files."""

import json
from collections.abc import Sequence
from math import copysign
from typing import Any

from ..errors import StateError
from ..format.names import dotted
from ..format.values import encode_value
from ..layout import Path, Shard, Tensor


def merge_tensors(shards_by_rank: Sequence[Sequence[Shard]]) -> dict[Path, Tensor]:
    """Collect the tensors of all ranks, in the order in which they first appear.

    Raises:
        StateError: two ranks disagree about dtype or global shape; the text lists every such
            tensor.
    """
    tensors: dict[Path, Tensor] = {}
    faults = []
    for rank, shards in enumerate(shards_by_rank):
        for shard in shards:
            mine, known = shard.tensor, tensors.setdefault(shard.tensor.path, shard.tensor)
            if mine != known:
                faults.append(
                    f"{dotted(mine.path)} is {mine.dtype} {list(mine.shape)} on rank {rank}, "
                    f"{known.dtype} {list(known.shape)} on a rank before it"
                )
    if faults:
        raise StateError(f"the ranks disagree: {'; '.join(faults)}")
    return tensors


def merge_ties(
    by_rank: Sequence[tuple[Sequence[Shard], dict[Path, Path]]],
) -> dict[Path, Path]:
    """Keep the ties on which all ranks agree that hold elements of the further name.

    A rank with an empty shard cannot tell; a rank on which the two names differ undoes the tie.
    """
    candidates: dict[Path, Path] = {}
    for _, ties in by_rank:
        for path, target in ties.items():
            candidates.setdefault(path, target)
    for shards, ties in by_rank:
        for shard in shards:
            path = shard.tensor.path
            if path in candidates and shard.box.elements and ties.get(path) != candidates[path]:
                del candidates[path]
    # A tie to a name that is itself tied would have no tensor to point at.
    return {path: target for path, target in candidates.items() if target not in candidates}


def merge_objects(objects_by_rank: Sequence[dict[Path, Any]]) -> dict[Path, Any]:
    """Collect the values of all ranks.

    Raises:
        StateError: two ranks have different values at one path; the text lists every such path.
    """
    merged: dict[Path, Any] = {}
    faults = []
    for rank, objects in enumerate(objects_by_rank):
        for path, value in objects.items():
            known = merged.setdefault(path, value)
            # Compared as encoded, so that NaN equals itself and 1 differs from True and 1.0;
            # most are plainly equal, and encoding them for every rank would take minutes.
            if not _equal(known, value) and _text(known, path) != _text(value, path):
                faults.append(
                    f"{dotted(path)} is {value!r:.60} on rank {rank}, {known!r:.60} before"
                )
    if faults:
        raise StateError(
            f"the ranks hold different values: {'; '.join(faults)}. Give what belongs to one rank "
            'a name of its own, such as state[f"reader.{rank}"]'
        )
    return merged


def _equal(one: Any, other: Any) -> bool:
    """Whether two values certainly have one encoding; False where only encoding them can tell."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(_equal, one.items(), other.items()))
    if type(one) is float:  # zeros of both signs are equal, and are encoded differently
        return bool(one == other) and copysign(1.0, one) == copysign(1.0, other)
    return type(one) in (str, int, bool, bytes) and bool(one == other)


def _text(value: Any, path: Path) -> str:
    return json.dumps(encode_value(value, path), sort_keys=True)
