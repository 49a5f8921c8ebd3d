"""The core's columns of what a load reads, against the same said chunk by chunk.

Which chunks, in which order, in which runs; and which targets share memory.
"""

import random
from itertools import combinations, groupby, pairwise

import numpy as np

from holdfast._core import join_runs, overlapping, reads_in_order

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


def file_of(chunks: Chunks, row: int) -> int:
    return next(file for file, first in enumerate(chunks[0][1:]) if row < first)


def expected_order(chunks: Chunks, pairs: list[tuple[int, int, bool]]) -> list[list[int]]:
    """Return rows, firsts, counts, wants and exact, from (number, row, exact) of every pair."""
    ordered = sorted(pairs, key=lambda p: (file_of(chunks, p[1]), chunks[1][p[1]], p[0]))
    groups = [(row, list(of_row)) for row, of_row in groupby(ordered, lambda pair: pair[1])]
    counts = [len(of_row) for _, of_row in groups]
    firsts = [sum(counts[:place]) for place in range(len(counts))]
    rows = [row for row, _ in groups]
    return [rows, firsts, counts, [p[0] for p in ordered], [int(p[2]) for p in ordered]]


def test_each_chunk_is_read_once_by_file_and_place() -> None:
    chance = random.Random(1)
    for _ in range(ROUNDS):
        chunks = some_chunks(chance)
        rows = [row for row in range(len(chunks[1])) for _ in range(chance.randrange(3))]
        pairs = [(number, row, chance.random() < 0.5) for number, row in enumerate(rows)]
        chance.shuffle(pairs)
        columns = [*zip(*pairs, strict=True)] or [(), (), ()]
        number, row = (np.array(column, np.int64) for column in columns[:2])
        *found, exact = reads_in_order(chunks, number, row, np.array(columns[2], np.bool_))
        numbers = [np.frombuffer(column, np.int64).tolist() for column in found]
        assert [*numbers, [*exact]] == expected_order(chunks, pairs)


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
