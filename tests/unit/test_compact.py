"""The codec compact, block by block: what is decoded, what is lost, and what is refused."""

import ctypes
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from format import reader
from holdfast.codecs import compact
from holdfast.codecs.base import Block, Loss, Payload
from holdfast.codecs.compact import Compact
from holdfast.errors import OptionError

steps, Corrupt = reader.payloads.steps, reader.Corrupt
Floats = NDArray[np.float32]
QUALITIES = ("high", "balanced", "small", "tiny")
GUARD = 64  # bytes behind everything that is written
MEANS, MOMENT, STEPS, CLASSES = 8, 10, 11, 12
WORDS = {"f32": np.uint32, "bf16": np.uint16, "f16": np.uint16}
TORCH = {"bf16": torch.bfloat16, "f16": torch.float16}

# (elements, of a row, column of the first): grids cut and whole, rows alone, tensors of one row.
CUTS = [
    (64 * 200, 200, 0),
    (61 * 131 + 17, 131, 100),
    (5000, 1000, 999),
    (200 * 131 + 17, 131, 100),
    (1 << 15, 64, 5),
    (4096, 16, 3),
    (4095, 16, 3),
    (384, 1, 0),
    (70_000, 1, 0),
    (9000, 100_000, 500),
    (2, 1, 0),
]


class Coded(NamedTuple):
    mode: int
    payload: bytes
    decoded: NDArray[Any]  # words
    loss: Loss


class Group(NamedTuple):
    """What training has of one parameter, in a block."""

    square: Floats
    moment: Floats
    weight: Floats
    base: Floats


