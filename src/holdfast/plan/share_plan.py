"""Who reads what several ranks need: each chunk once in the whole job. Pure; all ranks agree.

Every rank tells which chunks it needs (`encode_rows`). From that each finds the same: for every set
of ranks that need the same chunks, one share of these for each of the ranks to read, equal in
bytes, and to send to the rest of the set.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """Which ranks can read which data files, where not all can: disks of several hosts.

    Attributes:
        sets: ranks, ascending, that can read the same files.
        of_file: number of the set of each file; -1: each rank reads it in the store.
    """

    sets: tuple[tuple[int, ...], ...]
    of_file: I64

    def reader_of(self, file: int, rank: int, world_size: int) -> bool:
        """Return whether a rank is the one that checks a file."""
        able = self.set_of(int(self.of_file[file])) or tuple(range(world_size))
        return able[file % len(able)] == rank

    def set_of(self, number: int) -> tuple[int, ...]:
        """Return the ranks of a set; empty: all."""
        return self.sets[number] if number >= 0 else ()


def holders_of(told: Sequence[Sequence[bool]]) -> Holders:
    """Return who holds what.

    Args:
        told: of each rank, for each file, whether it can read it.
    """
    sets: dict[tuple[int, ...], int] = {}
    of_file = []
    for can_read in zip(*told, strict=True):
        ranks = tuple(rank for rank, can in enumerate(can_read) if can)
        of_file.append(sets.setdefault(ranks, len(sets)) if ranks else -1)
    return Holders(tuple(sets), np.array(of_file, np.int64))


@dataclass(frozen=True, slots=True)
class _Spans:
    """The rows that several ranks need, cut where any rank's need begins or ends.

    Attributes:
        first, end: rows of each span, ascending.
        kind: spans of one kind are needed by the same ranks.
        holders: of each, the number of the set of ranks that can read it; -1: all.
        needs: (rank, first, end) of every range of rows that a rank needs.
    """

    first: I64
    end: I64
    kind: I64
    holders: I64
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
    holders: Holders | None = None,
) -> tuple[tuple[ReadRun, ...], tuple[SharedRun, ...]]:
    """Split what a rank needs into what it alone does, and what others need too.

    Who cannot read a file is helped by one that can: that one reads it as if it needed it.

    Args:
        reads: what this rank needs, in file order.
        told: the `encode_rows` of every rank; empty where ranks cannot send.
        holders: who can read what; None: all ranks can read all.

    Returns:
        (runs for this rank alone, runs that several ranks need). Those that two ranks have in
        common stand in the same order on both.
    """
    ranges = [np.frombuffer(data, "<i8").reshape(2, -1).astype(np.int64) for data in told]
    if holders is not None:
        ranges = _with_help(manifest, holders, ranges)
        reads = _all_of(manifest, reads, ranges[rank])
    spans = _spans(manifest, ranges, holders)
    order = np.argsort(reads.rows)
    sorted_rows = reads.rows[order]
    alone = np.ones(len(reads), bool)
    keyed: list[tuple[tuple[int, int, int], SharedRun]] = []
    for kind, audience, readers, shares in _shares(manifest, spans, rank, holders):
        for number, rows in enumerate(shares):
            numbers = np.sort(order[np.searchsorted(sorted_rows, rows)])
            alone[numbers] = False
            runs = coalesce(manifest, reads[numbers], run_bytes_max)
            reader = readers[(number + kind) % len(readers)]
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


def _with_help(manifest: Manifest, holders: Holders, ranges: Sequence[I64]) -> list[I64]:
    """Add, to what each rank needs, what it is to read for others."""
    bounds = np.append(manifest.file_first_chunk, len(manifest.chunk_start)).astype(np.int64)
    wanted: list[list[I64]] = [[part] for part in ranges]
    for rank, part in enumerate(ranges):
        first, end = part
        file = bounds.searchsorted(first, "right") - 1
        counts = bounds.searchsorted(end - 1, "right") - file
        number = np.repeat(np.arange(len(first)), counts)
        begins = np.cumsum(counts) - counts
        file = file[number] + np.arange(len(number)) - begins[number]
        first, end = (
            np.maximum(first[number], bounds[file]),
            np.minimum(end[number], bounds[file + 1]),
        )
        for which, ranks in enumerate(holders.sets):
            chosen = np.flatnonzero(holders.of_file[file] == which)
            if rank in ranks or not len(chosen):
                continue
            helper = np.array(ranks)[(file[chosen] + rank) % len(ranks)]
            for other in np.unique(helper).tolist():
                mine = chosen[helper == other]
                wanted[other].append(np.stack([first[mine], end[mine]]))
    return [_merged(np.concatenate(parts, axis=1)) for parts in wanted]


def _merged(ranges: I64) -> I64:
    """Join ranges that overlap or touch; ascending."""
    first, end = ranges[:, np.argsort(ranges[0], kind="stable")]
    if not len(first):
        return ranges
    reach = np.maximum.accumulate(end)
    begins = np.flatnonzero(np.append(True, first[1:] > reach[:-1]))
    return np.stack([first[begins], np.append(reach[begins[1:] - 1], reach[-1])])


def _all_of(manifest: Manifest, reads: Reads, ranges: I64) -> Reads:
    """Add rows that nobody here wants anything of, in file order."""
    first, end = ranges
    sizes = end - first
    rows = np.repeat(first - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
    extra = np.setdiff1d(rows, reads.rows, assume_unique=True)
    if not len(extra):
        return reads
    none = np.zeros(len(extra), np.int64)
    rows = np.concatenate([reads.rows, extra])
    files = manifest.file_first_chunk.searchsorted(rows, "right")
    order = np.lexsort((manifest.chunk_start[rows], files))
    starts, counts = (np.concatenate([part, none]) for part in (reads.first, reads.count))
    return replace(reads, rows=rows[order], first=starts[order], count=counts[order])


def _spans(manifest: Manifest, ranges: Sequence[I64], holders: Holders | None) -> _Spans:
    """Sweep over the ranges of all ranks; a set of ranks is known by the sum of their numbers."""
    rank = np.repeat(np.arange(len(ranges)), [part.shape[1] for part in ranges])
    first, end = np.concatenate(ranges, axis=1)
    bounds = manifest.file_first_chunk.astype(np.int64) if holders is not None else first[:0]
    cuts, places = np.unique(np.concatenate([first, end, bounds]), return_inverse=True)
    places = places[: 2 * len(rank)]
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
    held = np.full(len(several), -1)
    if holders is not None:
        held = holders.of_file[bounds.searchsorted(cuts[several], "right") - 1]
    alike = np.vstack([sums[1:, several], held.astype(np.uint64)])
    _, kind = np.unique(alike, axis=1, return_inverse=True)
    return _Spans(cuts[several], cuts[several + 1], kind.reshape(-1), held, (rank, first, end))


def _shares(
    manifest: Manifest, spans: _Spans, rank: int, holders: Holders | None
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...], list[I64]]]:
    """Yield (kind, audience, readers, rows of each share) of the kinds that a rank needs."""
    needs_rank, needs_first, needs_end = spans.needs
    mine = np.flatnonzero(needs_rank == rank)
    # A range of this rank's begins and ends at cuts, so it holds a span or has nothing of it.
    at = needs_first[mine].searchsorted(spans.first, "right") - 1
    held = (at >= 0) & (spans.first < needs_end[mine][at]) if len(mine) else np.zeros(0, bool)
    for kind in np.unique(spans.kind[held]).tolist() if len(mine) else ():
        chosen = np.flatnonzero(spans.kind == kind)
        audience = spans.audience(int(chosen[0]))
        able = holders.set_of(int(spans.holders[chosen[0]])) if holders is not None else ()
        readers = tuple(r for r in audience if r in able) or audience
        rows = np.concatenate([np.arange(spans.first[s], spans.end[s]) for s in chosen.tolist()])
        sizes = manifest.chunk_bytes[rows]
        files = manifest.file_first_chunk.searchsorted(rows, "right")
        order = np.lexsort((manifest.chunk_start[rows], files))  # each share in one piece of a file
        before = np.empty_like(sizes)
        before[order] = np.cumsum(sizes[order]) - sizes[order]
        share = before * len(readers) // max(1, int(sizes.sum()))
        if len(manifest.references):  # what is decoded together is read by one
            for _ in range(REFERENCE_DEPTH_MAX):
                other = manifest.references[rows]
                at = np.minimum(np.searchsorted(rows, other), len(rows) - 1)
                share = np.where(rows[at] == other, share[at], share)
        yield kind, audience, readers, [rows[share == number] for number in range(len(readers))]
