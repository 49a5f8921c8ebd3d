"""Further plain values: what is saved comes back as it was, by its type; no code, no import."""

import dataclasses
import enum
import io
import pickle
import sys
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path, PosixPath
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import CorruptError, MismatchError, StateError, VersionError
from holdfast.format import natives
from holdfast.format.natives import Tagged
from holdfast.format.revive import revive, types_by_name
from holdfast.format.tags import has_native
from holdfast.format.values import decode_value, encode_value, write_json
from holdfast.state.natives import add_torch_types

NewPath = Callable[[], Path]
add_torch_types()


class Colour(enum.Enum):
    """An enumeration of the user's."""

    RED = "r"


class Level(enum.IntEnum):
    """One that is a number too."""

    LOW = 1


@dataclasses.dataclass(frozen=True)
class Point:
    """A dataclass whose constructor may not be called."""

    x: Any
    tags: set[str] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        Point.made += 1

    made = 0


VALUES: list[Any] = [
    *(bytearray(b"ab"), torch.Size([2, 3]), torch.Size([]), torch.bfloat16, torch.device("cuda:1")),
    *(OrderedDict([("b", 1), ("a", {3})]), defaultdict(list, {"a": [1]}), defaultdict(None)),
    *({1, 2, "x"}, set(), frozenset([(1, 2), frozenset([3])]), range(3, 9, 2), range(0)),
    *(deque([1, [2]], 5), deque(), PosixPath("a/b"), PosixPath("/é")),
    *(datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=UTC), datetime(1, 1, 1), date(2024, 2, 29)),
    *(time(3, 4), timedelta(days=-1, seconds=5), timezone(timedelta(hours=2))),
    *(Decimal("1.50"), Decimal("NaN"), Decimal("1E+5"), Fraction(1, 3), Fraction(2**70, 3)),
    *(Namespace(a=1, b=[{2}]), np.float64(0.1), np.int16(-3), np.bool_(True), np.float32("nan")),
    *(np.arange(6, dtype="<i2").reshape(2, 3), np.array(3.0), np.zeros((0, 2), "<c8")),
    *({"$set": [1]}, {'x"$set': 1}, 'say "$set": x', [{"deep": ({1},)}], {(1, 2): {3}}),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    again = decode_value(encode_value(value, ("v",)))
    assert type(again) is type(value)
    assert repr(again) == repr(value) or again == value


def test_a_file_in_memory_keeps_its_position(new_path: NewPath) -> None:
    path, given = new_path(), io.BytesIO(b"abcdef")
    given.seek(4)
    holdfast.save({"file": given, "w": torch.ones(2)}, path)
    found = holdfast.open(path).objects()["file"]
    assert type(found) is io.BytesIO and (found.tell(), found.getvalue()) == (4, b"abcdef")


def test_the_feature_is_named_only_where_a_value_needs_it(new_path: NewPath) -> None:
    plain, further = new_path(), new_path()
    holdfast.save({"v": ['"$set":', {"$set": 1}, {'x"$set': 1}]}, plain)
    holdfast.save({"v": [{1}]}, further)
    assert b'"name":"values"' not in (plain / "MANIFEST").read_bytes()
    assert b'"name":"values"' in (further / "MANIFEST").read_bytes()
    assert holdfast.verify(plain).damage == holdfast.verify(further).damage == ()


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_what_has_a_tag_is_found_in_the_text(value: Any) -> None:
    def tags(item: Any) -> bool:
        if isinstance(item, list):
            return any(map(tags, item))
        if not isinstance(item, dict):
            return False
        own = len(item) == 1 and next(iter(item)) not in ("$dict", "$tuple", "$float", "$int")
        return (own and next(iter(item)).startswith("$")) or any(map(tags, item.values()))

    encoded = encode_value(value, ("v",))
    assert has_native(write_json(encoded)) == tags(encoded)


def test_a_set_has_one_form_whatever_its_order() -> None:
    texts = {write_json(encode_value(set(order), ("v",))) for order in ("abcdefgh", "hgfedcba")}
    assert len(texts) == 1


class Own(deque[int]):
    """A subclass may do anything."""


