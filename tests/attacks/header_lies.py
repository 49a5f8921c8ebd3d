"""Lies in the preamble and the JSON header of a MANIFEST, in the order of docs/format.md §6."""

import zlib
from collections.abc import Callable

from format.forge import FOOTER_MAGIC, Forgery

from .lies import NEWER, key, lie, preamble, tensor, text, text_bytes, text_of, value

DEEP = b"[" * 100_000 + b"]" * 100_000
SIZES = r"preamble does not fit its \d+ bytes"

preamble("another magic", 0, FOOTER_MAGIC, "its magic is 89484646")
preamble("a newer version", 1, 2, "format version 2; this holdfast reads version 1", NEWER)
preamble("version 0", 1, 0, SIZES)
preamble("something in the first zero", 2, 1, SIZES)
preamble("more bytes than the file", 3, 2**63, SIZES)
preamble("fewer bytes than the file", 3, 88, SIZES)
preamble("a JSON header larger than the file", 4, 2**40, SIZES)
preamble("a JSON header of 2^64 - 8 bytes", 4, 2**64 - 8, SIZES)
preamble("more files than the table holds", 5, 3, SIZES)
preamble("2^62 files, whose bytes wrap around", 5, 2**62 + 2, SIZES)
preamble("2^59 shards, whose bytes wrap around", 6, 2**59 + 3, SIZES)
preamble("2^60 chunks, whose bytes wrap around", 7, 2**60 + 4, SIZES)
preamble("2^61 box numbers, whose bytes wrap around", 8, 2**61 + 10, SIZES)


def stream_of(body: bytes, change: Callable[[bytes], bytes] = bytes) -> bytes:
    stream = change(zlib.compress(body))
    return stream + bytes(-len(stream) % 8)


def packed(name: str, change: Callable[[bytes], bytes], text: str, more: int = 0) -> None:
    """A lie in a packed table, or in the bytes of its JSON header: so many more than it has."""

    def tell(forgery: Forgery) -> None:
        forgery.manifest.pack = lambda body: stream_of(body, change)
        forgery.manifest.preamble |= {4: len(text_bytes(forgery)) + more} if more else {}

    lie(name, text)(tell)


TAKES, PACKED = r"JSON header takes \d+ bytes", r"packed into \d+ bytes, from \d+"
UNPACKS = r"does not unpack to \d+ bytes"
preamble("the length of a stream where there is none", 9, 8, SIZES)
packed("a packed table with a JSON header of 7 bytes more", lambda s: s, TAKES, 7)
packed("a packed table with a JSON header of 2^62 bytes", lambda s: s, TAKES, 2**62)
packed("a packed table of 256 MiB in a few bytes", lambda s: s, PACKED, 2**28 - 4096)
packed("a packed table of 8 bytes more than the stream has", lambda s: s, UNPACKS, 8)
packed("a packed table of 8 bytes less than the stream has", lambda s: s, UNPACKS, -8)
packed("a packed table that grows", lambda s: s + bytes(4096), PACKED)
packed("a packed table that is no stream", lambda s: bytes(len(s)), "cannot be unpacked")
packed("a packed table with another sum", lambda s: s[:-1] + b"?", "cannot be unpacked")
# What is padded with zeros may end as a stream does, with another sum.
CUT = UNPACKS + "|incorrect data check"
packed("a packed table that is cut off", lambda s: s[:-16], CUT)
packed("a byte behind a packed table", lambda s: s + b"?", UNPACKS)
packed("padding behind a packed table", lambda s: s + bytes(8), UNPACKS)
packed("two packed tables", lambda s: s + zlib.compress(b"{}"), UNPACKS)


@lie("a stream of a length that is no multiple of 8", PACKED)
def _(forgery: Forgery) -> None:
    forgery.manifest.pack = lambda body: stream_of(body) + b"\0"


@lie("a packed table of 2^27 chunks", PACKED)
def _(forgery: Forgery) -> None:
    forgery.manifest.pack = stream_of
    forgery.manifest.preamble[7] = 2**27


@lie("chunks counted as box numbers", "not hold as many chunks")
def _(forgery: Forgery) -> None:
    forgery.manifest.preamble |= {7: 3, 8: 12}


@lie("a JSON header of a length that is no multiple of 8", r"JSON header takes \d+ bytes")
def _(forgery: Forgery) -> None:
    text_of(forgery, b'"step":7', b'"step":7')
    forgery.manifest.header += b" "


@lie("a byte behind the table", SIZES)
def _(forgery: Forgery) -> None:
    forgery.tail = b"\x00"


