"""Checks of single fields of a JSON header (docs/format.md §6)."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from ..errors import CorruptError
from .spec import CHUNK_ELEMENTS_MAX
from .values import Json, compact_json, decode_value


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


def parse_json(data: bytes) -> Json:
    """Parse untrusted JSON text strictly.

    Raises:
        CorruptError: not UTF-8, not JSON, a repeated key, NaN or Infinity.
    """
    try:
        text = data.decode()
        value = _read(text)
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


# One decoder for all: json.loads would make a new one for this argument.
_read = json.JSONDecoder(parse_constant=_refuse_constant).decode


def _check_surrogates(value: Json) -> None:
    """Refuse half a surrogate pair, which only an escape can bring in: it is not Unicode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CorruptError("the JSON header holds text that is not Unicode") from error
