"""The codec "excp": what an independent port keeps, in bytes that a second decoder reads alike."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from format import reader
from holdfast.codecs import excp
from holdfast.codecs.base import Block, Payload
from holdfast.codecs.excp import Excp
from holdfast.errors import OptionError

from . import excp_port as port
from .excp_port import Floats

second_decoder, Corrupt = reader.payloads.centres, reader.Corrupt

Bits = NDArray[np.uint32]
ROLES = ("weight", "exp_avg", "exp_avg_sq")
OPTIONS = {
    "paper": Excp(),
    "much is kept": Excp(alpha=1e-6),
    "all is kept": Excp(alpha=0, beta=0),
    "by element": Excp(alpha=3e-7, threshold="element"),
    "no cap": Excp(alpha=2e-6, cap=None),
    "optimal": Excp(kmeans="optimal"),
}


@dataclass
class Unit:
    """A parameter some steps after its base."""

    weight: Floats
    base: Floats
    exp_avg: Floats
    exp_avg_sq: Floats

    def part(self, first: int, count: int) -> excp.Part:
        tensors = (self.weight, self.base, self.exp_avg, self.exp_avg_sq)
        return excp.Part(count, *(address(tensor, first) for tensor in tensors))

    def parts(self, most: int) -> list[tuple[int, int, excp.Part]]:
        size = len(self.weight)
        return [
            (at, min(most, size - at), self.part(at, min(most, size - at)))
            for at in range(0, size, most)
        ]


@dataclass
class Coded:
    """Payloads of a unit by role and chunk, and what `encode` says a reader will have."""

    survey: excp.Survey | None
    decoded: dict[str, Floats]
    payloads: dict[str, list[tuple[int, bytes]]] = field(
        default_factory=lambda: {role: [] for role in ROLES}
    )


def address(tensor: NDArray[Any], first: int = 0) -> int:
    return int(tensor.ctypes.data) + first * tensor.itemsize


def unit_of(size: int, seed: int, scale: float = 1.0) -> Unit:
    """A weight moved by 1e-4; second moments over many octaves, first ones of their size."""
    print(f"seed {seed}")
    draw = np.random.default_rng(seed)
    base = (0.02 * draw.standard_normal(size)).astype("f4")
    weight = base + (scale * 1e-4 * draw.standard_normal(size)).astype("f4")
    squares = np.exp2(2 * draw.standard_normal(size) - 40).astype("f4")
    moment = (np.sqrt(squares) * draw.standard_normal(size)).astype("f4")
    return Unit(weight, base, moment, squares)


def coded(unit: Unit, options: Excp, most: int = 1 << 20) -> Coded:
    """Code a unit as a save does: survey, then chunk by chunk in the order of coding."""
    parts = unit.parts(most)
    made = Coded(
        excp.survey([part for *_, part in parts], options),
        {role: np.full(len(unit.weight), 7, "f4") for role in ROLES},
    )
    for first, count, part in parts:
        base = address(unit.base, first)
        relatives = {"base": base, "other_base": base}
        for role in ROLES:
            block = Block(address(getattr(unit, role), first), count, "f32", 1, 0)
            out = np.zeros(excp.room(block), np.uint8)
            target = address(made.decoded[role], first)
            payload = excp.encode(block, role, made.survey, part, relatives, address(out), target)
            relatives[role] = target
            stored = getattr(unit, role)[first : first + count].view("u1")
            written = out[: payload.size_bytes] if payload.mode else stored
            made.payloads[role].append((payload.mode, written.tobytes()))
    return made


def decoded(mode: int, payload: bytes, count: int, relatives: dict[str, Bits]) -> Bits | None:
    """Decode with the codec; None when it refuses."""
    stored, target = np.frombuffer(payload, "u1"), np.full(count + 1, 77, "u4")
    found = excp.decode(
        Payload(address(stored), len(payload), mode),
        Block(address(target), count, "f32", 1, 0),
        {role: address(tensor) for role, tensor in relatives.items()},
    )
    assert target[count] == 77
    return target[:count] if found else None


def decoded_again(mode: int, payload: bytes, count: int, relatives: dict[str, Bits]) -> Bits | None:
    """Decode with the second decoder; None when it refuses."""
    try:
        return second_decoder.decode(mode, payload, count, **relatives)  # type: ignore
    except Corrupt:
        return None


def relatives_of(unit: Unit, made: Coded, role: str, first: int, count: int) -> dict[str, Bits]:
    cut = slice(first, first + count)
    base, weight = unit.base[cut].view("u4"), made.decoded["weight"][cut].view("u4")
    if role == "weight":
        return {"base": base}
    if role == "exp_avg":
        return {"other_base": base, "weight": weight}
    return {"exp_avg": made.decoded["exp_avg"][cut].view("u4")}


def centres_of(made: Coded, role: str) -> Floats:
    assert made.survey is not None
    return np.array(made.survey.centres(role), "f4")


def pruned(unit: Unit, options: Excp) -> tuple[Floats, Floats, Floats]:
    """What the port keeps of a unit."""
    tensors = (unit.weight, unit.base, unit.exp_avg, unit.exp_avg_sq)
    by_element = options.threshold == "element"
    return port.prune(*tensors, options.alpha, options.beta, options.cap, by_element)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("size", [1009, 70001])
def test_masks_and_symbols_are_those_of_an_independent_port(name: str, size: int) -> None:
    """Given the centres, every bit that a reader will have follows from the port."""
    unit, options = unit_of(size, 1), OPTIONS[name]
    made = coded(unit, options, most=30011)
    for role, kept in zip(ROLES, pruned(unit, options), strict=True):
        assert all(mode >= excp.FROM_BASE for mode, _ in made.payloads[role])
        centres = centres_of(made, role)
        expected = np.where(kept != 0, centres[port.nearest(kept, centres)], np.float32(0))
        mask = made.decoded[role] != (unit.base if role == "weight" else 0)
        assert np.array_equal(mask, kept != 0) and mask.sum() > 0
        if role == "weight":
            expected = np.where(kept != 0, unit.base + expected, unit.base)
        assert np.array_equal(made.decoded[role].view("u4"), expected.view("u4"))


@pytest.mark.parametrize("threshold", ["tensor", "element"])
def test_what_equals_its_threshold_is_not_kept(threshold: Any) -> None:
    """Numbers that are exact: alpha / sqrt(v) is 1, the lower median 2, the mean of |m| 1."""
    steps = np.tile(np.array([1, -1, 2, -2, 2, 3, -3, 4], "f4"), 20)
    alpha = 2.0**-14
    moment = np.tile(np.array([1, -1, 1, 1, 1, 0.5, 1.5, -1], "f4"), 20)
    unit = Unit(steps, np.zeros_like(steps), moment, np.full_like(steps, alpha * alpha))
    options = Excp(alpha=alpha, beta=1, threshold=threshold)
    made = coded(unit, options)
    assert made.survey is not None
    assert (made.survey.median, made.survey.moment_threshold) == (2, 1)
    assert np.array_equal(made.decoded["weight"] != 0, np.abs(steps) > 2)
    assert np.array_equal(made.decoded["exp_avg"], np.where(moment == 1.5, moment, 0))
    kepts = pruned(unit, options)
    for role, kept in zip(ROLES, kepts, strict=True):
        assert np.array_equal(made.decoded[role], kept)


@pytest.mark.parametrize("name", OPTIONS)
def test_both_decoders_read_what_was_promised(name: str) -> None:
    unit = unit_of(20011, 2)
    made = coded(unit, OPTIONS[name], most=7001)
    for role in ROLES:
        for (first, count, _), (mode, payload) in zip(
            unit.parts(7001), made.payloads[role], strict=True
        ):
            relatives = relatives_of(unit, made, role, first, count)
            promised = made.decoded[role][first : first + count].view("u4")
            for decode in (decoded, decoded_again):
                assert np.array_equal(decode(mode, payload, count, relatives), promised)


def test_the_nearest_centre_is_told_to_the_last_bit() -> None:
    """Numbers in the middle of two centres, and next to it."""
    unit = unit_of(5000, 14)
    made = coded(unit, Excp(alpha=0))
    centres = centres_of(made, "weight")
    middles = ((centres[:-1].astype("f8") + centres[1:]) / 2).astype("f4")
    values = np.concatenate([middles, *(np.nextafter(middles, np.float32(x)) for x in (-1, 1))])
    values = np.tile(values, 9)  # so many that they are worth their centres
    zeros, found = np.zeros_like(values), np.zeros_like(values)
    part = excp.Part(len(values), *map(address, (values, zeros, zeros, zeros)))
    block = Block(address(values), len(values), "f32", 1, 0)
    out = np.zeros(excp.room(block), "u1")
    base = {"base": address(zeros)}
    payload = excp.encode(block, "weight", made.survey, part, base, address(out), address(found))
    assert payload.mode == excp.FROM_BASE
    assert np.array_equal(found, centres[port.nearest(values, centres)])


@pytest.mark.parametrize("seed", range(4))
def test_centres_cost_no_more_than_those_of_the_port(seed: int) -> None:
    """Sampled ones about as much, optimal ones least of all."""
    unit = unit_of(200_003, seed)
    for role, kept in zip(ROLES, pruned(unit, Excp()), strict=True):
        values = kept[kept != 0]
        sampled, optimal = (
            port.cost(values, centres_of(coded(unit, Excp(kmeans=kind)), role))
            for kind in ("sampled", "optimal")
        )
        theirs = np.mean([port.cost(values, port.k_means(values, s)) for s in range(8)])
        assert sampled < 1.1 * theirs
        assert optimal <= 1.001 * min(sampled, theirs)


def test_a_sample_is_drawn_evenly_from_the_whole_shard() -> None:
    """Of a ramp the centres are evenly spaced: 3 % is four times the sample's own error."""
    size = 300_007
    ramp = np.linspace(1, 2, size, dtype="f4")
    unit = Unit(ramp, np.zeros_like(ramp), ramp, ramp)
    made = coded(unit, Excp(alpha=0, beta=0), most=70_001)
    even = 1 + (2 * np.arange(15) + 1) / 30
    for role in ROLES:
        assert np.abs(centres_of(made, role) - even).max() < 0.03