def group(count: int, row: int, seed: int = 0, tail: float = 0.0) -> Group:
    chance = np.random.default_rng(seed)
    rows = np.exp2(2 * chance.standard_normal(count // row + 2))[:, None]
    scale = (rows * np.exp2(chance.standard_normal(row))).reshape(-1)[:count]
    square = 1e-9 * scale * chance.standard_normal(count) ** 2
    moment = 0.3 * np.sqrt(1e-9 * scale) * chance.standard_normal(count)
    base = 0.02 * chance.standard_normal(count)
    residual = 1e-3 * scale**0.1 * chance.standard_normal(count)
    residual *= 1 + tail * (chance.random(count) < 1e-3)
    made = (square, moment, base + residual, base)
    return Group(*(each.astype(np.float32) for each in made))


def words_of(values: Floats, dtype: str) -> NDArray[Any]:
    if dtype == "f32":
        return values.view(np.uint32)
    halves = torch.from_numpy(values).to(TORCH[dtype])
    return halves.view(torch.int16).numpy().view(np.uint16)


def address(values: NDArray[Any]) -> int:
    return int(values.ctypes.data)


def encode(
    values: Floats | NDArray[Any],
    role: str,
    *,
    row: int,
    column: int = 0,
    dtype: str = "f32",
    options: Compact | None = None,
    **relatives: Floats,
) -> Coded:
    """Code elements; check that nothing is written behind what may be."""
    words = values if values.dtype == WORDS[dtype] else words_of(values, dtype)
    block = Block(address(words), len(words), dtype, row, column)
    out = np.full(compact.room(block) + GUARD, 0xEE, np.uint8)
    decoded = np.full(len(words) + GUARD, 0x55, words.dtype)
    made, loss = compact.encode(
        block,
        {name: address(other) for name, other in relatives.items()},
        address(out),
        address(decoded),
        role=role,
        options=options or Compact(),
    )
    assert (out[-GUARD:] == 0xEE).all() and (decoded[-GUARD:] == 0x55).all()
    payload = ctypes.string_at(made.address, made.size_bytes)
    return Coded(made.mode, payload, decoded[: len(words)].copy(), loss)


def decode(
    mode: int,
    payload: bytes,
    count: int,
    *,
    row: int,
    column: int = 0,
    dtype: str = "f32",
    **relatives: Floats,
) -> NDArray[Any] | None:
    """Decode from memory that ends with the payload; None when it is refused."""
    held = np.frombuffer(payload, np.uint8).copy()
    target = np.full(count + GUARD, 0x55, WORDS[dtype])
    known = {name: address(other) for name, other in relatives.items()}
    block = Block(address(target), count, dtype, row, column)
    good = compact.decode(Payload(address(held), len(held), mode), block, known)
    assert (target[count:] == 0x55).all()
    return target[:count] if good else None


def agree(made: Coded, *, row: int, column: int = 0, dtype: str = "f32", **known: Floats) -> None:
    """Both decoders give what encoding said, to the bit."""
    count = len(made.decoded)
    if made.mode == 0:
        assert made.payload == made.decoded.tobytes()
        return
    place = {"row": row, "column": column, "dtype": dtype}
    found = decode(made.mode, made.payload, count, **place, **known)
    assert found is not None and np.array_equal(found, made.decoded)
    if made.mode >= MEANS:
        square = known.get("exp_avg_sq")
        second = None if square is None else square.view(np.uint32)
        other = steps.decode(
            made.mode, made.payload, dtype, count, column, base_words(known), second
        )
        assert np.array_equal(other, made.decoded)


def base_words(known: dict[str, Any]) -> Any:
    base = known.get("base")
    return base.view(np.uint32) if base is not None and base.dtype == np.float32 else base


def floats(words: NDArray[Any], dtype: str = "f32") -> Floats:
    if dtype == "f32":
        return words.view(np.float32)
    return torch.from_numpy(words.view(np.int16)).view(TORCH[dtype]).float().numpy()


def check_loss(made: Coded, values: Floats, dtype: str = "f32") -> None:
    error = floats(made.decoded, dtype).astype(np.float64) - values.astype(np.float64)
    assert made.loss.squared_error == pytest.approx((error**2).sum(), rel=1e-5, abs=1e-30)
    assert made.loss.largest_error == pytest.approx(abs(error).max(initial=0), rel=1e-6)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("quality", QUALITIES)
def test_both_decoders_give_what_encoding_says(quality: Any, cut: tuple[int, int, int]) -> None:
    count, row, column = cut
    options, made = Compact(quality=quality, residual=count % 2 == 0), group(count, row, count)
    place = {"row": row, "column": column}
    square = encode(made.square, "exp_avg_sq", options=options, **place)
    agree(square, **place)
    check_loss(square, made.square)
    known = floats(square.decoded)
    moment = encode(made.moment, "exp_avg", options=options, exp_avg_sq=known, **place)
    agree(moment, exp_avg_sq=known, **place)
    check_loss(moment, made.moment)
    for relatives in ({"base": made.base}, {"base": made.base, "exp_avg_sq": known}):
        weight = encode(made.weight, "weight", options=options, **relatives, **place)
        agree(weight, **relatives, **place)
        check_loss(weight, made.weight)
        residual = (made.weight - made.base).astype(np.float64)
        if weight.mode >= MEANS:
            assert weight.loss.energy == pytest.approx((residual**2).sum(), rel=1e-5)
    expected = {MEANS, 1 if quality != "high" else MOMENT, CLASSES}
    assert count < 100 or {square.mode, moment.mode, weight.mode} == expected


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_half_precision_weight_is_rounded(dtype: str) -> None:
    made = group(64 * 200, 200)
    relatives: Any = {"base": words_of(made.base, dtype), "exp_avg_sq": made.square}
    exact = floats(words_of(made.weight, dtype), dtype)
    weight = encode(made.weight, "weight", row=200, dtype=dtype, **relatives)
    assert weight.mode == CLASSES and len(weight.payload) < 0.25 * len(exact)
    agree(weight, row=200, dtype=dtype, **relatives)
    check_loss(weight, exact, dtype)


def test_rounding_to_f16_is_that_of_torch() -> None:
    """Normal, denormal, halfway, overflowing: escapes, as a decoder rounds them."""
    chance = np.random.default_rng(1)
    edges = [0, 2.0**-24, 2.0**-25, 3 * 2.0**-26, 65504, 65519, 65520, 1e6, 6.1e-5, 6.0e-8, 2.9e-8]
    values = (chance.standard_normal(5000) * np.exp2(chance.integers(-30, 18, 5000))).astype("f4")
    values[: len(edges)] = edges
    values[20] = np.nan
    # Centres in steps of 1, no limits, one group; symbol 253, of an escape, repeated.
    payload = bytes([1, 126, 0, 0, 128, 63, 0, 1, 1, 253]) + values.tobytes()
    base: Any = np.zeros(5000, np.uint16)
    found = decode(STEPS, payload, 5000, row=1, dtype="f16", base=base)
    assert found is not None
    expected = words_of(values, "f16")
    expected[20] = 0x7E00
    assert np.array_equal(found, expected)
    assert np.array_equal(steps.decode(STEPS, payload, "f16", 5000, 0, base), expected)


def test_a_weight_that_rounds_its_master_is_rounded_again() -> None:
    made = group(64 * 200, 200)
    master = encode(made.weight, "master", row=200, base=made.base)
    decoded = floats(master.decoded)
    masters = {"master": decoded, "exact_master": made.weight}
    weight = encode(made.weight, "weight", row=200, dtype="bf16", base=made.base, **masters)
    assert weight.mode == 5 and not weight.payload
    assert np.array_equal(weight.decoded, words_of(decoded, "bf16"))
    agree(weight, row=200, dtype="bf16", master=decoded)
    other = encode(made.base, "weight", row=200, dtype="bf16", **masters)
    assert other.mode != 5 and np.array_equal(other.decoded, words_of(made.base, "bf16"))


@pytest.mark.parametrize(
    ("quality", "weight_bits", "share"),
    [("tiny", 0.5, 0.66), ("small", 0.7, 0.55), ("balanced", 1.0, 0.43), ("high", 2.0, 0.15)],
)
def test_a_quality_has_its_size_and_its_error(
    quality: Any, weight_bits: float, share: float
) -> None:
    count, options = 512 * 384, Compact(quality=quality)
    made = group(count, 384)
    square = encode(made.square, "exp_avg_sq", row=384, options=options)
    if quality != "high":
        assert 8 * len(square.payload) < 0.05 * count
    relatives = {"base": made.base, "exp_avg_sq": floats(square.decoded)}
    weight = encode(made.weight, "weight", row=384, options=options, **relatives)
    assert 8 * len(weight.payload) < weight_bits * count
    assert weight.loss.squared_error < share * weight.loss.energy
    relatives.pop("base")
    moment = encode(made.moment, "exp_avg", row=384, options=options, **relatives)
    assert 8 * len(moment.payload) < (1.6 * count if quality == "high" else 33)


@pytest.mark.parametrize("cut", [(512 * 384, 384, 0), (1536, 1, 0)], ids=str)
def test_second_moments_keep_their_sum(cut: tuple[int, int, int]) -> None:
    """Linear means lean to neither side: a mean step is as long as it was."""
    count, row, _ = cut
    square = group(count, row).square
    found = floats(encode(square, "exp_avg_sq", row=row).decoded)
    assert found.sum(dtype=np.float64) == pytest.approx(square.sum(dtype=np.float64), rel=0.02)


def test_a_second_moment_with_its_residual_is_within_an_octave() -> None:
    made = group(512 * 384, 384)
    plain = encode(made.square, "exp_avg_sq", row=384, options=Compact(residual=False))
    near = encode(made.square, "exp_avg_sq", row=384, options=Compact(residual=True))
    above = made.square > made.square.max() * 2.0**-39
    distance = [
        abs(np.log2(floats(each.decoded)[above] / made.square[above])) for each in (plain, near)
    ]
    assert distance[0].max() > 5 and distance[1].max() < 1.1
    assert np.isfinite(floats(near.decoded)).all() and (floats(near.decoded) > 0).all()


@pytest.mark.parametrize("bound", [{"rel": 0.2}, {"rel": 1e-4}, {"rel": 0.9}, {"abs": 1e-4}])
@pytest.mark.parametrize("cut", CUTS[:8], ids=str)
def test_a_bound_is_kept(bound: dict[str, float], cut: tuple[int, int, int]) -> None:
    count, row, column = cut
    made, options = group(count, row, 3, tail=30.0), Compact(**bound)  # type: ignore[arg-type]
    relatives = {"base": made.base, "exp_avg_sq": made.square}
    place = {"row": row, "column": column}
    weight = encode(made.weight, "weight", options=options, **relatives, **place)
    agree(weight, **relatives, **place)
    check_loss(weight, made.weight)
    if "rel" in bound:
        assert weight.loss.squared_error <= bound["rel"] * weight.loss.energy
    else:
        assert weight.loss.largest_error <= bound["abs"]
    if bound != {"rel": 1e-4}:
        assert weight.mode >= MEANS and len(weight.payload) < 0.25 * weight.decoded.nbytes


@pytest.mark.parametrize("bits", [0.5, 1.0, 3.0])
def test_so_many_bits_are_about_taken(bits: float) -> None:
    made = group(512 * 384, 384)
    relatives = {"base": made.base, "exp_avg_sq": made.square}
    weight = encode(made.weight, "weight", row=384, options=Compact(bits=bits), **relatives)
    assert 8 * len(weight.payload) / len(made.weight) == pytest.approx(bits, rel=0.1)


def test_a_bound_that_cannot_be_kept_loses_nothing() -> None:
    made = group(64 * 200, 200)
    for options in (Compact(abs=1e-12), Compact(rel=1e-15)):
        weight = encode(made.weight, "weight", row=200, options=options, base=made.base)
        assert weight.loss.squared_error == 0
        assert np.array_equal(weight.decoded, made.weight.view(np.uint32))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_comes_back_bit_for_bit(odd: float) -> None:
    made = group(64 * 200, 200)
    options = Compact(quality="high")
    for role, values in (("exp_avg_sq", 0), ("exp_avg", 1), ("weight", 2)):
        for place in (0, 777, len(made.square) - 1):
            changed = made[values].copy()
            changed[place] = odd
            relatives = {"base": made.base, "exp_avg_sq": made.square}
            for quality in (options, Compact()):
                coded = encode(changed, role, row=200, options=quality, **relatives)
                assert coded.mode < MEANS
                assert np.array_equal(coded.decoded, changed.view(np.uint32))
                agree(coded, row=200, **relatives)
    base = made.base.copy()
    base[5] = odd
    coded = encode(made.weight, "weight", row=200, base=base)
    assert np.array_equal(coded.decoded, made.weight.view(np.uint32))


def test_without_a_base_or_a_known_role_nothing_is_lost() -> None:
    made = group(64 * 200, 200)
    for role, relatives in (
        ("weight", {"exp_avg_sq": made.square}),
        ("", {"base": made.base}),
        ("exp_avg", {"base": made.base}),
    ):
        coded = encode(made.weight, role, row=200, **relatives)
        assert coded.mode < MEANS and coded.loss.squared_error == 0
        assert np.array_equal(coded.decoded, made.weight.view(np.uint32))


def test_rows_of_zeros_stay_zero() -> None:
    """Of tokens that were never seen: neither moment becomes anything else there."""
    rows, row = 100, 64
    made = group(rows * row, row)
    unseen = np.isin(np.arange(rows), [0, 7, 8, 50, 99]).repeat(row)
    square, moment = (np.where(unseen, 0, each).astype("f4") for each in (made.square, made.moment))
    options = Compact(quality="high")
    found = encode(square, "exp_avg_sq", row=row, options=options)
    agree(found, row=row)
    known = floats(found.decoded)
    assert found.mode == MEANS and np.array_equal(known == 0, unseen)
    coded = encode(moment, "exp_avg", row=row, options=options, exp_avg_sq=known)
    agree(coded, row=row, exp_avg_sq=known)
    assert coded.mode == MOMENT and not floats(coded.decoded)[unseen].any()
    weight = encode(made.weight, "weight", row=row, base=made.base, exp_avg_sq=known)
    agree(weight, row=row, base=made.base, exp_avg_sq=known)


def test_second_moments_never_underflow() -> None:
    """Single zeros and denormals among others: small, but above 0; and all zeros are 0."""
    made = group(64 * 200, 200)
    square = made.square.copy()
    square[::7], square[1::7] = 0, 1e-42
    for residual in (False, True):
        coded = encode(square, "exp_avg_sq", row=200, options=Compact(residual=residual))
        agree(coded, row=200)
        assert floats(coded.decoded).min() >= square.max() * 2.0**-42
    tiny = (made.square * np.float32(1e-30)).astype("f4")
    coded = encode(tiny, "exp_avg_sq", row=200)
    agree(coded, row=200)
    assert floats(coded.decoded).min() >= 2.0**-126 or coded.mode < MEANS
    zeros = np.zeros(6400, "f4")
    coded = encode(zeros, "exp_avg_sq", row=200)
    assert coded.mode == 1 and not coded.decoded.any()
    weight = encode(made.weight[:6400], "weight", row=200, base=made.base[:6400], exp_avg_sq=zeros)
    agree(weight, row=200, base=made.base[:6400], exp_avg_sq=zeros)
    assert weight.mode == CLASSES


def test_what_has_not_changed_takes_nothing() -> None:
    base = group(64 * 200, 200).base
    weight = encode(base, "weight", row=200, base=base)
    agree(weight, row=200, base=base)
    assert len(weight.payload) < 20 and np.array_equal(weight.decoded, base.view(np.uint32))
    assert weight.loss == Loss(0, 0, 0)


def test_what_is_far_away_escapes() -> None:
    made = group(64 * 200, 200)
    weight = made.weight.copy()
    weight[[3, 5000, 12799]] = 3.0, -40.0, 1e4
    options = Compact(abs=2e-4)
    coded = encode(weight, "weight", row=200, options=options, base=made.base)
    agree(coded, row=200, base=made.base)
    assert coded.mode == STEPS and coded.loss.largest_error <= 2e-4
    assert np.array_equal(floats(coded.decoded)[[5000, 12799]], weight[[5000, 12799]])


# Lies. Each changes the payload of a mode; both decoders refuse it.
def put(at: int, *changed: int) -> Callable[[bytes], bytes]:
    return lambda payload: payload[:at] + bytes(changed) + payload[at + len(changed) :]


def group_at(payload: bytes) -> int:
    """Where the number of groups stands, behind centres and limits."""
    limits = 6 + 4 * payload[5]
    return limits + 1 + payload[limits]


LIES: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "a width beyond the chunk": (MEANS, put(0, 1, 0x32, 0, 0)),
    "a huge width": (MEANS, put(0, 255, 255, 255, 255)),
    "another width": (MEANS, put(0, 199)),
    "a large unit": (MEANS, put(4, 8)),
    "a large rest": (MEANS, put(5, 8)),
    "a floor of denormals": (MEANS, put(6, 7, 0)),
    "a floor of infinity": (MEANS, put(6, 0xF0, 7)),
    "a flag of 2": (MEANS, put(8, 1, 2)),
    "a huge width of classes": (CLASSES, put(0, 255, 255, 255, 255)),
    "an unknown form": (CLASSES, put(4, 2)),
    "too many centres": (CLASSES, put(5, 127)),
    "fewer centres": (CLASSES, lambda p: put(5, p[5] - 1)(p[:6] + p[10:])),
    "a centre that is none": (CLASSES, put(6, 0, 0, 0xC0, 0x7F)),
    "a centre of 0": (CLASSES, put(6, 0, 0, 0, 0)),
    "a negative centre": (CLASSES, lambda p: put(9, p[9] | 128)(p)),
    "a tiny centre": (CLASSES, put(6, 0, 0, 0, 1)),
    "too many limits": (CLASSES, lambda p: put(6 + 4 * p[5], 8)(p)),
    "a form of moments": (MOMENT, put(4, 7)),
    "limits without classes": (STEPS, lambda p: put(2 + 4 * p[1], 1, 3)(p)),
    "no groups": (STEPS, lambda p: put(3 + 4 * p[1], 0)(p)),
    "groups without rows": (STEPS, lambda p: put(3 + 4 * p[1], 2)(p)),
    "too many groups": (CLASSES, lambda p: put(group_at(p), 5)(p)),
    "a group that is not there": (CLASSES, lambda p: p[: group_at(p)] + b"\2\1\2" + p[-500:]),
    "an escape that is missing": (STEPS, lambda _: bytes([1, 126]) + b"\0\0\x80?\0\1\1\xfd"),
    "a symbol behind the escape": (STEPS, lambda _: bytes([1, 126]) + b"\0\0\x80?\0\1\1\xfe"),
    "an escape of few centres": (STEPS, lambda _: bytes([1, 125]) + b"\0\0\x80?\0\1\1\xfd"),
    "a symbol without a centre": (STEPS, lambda _: bytes([1, 1]) + b"\0\0\x80?\0\1\1\3"),
    "bytes behind the end": (STEPS, lambda p: p + b"\0"),
    "no bytes": (STEPS, lambda _: b""),
}


def coded_group(count: int, row: int) -> tuple[Group, dict[int, bytes]]:
    """Return a group, and a payload of each mode."""
    made, high = group(count, row), Compact(quality="high")
    known = {"base": made.base, "exp_avg_sq": made.square}
    coded = [
        encode(made.square, "exp_avg_sq", row=row, options=high),
        encode(made.moment, "exp_avg", row=row, options=high, **known),
        encode(made.weight, "weight", row=row, base=made.base),
        encode(made.weight, "weight", row=row, **known),
    ]
    assert [each.mode for each in coded] == [MEANS, MOMENT, STEPS, CLASSES]
    return made, {each.mode: each.payload for each in coded}


@pytest.fixture(scope="module")
def truths() -> tuple[Group, dict[int, bytes]]:
    return coded_group(64 * 200, 200)


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_by_both_decoders(truths: Any, lie: str) -> None:
    made, payloads = truths
    mode, tell = LIES[lie]
    payload, count = tell(payloads[mode]), len(made.weight)
    known = {"base": made.base, "exp_avg_sq": made.square}
    assert decode(mode, payloads[mode], count, row=200, **known) is not None
    assert payload != payloads[mode]
    assert decode(mode, payload, count, row=200, **known) is None
    with pytest.raises(Corrupt):
        steps.decode(mode, payload, "f32", count, 0, made.base, made.square.view(np.uint32))


def test_what_a_mode_refers_to_must_be_there(truths: Any) -> None:
    made, payloads = truths
    known = {"base": made.base, "exp_avg_sq": made.square}
    for mode, missing in ((MOMENT, "exp_avg_sq"), (STEPS, "base"), (CLASSES, "base")):
        rest = {name: each for name, each in known.items() if name != missing}
        assert decode(mode, payloads[mode], len(made.weight), row=200, **rest) is None
    only = {"base": made.base}
    assert decode(CLASSES, payloads[CLASSES], len(made.weight), row=200, **only) is None
    for mode in (6, 7, 9, 13, 255):
        assert decode(mode, payloads[STEPS], len(made.weight), row=200, **known) is None


def test_damaged_payloads_touch_nothing_else() -> None:
    """Flipped and cut at random: refused, or other elements that both decoders agree on."""
    count, row = 4480, 64
    made, payloads = coded_group(count, row)
    chance, second = np.random.default_rng(5), made.square.view(np.uint32)
    known = {"base": made.base, "exp_avg_sq": made.square}
    accepted = 0
    for mode, whole in payloads.items():
        for trial in range(60):
            damaged = bytearray(whole)
            head = 40 if trial % 2 else len(whole)
            damaged[chance.integers(head)] ^= 1 << chance.integers(8)
            if trial % 5 == 0:
                del damaged[chance.integers(len(whole)) :]
            found = decode(mode, bytes(damaged), count, row=row, **known)
            try:
                other = steps.decode(mode, bytes(damaged), "f32", count, 0, made.base, second)
            except Corrupt:
                other = None
            assert (found is None) == (other is None)
            accepted += found is not None
            assert found is None or np.array_equal(found, other)
    assert 0 < accepted < 200


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"quality": "best"}, "quality is 'best'; expected one of high, balanced, small, tiny"),
        ({"rel": 0.1, "bits": 2}, "rel and bits are given; expected at most one of them"),
        (
            {"abs": 0.1, "bf16_exact": True},
            "abs and bf16_exact are given; expected at most one of them",
        ),
        ({"bf16_exact": 1}, "bf16_exact is 1; expected True or False"),
        ({"rel": 1.5}, "rel is 1.5; expected a number above 0, at most 1"),
        ({"abs": 0}, "abs is 0; expected a number above 0"),
        ({"abs": math.nan}, "abs is nan; expected a number"),
        ({"bits": "2"}, "bits is '2'; expected a number above 0, at most 6"),
        ({"bits": 6.5}, "bits is 6.5; expected a number above 0, at most 6"),
        ({"residual": "yes"}, "residual is 'yes'; expected True, False or None"),
        ({"overrides": ["*"]}, "overrides is .*; expected a dict from patterns of names to q"),
        ({"overrides": {1: "tiny"}}, "overrides is .*; expected a dict from patterns"),
        ({"every": 0}, "every is 0; expected an integer from 2"),
    ],
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        Compact(**wrong)
