"""JSON-like leaves and paths ⇄ JSON, with tags for what JSON lacks. No pickle, no torch."""

import base64
import contextlib
import functools
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from ..errors import CorruptError, StateError, VersionError
from ..layout import Key, Path
from .inexact import MALFORMED, Inexact, Malformed, Unsupported, unsupported, within
from .names import dotted
from .spec import (
    INTEGER_DIGITS_MAX,
    JSON_DEPTH_MAX,
    JSON_INTEGER_MAX,
    PATH_BYTES_MAX,
    PATH_KEYS_MAX,
    VALUE_TAGS,
)

Json = Any  # null, bool, int, float, str, list of Json, dict of str to Json
_TEXTS = {str}


def encode_value(value: object, path: Path) -> Json:
    """Turn a JSON-like leaf into tagged JSON; exact for all that it accepts.

    ``(1, b"x", nan)`` → ``{"$tuple": [1, {"$bytes": "eA=="}, {"$float": "7ff8000000000000"}]}``

    Raises:
        StateError: the leaf, or something inside it, is of another type; the text names ``path``.
    """
    try:
        return _encode(value, path, JSON_DEPTH_MAX - 4)  # the header, "objects", the entry, a tag
    except Unsupported as error:
        raise StateError(*error.args) from None


def _encode(value: object, path: Path, depth: int) -> Json:
    if depth <= 0:
        raise StateError(
            f"{dotted(path)} is nested deeper than {JSON_DEPTH_MAX} levels of JSON; flatten it"
        )
    if value is None or isinstance(value, bool):
        return value
    if type(value) not in _PLAIN:  # before base types: numpy's are floats
        from . import natives  # which imports much that most programs do not need

        if natives.is_listed(value):
            return _encode_native(value, path, depth)
    if isinstance(value, str):
        _check_text(value, path)
        return str.__str__(value)  # an enumeration's str() is another text
    if isinstance(value, int):
        return (
            int.__int__(value) if abs(value) < JSON_INTEGER_MAX else {"$int": _digits(value, path)}
        )
    if isinstance(value, float):
        bits = struct.pack(">d", value).hex()
        return float.__float__(value) if math.isfinite(value) else {"$float": bits}
    if isinstance(value, complex):
        parts = (value.real, value.imag)
        return {"$complex": [_encode(part, path, depth - 2) for part in parts]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return _encode_items(value, path, depth - 1)
    if isinstance(value, tuple):
        return {"$tuple": _encode_items(value, path, depth - 2)}
    if isinstance(value, dict):
        return _encode_dict(value, path, depth)
    if natives.has_class(value):
        return _encode_native(value, path, depth)
    raise unsupported(value, dotted(path))


_PLAIN = {bool, str, int, float, complex, bytes, list, tuple, dict}


def _encode_native(value: Any, path: Path, depth: int) -> Json:
    """Encode a value of the list of `natives`; what it holds takes at most three levels more."""
    from .natives import encode_native

    try:
        return encode_native(value, lambda item: _encode(item, path, depth - 4))
    except (Inexact, Unsupported) as error:
        raise within(value, dotted(path), error) from error


def _encode_items(items: Iterable[Any], path: Path, depth: int) -> list[Json]:
    """`_encode` of each; what JSON says as it is, which most are, takes no further call."""
    encoded = []
    for item in items:
        kind = type(item)
        is_plain = (
            (kind in _CONSTANTS)
            or (kind is float and math.isfinite(item))
            or (kind is int and -JSON_INTEGER_MAX < item < JSON_INTEGER_MAX)
            or (kind is str and item.isascii())
        )
        encoded.append(item if is_plain and depth > 0 else _encode(item, path, depth))
    return encoded


_CONSTANTS = {bool, type(None)}
_TAGGED = "\0$"  # in keys that are joined by the first of these, behind it: where one may be a tag


def _encode_dict(value: dict[Any, Any], path: Path, depth: int) -> Json:
    if set(map(type, value)) <= _TEXTS:
        keys = "\0" + "\0".join(value)
        if keys.isascii() and _TAGGED not in keys:
            return dict(zip(value, _encode_items(value.values(), path, depth - 1), strict=True))
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        for key in value:
            _check_text(key, path)
        items = _encode_items(value.values(), path, depth - 1)
        return dict(zip(map(str.__str__, value), items, strict=True))
    pairs = [[_encode(k, path, depth - 3), _encode(v, path, depth - 3)] for k, v in value.items()]
    return {"$dict": pairs}


def _digits(value: int, path: Path) -> str:
    with contextlib.suppress(ValueError):  # Python bounds it, if the program has not changed that
        text = str(int.__int__(value))
        if len(text.removeprefix("-")) <= INTEGER_DIGITS_MAX:
            return text
    raise StateError(
        f"{dotted(path)} is an integer of {value.bit_length()} bits, too many to "
        "save; give it as text or bytes"
    )


def _check_text(text: str, path: Path) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = dotted(path).encode("ascii", "backslashreplace").decode()
        raise StateError(
            f"{where}: the text {text!r:.80} is not valid Unicode; escape it, or save bytes"
        ) from error


def decode_value(value: Json) -> Any:
    """Turn tagged JSON back into the leaf.

    Raises:
        CorruptError: a malformed tag, or not the one form the value has.
        VersionError: an unknown tag.
    """
    if value is None or type(value) in (bool, str):
        return value
    decoded = _decode(value)
    if type(decoded) is float and math.isfinite(decoded):
        return decoded
    try:
        canonical = encode_value(decoded, ("value",))
    except StateError as error:
        raise CorruptError(f"a value is invalid: {error}") from error
    if repr(canonical) != repr(value):  # which tells 1, 1.0 and True apart
        raise CorruptError(f"the value {json.dumps(value):.80} is not in its canonical form")
    return decoded


def _decode(value: Json) -> Any:
    if isinstance(value, list):
        return _decode_items(value)
    if not isinstance(value, dict):
        if isinstance(value, int) and abs(value) >= JSON_INTEGER_MAX:
            raise CorruptError(f"an integer of {len(str(value))} digits has no $int tag")
        return value
    if _TAGGED not in "\0" + "\0".join(value) or not any(key.startswith("$") for key in value):
        return dict(zip(value, _decode_items(value.values()), strict=True))
    if len(value) != 1:
        raise CorruptError(f"a tagged value has {len(value)} keys; expected one")
    ((tag, content),) = value.items()
    if tag not in _UNTAG and tag not in VALUE_TAGS:
        if re.fullmatch(r"\$[a-z0-9_]{1,40}", tag) is None:
            raise CorruptError(f"{tag!r:.80} is not the name of a tag")
        raise VersionError(
            f"a value has the tag {tag!r}, which this holdfast does not know. Upgrade holdfast"
        )
    try:
        if tag not in _UNTAG:
            from .natives import decode_native

            return decode_native(tag, content, _decode)
        return _UNTAG[tag](content)
    except MALFORMED as error:
        raise CorruptError(f"the content of the tag {tag} is malformed: {error}") from error


def _decode_items(items: Iterable[Json]) -> list[Json]:
    """`_decode` of each, of which those that are no containers mostly take no further call."""
    decoded = []
    for item in items:
        kind = type(item)
        is_plain = kind in _SCALARS or (kind is int and -JSON_INTEGER_MAX < item < JSON_INTEGER_MAX)
        decoded.append(item if is_plain else _decode(item))
    return decoded


_SCALARS = {str, bool, float, type(None)}


def _untag_int(content: Json) -> int:
    if type(content) is not str or len(content) > INTEGER_DIGITS_MAX + 1:
        raise Malformed("too many digits, or no text")
    number = int(content, 10)
    if str(number) != content or abs(number) < JSON_INTEGER_MAX:
        raise CorruptError("the content of $int is not a large decimal integer")
    return number


def _untag_float(content: Json) -> float:
    if not isinstance(content, str) or len(content) != 16 or content != content.lower():
        raise CorruptError("the content of $float is not 16 lower-case hexadecimal digits")
    number: float = struct.unpack(">d", bytes.fromhex(content))[0]
    if math.isfinite(number):
        raise CorruptError("the content of $float is finite")
    return number


def _untag_complex(content: Json) -> complex:
    real, imaginary = (_decode(part) for part in content)
    if not (isinstance(real, float) and isinstance(imaginary, float)):
        raise CorruptError("the content of $complex is not two floats")
    return complex(real, imaginary)


def _untag_tuple(content: Json) -> tuple[Any, ...]:
    if not isinstance(content, list):
        raise CorruptError("the content of $tuple is not a list")
    return tuple(_decode_items(content))


def _untag_dict(content: Json) -> dict[Any, Any]:
    pairs = [(_decode(key), _decode(value)) for key, value in content]
    result = dict(pairs)
    if len(result) != len(pairs):
        raise CorruptError("the content of $dict repeats a key")
    return result


_UNTAG = {
    "$int": _untag_int,
    "$float": _untag_float,
    "$complex": _untag_complex,
    "$bytes": lambda content: base64.b64decode(content, validate=True),
    "$tuple": _untag_tuple,
    "$dict": _untag_dict,
}


def encode_path(path: Path) -> Json:
    """Turn a path into JSON: string and integer keys as they are, positions as [kind, n].

    Raises:
        StateError: the path is too long, or a key is not valid Unicode.
    """
    if len(path) > PATH_KEYS_MAX:
        raise StateError(
            f"{dotted(path)[:80]}… has {len(path)} keys; expected at most {PATH_KEYS_MAX}"
        )
    encoded = [list(key) if isinstance(key, tuple) else key for key in path]
    for position, key in enumerate(path):
        if isinstance(key, str):
            _check_text(key, path)
        elif isinstance(key, int) and not _fits_i64(key):
            where, bits = dotted(path[:position]) or "the state", key.bit_length()
            raise StateError(f"{where} has an integer key of {bits} bits, which does not fit 64")
    if (size_bytes := _path_bytes(encoded)) > PATH_BYTES_MAX:
        shown = dotted(path)[:80]
        raise StateError(
            f"the path {shown}… takes {size_bytes} bytes; expected at most {PATH_BYTES_MAX}"
        )
    return encoded


@functools.lru_cache(maxsize=1 << 16)  # a save writes each path several times
def path_text(path: Path) -> str:
    """Write a path as JSON text.

    Raises:
        StateError: as `encode_path`.
    """
    if {*map(type, path)} == _TEXTS:
        text = ",".join(map(_quote, path))  # type: ignore[arg-type]
        if text.isascii() and len(path) <= PATH_KEYS_MAX and len(text) + 2 <= PATH_BYTES_MAX:
            return f"[{text}]"
    return write_json(encode_path(path))


_quote: Callable[[str], str] = json.encoder.encode_basestring


# One encoder for all: json.dumps would make a new one for each of these arguments. Headers have the
# strict one's form; a ValueError says that a number is not finite.
compact_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
write_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _path_bytes(encoded: Json) -> int:
    """Return the bytes of a path as JSON; of short ones, more than they take at most."""
    bound = 0
    for key in encoded:
        bound += 6 * len(key) + 3 if type(key) is str else 64
    return bound if bound <= PATH_BYTES_MAX else len(compact_json(encoded).encode())


def decode_path(value: Json) -> Path:
    """Turn JSON back into a path.

    Raises:
        CorruptError: it is not a path.
    """
    if not isinstance(value, list) or not 0 < len(value) <= PATH_KEYS_MAX:
        raise CorruptError(f"{value!r:.80} is not a path")
    path = tuple([key if type(key) is str else _decode_key(key) for key in value])
    if (size_bytes := _path_bytes(value)) > PATH_BYTES_MAX:
        raise CorruptError(f"a path takes {size_bytes} bytes; expected at most {PATH_BYTES_MAX}")
    return path


def decode_paths(values: Sequence[Json]) -> list[Path]:
    """Turn JSON back into paths; those of texts alone without a call for each.

    Raises:
        CorruptError: one is not a path.
    """
    if set(map(type, values)) == {list} and (keys := list(chain.from_iterable(values))):
        longest = max(map(len, values))
        is_plain = min(map(len, values)) > 0 and longest <= PATH_KEYS_MAX
        if is_plain and set(map(type, keys)) == {str}:
            bound = longest * (6 * max(map(len, keys)) + 3)  # as `_path_bytes` has it
            if bound <= PATH_BYTES_MAX:
                return list(map(tuple, values))
    return [decode_path(value) for value in values]


def _decode_key(key: Json) -> Key:
    if isinstance(key, str) or (type(key) is int and _fits_i64(key)):
        return key
    if isinstance(key, list) and len(key) == 2:
        kind, position = key
        if kind in ("list", "tuple") and type(position) is int and position >= 0:
            return (kind, position)
    raise CorruptError(f"{key!r:.80} is not a key of a path")


def _fits_i64(key: int) -> bool:
    return -(1 << 63) <= key < 1 << 63