@pytest.mark.parametrize("seed", range(5))
def test_optimal_centres_are_those_of_an_exhaustive_search(seed: int) -> None:
    """Values that differ in their upper 16 bits: the least cost by the plain recurrence."""
    draw = np.random.default_rng(seed)
    values = np.unique(np.round(draw.standard_normal(60) * 100) / 128).astype("f4")
    values = np.repeat(values[values != 0], 3)
    zeros, ones = np.zeros_like(values), np.ones_like(values)
    made = coded(Unit(values, zeros, zeros, ones), Excp(alpha=0, kmeans="optimal"))
    found = port.cost(values, centres_of(made, "weight"))
    wide = values.astype("f8")

    def spread(first: int, end: int) -> float:
        return float(np.square(wide[first:end] - wide[first:end].mean()).sum())

    size = len(wide)
    least = [spread(0, end) if end else 0.0 for end in range(size + 1)]
    for _ in range(port.CENTRES - 1):
        least = [0.0] + [
            min(least[cut] + spread(cut, end) for cut in range(end)) for end in range(1, size + 1)
        ]
    assert found == pytest.approx(least[-1], rel=1e-5)


def test_a_survey_does_not_depend_on_how_the_shard_is_cut() -> None:
    unit = unit_of(50_021, 3)
    surveys = [coded(unit, Excp(kmeans="optimal"), most).survey for most in (1 << 20, 999, 20_000)]
    first, *others = (
        (s.median, s.threshold, s.moment_threshold, *(s.centres(role) for role in ROLES))
        for s in surveys
        if s is not None
    )
    assert len(others) == 2 and all(other == first for other in others)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 40, 383])
