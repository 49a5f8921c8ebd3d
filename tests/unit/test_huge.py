"""Sizes past 2^31 and 2^40, by arithmetic alone: no test here holds a large tensor."""

import random
import time
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from format.file_rows import FileRows
from holdfast.boxes import unflatten
from holdfast.errors import CorruptError
from holdfast.format import spec
from holdfast.format.data_file import align_payload
from holdfast.format.header import Header
from holdfast.format.manifest import Manifest, decode_manifest, encode_manifest
from holdfast.format.rows import join_written, planned_of, written_in
from holdfast.format.table import Table
from holdfast.format.tiling import check_tiling
from holdfast.layout import (
    Box,
    Shard,
    Tensor,
    boxes_of_range,
    chunks_of,
    elements_per_chunk,
    tiling_fault,
    whole,
)
from holdfast.plan.balance import cut_shard
from holdfast.plan.load_plan import plan_load

CHUNK = 1 << 20
FILE_BYTES = 256 << 30
HUGE_SHAPES = [
    (2**31 + 7,),
    (2**33, 3),
    (3, 2**33),
    (2**20, 2**20),
    (5, 1, 2**31 + 1, 2),
    (2**12, 2**12, 2**12),
]


def header_of(*tensors: Tensor) -> Header:
    return Header("ab" * 16, 1, 1, None, {}, "holdfast 0", CHUNK, tensors, (), ())


def joined(header: Header, shards: list[Shard], tables: list[Table]) -> Table:
    ndim = np.array([len(shard.box.shape) for shard in shards], np.int64)
    numbers = [n for shard in shards for n in (*shard.box.offset, *shard.box.shape)]
    boxes = unflatten(np.array(numbers, np.int64), np.cumsum(2 * ndim) - 2 * ndim, ndim)
    tensor = np.array([header.tensors.index(shard.tensor) for shard in shards], np.int64)
    first = np.array([0, len(shards)])
    planned = planned_of(header.tensors, header.chunk_elements, tensor, boxes, first)
    return join_written(header, planned, [written_in(tables)])


def manifest_of(header: Header, shards_by_file: list[list[Shard]]) -> Manifest:
    """The MANIFEST of data files that are not there: rows, offsets and sizes as the writer's."""
    tables = []
    for number, shards in enumerate(shards_by_file):
        rows = FileRows(0, number)
        position = spec.DATA_HEADER_BYTES
        for shard in shards:
            chunks = list(chunks_of(shard, CHUNK))
            first = rows.add_shard(shard, len(chunks)).first_chunk
            for number_in_shard, chunk in enumerate(chunks):
                position = align_payload(position, chunk.size_bytes)
                row = first + number_in_shard
                rows.set_chunk(row, chunk.size_bytes, spec.MODE_RAW, position, 0)
                position += chunk.size_bytes
        size = np.array([position + spec.TRAILER_BYTES], np.uint64)
        tables.append(replace(rows.table(header), file_bytes=size))
    shards = [shard for listed in shards_by_file for shard in listed]
    manifest = decode_manifest(encode_manifest(joined(header, shards, tables)), "nowhere")
    check_tiling(manifest)
    return manifest


@pytest.mark.parametrize("shape", HUGE_SHAPES)
def test_runs_of_a_huge_array_are_cut_into_few_boxes_that_make_the_run(
    shape: tuple[int, ...],
) -> None:
    chance = random.Random(str(shape))
    total = prod(shape)
    for _ in range(200):
        first = chance.randrange(total)
        count = min(total - first, chance.choice([1, CHUNK, 2**31 + 3, 2**35]))
        parts = list(boxes_of_range(shape, first, count))
        assert len(parts) <= 2 * (len(shape) - 1) + 1
        done = 0
        for before, box in parts:
            corner = [a + n - 1 for a, n in zip(box.offset, box.shape, strict=True)]
            start, last = (int(np.ravel_multi_index(i, shape)) for i in (box.offset, corner))
            # The corners and the volume say that the box is this run and no other.
            assert (before, start) == (done, first + done)
            assert last - start + 1 == box.elements
            done += box.elements
        assert done == count


def test_every_run_of_a_small_array_is_its_elements_in_order() -> None:
    for shape in [(5,), (3, 4), (2, 3, 4), (1, 3, 1, 2), (4, 1, 1), ()]:
        numbers = np.arange(prod(shape)).reshape(shape)
        for first in range(numbers.size):
            for count in range(1, numbers.size - first + 1):
                parts = [
                    numbers[box.slices()].ravel() for _, box in boxes_of_range(shape, first, count)
                ]
                assert np.concatenate(parts).tolist() == list(range(first, first + count))


