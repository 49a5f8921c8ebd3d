"""Who reads what several ranks need: each chunk once in the whole job. Pure; all ranks agree.

Every rank tells which chunks it needs (`encode_rows`). From that each finds the same: for every set
of ranks that need the same chunks, one share of these for each of the ranks to read, equal in
bytes, and to send to the rest of the set.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..boxes import I64, mix
from ..format.manifest import Manifest
from ..format.spec import REFERENCE_DEPTH_MAX
from .reads import ReadRun, Reads, coalesce


@dataclass(frozen=True, slots=True)
class SharedRun:
    """A run that ``reader`` reads, and sends to the others of ``audience``, which all need it."""

    run: ReadRun
    reader: int
    audience: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Spans:
    """The rows that several ranks need, cut where any rank's need begins or ends.

    Attributes:
        first, end: rows of each span, ascending.
        kind: spans of one kind are needed by the same ranks.
        needs: (rank, first, end) of every range of rows that a rank needs.
    """

    first: I64
    end: I64
    kind: I64
    needs: tuple[I64, I64, I64]

    def audience(self, span: int) -> tuple[int, ...]:
        """Return the ranks that need a span, ascending."""
        rank, first, end = self.needs
        return tuple(rank[(first <= self.first[span]) & (end > self.first[span])].tolist())


def encode_rows(reads: Reads) -> bytes:
    """Tell the other ranks which chunks this one needs: ranges of rows, ascending."""
    rows = np.sort(reads.rows)
    begins = np.flatnonzero(np.diff(rows, prepend=-2) > 1)
    lengths = np.diff(begins, append=len(rows))
    return np.stack([rows[begins], rows[begins] + lengths]).astype("<i8").tobytes()


def share_out(
    manifest: Manifest,
    reads: Reads,
    told: Sequence[bytes],
    rank: int,
    run_bytes_max: int,
) -> tuple[tuple[ReadRun, ...], tuple[SharedRun, ...]]:
    """Split what a rank needs into what it alone does, and what others need too.

    Args:
        reads: what this rank needs, in file order.
        told: the `encode_rows` of every rank; empty where ranks cannot send.

    Returns:
        (runs for this rank alone, runs that several ranks need). Those that two ranks have in
        common stand in the same order on both.
    """
    spans = _spans(told)
    order = np.argsort(reads.rows)
    sorted_rows = reads.rows[order]
    alone = np.ones(len(reads), bool)
    keyed: list[tuple[tuple[int, int, int], SharedRun]] = []
    for kind, audience, shares in _shares(manifest, spans, rank):
        for number, rows in enumerate(shares):
            numbers = np.sort(order[np.searchsorted(sorted_rows, rows)])
            alone[numbers] = False
            runs = coalesce(manifest, reads[numbers], run_bytes_max)
            reader = audience[(number + kind) % len(audience)]
            keyed += [
                ((at, kind, number), SharedRun(run, reader, audience))
                for at, run in enumerate(runs)
            ]
    # The first run of every share, then the second of each: all readers are at work at once.
    keyed.sort(key=lambda entry: entry[0])
    rest = coalesce(manifest, reads[alone], run_bytes_max)
    return rest, tuple(shared for _, shared in keyed)


def read_here(shared: Sequence[SharedRun], rank: int) -> tuple[ReadRun, ...]:
    """Return those runs that a rank reads."""
    return tuple(entry.run for entry in shared if entry.reader == rank)


def _spans(told: Sequence[bytes]) -> _Spans:
    """Sweep over the ranges of all ranks; a set of ranks is known by the sum of their numbers."""
    ranges = [np.frombuffer(data, "<i8").reshape(2, -1) for data in told]
    rank = np.repeat(np.arange(len(told)), [part.shape[1] for part in ranges])
    first, end = np.concatenate(ranges, axis=1).astype(np.int64)
    cuts, places = np.unique(np.concatenate([first, end]), return_inverse=True)
    # Random numbers in two lanes make it all but certain (2^-128) that other sets have other sums.
    numbers = np.stack([mix(2 * rank.astype(np.uint64) + np.uint64(lane + 1)) for lane in (0, 1)])
    ones = np.ones((1, len(rank)), np.uint64)
    steps = np.concatenate([ones, numbers])
    sums = np.zeros((3, len(cuts)), np.uint64)
    for lane in range(3):
        np.add.at(sums[lane], places[: len(rank)], steps[lane])
        np.subtract.at(sums[lane], places[len(rank) :], steps[lane])
    sums = np.cumsum(sums, axis=1, dtype=np.uint64)
    several = np.flatnonzero(sums[0] > 1)
    _, kind = np.unique(sums[1:, several], axis=1, return_inverse=True)
    return _Spans(cuts[several], cuts[several + 1], kind.reshape(-1), (rank, first, end))


def _shares(
    manifest: Manifest, spans: _Spans, rank: int
) -> Iterator[tuple[int, tuple[int, ...], list[I64]]]:
    """Yield (kind, audience, rows of each share) of the kinds that a rank needs."""
    needs_rank, needs_first, needs_end = spans.needs
    mine = np.flatnonzero(needs_rank == rank)
    # A range of this rank's begins and ends at cuts, so it holds a span or has nothing of it.
    at = needs_first[mine].searchsorted(spans.first, "right") - 1
    held = (at >= 0) & (spans.first < needs_end[mine][at]) if len(mine) else np.zeros(0, bool)
    for kind in np.unique(spans.kind[held]).tolist() if len(mine) else ():
        chosen = np.flatnonzero(spans.kind == kind)
        audience = spans.audience(int(chosen[0]))
        rows = np.concatenate([np.arange(spans.first[s], spans.end[s]) for s in chosen.tolist()])
        sizes = manifest.chunk_bytes[rows]
        files = manifest.file_first_chunk.searchsorted(rows, "right")
        order = np.lexsort((manifest.chunk_start[rows], files))  # each share in one piece of a file
        before = np.empty_like(sizes)
        before[order] = np.cumsum(sizes[order]) - sizes[order]
        share = before * len(audience) // max(1, int(sizes.sum()))
        if len(manifest.references):  # what is decoded together is read by one
            for _ in range(REFERENCE_DEPTH_MAX):
                other = manifest.references[rows]
                at = np.minimum(np.searchsorted(rows, other), len(rows) - 1)
                share = np.where(rows[at] == other, share[at], share)
        yield kind, audience, [rows[share == number] for number in range(len(audience))]