def test_fifteen_values_or_fewer_come_back_as_they_are(size: int) -> None:
    """Whatever mode a tiny tensor takes: it is not larger than the elements."""
    unit = unit_of(size, size)
    made = coded(unit, Excp())
    for role, kept in zip(ROLES, pruned(unit, Excp()), strict=True):
        ((mode, payload),) = made.payloads[role]
        assert len(payload) <= 4 * size
        if mode < excp.FROM_BASE:
            assert np.array_equal(made.decoded[role], getattr(unit, role))
        elif np.count_nonzero(kept) <= port.CENTRES:
            exact = unit.base + kept if role == "weight" else kept
            assert np.array_equal(made.decoded[role], exact)


def test_what_did_not_move_takes_a_few_bytes() -> None:
    """Not even a zero's sign is lost."""
    unit = unit_of(5000, 4)
    unit.base[::7] = -0.0
    unit.weight[:] = unit.base
    made = coded(unit, Excp())
    assert np.array_equal(made.decoded["weight"].view("u4"), unit.base.view("u4"))
    assert not made.decoded["exp_avg"].any() and not made.decoded["exp_avg_sq"].any()
    assert all(len(payload) <= 8 for payloads in made.payloads.values() for _, payload in payloads)


@pytest.mark.parametrize("threshold", ["tensor", "element"])
def test_a_second_moment_of_zeros(threshold: Any) -> None:
    """alpha / 0 is limited by the cap; without a cap nothing passes it."""
    unit = unit_of(5000, 5)
    unit.exp_avg_sq[:] = 0
    made = coded(unit, Excp(threshold=threshold))
    residual = pruned(unit, Excp())[0]
    assert np.array_equal(made.decoded["weight"] != unit.base, residual != 0)
    assert made.decoded["exp_avg"].any() and not made.decoded["exp_avg_sq"].any()
    made = coded(unit, Excp(threshold=threshold, cap=None))
    assert np.array_equal(made.decoded["weight"].view("u4"), unit.base.view("u4"))


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["weight", "base", "exp_avg", "exp_avg_sq"])
def test_what_is_not_finite_is_coded_without_loss(odd: float, which: str) -> None:
    unit = unit_of(3001, 6)
    getattr(unit, which)[3000] = odd
    made = coded(unit, Excp(), most=1000)
    assert made.survey is None
    for role in ROLES:
        assert all(mode < excp.FROM_BASE for mode, _ in made.payloads[role])
        assert np.array_equal(made.decoded[role].view("u4"), getattr(unit, role).view("u4"))