@pytest.mark.parametrize("dtype", ["u8", "bf16", "f64", "c128"])
def test_chunks_of_a_huge_shard_follow_each_other(dtype: str) -> None:
    shape = (3, 2**31 // 16 + 5)
    shard = Shard(Tensor(("t",), dtype, shape), whole(shape))
    step = elements_per_chunk(dtype, CHUNK)
    first = 0
    for chunk in chunks_of(shard, CHUNK):
        assert chunk.first == first
        assert chunk.elements == step or first + chunk.elements == prod(shape)
        assert 0 < chunk.size_bytes <= spec.PAYLOAD_BYTES_MAX
        first += chunk.elements
    assert first == prod(shape)


@pytest.mark.parametrize(
    "shape", [(2**20, 2**20), (2**40,), (2, 2**39), (1, 7, 2**37 + 1), (2**39 + 1, 2)]
)
def test_a_tensor_of_a_tebibyte_is_cut_to_the_files(shape: tuple[int, ...]) -> None:
    tensor = Tensor(("t",), "u8", shape)
    pieces = list(cut_shard(Shard(tensor, whole(shape)), FILE_BYTES // 2))
    assert all(0 < piece.size_bytes <= FILE_BYTES // 2 for piece in pieces)
    assert sum(piece.size_bytes for piece in pieces) == tensor.size_bytes
    assert tiling_fault(shape, [piece.box for piece in pieces]) is None
    assert len(pieces) <= 4 * tensor.size_bytes // FILE_BYTES + 2


def test_a_manifest_of_more_than_2_31_elements_is_written_checked_and_planned() -> None:
    shape = (3, 2**31 + 11)
    tensor = Tensor(("t",), "u8", shape)
    pieces = list(cut_shard(Shard(tensor, whole(shape)), FILE_BYTES // 64))
    half = len(pieces) // 2
    manifest = manifest_of(header_of(tensor), [pieces[:half], pieces[half:]])
    assert int(manifest.table.shard_chunks.sum()) == sum(-(-p.size_bytes // CHUNK) for p in pieces)

    everything = plan_load(manifest, {("t",): (0, [whole(shape)])}, 16 << 20)
    read = [chunk for run in everything for chunk in run.chunks]
    assert sum(chunk.chunk.elements for chunk in read) == prod(shape)
    assert len({chunk.row for chunk in read}) == len(read)
    assert all(run.extent.size_bytes <= 16 << 20 for run in everything)
    assert all(run.extent.offset % 4096 == 0 for run in everything)

    corner = Box((2, 2**31 + 3), (1, 8))
    (run,) = plan_load(manifest, {("t",): (0, [corner])}, 16 << 20)
    (chunk,) = run.chunks
    assert chunk.chunk.first + chunk.chunk.elements == chunk.chunk.shard.box.elements
    assert run.extent.offset > 2**31
    end = int(manifest.chunk_start[chunk.row] + manifest.chunk_bytes[chunk.row])
    assert run.extent.offset <= end - 8 < run.extent.offset + run.extent.size_bytes


def test_a_narrow_column_of_a_huge_tensor_is_planned_without_its_other_chunks() -> None:
    shape = (4, 2**31 + 5)
    tensor = Tensor(("t",), "bf16", shape)
    manifest = manifest_of(header_of(tensor), [[Shard(tensor, whole(shape))]])
    started = time.perf_counter()
    runs = plan_load(manifest, {("t",): (0, [Box((0, 2**30), (4, 2))])}, 16 << 20)
    assert time.perf_counter() - started < 2.0
    found = [chunk.chunk for run in runs for chunk in run.chunks]
    at = [row * shape[1] + 2**30 for row in range(4)]
    assert [
        chunk.first <= i < chunk.first + chunk.elements for chunk, i in zip(found, at, strict=True)
    ] == [True] * 4


def test_files_past_256_gib_and_offsets_past_32_bits_of_units_are_refused() -> None:
    tensor = Tensor(("t",), "u8", (8,))
    good = manifest_of(header_of(tensor), [[Shard(tensor, whole((8,)))]]).table
    decode_manifest(encode_manifest(good), "nowhere")
    too_large = replace(good, file_bytes=np.array([FILE_BYTES + 1], np.uint64))
    with pytest.raises(CorruptError, match="256 GiB"):
        decode_manifest(encode_manifest(too_large), "nowhere")
    last_unit = replace(good, chunk_offset=np.array([2**32 - 1], np.uint32))
    with pytest.raises(CorruptError, match="gap is too long"):
        decode_manifest(encode_manifest(last_unit), "nowhere")


def test_the_largest_tensor_there_can_be_is_told_from_one_that_overflows() -> None:
    for shape, dtype in [((2**63 - 1,), "u8"), ((2**31, 2**31), "u8"), ((2**62 - 1,), "f16")]:
        tensor = Tensor(("t",), dtype, shape)
        data = encode_manifest(joined(header_of(tensor), [], []))
        with pytest.raises(CorruptError, match=r"cover 0 of \d+ elements"):
            check_tiling(decode_manifest(data, "nowhere"))
    for shape, dtype in [((2**63,), "u8"), ((2**62,), "f16"), ((0, 2**63), "u8")]:
        tensor = Tensor(("t",), dtype, shape)
        data = encode_manifest(joined(header_of(tensor), [], []))
        with pytest.raises(CorruptError, match=r"2\^63 bytes or more|a dimension is"):
            decode_manifest(data, "nowhere")
