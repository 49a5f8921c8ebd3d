"""Lies in further values (the feature `values`), in the order of docs/format.md §6."""

from typing import Any

from format.forge import Forgery

from .lies import CORRUPT, NEWER, lie

SINCE = {"name": "values", "since": "0.1.0"}
FORM = "not in its canonical form"


def further(name: str, value: Any, text: str, error: str = CORRUPT, named: bool = True) -> None:
    """A lie in a value, of a checkpoint that names the feature."""

    def tell(forgery: Forgery) -> None:
        forgery.header["objects"][0]["value"] = value
        forgery.header["features"] = [SINCE] if named else []

    lie(name, text, error)(tell)


further("a further value without its feature", {"$set": [1]}, "is not named", named=False)
further("the feature of no value", [1], "has no value of it")
further("a text like a tag under the feature", '"$set":', "has no value of it")
further("a tag of a later feature", {"$future": [1]}, r"has the tag '\$future'", NEWER)
further("two further tags at once", {"$set": [], "$frozenset": []}, "tagged value has 2 keys")
further("a set that repeats an element", {"$set": [1, 1]}, "stands twice")
further("a set that repeats an element as a float", {"$set": [1, 1.0]}, "stands twice")
further("a set out of order", {"$set": [2, 1]}, FORM)
further("a set with a list in it", {"$set": [[1]]}, r"\$set is malformed")
further("a set in a set", {"$set": [{"$set": []}]}, r"\$set is malformed")
further("a set that is a number", {"$set": 5}, r"\$set is malformed")
further("a set that is a text", {"$set": "ab"}, FORM)
further("an ordered dict that repeats a key", {"$ordered_dict": [[1, 1], [1, 2]]}, "stands twice")
further("an ordered dict of an object", {"$ordered_dict": {"ab": 1}}, f"{FORM}|malformed")
further("a default dict of eval", {"$default_dict": ["eval", []]}, r"\$default_dict is malformed")
further("a default dict of a list", {"$default_dict": [["list"], []]}, r"\$default_dict")
further("a range with a step of 0", {"$range": [0, 1, 0]}, r"\$range is malformed")
further("a range of floats", {"$range": [0.0, 1.0, 1.0]}, r"\$range is malformed")
further("a range of two", {"$range": [0, 1]}, f"{FORM}|malformed")
further("a deque above its limit", {"$deque": [1, [1, 2]]}, "more items than it may")
further("a deque with a limit below 0", {"$deque": [-1, []]}, "more items than it may")
further("a path with a part too many", {"$path": "a/./b"}, FORM)
further("a path with a zero byte", {"$path": ["a"]}, r"\$path")
further("a date of another form", {"$date": "20240101"}, FORM)
further("a date that is none", {"$date": "2024-02-30"}, r"\$date is malformed")
further("a date that is a number", {"$date": 5}, r"\$date is malformed")
further("a moment with a Z", {"$datetime": "2024-01-01T00:00:00Z"}, FORM)
further("a time of hour 24", {"$time": "24:00:00"}, r"\$time is malformed")
further("a span with seconds too many", {"$timedelta": [0, 86400, 0]}, FORM)
further("a span of floats", {"$timedelta": [0.0, 0, 0]}, r"\$timedelta is malformed")
further("a span of 10^12 days", {"$timedelta": [10**12, 0, 0]}, r"\$timedelta is malformed")
further("a zone of two days", {"$timezone": [2, 0, 0]}, r"\$timezone is malformed")
further("a decimal number of letters", {"$decimal": "abc"}, r"\$decimal is malformed")
further("a decimal number with a sign too many", {"$decimal": "+1"}, FORM)
further("a decimal number in other digits", {"$decimal": "\u0661"}, FORM)
further("a decimal number that is a number", {"$decimal": 1}, r"\$decimal is malformed")
further("a fraction by 0", {"$fraction": [1, 0]}, r"\$fraction is malformed")
further("a fraction not in lowest terms", {"$fraction": [2, 4]}, FORM)
further("a fraction of floats", {"$fraction": [0.5, 1]}, r"\$fraction is malformed")
further("a namespace of numbers", {"$namespace": {"$dict": [[1, 2]]}}, r"\$namespace is malformed")
further("a namespace that is a list", {"$namespace": []}, r"\$namespace is malformed")
further("an array of objects", {"$ndarray": ["|O", [1], "AAAAAAAAAAA="]}, "no dtype of the list")
further("an array of big-endian numbers", {"$ndarray": [">i4", [1], "AAAAAQ=="]}, "no dtype of")
further("an array of too few bytes", {"$ndarray": ["<i4", [2], "AAAAAQ=="]}, r"\$ndarray")
further("an array with a side of -1", {"$ndarray": ["<i4", [-1], "AAAAAQ=="]}, FORM)
further("an array of 2^62 sides of nothing", {"$ndarray": ["|u1", [0] * 70, ""]}, r"\$ndarray")
further("a number of two", {"$numpy": ["|u1", "AAA="]}, r"\$numpy is malformed")
further("changeable bytes that are not base64", {"$bytearray": "@@"}, r"\$bytearray")
further("a file at a position below 0", {"$bytes_io": ["", -1]}, r"\$bytes_io is malformed")
further("a file at a position that is true", {"$bytes_io": ["", True]}, f"{FORM}|malformed")
further("a member of no class", {"$enum": [5, 1]}, r"\$enum is malformed")
further("a member of a class alone", {"$enum": ["a.B"]}, r"\$enum is malformed")
further("fields that are no object", {"$dataclass": ["a.B", [1]]}, r"\$dataclass is malformed")
further("fields that are numbers", {"$dataclass": ["a.B", {"$dict": [[1, 2]]}]}, r"\$dataclass")
further("a size below 0", {"$size": [-1]}, r"\$size is malformed")
further("a size of floats", {"$size": [1.0]}, r"\$size is malformed")
