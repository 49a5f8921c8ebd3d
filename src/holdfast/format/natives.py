"""Further plain values of Python ⇄ tagged JSON: docs/format.md §6, feature `values`.

A fixed list. No name in a file is imported or called: enumerations and dataclasses come back as
`Tagged`, until a reader gives their classes (`revive.py`). No pickle; torch's own types are added
by the room that knows torch (`add_native`).
"""

import base64
import dataclasses
import enum
import io
import json
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Context, Decimal
from fractions import Fraction
from pathlib import PosixPath
from typing import Any

import numpy as np

from .inexact import Inexact, Malformed
from .spec import HEADER_BYTES_MAX, VALUE_TAGS

Json = Any
Code = Callable[[Any], Json]  # of what is inside a value

FACTORIES = {
    kind.__name__: kind
    for kind in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
}
_FACTORY_NAMES: dict[Any, str] = {kind: name for name, kind in FACTORIES.items()}
_DTYPES = ["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8"]
_BYTES_MAX = HEADER_BYTES_MAX // 4 * 3  # base64 takes four for three
_DTYPES += ["<f2", "<f4", "<f8", "<c8", "<c16"]


@dataclasses.dataclass(frozen=True, slots=True)
class Tagged:
    """A value whose class the reader was not given.

    Attributes:
        tag: "$enum" or "$dataclass"; or "$dtype", "$device" and "$size", where torch is missing.
        name: of its class, as in ``"mymodule.Colour"``; it is never imported.
        content: what it holds: the value of the member, {field: value}, or plain data.
    """

    tag: str
    name: str
    content: Any

    def __hash__(self) -> int:
        content = self.content
        try:
            plain = frozenset(content.items()) if type(content) is dict else content
            return hash((self.tag, self.name, plain))
        except TypeError:  # a list is in it
            return hash((self.tag, self.name))


_DECIMAL = Context(capitals=1)  # str() writes as the thread's own context has it
_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _check_bytes(count: int) -> None:
    if count > _BYTES_MAX:
        raise Inexact(f"has {count} bytes; only a tensor may have more than {_BYTES_MAX}")


def _text(value: bytes) -> str:
    _check_bytes(len(value))
    return base64.b64encode(value).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _pairs(value: Mapping[Any, Any], encode: Code) -> Json:
    return [[encode(key), encode(item)] for key, item in value.items()]


def _unpaired(content: Json, decode: Code) -> list[tuple[Any, Any]]:
    pairs = [(decode(key), decode(item)) for key, item in content]
    if len(dict(pairs)) != len(pairs):
        raise Malformed("a key stands twice")
    return pairs


def _elements(content: Json, decode: Code, kind: Callable[[Iterable[Any]], Any]) -> Any:
    found = kind(map(decode, content))
    if len(found) != len(content):
        raise Malformed("an element stands twice")
    return found


def _dtype(name: str) -> np.dtype[Any]:
    if name not in _DTYPES:
        raise Malformed(f"{name!r:.80} is no dtype of the list")
    return np.dtype(name)


def _array(content: Json, _: Code) -> np.ndarray[Any, Any]:
    name, shape, text = content
    return np.frombuffer(_bytes(text), _dtype(name)).reshape(shape).copy()


def _scalar(content: Json, _: Code) -> Any:
    name, text = content
    (found,) = np.frombuffer(_bytes(text), _dtype(name))
    return found


def _deque(content: Json, decode: Code) -> deque[Any]:
    bound, items = content
    if bound is not None and (type(bound) is not int or bound < len(items)):
        raise Malformed("it has more items than it may")
    return deque(map(decode, items), bound)


def _of_bytes_io(value: io.BytesIO, _: Code) -> Json:
    if value.closed:
        raise Inexact("is closed")
    return [_text(value.getvalue()), value.tell()]


def _bytes_io(content: Json, _: Code) -> io.BytesIO:
    text, position = content
    found = io.BytesIO(_bytes(text))
    found.seek(position)
    return found


def _is_exact(value: Any, again: Any) -> bool:
    return type(value) is type(again) and repr(value) == repr(again)


def _iso(value: Any, _: Code) -> Json:
    text = value.isoformat()
    if not _is_exact(value, type(value).fromisoformat(text)):
        raise Inexact("has a time zone, or a fold, that text does not keep")
    return text


def _plain_zone(value: timezone, encode: Code) -> Json:
    offset = value.utcoffset(None)
    if not _is_exact(value, timezone(offset)):
        raise Inexact("is a named time zone")
    return _of_delta(offset, encode)


def _of_delta(value: timedelta, _: Code) -> Json:
    return [value.days, value.seconds, value.microseconds]


def _delta(content: Json, _: Code) -> timedelta:
    if [type(part) for part in content] != [int] * 3:
        raise Malformed("expected three integers")
    return timedelta(*content)


def _of_namespace(value: Namespace, encode: Code) -> Json:
    if not all(isinstance(name, str) for name in vars(value)):
        raise Inexact("has an attribute whose name is no text")
    return encode(vars(value))


def _sorted(value: Iterable[Any], encode: Code) -> Json:
    return sorted(map(encode, value), key=lambda item: _compact(item).encode())


def _of_default(value: defaultdict[Any, Any], encode: Code) -> Json:
    factory = value.default_factory
    return [None if factory is None else _FACTORY_NAMES[factory], _pairs(value, encode)]


def _default(content: Json, decode: Code) -> defaultdict[Any, Any]:
    name, pairs = content
    return defaultdict(None if name is None else FACTORIES[name], _unpaired(pairs, decode))