text("JSON that is not UTF-8", b'"x"', b'"\xff"', "does not parse: 'utf-8' codec")
text("JSON that is cut off", b'"x"]}]}', b'"x"]}]', "does not parse")
text("two JSON objects", b'"x"]}]}', b'"x"]}]}{}', "does not parse")
text("a repeated key", b'"step":7', b'"step":7,"step":7', "repeats a key")
text("a repeated key far within", b'[1,"x"]', b'{"a":1,"a":1}', "repeats a key")
text("NaN", b'[1,"x"]', b"NaN", "holds NaN")
text("Infinity", b'[1,"x"]', b"-Infinity", "holds -Infinity")
text(
    "a number too large for binary64", b'[1,"x"]', b"1e999", "not finite|not in its canonical form"
)
text("an integer of 100,000 digits", b'[1,"x"]', b"9" * 100_000, "does not parse: Exceeds")
text("nesting of 65 levels", b'[1,"x"]', b"[" * 62 + b"]" * 62, "deeper than 64 levels")
text("nesting of 100,000 levels", b'[1,"x"]', DEEP, "does not parse: maximum recursion")
text("half a surrogate pair", b'"x"', b'"\\ud800"', "not Unicode")
text("half a surrogate pair in a path", b'["v"]', b'["\\udfff"]', "not Unicode")
text("a byte-order mark", b'{"save_id"', b'\xef\xbb\xbf{"save_id"', "does not parse|byte-order")


@lie("a JSON list", "JSON header is not an object")
def _(forgery: Forgery) -> None:
    forgery.manifest.header = [forgery.header]


@lie("a missing key", "does not have the keys of version 1")
def _(forgery: Forgery) -> None:
    del forgery.header["metrics"]


@lie("an unknown key", "does not have the keys of version 1")
def _(forgery: Forgery) -> None:
    forgery.header["more"] = None


@lie("nothing but spaces", "padded by 64 spaces")
def _(forgery: Forgery) -> None:
    forgery.manifest.header = b" " * 64


@lie("more than 7 spaces behind the JSON text", r"padded by \d+ spaces")
def _(forgery: Forgery) -> None:
    text_of(forgery, b'"step":7', b'"step":7')
    forgery.manifest.header += b" " * 8


for name, wrong in {
    "short": "ab",
    "upper-case": "AB" * 16,
    "a way out": "../../../../../../../../../etc/x",
    "a number": 5,
    "digits of another script": "\u0663" * 32,
}.items():
    key(f"a save_id that is {name}", "save_id", wrong, "save_id is .*; expected 32 hexadecimal")

for name, wrong in {"negative": -1, "a fraction": 1.5, "true": True, "2^53": 2**53}.items():
    key(f"a step that is {name}", "step", wrong, "step is .*; expected an integer")
for name, wrong in {"0": 0, "true": True, "2^32": 2**32, "text": "2"}.items():
    key(f"a world_size that is {name}", "world_size", wrong, "world_size is .*; expected an int")
for name, wrong in {"0": 0, "true": True, "a fraction": 4.0, "past 2^20": 2**20 + 1}.items():
    key(f"chunk_elements that are {name}", "chunk_elements", wrong, "chunk_elements is")
key("a mesh that is a list", "mesh", [2], "mesh is neither null nor an object")
key("a mesh with more names than sizes", "mesh", {"shape": [2], "names": ["a", "b"]}, "one length")
key("a mesh of text", "mesh", {"shape": ["2"], "names": ["a"]}, "a dimension is '2'")
key("metrics that are a list", "metrics", [], "metrics is not an object of numbers")
key("metrics that are text", "metrics", {"loss": "1"}, "metrics is not an object of numbers")
key("metrics that are true", "metrics", {"loss": True}, "metrics is not an object of numbers")
key("a writer that is a number", "written_by", 5, "written_by is 5; expected text")
key("an unknown feature", "features", [{"name": "dedup", "since": "9.0"}], "'dedup', .*9.0", NEWER)
key("features that are an object", "features", {}, "'features' of its JSON header is not a list")
key("a feature of number 5", "features", [{"name": 5, "since": "9.0"}], "name of a feature is 5")
key("a feature without a name", "features", [{"since": "9.0"}], "a feature of its JSON header has")
key("an unknown codec", "codecs", [{"name": "zip"}], "the codec 'zip', which this holdfast", NEWER)
key("a codec with another key", "codecs", [{"name": "raw", "level": 1}], "a codec of its JSON")
key("a codec without a name", "codecs", [{}], "the name of a codec is None; expected text")
key("codecs that are text", "codecs", "raw", "'codecs' of its JSON header is not a list")

tensor("an unknown dtype", "dtype", "f33", "the dtype 'f33' is unknown")
tensor("a dtype that is a list", "dtype", ["f32"], r"the dtype \['f32'\] is unknown")
tensor("a shape that is a number", "shape", 12, "the shape 12 is not a list")
tensor("a negative dimension", "shape", [-3, -4], "a dimension is -3; expected an integer from 0")
tensor("a dimension that is a fraction", "shape", [3.0, 4], "a dimension is 3.0")
tensor("a dimension that is true", "shape", [True, 12], "a dimension is True")
tensor("65 dimensions", "shape", [1] * 65, "not a list of at most 64 dimensions")
tensor("a shape of 2^64 bytes", "shape", [2**31, 2**31], r"2\^63 bytes or more")
tensor("a dimension of 2^200", "shape", [2**200], r"2\^63|a dimension is")
tensor("no elements of a shape no memory holds", "shape", [0, 2**40, 2**40], r"2\^63 bytes")
tensor(
    "more elements than its shards hold", "shape", [3, 5], "cover 12 of 15 elements|has 2 chunks"
)
tensor("fewer elements than its shards hold", "shape", [2, 4], "leaves the tensor")
tensor("fewer dimensions than its shards have", "shape", [12], "boxes do not fit its shards")
tensor("another dtype than its payloads", "dtype", "f64", "payload of another size or mode")
tensor("a codec that is not in the table", "codec", 1, "codec 1 is not in the table of 1")
tensor("a codec that is negative", "codec", -1, "codec is -1")

