"""The core's columns of what a load reads, against the same said chunk by chunk.

Which chunks, in which order, in which runs; and which targets share memory.
"""

import random
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest

from holdfast._core import join_runs, overlapping, place_reads, reads_in_order

PAGE, KIB, MIB = 4096, 1 << 10, 1 << 20
ROUNDS = 400

Chunks = tuple[np.ndarray, ...]  # as `format.manifest.CHUNKS` has them


def some_chunks(chance: random.Random) -> Chunks:
    """Lay out chunks of a few files, in their order or not, with gaps between some."""
    counts = [chance.randrange(0, 9) for _ in range(chance.randrange(1, 4))]
    start, size, gap_start = [], [], []
    for count in counts:
        at, places = 64, list[tuple[int, int, int]]()
        for _ in range(count):
            length = chance.choice([1, 100, 70_000, MIB, 3 * MIB, 5 * MIB])
            begin = -(-at // 64) * 64 + chance.choice([0, 0, 0, 4 * KIB, 40 * KIB, 100 * KIB])
            places.append((begin, length, at))
            at = begin + length
        if chance.random() < 0.3:
            chance.shuffle(places)
        for begin, length, before in places:
            start.append(begin)
            size.append(length)
            gap_start.append(before)
    first = [sum(counts[:number]) for number in range(len(counts) + 1)]
    return tuple(np.array(column, np.int64) for column in (first, start, size, gap_start))


def with_empty_ones(chunks: Chunks, chance: random.Random) -> Chunks:
    """Let some chunks be empty, as those that were rounded to zeros: they lie nowhere."""
    first, start, size, gap_start = (column.copy() for column in chunks)
    for row in range(len(start)):
        if chance.random() < 0.3:
            start[row] = size[row] = gap_start[row] = 0
    return first, start, size, gap_start


def file_of(chunks: Chunks, row: int) -> int:
    return next(file for file, first in enumerate(chunks[0][1:]) if row < first)


def expected_order(chunks: Chunks, pairs: list[tuple[int, int, bool]]) -> list[list[Any]]:
    """Return rows, and what wants each, from (number, row, exact) of every pair."""
    rows = sorted({row for _, row, _ in pairs}, key=lambda r: (file_of(chunks, r), chunks[1][r], r))
    return [[row, *sorted((n, exact) for n, of, exact in pairs if of == row)] for row in rows]


def test_each_chunk_is_read_once_by_file_and_place() -> None:
    chance = random.Random(1)
    for _ in range(ROUNDS):
        chunks = with_empty_ones(some_chunks(chance), chance)
        rows = [row for row in range(len(chunks[1])) for _ in range(chance.randrange(3))]
        pairs = [(number, row, chance.random() < 0.5) for number, row in enumerate(rows)]
        chance.shuffle(pairs)
        columns = [*zip(*pairs, strict=True)] or [(), (), ()]
        number, row = (np.array(column, np.int64) for column in columns[:2])
        *found, exact = reads_in_order(chunks, number, row, np.array(columns[2], np.bool_))
        rows, first, count, wants = (np.frombuffer(column, np.int64).tolist() for column in found)
        wanted = [*zip(wants, map(bool, exact), strict=True)]
        reads = zip(rows, first, count, strict=True)
        assert [[r, *wanted[at : at + n]] for r, at, n in reads] == expected_order(chunks, pairs)
        assert sum(count) == len(pairs)


def expected_runs(
    chunks: Chunks, rows: list[int], begins: list[int], longest: int, enough: int
) -> list[tuple[int, ...]]:
    """Join units one by one: near, of one file, not too long, and none behind a long enough run."""
    units = []
    for begin, end in pairwise([*begins, len(rows)]):
        held = rows[begin:end]
        first = min(int(chunks[3][row]) for row in held) // PAGE * PAGE
        last = -(-max(int(chunks[1][row] + chunks[2][row]) for row in held) // PAGE) * PAGE
        units.append((file_of(chunks, held[0]), first, last, begin, end))
    runs: list[tuple[int, ...]] = []
    before = 0  # the end of the unit before
    for file, first, last, begin, end in units:
        if runs:
            of, start, size, run_begin, _ = runs[-1]
            is_near = first - before <= min(64 * KIB, (before - start) // 64)
            if of == file and size < enough and is_near and last - start <= longest:
                runs[-1] = (file, start, max(start + size, last) - start, run_begin, end)
                before = last
                continue
        runs.append((file, first, last - first, begin, end))
        before = last
    return runs


def test_runs_are_as_long_as_they_may_be() -> None:
    chance, joined = random.Random(2), 0
    for _ in range(ROUNDS):
        chunks = some_chunks(chance)
        count = len(chunks[1])
        rows = [row for row in range(count) if chance.random() < 0.8]
        rows.sort(key=lambda row: (file_of(chunks, row), chunks[1][row]))
        begins = [at for at in range(len(rows)) if at == 0 or chance.random() < 0.8]
        for at, row in enumerate(rows):  # no unit has chunks of two files
            if at and file_of(chunks, rows[at - 1]) != file_of(chunks, row) and at not in begins:
                begins.append(at)
        begins.sort()
        limits = chance.choice([(8 * MIB, 4 * MIB), (4 * MIB, 4 * MIB), (2 * MIB, 8 * MIB)])
        columns = (np.array(column, np.int64) for column in (rows, begins))
        found = join_runs(chunks, *columns, *limits)
        assert found == expected_runs(chunks, rows, begins, *limits)
        joined += len(begins) - len(found)
    assert joined > ROUNDS


def test_of_what_is_wanted_only_what_a_run_holds_is_looked_at() -> None:
    """Runs share these columns: who looked at all of them for each run would need their square."""
    numbers = [np.array([n], np.int64) for n in (0, 64, 4, 64)]
    chunks = (np.array([0, 1], np.int64), *numbers[1:])
    shards = numbers[0], np.zeros(1, np.uint32), np.ones(1, np.int64), np.ones(1, np.int64)
    stored, target = np.arange(72, dtype=np.uint8), np.zeros(4, np.uint8)
    wants, exact = np.array([7, 0, 7], np.int64), np.ones(3, np.bool_)
    reads = numbers[0], np.ones(1, np.int64), np.ones(1, np.int64), wants, exact
    address = np.array([target.ctypes.data], np.uint64)
    assert place_reads(chunks, shards, reads, address, stored.ctypes.data) is None
    assert target.tolist() == [64, 65, 66, 67]
    wants[1] = 1
    with pytest.raises(IndexError):
        place_reads(chunks, shards, reads, address, stored.ctypes.data)


def test_stretches_of_memory_that_share_a_byte_are_found() -> None:
    chance, none = random.Random(3), 0
    for _ in range(ROUNDS):
        held = [(chance.randrange(200), chance.choice([0, 1, 5, 30])) for _ in range(8)]
        sharing = set[int]()
        for one, other in combinations(range(len(held)), 2):
            (first, size), (second, length) = held[one], held[other]
            if size and length and first < second + length and second < first + size:
                sharing |= {one, other}
        addresses, sizes = ([*column] for column in zip(*held, strict=True))
        assert overlapping(addresses, sizes) == sorted(sharing)
        none += not sharing
    assert 0 < none < ROUNDS