def test_a_second_moment_below_zero_is_coded_without_loss() -> None:
    unit = unit_of(3001, 7)
    unit.exp_avg_sq[5] = -1e-30
    assert coded(unit, Excp()).survey is None


def test_a_sum_that_overflows_is_coded_without_loss() -> None:
    """The moments still know which weights changed."""
    unit = unit_of(3001, 8)
    most = np.finfo("f4").max
    unit.base[:10] = 0.99 * most
    unit.weight[:10] = 0.9995 * most  # nearest to a centre that is larger than what it moved
    unit.weight[10:] = np.linspace(0.011, 0.3, 2991) * most
    made = coded(unit, Excp(alpha=1e-9), most=3001)
    ((mode, _),) = made.payloads["weight"]
    assert mode < excp.FROM_BASE and np.array_equal(made.decoded["weight"], unit.weight)
    ((mode, payload),) = made.payloads["exp_avg"]
    relatives = relatives_of(unit, made, "exp_avg", 0, 3001)
    promised = made.decoded["exp_avg"].view("u4")
    assert mode == excp.OF_FIRST
    assert np.array_equal(decoded(mode, payload, 3001, relatives), promised)


def test_half_precision_centres_lose_small_second_moments() -> None:
    """The fault of the public code, when it is asked for, and only then."""
    unit = unit_of(40_001, 9)
    half, full = (coded(unit, Excp(codebook=kind)) for kind in ("f16", "f32"))
    for role in ROLES:
        expected = centres_of(full, role).astype("f2").astype("f4")
        assert np.array_equal(centres_of(half, role), expected)
    assert full.decoded["exp_avg_sq"].any() and not half.decoded["exp_avg_sq"].any()