NO_KEY = "is not a key of a path"
tensor("a path that is empty", "path", [], r"\[\] is not a path")
tensor("a path that is text", "path", "w", "'w' is not a path")
tensor("a path of 129 keys", "path", ["k"] * 129, "is not a path")
tensor(
    "a path of more than 4 KiB",
    "path",
    ["w" * 4093],
    "a path takes 4097 bytes; expected at most 4096",
)
tensor("a key that is null", "path", [None], f"None {NO_KEY}")
tensor("a key that is true", "path", [True], f"True {NO_KEY}")
tensor("a key that is a fraction", "path", [1.5], f"1.5 {NO_KEY}")
tensor("a key of 2^63", "path", [2**63], f"9223372036854775808 {NO_KEY}")
tensor("a position of another kind", "path", [["set", 1]], NO_KEY)
tensor("a position that is negative", "path", [["list", -1]], NO_KEY)
tensor("a position that is true", "path", [["list", True]], NO_KEY)
tensor("a position without a number", "path", [["list"]], NO_KEY)
tensor("the path of another tensor", "path", ["b"], "names a path twice")
tensor("the path of a tie", "path", ["t", 1], "names a path twice")
tensor("the path of a value", "path", ["v"], "names a path twice")


@lie("a tensor without a dtype", "a tensor of its JSON header has the keys")
def _(forgery: Forgery) -> None:
    del forgery.header["tensors"][0]["dtype"]


key("tensors that are an object", "tensors", {}, "'tensors' of its JSON header is not a list")
key("a tie to no tensor", "ties", [{"path": ["t"], "tensor": 3}], "a tie names tensor 3 of 3")
key("a tie to a negative tensor", "ties", [{"path": ["t"], "tensor": -1}], "tie is -1")
key("a tie to true", "ties", [{"path": ["t"], "tensor": True}], "tie is True")
key("a tie with another key", "ties", [{"path": ["t"], "tensor": 1, "x": 1}], "a tie of its JSON")
key("an object without a value", "objects", [{"path": ["v"]}], "an object of its|a object of its")

value("an unknown tag", {"$future": [1]}, r"has the tag '\$future'.*Upgrade holdfast", NEWER)
value("an unknown tag in a list", [1, {"a": {"$later": 1}}], r"has the tag '\$later'", NEWER)
value("a tag of no name", {"$": [1]}, "is not the name of a tag")
value("a tag that is no name", {"$A b": [1]}, "is not the name of a tag")
value("two tags at once", {"$int": "9" * 20, "$bytes": ""}, "tagged value has 2 keys")
value("a tag beside a key", {"$int": "9" * 20, "a": 1}, "tagged value has 2 keys")
value("a large integer without its tag", 2**53, "has no .int tag")
value(
    "a small integer with a tag",
    {"$int": "7"},
    "not a large decimal integer|not in its canonical form",
)
value("an integer with a sign too many", {"$int": "+" + "9" * 20}, "not a large decimal|form")
value("an integer with underscores", {"$int": "9_" * 20 + "9"}, "not a large decimal|form")
value("an integer that is a number", {"$int": 2**60}, r"\$int|has no")
value("a finite float with a tag", {"$float": "3ff0000000000000"}, "content of .float is finite")
value("a float of 15 digits", {"$float": "7ff000000000000"}, "not 16 lower-case hexadecimal")
value("a float in capitals", {"$float": "7FF0000000000000"}, "not 16 lower-case hexadecimal")
value("bytes that are not base64", {"$bytes": "@@@@"}, r"\$bytes")
value("bytes without padding", {"$bytes": "eA"}, r"\$bytes")
value("bytes with a bit too many", {"$bytes": "eB=="}, r"\$bytes|not in its canonical form")
value("a complex number of integers", {"$complex": [1, 2]}, "not two floats")
value("a complex number of three", {"$complex": [1.0, 2.0, 3.0]}, r"\$complex")
value("a tuple that is an object", {"$tuple": {}}, "content of .tuple is not a list")
value("a dict without its tag's need", {"$dict": [["a", 1]]}, r"\$dict|not in its canonical form")
value("a dict that repeats a key", {"$dict": [[1, 1], [1, 2]]}, "repeats a key")
value("a dict that repeats a key as a float", {"$dict": [[1, 1], [1.0, 2]]}, "repeats a key")
value("a dict with a list for a key", {"$dict": [[[1], 1]]}, r"\$dict")
value("a dict of no pairs", {"$dict": [[1]]}, r"\$dict")
value("a dict that is a number", {"$dict": 5}, r"\$dict")
