"""What is saved comes back, bit for bit, in every dtype, shape, stride and kind of value.

The oracle is `torch.save` and `torch.load`; bits are compared, never numbers.
"""

import io
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.state.tensors import DTYPE_NAMES

# A prime chunk length cuts every shape at odd places; a small pool is touched quickly.
OPTIONS = holdfast.Options(chunk_elements=7, pool_bytes=32 << 20)
DTYPES = list(DTYPE_NAMES)
NewPath = Callable[[], Path]

checked = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


thorough = settings(checked, max_examples=150)


def bits_of(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, as the number of bytes that the dtype says."""
    tensor = tensor.detach()
    if tensor.element_size() == 1:
        return tensor.view(torch.uint8).contiguous().numpy().tobytes()
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def by_torch(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer)
    return loaded


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits: NaNs with payloads, denormals, both zeros and infinities among them."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        raw &= 1
    elif seed % 3 == 0 and dtype.itemsize > 1:
        # Exponents all ones or all zeros: every other element is special.
        raw[dtype.itemsize - 1 :: 2 * dtype.itemsize] = 0xFF if seed % 2 else 0x80
        raw[dtype.itemsize - 2 :: 2 * dtype.itemsize] = 0xFF if seed % 2 else 0x00
    return raw.view(dtype).view(shape)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1) if t.ndim > 1 else t,
    "permuted": lambda t: t.permute(*range(1, t.ndim), 0) if t.ndim > 1 else t,
    "every second": lambda t: t[..., ::2] if t.ndim else t,
    "a slice": lambda t: t[1:] if t.ndim else t,
    "a column": lambda t: t[..., :1] if t.ndim else t,
    "an element": lambda t: t[(-1,) * t.ndim] if t.numel() else t,
    "expanded": lambda t: t.unsqueeze(0).expand(3, *t.shape) if t.ndim < 5 else t,
    "overlapping": lambda t: t.as_strided((2, 2), (1, 1)) if t.numel() > 3 else t,
}
TARGETS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a plain one": lambda t: torch.empty(t.shape, dtype=t.dtype),
    "column-major": lambda t: torch.empty(t.shape[::-1], dtype=t.dtype).permute(
        tuple(reversed(range(t.ndim)))
    ),
    "with gaps": lambda t: torch.empty((*t.shape, 2), dtype=t.dtype)[..., 0],
    "within a larger one": lambda t: torch.empty([n + 2 for n in t.shape], dtype=t.dtype)[
        tuple(slice(1, n + 1) for n in t.shape)
    ],
}
shapes = st.lists(st.integers(1, 6), max_size=5).map(tuple)
shapes |= st.lists(st.integers(0, 3), max_size=3).map(tuple)
seeds = st.integers(0, 2**32)


def save_and_read(path: Path, source: torch.Tensor) -> torch.Tensor:
    holdfast.save({"t": source}, path, options=OPTIONS)
    with holdfast.open(path, options=OPTIONS) as checkpoint:
        return checkpoint.tensor("t")


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@checked
@given(shapes, st.sampled_from(list(LAYOUTS)), seeds)
def test_a_tensor_of_any_dtype_shape_and_stride_comes_back_as_torch_saves_it(
    new_path: NewPath, dtype: torch.dtype, shape: tuple[int, ...], layout: str, seed: int
) -> None:
    source = LAYOUTS[layout](filled(shape, dtype, seed))
    found = save_and_read(new_path(), source)
    assert (found.dtype, found.shape) == (source.dtype, source.shape)
    assert bits_of(found) == bits_of(by_torch({"t": source})["t"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@checked
@given(shapes, st.sampled_from(list(TARGETS)), seeds)
def test_a_tensor_is_filled_in_place_whatever_its_strides(
    new_path: NewPath, dtype: torch.dtype, shape: tuple[int, ...], kind: str, seed: int
) -> None:
    source = filled(shape, dtype, seed)
    path = new_path()
    holdfast.save({"t": source}, path, options=OPTIONS)
    expected = bits_of(source)
    target = TARGETS[kind](source)
    storage = target.untyped_storage()
    before = bytearray(storage.tolist())
    report = holdfast.load(path, into={"t": target}, options=OPTIONS)
    assert bits_of(target) == expected
    assert target.untyped_storage().data_ptr() == storage.data_ptr()
    assert report.tensors == 1
    assert report.bytes_needed == len(expected)
    changed = sum(a != b for a, b in zip(before, storage.tolist(), strict=True))
    assert changed <= len(expected), "bytes beside the target were written"


@pytest.mark.parametrize("shape", [(), (3,), (4, 5), (2, 1, 9)])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_conjugate_and_negative_views_are_saved_and_filled_as_what_they_show(
    new_path: NewPath, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    plain = filled(shape, dtype, 1)
    for view in (plain.conj(), plain.conj().transpose(0, -1) if shape else plain.conj()):
        assert view.is_conj()
        path = new_path()
        assert bits_of(save_and_read(path, view)) == bits_of(view.resolve_conj())
        target = torch.zeros(view.shape, dtype=dtype).conj()
        holdfast.load(path, into={"t": target}, options=OPTIONS)
        assert bits_of(target.resolve_conj()) == bits_of(view.resolve_conj())
    negative = plain.conj().imag
    assert negative.is_neg()
    path = new_path()
    assert bits_of(save_and_read(path, negative)) == bits_of(negative.resolve_neg())
    target = torch.zeros(shape, dtype=dtype).conj().imag
    assert target.is_neg()
    holdfast.load(path, into={"t": target}, options=OPTIONS)
    assert bits_of(target.resolve_neg()) == bits_of(negative.resolve_neg())


def test_complex_halves_are_saved_conjugate_too(new_path: NewPath) -> None:
    plain = filled((3, 4), torch.complex32, 2)
    found = save_and_read(new_path(), plain.conj())
    assert bits_of(found) == bits_of(
        torch.complex(plain.real.float(), -plain.imag.float()).to(torch.complex32)
    )


@thorough
@given(
    st.lists(st.integers(1, 9), max_size=4).map(tuple),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float64, torch.complex128]),
    st.integers(0, 2**32),
    st.data(),
)
def test_a_box_is_what_slicing_gives(
    new_path: NewPath, shape: tuple[int, ...], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    source = filled(shape, dtype, seed)
    path = new_path()
    holdfast.save({"t": source}, path, options=OPTIONS)
    with holdfast.open(path, options=OPTIONS) as checkpoint:
        for _ in range(5):
            ends = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shape]
            offset, extent = [a for a, _ in ends], [b - a for a, b in ends]
            found = checkpoint.tensor("t", (tuple(offset), tuple(extent)))
            assert bits_of(found) == bits_of(source[tuple(slice(a, b) for a, b in ends)])


def test_a_box_outside_the_tensor_is_refused(new_path: NewPath) -> None:
    path = new_path()
    holdfast.save({"t": torch.zeros(4, 5)}, path)
    checkpoint = holdfast.open(path)
    for offset, shape in [((0, 3), (1, 3)), ((-1, 0), (1, 1)), ((0,), (1,)), ((0, 0), (1, -1))]:
        with pytest.raises(holdfast.errors.MismatchError, match=r"exceeds t.*\[4, 5\]"):
            checkpoint.tensor("t", (offset, shape))
    with pytest.raises(holdfast.errors.MismatchError, match="no tensor 'u'; expected one of t"):
        checkpoint.tensor("u")


def exactly(value: Any) -> Any:
    """A form in which two values are equal only when types, bits and order are."""
    if isinstance(value, float):
        return ("float", struct.pack(">d", value))
    if isinstance(value, complex):
        return ("complex", struct.pack(">dd", value.real, value.imag))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [exactly(item) for item in value])
    if isinstance(value, dict):
        return ("dict", [(exactly(key), exactly(item)) for key, item in value.items()])
    return (type(value).__name__, value)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
floats = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack(">d", bits.to_bytes(8))[0])
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-(10**300), 10**300),
    st.sampled_from([2**53, 2**53 - 1, -(2**53), 0, -1]),
    floats,
    st.sampled_from([math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e16, 1e22]),
    st.complex_numbers(),
    texts,
    st.binary(max_size=12),
    st.sampled_from(["$int", "$", "", "\x00", "\u202e", "é" * 5, "\U0001f600"]),
)
integer_keys = st.integers(-(2**63), 2**63 - 1)
keys = st.one_of(texts, st.just("$tuple"), integer_keys, st.none(), st.booleans())
keys |= st.floats(allow_nan=False) | st.tuples(st.integers(0, 3), texts) | st.binary(max_size=3)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(texts, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


@thorough
@given(values)
def test_a_value_comes_back_with_its_type_bits_and_order(new_path: NewPath, value: Any) -> None:
    path = new_path()
    holdfast.save({"a": [value], "t": torch.zeros(1)}, path, options=OPTIONS)
    with holdfast.open(path) as checkpoint:
        assert exactly(checkpoint.objects()["a"]) == exactly([value])
    target: dict[str, Any] = {"a": None, "t": torch.ones(1)}
    holdfast.load(path, into=target, options=OPTIONS)
    assert exactly(target["a"]) == exactly([value])


@thorough
@given(st.dictionaries(texts | integer_keys, values, max_size=5))
def test_a_dict_of_values_is_rebuilt_whole(new_path: NewPath, state: dict[Any, Any]) -> None:
    path = new_path()
    holdfast.save(state, path, options=OPTIONS)
    assert exactly(holdfast.open(path).state()) == exactly(state)


def test_the_deepest_value_that_is_accepted_can_be_read(new_path: NewPath) -> None:
    wraps: list[Callable[[Any], Any]] = [
        lambda v: [v],
        lambda v: (v,),
        lambda v: {"k": v},
        lambda v: {1.5: v},
    ]
    for wrap in wraps:
        for leaf in (0, math.nan, complex(math.nan, 0)):
            value: Any = leaf
            accepted = 0
            while accepted < 80:
                path = new_path()
                try:
                    holdfast.save({"a": [value]}, path, options=OPTIONS)
                except holdfast.errors.StateError as error:
                    assert "nested deeper than 64" in str(error)
                    break
                assert exactly(holdfast.open(path).objects()["a"]) == exactly([value])
                value, accepted = wrap(value), accepted + 1
            assert 15 <= accepted < 80


def test_many_tensors_of_many_dtypes_share_one_checkpoint(new_path: NewPath) -> None:
    state = {
        DTYPE_NAMES[dtype]: {"n": filled((3, 5), dtype, 3), "e": filled((0, 2), dtype, 4)}
        for dtype in DTYPES
    }
    path = new_path()
    holdfast.save(state, path, options=OPTIONS)
    found = holdfast.open(path).state()
    for name, tensors in state.items():
        for key, tensor in tensors.items():
            assert bits_of(found[name][key]) == bits_of(tensor)
            assert found[name][key].shape == tensor.shape
    assert holdfast.open(path).verify() == []
