"""The quick way to read tensors of a header gives what the strict parser does, or nothing."""

import random
from dataclasses import replace
from typing import Any

import pytest

from holdfast._core import read_listed
from holdfast.errors import HoldfastError
from holdfast.format import header as header_module
from holdfast.format import spec
from holdfast.format.header import Header, decode_header, encode_header
from holdfast.format.values import write_json
from holdfast.layout import Path, Tensor

SEED = 20240621
PLAIN: tuple[Path, ...] = (
    ("t", "a.0.weight"),
    ("t", "a.1.weight"),
    ("",),
    ("", ""),
    ("größe", "✓"),
)
ODD: tuple[Path, ...] = (
    ("t", 'a"b'),
    ("t", "a\\b"),
    ("t", "a\nb"),
    ("t", 3),
    ("t", ("list", 2)),
    ("t", '},{"path":['),
    ("x" * 2000,),
)
BRACKETS: tuple[Path, ...] = (("a],b",), ("a},{b",), ("[],", "}],"), ("tensors:[",))
# What a liar may put anywhere: pieces of the form itself, and what JSON takes otherwise.
PIECES = (
    *('"', ",", "[", "]", "{", "}", "\\", "\n", " ", "0", "1", "-1", "1e3", "null", "true", ":"),
    *('],"ties":[', '}],"ties":[', ',"tensors":[{"path":[', '"tensors":[]', '},{"path":["t"]'),
    *(',"tensors":[]', '"a"],["b"', '"dtype":"f32"', '"shape":[2]', ',"codec":0', ',"codec":1'),
    *('{"path":["t","u"],"dtype":"f32","shape":[2],"codec":0}', '"x":{', "\x00", "\ud7ff", "é"),
)


def header_of(paths: tuple[Path, ...], **more: Any) -> Header:
    """Make a header whose tensors have these paths."""
    shapes = ((), (0,), (2, 3), (4096,))
    tensors = tuple(
        Tensor(path, ("f32", "bf16", "u8")[number % 3], shapes[number % 4])
        for number, path in enumerate(paths)
    )
    said: dict[str, Any] = {"metrics": {}, "ties": (), "objects": ()} | more
    return Header("0" * 32, 7, 2, None, written_by="a", chunk_elements=64, tensors=tensors, **said)


def outcome(text: bytes) -> str:
    """Say what a text is read as."""
    try:
        return repr(decode_header(text))
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"


