"""A short fuzz of what is not a payload, unguided: `make fuzz` does it at length.

Payloads are fuzzed by ctest: `make check`.
"""

import json
import random
from collections.abc import Callable, Iterator

import pytest

from . import parsers

SEED = 6
CHANGES = 2000
TOKENS = b'0123456789"{}[],:-.e\\$'


@pytest.fixture
def checkpoint() -> Iterator[parsers.Directory]:
    target = parsers.Directory()
    yield target
    target.close()


def changed(chance: random.Random, data: bytes) -> bytes:
    content = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 4])):
        at, way = chance.randrange(len(content)), chance.randrange(4)
        if way == 0:
            content[at] ^= 1 << chance.randrange(8)
        elif way == 1:
            content[at] = chance.choice(TOKENS)
        elif way == 2:
            del content[at : at + chance.choice([1, 4])]
        else:
            content.insert(at, chance.choice(TOKENS))
    return bytes(content)


@pytest.mark.parametrize("target", [parsers.value, parsers.header, parsers.table])
def test_both_readers_say_the_same(target: Callable[[bytes], None]) -> None:
    chance, name = random.Random(SEED), target.__name__
    inputs = parsers.seeds(name)
    for number in range(len(inputs) + CHANGES):
        data = inputs[number] if number < len(inputs) else changed(chance, chance.choice(inputs))
        try:
            target(data)
        except Exception as error:
            raise AssertionError(f"seed {SEED}, input {number}: {data!r}") from error


UNKNOWN, NAMELESS = {"name": "zip", "level": 3}, {"groups": []}
SINCE, BASE = {"since": "9.0"}, {"name": "base", "since": "0.1.0"}
FOUND = {  # by fuzzing: what one reader took, or called newer, and the other refused
    "a dimension of the mesh past 2^63": ("mesh", {"shape": [8**30, 2], "names": ["a", "b"]}),
    "a codec without a name behind an unknown one": ("codecs", [UNKNOWN, NAMELESS]),
    "an unknown codec behind one with strange keys": ("codecs", [{"name": "raw", "x": 1}, UNKNOWN]),
    "a feature without its keys behind an unknown one": ("features", [{"name": "x", **SINCE}, {}]),
    "an unknown feature behind one that stands twice": (
        "features",
        [BASE, BASE, {"name": "x", **SINCE}],
    ),
}


@pytest.mark.parametrize("key, value", FOUND.values(), ids=FOUND)
def test_both_readers_say_the_same_of_what_was_found(key: str, value: object) -> None:
    parsers.header(json.dumps(json.loads(parsers.EMPTY) | {key: value}).encode())


def test_both_readers_say_the_same_of_a_changed_checkpoint(checkpoint: parsers.Directory) -> None:
    chance = random.Random(SEED)
    for number in range(CHANGES // 16):
        data = chance.randbytes(7 * chance.choice([1, 1, 1, 2]))
        try:
            checkpoint(data)
        except Exception as error:
            raise AssertionError(f"seed {SEED}, input {number}: {data.hex()}") from error


def test_a_reader_that_takes_what_the_other_refuses_is_noticed(
    checkpoint: parsers.Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsers, "decode_header", lambda data: None)
    with pytest.raises(AssertionError, match="the other reader: Corrupt"):
        parsers.header(b"[]")
    with pytest.raises(AssertionError, match=r"the other reader: Corrupt\('value of \$set'"):
        parsers.value(b'{"$set":[2,1]}')
    content = next(data for data in parsers.seeds("table") if data[0] == 0)  # of a MANIFEST
    monkeypatch.setattr(parsers, "decode_manifest", lambda content, where: None)
    monkeypatch.setattr(parsers, "check_tiling", lambda manifest: None)
    with pytest.raises(parsers.REFUSALS):
        parsers.table(content[:5] + b"[" + content[5:])
