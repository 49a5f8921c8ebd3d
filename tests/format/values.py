"""Values of a JSON header, for the independent reader: docs/format.md § 6 alone."""

import base64
import math
import re
import struct

import further
from chains import Corrupt, check


class Newer(Exception): ...  # It takes a reader of a later version.


def fits(value, schema):
    if isinstance(schema, dict):
        same = isinstance(value, dict) and value.keys() == schema.keys()
        return same and all(fits(value[key], schema[key]) for key in schema)
    if isinstance(schema, list):
        return isinstance(value, list) and all(fits(item, schema[0]) for item in value)
    return schema is object or type(value) is schema  # A bool is not taken for an int.


# § 6. Values. What JSON has must not be written in the ways of what it lacks.
def decode(value):
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        check(not fits(value, int) or abs(value) < 2**53, "an integer of 2^53 or more")
        check(not fits(value, float) or math.isfinite(value), "a number that is not finite")
        return value
    if not any(key.startswith("$") for key in value):
        return {key: decode(item) for key, item in value.items()}
    kind, inner = next(iter(value.items()))
    if kind in further.TAGS:
        return further.decode(value, decode)
    unknown = re.fullmatch(r"\$(?!(int|float|bytes|complex|tuple|dict)$)[a-z0-9_]{1,40}", kind)
    expected = {"$tuple": list, "$complex": list, "$dict": [list]}.get(kind, str)
    check(len(value) == 1 and (unknown or fits(inner, expected)), f"value of {kind}")
    try:
        if kind == "$int" and str(int(inner)) == inner and abs(int(inner)) >= 2**53:
            return int(inner)
        if kind == "$float" and re.fullmatch("[7f]ff[0-9a-f]{13}", inner):
            return struct.unpack(">d", bytes.fromhex(inner))[0]
        if kind == "$bytes" and base64.b64encode(base64.b64decode(inner)).decode() == inner:
            return base64.b64decode(inner)
        if kind == "$tuple":
            return tuple(decode(inner))
        if kind == "$complex" and [type(part) for part in decode(inner)] == [float, float]:
            return complex(*decode(inner))
        pairs = {decode(key): decode(item) for key, item in inner} if kind == "$dict" else {}
        if any(not isinstance(key, str) or key.startswith("$") for key in pairs):
            check(len(pairs) == len(inner), "two equal keys of a $dict")
            return pairs
    except (TypeError, ValueError) as error:
        raise Corrupt(f"value of {kind}: {error}") from None
    raise (Newer if unknown else Corrupt)(f"value of {kind}")
