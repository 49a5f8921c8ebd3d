"""What several ranks hold in common, once. Pure; knows no torch, no files."""

import json
from collections.abc import Sequence

from ..errors import StateError
from ..format.names import dotted
from ..format.values import decode_value, parse_json
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


def merge_objects(objects_by_rank: Sequence[dict[Path, bytes]]) -> dict[Path, int]:
    """Find the first rank that holds each value.

    Args:
        objects_by_rank: JSON texts of the values.

    Raises:
        StateError: two ranks have different values at one path; the text lists every such path.
    """
    first: dict[Path, int] = {}
    faults = []
    for rank, objects in enumerate(objects_by_rank):
        for path, text in objects.items():
            known = objects_by_rank[first.setdefault(path, rank)][path]
            # Texts, so that NaN equals itself and 1 differs from True and 1.0.
            if known != text and _sorted(known) != _sorted(text):
                faults.append(
                    f"{dotted(path)} is {_shown(text)} on rank {rank}, {_shown(known)} before"
                )
    if faults:
        raise StateError(
            f"the ranks hold different values: {'; '.join(faults)}. Give what belongs to one rank "
            'a name of its own, such as state[f"reader.{rank}"]'
        )
    return first


def _sorted(text: bytes) -> str:
    return json.dumps(parse_json(text), sort_keys=True)


def _shown(text: bytes) -> str:
    return f"{decode_value(parse_json(text))!r:.60}"
