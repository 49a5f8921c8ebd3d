"""Checks of single fields of a JSON header (docs/format.md §6), and its tensors as columns.

There are many tensors, all alike. `read_listed` knows the one form that holdfast gives them, and
proves that the text has it. Any other text, damaged or merely written otherwise, is for the strict
parser, which says what is wrong.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter, methodcaller
from typing import Any

from ..errors import CorruptError
from ..layout import Path
from .spec import CHUNK_ELEMENTS_MAX, PATH_BYTES_MAX, PATH_KEYS_MAX
from .values import Json, compact_json, decode_value

_BEGIN, _END, _EMPTY = ',"tensors":[{"path":[', '}],"ties":[', ',"tensors":[]'
_BETWEEN, _AFTER_PATH = '},{"path":[', "],"
_NUMBER = "(?:0|[1-9][0-9]{0,17})"  # below 2^63
_FORM = re.compile(
    rf'"dtype":"([a-z0-9_]+)","shape":\[((?:{_NUMBER}(?:,{_NUMBER})*)?)\],"codec":({_NUMBER})'
)
_CONTROL = re.compile(r"[\x00-\x1f\\]")  # what JSON escapes, and the sign of an escape
_BETWEEN_TEXTS = {",", "\n"}
_UTF8_BYTES_MAX = 4  # of a character
_CUT, _KEYS_OF, _UNQUOTED = (
    methodcaller("partition", _AFTER_PATH),
    methodcaller("split", '","'),
    itemgetter(slice(1, -1)),
)


@dataclass(frozen=True, slots=True)
class Listed:
    """The tensors of a header, as columns.

    Attributes:
        rest: the header without them.
        paths: of each tensor.
        form: of each, all but the path, as text.
        forms: what those texts say: dtype, shape, place of the codec.
    """

    rest: bytes
    paths: list[Path]
    form: Sequence[str]
    forms: dict[str, tuple[str, list[int], int]]


def entries(values: dict[str, Any], *names: str) -> list[list[dict[str, Any]]]:
    """Return the lists of objects that some keys have to have."""
    found = []
    for key in names:
        listed = values.get(key)
        if not isinstance(listed, list) or not set(map(type, listed)) <= {dict}:
            raise CorruptError(f"{key!r} of its JSON header is not a list of objects")
        found.append(listed)
    return found


def scalars(values: dict[str, Any]) -> dict[str, Any]:
    """Check what is neither a list of objects nor the base; the step may be missing."""
    step = values["step"]
    chunk_elements = count(values["chunk_elements"], 1, "chunk_elements")
    if chunk_elements > CHUNK_ELEMENTS_MAX:
        raise CorruptError(
            f"chunk_elements is {chunk_elements}; expected at most {CHUNK_ELEMENTS_MAX}"
        )
    return {
        "save_id": hex_digits(values["save_id"], "save_id"),
        "step": None if step is None else count(step, 0, "step", 1 << 53),
        "world_size": count(values["world_size"], 1, "world_size", 1 << 32),
        "written_by": text(values["written_by"], "written_by"),
        "chunk_elements": chunk_elements,
        "mesh": None if values["mesh"] is None else _mesh(values["mesh"]),
        "metrics": values["metrics"] if values["metrics"] == {} else _metrics(values["metrics"]),
    }


def keys(entry: dict[str, Any], wanted: set[str], what: str) -> None:
    """Check which keys an object has."""
    if entry.keys() != wanted:
        raise CorruptError(f"a {what} of its JSON header has the keys {sorted(entry)!r:.80}")


def count(value: Any, low: int, what: str, end: int = 1 << 63) -> int:
    """Check an integer from ``low`` below ``end``."""
    if type(value) is not int or not low <= value < end:
        raise CorruptError(f"{what} is {value!r:.40}; expected an integer from {low} below {end}")
    return value


def text(value: Any, what: str) -> str:
    """Check that a value is a text."""
    if not isinstance(value, str):
        raise CorruptError(f"{what} is {value!r:.40}; expected text")
    return value


def hex_digits(value: Any, what: str) -> str:
    """Check that a value is 32 hexadecimal digits."""
    if not isinstance(value, str) or len(value) != 32 or not set(value) <= set("0123456789abcdef"):
        raise CorruptError(f"{what} is {value!r:.40}; expected 32 hexadecimal digits")
    return value


def _mesh(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != {"shape", "names"}:
        raise CorruptError("mesh is neither null nor an object of shape and names")
    shape, names = value["shape"], value["names"]
    if not isinstance(shape, list) or not isinstance(names, list) or len(shape) != len(names):
        raise CorruptError("the mesh's shape and names are not lists of one length")
    return {
        "shape": [count(n, 0, "a dimension") for n in shape],
        "names": [text(name, "a mesh name") for name in names],
    }


def _metrics(value: Any) -> dict[str, float]:
    decoded = decode_value(value)
    if not isinstance(decoded, dict) or any(
        not isinstance(name, str) or type(number) not in (int, float)
        for name, number in decoded.items()
    ):
        raise CorruptError("metrics is not an object of numbers")
    return decoded


def comparable_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as they can be compared and shown: an integer that no float holds is infinite.

    A header keeps what it was read from, so that it can be written again to the bit.
    """
    found = dict(metrics)
    for name, number in metrics.items():
        try:
            float(number)
        except OverflowError:
            found[name] = math.inf if number > 0 else -math.inf
    return found


