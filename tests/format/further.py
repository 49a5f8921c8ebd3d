"""Further values, for the independent reader: the feature `values` of docs/format.md § 6 alone."""

import base64
import io
import json
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque, namedtuple
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath

import numpy as np
from chains import Corrupt, check

DTYPES = [
    "|b1",
    "|i1",
    "|u1",
    "<i2",
    "<u2",
    "<i4",
    "<u4",
    "<i8",
    "<u8",
    "<f2",
    "<f4",
    "<f8",
    "<c8",
    "<c16",
]
FACTORIES = (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
MOMENTS = {"$datetime": datetime, "$date": date, "$time": time}
TAGS = {"$bytearray", "$bytes_io", "$ordered_dict", "$default_dict", "$set", "$frozenset"}
TAGS |= {"$range", "$deque", "$path", *MOMENTS, "$timedelta", "$timezone", "$decimal"}
TAGS |= {"$fraction", "$namespace", "$ndarray", "$numpy", "$enum", "$dataclass"}
TAGS |= {"$dtype", "$device", "$size"}


class Member(namedtuple("Member", "tag name held")):
    """Of a class; unlike a list or dict that it holds, it may be an element or a key."""

    def __hash__(self):
        return hash(self[:2])


def is_used(value):
    if isinstance(value, dict):
        return bool(value.keys() & TAGS) or any(map(is_used, value.values()))
    return isinstance(value, list) and any(map(is_used, value))


def decode(value, inner):
    check(len(value) == 1, "a tag with another key")
    ((tag, content),) = value.items()
    try:
        found, canonical = READ[tag](content, inner, tag)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise Corrupt(f"value of {tag}: {error}") from None
    check(repr(canonical) == repr(content), f"value of {tag}")  # Which tells 1 from 1.0 and True.
    return found


def code(content):
    return base64.b64encode(content).decode()


def plain(content, *_):
    found = base64.b64decode(content)
    return bytearray(found), code(found)


def file(content, *_):
    found = io.BytesIO(base64.b64decode(content[0]))
    found.seek(content[1])
    return found, [code(found.getvalue()), found.tell()]


def pairs(content, inner):
    found = [(inner(key), inner(item)) for key, item in content]
    check(len(dict(found)) == len(found), "two equal keys")
    return found, [[key, item] for key, item in content]


def ordered(content, inner, _):
    found, canonical = pairs(content, inner)
    return OrderedDict(found), canonical


def default(content, inner, _):
    found, canonical = pairs(content[1], inner)
    kinds = {None: None} | {kind.__name__: kind for kind in FACTORIES}
    return defaultdict(kinds[content[0]], found), [content[0], canonical]


def elements(content, inner, tag):
    found = [inner(item) for item in content]
    kind = set if tag == "$set" else frozenset
    check(len(kind(found)) == len(found), "two equal elements")
    text = lambda item: json.dumps(item, ensure_ascii=False, separators=(",", ":")).encode()  # noqa: E731
    return kind(found), sorted(content, key=text)


def steps(content, inner, _):
    numbers = [inner(number) for number in content]
    check([type(number) for number in numbers] == [int] * 3, "numbers of a range")
    return range(*numbers), content


def queue(content, inner, _):
    limit, items = content
    check(limit is None or (type(limit) is int and limit >= len(items)), "limit of a queue")
    return deque(map(inner, items), limit), [limit, [*items]]


def path(content, inner, _):
    return PosixPath(inner(content)), str(PosixPath(content))


def moment(content, _, tag):
    found = MOMENTS[tag].fromisoformat(content)
    return found, found.isoformat()


def span(content, _, tag):
    days, seconds, microseconds = content
    found = timedelta(days, seconds, microseconds)
    canonical = [found.days, found.seconds, found.microseconds]
    return (timezone(found) if tag == "$timezone" else found), canonical


def decimal(content, *_):
    check(type(content) is str, "text of a decimal number")
    return Decimal(content), str(Decimal(content))


def fraction(content, inner, _):
    found = Fraction(*map(inner, content))
    terms = [inner(number) for number in content]
    check(repr(terms) == repr([found.numerator, found.denominator]), "terms")
    return found, content


def texts(content, inner):
    found = inner(content)
    check(type(found) is dict and all(type(key) is str for key in found), "names")
    return found


def namespace(content, inner, _):
    found = Namespace()
    vars(found).update(texts(content, inner))
    return found, content


def array(content, *_):
    dtype, shape, text = content
    found = np.frombuffer(base64.b64decode(text), DTYPES[DTYPES.index(dtype)]).reshape(shape)
    return found, [dtype, list(found.shape), code(found.tobytes())]


def number(content, *_):
    dtype, text = content
    (found,) = np.frombuffer(base64.b64decode(text), DTYPES[DTYPES.index(dtype)])
    return found, [dtype, code(found.tobytes())]


def named(content, inner, tag):
    name, held = content
    check(type(name) is str, "name of a class")
    return Member(tag, name, inner(held) if tag == "$enum" else texts(held, inner)), [name, held]


def of_torch(content, _, tag):
    if tag != "$size":
        check(type(content) is str, "text")
        return (tag, content), content
    check(type(content) is list and all(type(n) is int and n >= 0 for n in content), "sides")
    return (tag, *content), content


READ = dict.fromkeys(MOMENTS, moment) | {"$bytearray": plain, "$bytes_io": file}
READ |= {"$ordered_dict": ordered, "$default_dict": default, "$set": elements}
READ |= {"$frozenset": elements, "$range": steps, "$deque": queue, "$path": path}
READ |= {"$timedelta": span, "$timezone": span, "$decimal": decimal, "$fraction": fraction}
READ |= {"$namespace": namespace, "$ndarray": array, "$numpy": number}
READ |= {"$enum": named, "$dataclass": named}
READ |= dict.fromkeys(("$dtype", "$device", "$size"), of_torch)