def strict(text: bytes) -> str:
    """Say what the strict parser alone reads a text as."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(header_module, "read_listed", lambda _: None)
        return outcome(text)


@pytest.mark.parametrize("paths", [PLAIN, BRACKETS, PLAIN[:1]])
def test_what_holdfast_writes_is_read_the_quick_way(paths: tuple[Path, ...]) -> None:
    text = encode_header(header_of(paths, ties=((("tied",), 0),), objects=((("o", 1), [1, {}]),)))
    listed = read_listed(text)
    if paths is not BRACKETS:  # these may look like the ends of something
        assert listed is not None and listed[1] == list(paths)
    assert outcome(text) == strict(text)
    assert decode_header(text).tensors == header_of(paths).tensors


@pytest.mark.parametrize("forms", [1, 7, 50])
def test_each_tensor_has_its_own_form_of_many(forms: int) -> None:
    header = header_of(tuple(("t", f"{number}") for number in range(200)))
    shapes = [(kind, *range(kind % 5)) for kind in random.Random(SEED).choices(range(forms), k=200)]
    pairs = zip(header.tensors, shapes, strict=True)
    tensors = tuple(Tensor(tensor.path, "f32", shape) for tensor, shape in pairs)
    text = encode_header(replace(header, tensors=tensors))
    listed = read_listed(text)
    assert listed is not None and len(listed[3]) == len(set(shapes))
    assert decode_header(text).tensors == tensors
    assert outcome(text) == strict(text)


@pytest.mark.parametrize("path", ODD)
def test_what_is_written_otherwise_is_left_to_the_strict_parser(path: Path) -> None:
    header = header_of((*PLAIN, path))
    text = encode_header(header)
    assert read_listed(text) is None
    assert decode_header(text).tensors == header.tensors


@pytest.mark.parametrize(
    ("found", "put"),
    [
        (
            '"metrics":{}',
            '"metrics":{"a":1,"tensors":[{"path":["t"],"dtype":"f32","shape":[2],"codec":0}],"ties":[]}',
        ),
        ('"codec":0}', '"codec":0,"codec":0}'),
        ('"codec":0}', '"codec":00}'),
        ('"codec":0}', '"codec":1}'),
        ('"shape":[0]', '"shape":[9223372036854775808]'),
        ('"shape":[0]', '"shape":[999999999999999999,999999999999999999]'),
        ('"dtype":"u8"', '"dtype":"u9"'),
        ('["t","a.0.weight"]', '["t","a.1.weight"]'),
        ('["t","a.0.weight"]', "[]"),
        ('["t","a.0.weight"]', '["t","a.0.weight",""' + ',"x"' * 130 + "]"),
        ('["t","a.0.weight"]', '["t" ,"a.0.weight"]'),
        ('"ties":[', '"tensors":[],"ties":['),
        ('"objects":[', '"ties":[],"objects":['),
    ],
)
def test_a_lie_about_tensors_is_refused_as_by_the_strict_parser(found: str, put: str) -> None:
    text = encode_header(header_of(PLAIN)).decode().rstrip()
    lie = text.replace(found, put, 1)
    assert lie != text
    data = lie.encode()
    assert outcome(data + b" " * (-len(data) % 8)) == strict(data + b" " * (-len(data) % 8))


def test_members_moved_behind_a_stray_comma_are_refused() -> None:
    text = encode_header(header_of(PLAIN)).decode().rstrip()
    begin, end = text.index(',"tensors":['), text.index(',"objects":[')
    lie = f"{{{text[begin:end]},{text[1:begin]}{text[end:]}".encode()
    assert strict(lie).startswith("CorruptError: the JSON header does not parse")
    assert outcome(lie) == strict(lie)


def test_a_value_that_looks_like_the_tensors_is_a_value() -> None:
    entry = {"path": ["x"], "dtype": "f32", "shape": [2], "codec": 0}
    value = {"a": 1, "tensors": [entry], "ties": [], "objects": []}
    for paths in ((), PLAIN):
        header = header_of(paths, objects=((("o",), value),))
        text = encode_header(header)
        assert (read_listed(text) is None) == (paths == ())
        assert decode_header(text).objects == ((("o",), value),)
        assert decode_header(text).tensors == header.tensors


def test_a_text_that_reaches_into_the_next_path_is_refused() -> None:
    text = encode_header(header_of((("a",), ("b",)))).decode().rstrip()
    lie = text.replace('["a"]', '["a]').replace('["b"]', '[b"]').encode()
    assert strict(lie).startswith("CorruptError: the JSON header does not parse")
    assert outcome(lie) == strict(lie)


def test_changed_texts_are_read_as_by_the_strict_parser() -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    texts = [
        encode_header(header_of(paths, objects=objects)).decode().rstrip()
        for paths in (PLAIN, BRACKETS, PLAIN[:1])
        for objects in ((), ((("o",), {"a": [1]}),))
    ]
    quick = 0
    for _ in range(4000):
        text = chance.choice(texts)
        for _ in range(chance.choice((1, 1, 2, 3))):
            at = chance.randrange(len(text))
            end = at + chance.choice((0, 0, 1, 2, 40))
            if chance.random() < 0.3:  # something that stands there already
                start = chance.randrange(len(text))
                piece = text[start : start + chance.randrange(80)]
            else:
                piece = chance.choice(PIECES)
            text = text[:at] + piece + text[end:]
        data = text.encode()
        quick += read_listed(data) is not None
        assert outcome(data) == strict(data), text
    assert quick > 200  # else the quick way is not tried


@pytest.mark.parametrize(
    "broken",
    [
        *(b"\xff", b"\x80", b"\xc3", b"\xe2\x9c"),  # no first byte, or too few behind it
        *(b"\xc0\xaf", b"\xe0\x80\xaf", b"\xf0\x80\x80\xaf"),  # "/", needlessly long
        *(b"\xed\xa0\x80", b"\xed\xa0\xbd\xed\xb8\x80"),  # halves of a surrogate pair
        *(b"\xf4\x90\x80\x80", b"\xef\xbb\xbf\xff"),  # behind the last character
    ],
)
def test_text_that_is_not_utf8_is_refused(broken: bytes) -> None:
    text = encode_header(header_of(PLAIN)).rstrip()
    for found in (b"a.1.weight", "größe".encode()):
        assert read_listed(text.replace(found, broken)) is None
    for found in (b"a.1.weight", b'"f32"', b'"written_by":"', b'"objects":[', b'{"save_id'):
        lie = text.replace(found, found + broken, 1)
        assert strict(lie).startswith("CorruptError: the JSON header does not parse")
        assert outcome(lie) == strict(lie)


def test_paths_at_their_bounds_are_read_the_quick_way() -> None:
    text = "x" * (spec.PATH_BYTES_MAX // 4 - 4)  # brackets and quotes besides
    keys = ("x",) * spec.PATH_KEYS_MAX
    for path, more in ((keys, (*keys, "x")), ((text,), (text + "x",))):
        data = encode_header(header_of((*PLAIN, path))).rstrip()
        listed = read_listed(data)
        assert listed is not None and listed[1] == [*PLAIN, path]
        lie = data.replace(write_json(path).encode(), write_json(more).encode())
        assert lie != data
        assert read_listed(lie) is None
        assert outcome(lie) == strict(lie)


def test_paths_that_begin_alike_are_told_apart() -> None:
    chance = random.Random(SEED)
    paths = {tuple(chance.choices(("ab", "cd", ""), k=chance.randrange(1, 5))) for _ in range(200)}
    paths_in_order = tuple(chance.sample(sorted(paths), len(paths)))
    listed = read_listed(encode_header(header_of(paths_in_order)))
    assert listed is not None and listed[1] == list(paths_in_order)