def _of_array(value: np.ndarray[Any, Any], _: Code) -> Json:
    if value.dtype.str not in _DTYPES:
        raise Inexact(f"has the dtype {value.dtype}, which is not on the list")
    _check_bytes(value.nbytes)
    return [value.dtype.str, list(value.shape), _text(value.tobytes())]


_FORMS: dict[type, tuple[str, Callable[[Any, Code], Json], Callable[[Json, Code], Any]]] = {
    bytearray: ("$bytearray", lambda v, _: _text(v), lambda c, _: bytearray(_bytes(c))),
    io.BytesIO: ("$bytes_io", _of_bytes_io, _bytes_io),
    OrderedDict: ("$ordered_dict", _pairs, lambda c, d: OrderedDict(_unpaired(c, d))),
    defaultdict: ("$default_dict", _of_default, _default),
    set: ("$set", _sorted, lambda c, d: _elements(c, d, set)),
    frozenset: ("$frozenset", _sorted, lambda c, d: _elements(c, d, frozenset)),
    range: (
        "$range",
        lambda v, e: [e(v.start), e(v.stop), e(v.step)],
        lambda c, d: range(*map(d, c)),
    ),
    deque: ("$deque", lambda v, e: [v.maxlen, [e(item) for item in v]], _deque),
    PosixPath: ("$path", lambda v, e: e(str(v)), lambda c, d: PosixPath(d(c))),
    datetime: ("$datetime", _iso, lambda c, _: datetime.fromisoformat(c)),
    date: ("$date", _iso, lambda c, _: date.fromisoformat(c)),
    time: ("$time", _iso, lambda c, _: time.fromisoformat(c)),
    timedelta: ("$timedelta", _of_delta, _delta),
    timezone: ("$timezone", _plain_zone, lambda c, d: timezone(_delta(c, d))),
    Decimal: (
        "$decimal",
        lambda v, _: _DECIMAL.to_sci_string(v),
        lambda c, _: Decimal(_checked_text(c)),
    ),
    Fraction: (
        "$fraction",
        lambda v, e: [e(v.numerator), e(v.denominator)],
        lambda c, d: Fraction(*map(d, c)),
    ),
    Namespace: ("$namespace", _of_namespace, lambda c, d: namespace_of(d(c))),
    np.ndarray: ("$ndarray", _of_array, _array),
}
_FORMS |= {
    np.dtype(name).type: (
        "$numpy",
        lambda v, _: [v.dtype.str, _text(v.tobytes())],
        _scalar,
    )
    for name in _DTYPES
}
_DECODERS = {tag: decode for tag, _, decode in _FORMS.values()}


def _checked_text(content: Json) -> str:
    if type(content) is not str:
        raise Malformed("expected text")
    return content


def namespace_of(fields: Any) -> Namespace:
    if type(fields) is not dict or not all(type(name) is str for name in fields):
        raise Malformed("expected names and values")
    found = Namespace()
    vars(found).update(fields)
    return found


def add_native(
    kind: type, tag: str, encode: Callable[[Any], Json], decode: Callable[[Json], Any]
) -> None:
    """Add a type whose module this room does not import; its content is JSON as it is."""
    _FORMS[kind] = (tag, lambda value, _: encode(value), lambda content, _: decode(content))
    _DECODERS[tag] = _FORMS[kind][2]


def is_listed(value: object) -> bool:
    """Return whether a value's very type is on the list, and so is what makes its defaults."""
    if type(value) is not defaultdict:
        return type(value) in _FORMS
    factory: Any = value.default_factory
    return factory is None or (isinstance(factory, type) and factory in _FACTORY_NAMES)


def has_class(value: object) -> bool:
    """Return whether a value is a member of an enumeration, or of a dataclass."""
    return isinstance(value, (Tagged, enum.Enum)) or dataclasses.is_dataclass(type(value))


def encode_native(value: Any, encode: Code) -> Json:
    """Return tag and content of a value of the list.

    Raises:
        Inexact: this one has something that is not kept; the text says what.
    """
    if form := _FORMS.get(type(value)):
        return {form[0]: form[1](value, encode)}
    if type(value) is Tagged:
        if value.tag in ("$enum", "$dataclass"):
            return {value.tag: [encode(value.name), encode(value.content)]}
        return {value.tag: value.content}
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, enum.Enum):
        return {"$enum": [encode(name), encode(value.value)]}
    try:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    except AttributeError as error:
        raise Inexact("has a field without a value") from error
    if hasattr(value, "__dict__") and vars(value).keys() - fields.keys():
        raise Inexact("has attributes that are no fields")
    return {"$dataclass": [encode(name), encode(fields)]}


def decode_native(tag: str, content: Json, decode: Code) -> Any:
    """Return the value of a tag of the list.

    Raises:
        Malformed, ArithmeticError, LookupError, TypeError, ValueError: the content is malformed.
    """
    if tag in ("$enum", "$dataclass"):
        name, inner = content
        found = decode(inner)
        if tag == "$dataclass" and not (type(found) is dict and all(map(_is_text, found))):
            raise Malformed("expected names of fields and values")
        return Tagged(tag, _checked_text(name), found)
    if known := _DECODERS.get(tag):
        return known(content, decode)
    if tag != "$size":
        return Tagged(tag, "", _checked_text(content))
    if type(content) is not list or not all(type(n) is int and n >= 0 for n in content):
        raise Malformed("expected sides from 0")
    return Tagged(tag, "", content)


def _is_text(value: object) -> bool:
    return type(value) is str


assert set(_DECODERS) <= VALUE_TAGS