@dataclasses.dataclass
class Unset:
    """One whose constructor leaves a field out."""

    x: int = dataclasses.field(init=False)


CLOSED, ODD_NAMES, LABELLED = io.BytesIO(), Namespace(), Point(1)
CLOSED.close()
vars(LABELLED)["label"] = "a"
vars(ODD_NAMES)[1] = 2  # type: ignore[index]
LOCAL = datetime(2024, 7, 1, tzinfo=ZoneInfo("UTC"))
REFUSED: dict[str, tuple[Any, str]] = {
    "a subclass": (Own([1]), r"is a unit\.test_native_values\.Own; a state holds"),
    "a zone of a name": (LOCAL, "has a time zone, or a fold"),
    "a fold": (datetime(2024, 7, 1, fold=1), "has a time zone, or a fold"),
    "a named offset": (timezone(timedelta(hours=1), "CET"), "is a named time zone"),
    "a namespace with a number for a name": (ODD_NAMES, "has an attribute whose name is no text"),
    "a field that was never set": (Unset(), r"Unset that has a field without a value"),
    "an attribute that is no field": (LABELLED, "Point that has attributes that are no fields"),
    "a file that is closed": (CLOSED, "is closed"),
    "a tensor in a set": ({torch.ones(1)}, r"is a set that holds a torch\.Tensor; expected plain"),
    "a tensor in a dataclass": (
        Point(torch.ones(1)),
        r"Point that holds a torch\.Tensor; expected",
    ),
    "an array of objects": (np.array([object()]), "has the dtype object"),
    "an array of long doubles": (np.zeros(1, np.longdouble), "has the dtype float128"),
    "a big-endian array": (np.zeros(1, ">i4"), "has the dtype >i4"),
    "an object in a set": (frozenset([object()]), "is a frozenset that holds a object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_come_back_exactly_is_refused_by_name(name: str) -> None:
    value, text = REFUSED[name]
    with pytest.raises(StateError, match=text) as caught:
        encode_value([value], ("model", "v"))
    assert "model.v" in str(caught.value)


@pytest.mark.parametrize("kind", [list, tuple, set, dict, deque, OrderedDict])
def test_a_value_nested_10_000_deep_is_refused(kind: Any) -> None:
    value: Any = 1
    for _ in range(10_000):
        if kind is set:
            value = frozenset([value])
        else:
            value = {"a": value} if kind is dict else kind([("a", value)])
    with pytest.raises(StateError, match="is nested deeper than 64 levels"):
        encode_value(value, ("v",))


def test_a_text_nested_10_000_deep_is_damage(new_path: NewPath) -> None:
    value: Any = 1
    for _ in range(10_000):
        value = {"$deque": [None, [value]]}
    with pytest.raises((CorruptError, RecursionError)):
        decode_value(value)


@pytest.mark.parametrize("name", ["float1", "load"])
def test_a_dtype_that_torch_lacks_is_newer_and_not_damage(name: str) -> None:
    with pytest.raises(VersionError, match=f"has no dtype {name}"):
        decode_value({"$dtype": name})


@pytest.mark.parametrize("value", [{"$dtype": "os.system"}, {"$device": "nowhere:0"}])
def test_what_is_no_name_of_torch_is_damage(value: Any) -> None:
    with pytest.raises(CorruptError, match="is malformed"):
        decode_value(value)


def test_classes_come_back_only_where_the_reader_gives_them() -> None:
    value = [Colour.RED, Point(1, {"a"}), {"deep": Point(2)}]
    made = Point.made
    found = decode_value(encode_value(value, ("v",)))
    name = "unit.test_native_values.Colour"
    assert found[0] == Tagged("$enum", name, "r")
    assert found[1].content == {"x": 1, "tags": {"a"}}
    assert decode_value(encode_value(found, ("v",))) == found
    assert pickle.loads(pickle.dumps(found)) == found
    again = revive(found, types_by_name([Colour, Point]))
    assert again == value and again[0] is Colour.RED
    assert Point.made == made, "a constructor was called"


def test_an_enumeration_that_is_a_number_is_saved_as_one() -> None:
    assert encode_value(Level.LOW, ("v",)) == 1


def test_a_class_with_other_fields_is_an_error() -> None:
    found = Tagged("$dataclass", "unit.test_native_values.Point", {"x": 1})
    with pytest.raises(MismatchError, match=r"has the fields \['tags', 'x'\], and was saved with"):
        revive(found, types_by_name([Point]))
    with pytest.raises(MismatchError, match="was saved as dataclass"):
        revive(Tagged("$dataclass", found.name, {}), {found.name: Colour})


def test_metrics_stay_numbers(new_path: NewPath) -> None:
    path = new_path()
    holdfast.save({"w": torch.ones(2)}, path, metrics={"loss": np.float64(0.5)})
    assert type(holdfast.open(path).metrics["loss"]) is float


def test_defaults_by_a_function_are_a_dict_as_of_any_further_dict() -> None:
    given = defaultdict(lambda: 1, {"a": defaultdict(int, {"b": 2})})
    found = decode_value(encode_value([given], ("v",)))[0]
    assert (type(found), type(found["a"]), found) == (dict, defaultdict, given)


def test_a_decimal_number_has_one_form_whatever_the_context_of_a_thread() -> None:
    value = Decimal("1.50E+5")
    with localcontext() as context:
        context.capitals, context.prec = 0, 1
        encoded = encode_value(value, ("v",))
        assert decode_value(encoded) == value
    assert encoded == {"$decimal": "1.50E+5"}
    assert str(decode_value(encoded)) == "1.50E+5"


def test_an_array_that_no_header_can_hold_is_refused_before_it_is_encoded() -> None:
    value = np.broadcast_to(np.zeros(1, "u1"), (1 << 40,))  # which takes no memory itself
    with pytest.raises(StateError, match=r"v is a numpy\.ndarray that has 1099511627776 b"):
        encode_value(value, ("v",))


def test_many_instances_of_one_class_in_a_set_differ_by_their_hashes() -> None:
    found = [Tagged("$dataclass", "m.P", {"x": x, "y": [x]}) for x in range(100)]
    assert len({*map(hash, found)}) == 1, "what holds a list"
    found = [Tagged("$dataclass", "m.P", {"x": x, "y": 1}) for x in range(100)]
    assert len({*map(hash, found)}) > 90
    assert hash(Tagged("$dataclass", "m.P", {"y": 1, "x": 1})) == hash(found[1])


def test_what_is_within_a_class_that_was_not_given_comes_back_as_its_own() -> None:
    found = decode_value(encode_value(Point([Colour.RED]), ("v",)))
    assert revive(found, types_by_name([Colour])).content["x"] == [Colour.RED]


@pytest.mark.parametrize("held", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_a_value_comes_back_within_every_other(held: Any) -> None:
    around: list[Any] = [[held], (held,), {"a": held}, {(1,): held}, OrderedDict(a=held)]
    around += [defaultdict(int, a=held), deque([held]), Namespace(a=held), Point(held)]
    if getattr(held, "__hash__", None) and not isinstance(held, tuple):
        around += [{held}, frozenset([held]), {held: 1}, OrderedDict([(held, 1)])]
    for value in around:
        text = encode_value(value, ("v",))
        again = revive(decode_value(text), types_by_name([Point]))
        assert type(again) is type(value)
        assert repr(encode_value(again, ("v",))) == repr(text)


def test_an_integer_has_at_most_4300_digits_whatever_the_program_allows() -> None:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        assert decode_value(encode_value(1 - 10**4300, ("v",))) == 1 - 10**4300
        with pytest.raises(StateError, match="is an integer of 14285 bits, too many to save"):
            encode_value(10**4300, ("v",))
        with pytest.raises(CorruptError, match=r"\$int"):
            decode_value({"$int": "9" * 5000})
    finally:
        sys.set_int_max_str_digits(limit)


@pytest.mark.parametrize("value", [{"$dtype": [1]}, {"$device": 5}, {"$size": "ab"}])
def test_torch_s_values_are_checked_where_torch_is_missing(
    value: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for tag in ("$dtype", "$device", "$size"):
        monkeypatch.delitem(natives._DECODERS, tag)
    assert decode_value({"$size": [2]}) == Tagged("$size", "", [2])
    with pytest.raises(CorruptError, match="is malformed"):
        decode_value(value)