@pytest.mark.parametrize("octave", [-40, -25])
def test_a_second_moment_is_kept_where_the_first_is_rounded_to_nothing(octave: int) -> None:
    """Unlikely, and still there: all of them, or some."""
    unit, size = unit_of(9001, 13), 9001
    unit.exp_avg[:] = np.exp2(octave + 2 * np.random.default_rng(1).standard_normal(size))
    unit.exp_avg_sq[:] = np.abs(unit.weight)
    made = coded(unit, Excp(codebook="f16", beta=0.1))
    kept = pruned(unit, Excp(codebook="f16", beta=0.1))[2]
    assert np.array_equal(made.decoded["exp_avg_sq"] != 0, kept != 0)
    rounded_away = (kept != 0) & (made.decoded["exp_avg"] == 0)
    assert rounded_away.any() and (octave < -30 or not np.array_equal(rounded_away, kept != 0))
    ((mode, payload),) = made.payloads["exp_avg_sq"]
    relatives = relatives_of(unit, made, "exp_avg_sq", 0, size)
    for decode in (decoded, decoded_again):
        found = decode(mode, payload, size, relatives)
        assert np.array_equal(found, made.decoded["exp_avg_sq"].view("u4"))


@pytest.mark.parametrize("kind", ["rounding", "another"])
def test_a_half_precision_weight_follows_its_master_if_it_was_its_rounding(kind: str) -> None:
    unit, size = unit_of(6001, 10), 6001
    source = unit.weight if kind == "rounding" else unit.base
    half = rounded(source)
    part = excp.Part(
        size,
        *map(address, (unit.weight, unit.base, unit.exp_avg, unit.exp_avg_sq)),
        half=address(half),
    )
    survey = excp.survey([part], Excp())
    master, found = np.zeros(size, "f4"), np.zeros(size, "u2")
    out = np.zeros(1 << 16, "u1")
    base = {"base": address(unit.base)}
    block = Block(address(unit.weight), size, "f32", 1, 0)
    excp.encode(block, "master", survey, part, base, address(out), address(master))
    block = Block(address(half), size, "bf16", 1, 0)
    relatives = {"master": address(master)}
    payload = excp.encode(block, "weight", survey, part, relatives, address(out), address(found))
    assert (payload.size_bytes == 0) == (kind == "rounding")
    assert np.array_equal(found, rounded(master) if kind == "rounding" else half)
    target = np.zeros(size, "u2")
    assert excp.decode(payload, replace(block, address=address(target)), relatives)
    assert np.array_equal(target, found)


def rounded(values: Floats) -> NDArray[np.uint16]:
    bits = values.view("u4").astype("u8")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("u2")


def lies(payload: bytes, chance: random.Random) -> bytes:
    """A payload cut short, made longer, with flipped bits, or of another number of centres."""
    kind, damaged = chance.randrange(4), bytearray(payload)
    if kind == 0:
        return payload[: chance.randrange(len(payload))]
    if kind == 1:
        return payload + bytes(chance.randrange(1, 5))
    if kind == 2:
        damaged[0] = chance.randrange(256)
    else:
        for _ in range(chance.choice([1, 1, 4])):
            place = chance.randrange(min(len(damaged), chance.choice([20, 120, 1 << 20])))
            damaged[place] ^= 1 << chance.randrange(8)
    return bytes(damaged)


