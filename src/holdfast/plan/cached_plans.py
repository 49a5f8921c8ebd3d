"""Plans that were made before, and a few numbers by which all ranks see that one still holds.

What a plan depends on seldom changes from save to save: names, shapes, boxes, settings. What has to
be equal on several ranks, and is not known to be, are the values: counters, schedules, replicas
that may have drifted. Each rank multiplies the digest of every value that it shares by a key of the
value's path, adds that to its proof as often as others hold the value too if it is the first that
holds it, and takes it away if it is not: over all ranks the proofs come to 0 when all of them hold
the same, and otherwise but once in 2^96 times. So one small sum over the ranks stands for the
exchange of everything they hold.

Pure but for the plans remembered, which change no answer; knows no torch, no files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core import xxh3_128
from ..format.fields import parse_json
from ..format.header import Header
from ..format.links import Base
from ..format.values import decode_value, path_text, write_json
from ..layout import Path
from .local_states import LocalState, distinct
from .save_plan import SavePlan
from .shard_table import ShardTable

CACHED_MAX = 8  # plans: of the whole state, of the weights alone, …
PROOFS, PROOF_BITS = 2, 48  # the sum over 2^15 ranks stays below 2^63
WORD_BYTES, PART_BYTES = 448, 7  # in so many bytes for each number
NUMBERS = 1 + PROOFS + WORD_BYTES // PART_BYTES  # whether busy, the proof, the coordinator's word

U64 = npt.NDArray[np.uint64]
PlanKey = tuple[Any, ...]  # all that a plan depends on, on one rank; compared by value


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """A plan, and what this rank held when it was made.

    Attributes:
        shards: those that this rank writes, in order.
        settings: the coordinator's.
        answers: digest of what all ranks answered: that they hold the same plan.
        shared: values that other ranks hold too and that have to be equal.
        factors: for each of those, the answers, and the arguments of a save: how often it counts;
            negative is 2^64 less.
        keys: for each of those, two odd numbers.
    """

    key: PlanKey
    plan: SavePlan
    shards: ShardTable
    settings: dict[str, Any]
    answers: bytes
    shared: tuple[Path, ...]
    factors: U64
    keys: U64

    def header(self, word: Mapping[str, Any]) -> Header:
        """Return the header of a save by this plan, still without objects.

        Args:
            word: the coordinator's.
        """
        base = word["base"]
        return Header(
            save_id=word["save_id"],
            step=word["step"],
            world_size=self.settings["world_size"],
            mesh=self.plan.mesh,
            metrics=decode_value(word["metrics"]) if word["metrics"] else {},
            written_by=self.settings["written_by"],
            chunk_elements=self.settings["chunk_elements"],
            tensors=self.plan.tensors,
            ties=self.plan.ties,
            objects=(),
            codecs=(self.plan.coding,),
            base=Base(base["name"], base["digest"], base["links"]) if base else None,
        )


def plan_key(rank: int, settings: dict[str, Any], local_state: LocalState) -> PlanKey:
    """Return all that a plan depends on, on one rank: what it holds, but no values."""
    values = (
        tuple(local_state.values.digests),
        tuple(local_state.values.objects),
        local_state.values.exact,
    )
    return (rank, settings, local_state.names, local_state.boxes, values, local_state.node)


def find(
    rank: int, settings: dict[str, Any], local_state: LocalState
) -> tuple[PlanKey, CachedPlan | None]:
    """Return the key of a plan, and the plan that was made when this rank held just this."""
    key = plan_key(rank, settings, local_state)
    return key, _find(key)


def _find(key: PlanKey) -> CachedPlan | None:
    for cached in reversed(_cached):
        if cached.key == key:
            return cached
    return None


def remember(cached: CachedPlan) -> None:
    """Keep a plan that a save was committed with."""
    if _cached and _cached[-1] is cached:
        return
    if (before := _find(cached.key)) is not None:
        _cached[:] = [other for other in _cached if other is not before]
    _cached.append(cached)
    del _cached[:-CACHED_MAX]


def forget_all() -> None:
    """Let the next saves plan anew."""
    _cached.clear()


_cached: list[CachedPlan] = []


def cacheable(
    key: PlanKey,
    plan: SavePlan,
    settings: dict[str, Any],
    local_states: Sequence[LocalState],
    rank: int,
    answers: Sequence[bytes],
) -> CachedPlan:
    """Prepare what shows, in a later save, that all ranks hold what they did.

    Args:
        local_states: of all ranks.
        answers: what all ranks answered.
    """
    first: dict[Path, int] = {}
    count: dict[Path, int] = {}
    for values, ranks in distinct([local_state.values for local_state in local_states]):
        for path in (*values.digests, *values.objects):
            first.setdefault(path, ranks[0])
            count[path] = count.get(path, 0) + len(ranks)
    mine = local_states[rank].values
    shared = tuple(
        path
        for path in (*mine.digests, *mine.objects)
        if count[path] > 1 and path not in plan.forced
    )
    factors = [_factor(first[path] == rank, count[path]) for path in shared]
    factors += [_factor(rank == 0, len(local_states))] * 2
    names = [path_text(path).encode() for path in shared]
    names += [b"answers", b"arguments"]
    keys = _numbers([xxh3_128(name) for name in names]) | np.uint64(1)
    digest = xxh3_128(b"".join(map(xxh3_128, answers)))
    counts = np.array(factors, np.uint64)
    return CachedPlan(key, plan, plan.shards(rank), settings, digest, shared, counts, keys)


def numbers(
    cached: CachedPlan,
    local_state: LocalState,
    arguments: bytes,
    word: Mapping[str, Any],
    *,
    busy: bool,
) -> list[int] | None:
    """Return what this rank has to say, when it is short enough to be added up.

    Args:
        arguments: of this save, which have to be the same on all ranks.
        word: of the coordinator; others have none.
    """
    text = write_json(word).encode() if word else b""
    if len(text) > WORD_BYTES:
        return None
    padded = text.ljust(WORD_BYTES) if word else bytes(WORD_BYTES)
    parts = [padded[at : at + PART_BYTES] for at in range(0, WORD_BYTES, PART_BYTES)]
    said = [int.from_bytes(part, "little") for part in parts]
    return [int(busy), *_prove(cached, local_state, arguments), *said]


def settled(sums: Sequence[int]) -> bool:
    """Whether the ranks' numbers show that none is busy, and all hold and ask for the same."""
    busy, *proof = sums[: 1 + PROOFS]
    return not busy and all(number % (1 << PROOF_BITS) == 0 for number in proof)


def decode_word(sums: Sequence[int]) -> dict[str, Any]:
    """Return what the coordinator said."""
    parts = [part.to_bytes(PART_BYTES, "little") for part in sums[1 + PROOFS :]]
    word: dict[str, Any] = parse_json(b"".join(parts).rstrip())
    return word


def _prove(cached: CachedPlan, local_state: LocalState, arguments: bytes) -> list[int]:
    found, texts = local_state.values.digests, local_state.values.objects
    digests = [found[path] if path in found else xxh3_128(texts[path]) for path in cached.shared]
    values = _numbers([*digests, cached.answers, xxh3_128(arguments)])
    proof = (values * cached.keys * cached.factors[:, None]).sum(axis=0, dtype=np.uint64)
    return [int(number) for number in proof & np.uint64((1 << PROOF_BITS) - 1)]


def _factor(first: bool, holders: int) -> int:
    return holders - 1 if first else (1 << 64) - 1


def _numbers(digests: Sequence[bytes]) -> U64:
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