def read_listed(data: bytes) -> Listed | None:
    """Read the tensors of a JSON header; None: the text has another form than holdfast gives it.

    Every quote of the list is seen to begin or end a text: it has no escapes, and between its texts
    stands nothing but what belongs there. The list is a member of the header itself: what is before
    it makes an object.
    """
    try:
        text = data.decode()
        begin = text.find(_BEGIN)
        end = text.find(_END, begin) if begin >= 0 else -1
        if end < 0:
            return None
        json.loads(text[:begin] + "}")
    except (ValueError, RecursionError):
        return None
    body = text[begin + len(_BEGIN) : end]
    if _CONTROL.search(body):
        return None
    heads, _, form = zip(*map(_CUT, body.split(_BETWEEN)), strict=True)
    forms = dict[str, tuple[str, list[int], int]]()
    for one in dict.fromkeys(form):
        match = _FORM.fullmatch(one)
        if match is None:
            return None
        dtype, shape, codec = match.groups()
        forms[one] = dtype, [*map(int, shape.split(","))] if shape else [], int(codec)
    pieces = "\n".join(heads).split('"')  # outside of texts, inside, outside, …
    is_quoted = len(pieces) % 2 == 1 and len(pieces) > 1 and pieces[0] == pieces[-1] == ""
    between = pieces[2:-1:2]
    if not is_quoted or not set(between) <= _BETWEEN_TEXTS:
        return None
    if between.count("\n") != len(heads) - 1:
        return None
    paths = [*map(tuple, map(_KEYS_OF, map(_UNQUOTED, heads)))]
    is_short = (max(map(len, heads)) + 2) * _UTF8_BYTES_MAX <= PATH_BYTES_MAX
    if not is_short or max(map(len, paths)) > PATH_KEYS_MAX:
        return None
    rest = f"{text[:begin]}{_EMPTY}{text[end + 2 :]}"
    return Listed(rest.encode(), paths, form, forms)


def parse_json(data: bytes) -> Json:
    """Parse untrusted JSON text strictly.

    Raises:
        CorruptError: not UTF-8, not JSON, a repeated key, NaN or Infinity.
    """
    try:
        text = data.decode()
        value = json.loads(text, parse_constant=_refuse_constant)
        # What reads the same when it is written again has repeated no key: without a look at each.
        if compact_json(value) != text:
            value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"the JSON header does not parse: {error}") from error
    if re.search(rb"\\u[dD]", data):
        _check_surrogates(value)
    return value


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise CorruptError("the JSON header repeats a key")
    return result


def _refuse_constant(name: str) -> None:
    raise CorruptError(f"the JSON header holds {name}")


def _check_surrogates(value: Json) -> None:
    """Refuse half a surrogate pair, which only an escape can bring in: it is not Unicode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CorruptError("the JSON header holds text that is not Unicode") from error
