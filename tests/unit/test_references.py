"""Which chunk refers to which, in whatever order the shards of a file stand."""

import itertools
import random
from functools import partial

import numpy as np
import pytest

from holdfast.errors import CorruptError
from holdfast.format.coding import Coding
from holdfast.format.header import Header
from holdfast.format.references import NONE, check_references, find_references
from holdfast.format.table import Table
from holdfast.layout import Tensor

ROLES = ("exp_avg_sq", "exp_avg", "weight")
PARAMETERS = 3
COLUMNS = ((0, 4), (4, 3), (7, 5))  # of the boxes of each tensor: (offset, length)
CHUNKS = 2  # of each shard
OTHER = 1  # mode of a payload that refers to nothing
BY_SECOND_MOMENT = 4  # mode of one that refers to its tensor's exp_avg_sq
FILES = 2

Row = tuple[int, int, int]  # parameter, role, box


def table_of(shards: list[Row]) -> Table:
    """Lay shards into a file in this order, and the same into another one behind it."""
    tensors = [Tensor((role, str(n)), "f32", (12,)) for n in range(PARAMETERS) for role in ROLES]
    groups = [
        {role: n * len(ROLES) + place for place, role in enumerate(ROLES)}
        for n in range(PARAMETERS)
    ]
    coding = Coding("lossless", tuple(groups))
    header = Header("0" * 32, 1, 2, None, {}, "test", 4, tuple(tensors), (), (), (coding,))
    rows, count = shards * FILES, len(shards) * FILES
    modes = [BY_SECOND_MOMENT if ROLES[role] == "exp_avg" else OTHER for _, role, _ in rows]
    zeros = np.zeros(count * CHUNKS, np.uint64)
    return Table(
        header=header,
        file_bytes=zeros[:FILES],
        file_footer_checksum=zeros[:FILES],
        file_rank=np.arange(FILES, dtype=np.uint32),
        file_number=np.zeros(FILES, np.uint32),
        file_chunks=np.full(FILES, len(shards) * CHUNKS, np.uint32),
        shard_digest=np.zeros((count, 2), np.uint64),
        shard_box=np.array([COLUMNS[box] for _, _, box in rows], np.int64).reshape(-1),
        shard_tensor=np.array([n * len(ROLES) + role for n, role, _ in rows], np.uint32),
        shard_file=np.repeat(np.arange(FILES, dtype=np.uint32), len(shards)),
        shard_first_chunk=np.tile(np.arange(len(shards), dtype=np.uint32) * CHUNKS, FILES),
        shard_chunks=np.full(count, CHUNKS, np.uint32),
        chunk_checksum=zeros,
        chunk_size_mode=np.repeat(np.array(modes, np.uint32) << np.uint32(24), CHUNKS),
        chunk_offset=zeros.astype(np.uint32),
    )


def found(table: Table) -> list[int]:
    count = len(table.shard_tensor)
    return find_references(table, table.box_starts(), np.arange(count) * CHUNKS).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_a_payload_refers_to_the_same_box_wherever_it_stands_in_the_file(seed: int) -> None:
    shards = list(itertools.product(range(PARAMETERS), range(len(ROLES)), range(len(COLUMNS))))
    random.Random(seed).shuffle(shards)
    expected = []
    for file, (parameter, role, box) in itertools.product(range(FILES), shards):
        needed = (file * len(shards) + shards.index((parameter, 0, box))) * CHUNKS
        refers = ROLES[role] == "exp_avg"
        expected += [needed + chunk if refers else NONE for chunk in range(CHUNKS)]
    assert found(table_of(shards)) == expected


def test_a_payload_refers_to_no_other_box_and_no_other_parameter() -> None:
    with pytest.raises(CorruptError, match="a shard that is not in its file"):
        found(table_of([(0, 0, 0), (0, 1, 1)]))
    with pytest.raises(CorruptError, match="a shard that is not in its file"):
        found(table_of([(0, 0, 0), (1, 1, 0)]))


@pytest.mark.parametrize(("between", "fits"), [(15 << 20, True), ((15 << 20) + 64, False)])
def test_a_chunk_lies_near_the_one_it_refers_to(between: int, fits: bool) -> None:
    """From the beginning of the first to the end of the last: a reader takes them in at once."""
    start, size = np.array([64, between - 936]), np.array([500, 1000])
    first = np.array([0, 2])
    check = partial(check_references, np.array([-1, 0]), first, start, size, start.copy())
    if fits:
        check()
        return
    with pytest.raises(CorruptError, match="lies far from the one it refers to"):
        check()


def chain(*references: int, sizes: tuple[int, ...] | None = None) -> partial[None]:
    """Return a check of payloads of one file, one behind the other."""
    size = np.array(sizes or [64] * len(references))
    start = 64 + np.concatenate([[0], np.cumsum(size)[:-1]])
    rows, first = np.array(references), np.array([0, len(references)])
    return partial(check_references, rows, first, start, size, start.copy())


def test_references_go_through_three_chunks_and_no_further() -> None:
    chain(NONE, 0, 1, 2)()
    with pytest.raises(CorruptError, match="refers to one that refers to others in turn"):
        chain(NONE, 0, 1, 2, 3)()
    with pytest.raises(CorruptError, match="refers to one that refers to others in turn"):
        chain(1, 0)()  # for ever


def test_nothing_refers_to_a_chunk_of_no_payload() -> None:
    chain(NONE, 0, sizes=(64, 0))()
    with pytest.raises(CorruptError, match="refers to one of no payload"):
        chain(NONE, 0, sizes=(0, 64))()
    with pytest.raises(CorruptError, match="refers to one of no payload"):
        chain(NONE, 0, 1, sizes=(64, 0, 64))()
