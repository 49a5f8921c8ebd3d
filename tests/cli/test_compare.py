"""Distances of elements: against numpy, and against values known by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.layout import Box, tiling_fault
from holdfast.tools import compare
from holdfast.tools.compare import Distance
from holdfast.tools.diff import slabs

F8 = [
    (torch.float8_e4m3fn, [1.0, 448.0, -0.5], [1.125, 416.0, 0.5], [0.125, 32.0, 1.0]),
    (torch.float8_e5m2, [1.0, 57344.0], [1.25, 49152.0], [0.25, 8192.0]),
    (torch.float8_e4m3fnuz, [1.0, 240.0], [1.125, 224.0], [0.125, 16.0]),
    (torch.float8_e5m2fnuz, [1.0, 57344.0], [1.25, 49152.0], [0.25, 8192.0]),
    (torch.float8_e8m0fnu, [1.0, 1024.0], [2.0, 256.0], [1.0, 768.0]),
]
EXTREMES = [
    (torch.int8, -128, 127, 255.0),
    (torch.int64, -(2**63), 2**63 - 1, float(2**64 - 1)),
    (torch.int64, 2**53, 2**53 + 1, 1.0),  # equal when each is rounded first
    (torch.uint64, 0, 2**64 - 1, float(2**64 - 1)),
    (torch.uint16, 65535, 0, 65535.0),
]


def distance(a: torch.Tensor, b: torch.Tensor) -> Distance:
    result = Distance()
    result.add(a, b)
    return result


def check_figures(found: Distance, expected: "np.ndarray") -> None:
    assert found.differing == len(expected[expected != 0])
    assert found.max_abs == expected.max()
    assert found.mean_abs == pytest.approx(expected.mean(), rel=1e-12)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_floats_against_numpy(dtype: type) -> None:
    rng = np.random.default_rng(1)
    a = rng.standard_normal((7, 300)).astype(dtype)
    b = np.where(rng.random(a.shape) < 0.3, a + dtype(0.01), a).astype(dtype)
    found = distance(torch.from_numpy(a), torch.from_numpy(b))
    assert found.elements == 2100
    check_figures(found, np.abs(a.astype(np.float64) - b.astype(np.float64)))


def test_bfloat16_against_numpy() -> None:
    rng = np.random.default_rng(2)
    high = rng.integers(0x3F00, 0x4100, (2, 999), np.uint32)
    a, b = (high << 16).view(np.float32).astype(np.float64)
    tensors = [torch.from_numpy(row.astype(np.int16)).view(torch.bfloat16) for row in high]
    check_figures(distance(*tensors), np.abs(a - b))


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_numbers_against_numpy(dtype: type) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((2, 50)) + 1j * rng.standard_normal((2, 50))).astype(dtype)
    wide = np.abs(a.astype(np.complex128) - b.astype(np.complex128))
    check_figures(distance(torch.from_numpy(a), torch.from_numpy(b)), wide)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_half_complex_numbers() -> None:
    a, b = (torch.tensor(x).to(torch.complex32) for x in ([3 + 4j, 1j], [0j, 1j]))
    found = distance(a, b)
    assert (found.differing, found.max_abs, found.mean_abs) == (1, 5.0, 2.5)


@pytest.mark.parametrize(("dtype", "a", "b", "expected"), F8)
def test_eight_bit_floats(
    dtype: torch.dtype, a: list[float], b: list[float], expected: list[float]
) -> None:
    found = distance(torch.tensor(a).to(dtype), torch.tensor(b).to(dtype))
    check_figures(found, np.array(expected))


def test_four_bit_floats() -> None:
    # Low half byte first: 0x2 is 1.0, 0x7 is 6.0, 0xF is -6.0.
    a, b = (
        torch.tensor(x, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        for x in ([0x22, 0x70, 0x01], [0x22, 0xF0, 0x03])
    )
    check_figures(distance(a, b), np.array([0, 12.0, 1.0]))


@pytest.mark.parametrize(("dtype", "a", "b", "expected"), EXTREMES)
def test_integers_do_not_overflow_or_round(
    dtype: torch.dtype, a: int, b: int, expected: float
) -> None:
    for x, y in ((a, b), (b, a)):
        found = distance(torch.tensor([x], dtype=dtype), torch.tensor([y], dtype=dtype))
        assert (found.differing, found.max_abs) == (1, expected)


def test_booleans() -> None:
    found = distance(
        torch.tensor([True, False, True, True]), torch.tensor([True, True, False, True])
    )
    assert (found.elements, found.differing) == (4, 2)
    assert (found.max_abs, found.mean_abs) == (1.0, 0.5)


def test_equal_bits_are_equal_and_nan_is_no_distance() -> None:
    nan, inf = float("nan"), float("inf")
    a = torch.tensor([nan, inf, -0.0, 1.0, inf, 2.0, nan])
    b = torch.tensor([nan, inf, 0.0, nan, -inf, 2.5, nan])
    b.view(torch.int32)[6] += 1  # another NaN
    found = distance(a, b)
    assert (found.elements, found.differing, found.not_finite) == (7, 5, 3)
    assert found.max_abs == 0.5 and found.mean_abs == 0.5 / 4


def test_the_mean_of_huge_distances_is_finite() -> None:
    huge = torch.full((1000,), 1.7e308, dtype=torch.float64)
    found = distance(huge, torch.zeros_like(huge))
    assert found.max_abs == 1.7e308
    assert found.mean_abs == pytest.approx(1.7e308)


def test_scalars_and_empty_tensors() -> None:
    assert distance(torch.tensor(1.5), torch.tensor(1.0)).max_abs == 0.5
    empty = distance(torch.zeros(0, 3), torch.zeros(0, 3))
    assert (empty.elements, empty.differing, empty.mean_abs) == (0, 0, 0.0)


def test_figures_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(1001, generator=torch.Generator().manual_seed(4)), torch.zeros(1001)
    whole = distance(a, b)
    monkeypatch.setattr(compare, "BLOCK_ELEMENTS", 64)
    parts = distance(a, b)
    assert parts.max_abs == whole.max_abs and parts.differing == whole.differing
    assert parts.mean_abs == pytest.approx(whole.mean_abs, rel=1e-12)


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), max_size=3), st.sampled_from([1, 2, 8, 16]), st.integers(1, 300))
def test_slabs_tile_a_tensor_and_keep_to_the_limit(
    shape: list[int], item_bytes: int, limit_bytes: int
) -> None:
    size = int(np.prod(shape, dtype=np.int64)) * item_bytes
    boxes = [Box(*box) for box in slabs(tuple(shape), size, limit_bytes)]
    assert tiling_fault(shape, boxes) is None
    assert all(box.elements * item_bytes <= max(limit_bytes, item_bytes) for box in boxes)


def test_no_slabs_of_nothing() -> None:
    assert list(slabs((3, 0), 0, 100)) == []