@pytest.mark.parametrize("role", ROLES)
def test_both_decoders_judge_a_lying_payload_alike(role: str) -> None:
    """Refused by both, or the same elements from both."""
    unit, chance = unit_of(2003, 11), random.Random(role)
    made = coded(unit, Excp(alpha=1e-6))
    ((mode, payload),) = made.payloads[role]
    relatives, refused = relatives_of(unit, made, role, 0, 2003), 0
    for _ in range(400):
        lie = lies(payload, chance)
        one = decoded(mode, lie, 2003, relatives)
        other = decoded_again(mode, lie, 2003, relatives)
        assert (one is None) == (other is None)
        refused += one is None
        if one is not None and other is not None:
            assert np.array_equal(one, other)
    assert refused > 200


@pytest.mark.parametrize("mode", [excp.FROM_BASE, excp.OF_SECOND])
def test_a_symbol_needs_a_centre_and_a_centre_is_a_number(mode: int) -> None:
    """Payloads put together by hand: k, centres, all symbols the same; and one symbol that is."""
    base = np.arange(1, 41, dtype="f4").view("u4")
    relatives = {"base": base} if mode == excp.FROM_BASE else {"exp_avg": base}
    rest = b"" if mode == excp.FROM_BASE else b"\0"  # all are likely

    def made(centres: list[float], symbols: bytes) -> bytes:
        return bytes([len(centres)]) + np.array(centres, "<f4").tobytes() + symbols + rest

    one = 40 * bytes([1])
    cases = {
        made([0.5], b"\1\1"): True,
        made([0.5], b"\0" + one): True,
        made([], b"\1\0"): True,
        made([], b"\1\1"): False,
        made([0.5], b"\1\2"): False,
        made([0.5], b"\1\xff"): False,
        made([0.5], b"\0" + one[:39] + b"\x10"): False,
        made([0.5], b"\0" + one[:39]): False,
        made([np.inf, 0.5], b"\1\2"): False,
        made([0.5, np.nan], b"\1\1"): False,
        made(15 * [0.5], b"\1\x0f"): True,
        made(16 * [0.5], b"\1\1"): False,
        made([0.5], b"\1\1") + b"\0": False,
    }
    for payload, good in cases.items():
        for decode in (decoded, decoded_again):
            assert (decode(mode, payload, 40, relatives) is not None) == good, payload


def test_what_a_payload_refers_to_has_to_be_there() -> None:
    unit = unit_of(2003, 12)
    made = coded(unit, Excp())
    for role in ROLES:
        ((mode, payload),) = made.payloads[role]
        relatives = relatives_of(unit, made, role, 0, 2003)
        assert decoded(mode, payload, 2003, relatives) is not None
        for name in relatives:
            others = {key: value for key, value in relatives.items() if key != name}
            assert decoded(mode, payload, 2003, others) is None


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"alpha": -1}, "alpha of Excp is -1; expected a number from 0"),
        ({"alpha": float("nan")}, "alpha of Excp is nan"),
        ({"beta": "2"}, "beta of Excp is '2'"),
        ({"beta": True}, "beta of Excp is True"),
        ({"cap": float("inf")}, "cap of Excp is inf"),
        ({"threshold": "row"}, "threshold of Excp is 'row'; expected one of tensor, element"),
        ({"codebook": "bf16"}, "codebook of Excp is 'bf16'; expected one of f32, f16"),
        ({"kmeans": 1}, "kmeans of Excp is 1; expected one of sampled, optimal"),
        ({"every": 0}, "every is 0; expected an integer from 2"),
    ],
)
def test_an_option_that_cannot_be_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        Excp(**wrong)
