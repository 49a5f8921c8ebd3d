"""Random changes under right checksums: whatever a MANIFEST says, only our own errors come out."""

import copy
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import holdfast
from format.forge import COLUMNS, H128_BYTES, PREAMBLE_BYTES, Table, hash128
from holdfast.errors import HoldfastError

from .lies import OPTIONS, save_truth, target

NewPath = Callable[[], Path]
ROUNDS = 500
JUNK: list[Any] = [None, True, 0, -1, 1, 2, 2**31, 2**53, 2**63, 2**64, 10**30, 0.5, "", "w", "v"]
JUNK += [[], [0], [[]], {}, {"": 0}, {"$int": "1"}, ["list", 0], [["list", 0]], [["tuple", 2], "a"]]
JUNK += [["w", "x"], ["v", 1], ["b"], "f64", "f4_e2m1fn_x2", [0, 2**40], [1] * 64, "\x00\u202e" * 9]
NUMBERS = [0, 1, 2, 3, 4, 7, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]


def use(path: Path) -> None:
    """Ask everything one can ask of a checkpoint; errors of ours are answers."""
    with suppress(HoldfastError):
        holdfast.load(path, into=target(), options=OPTIONS)
    with suppress(HoldfastError):
        holdfast.load(path, into=target(), strict=False, options=OPTIONS)
    with suppress(HoldfastError):
        checkpoint = holdfast.open(path, options=OPTIONS)
        checkpoint.verify()
        checkpoint.objects()
        for name in checkpoint.names():
            checkpoint.info(name)
            with suppress(HoldfastError):
                checkpoint.tensor(name)
        checkpoint.state()


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], (dict, list)):
            found += places(value[key])
    return found


def change_json(chance: random.Random, content: bytes) -> bytes:
    table = Table.parse(content)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        container, key = chance.choice(places(table.header))
        if isinstance(container, list) and chance.random() < 0.4:
            container.insert(chance.choice([0, len(container)]), copy.deepcopy(chance.choice(JUNK)))
        elif chance.random() < 0.2 and not isinstance(container, dict):
            container.pop()
        elif chance.random() < 0.2:
            container[key] = copy.deepcopy(chance.choice(places(table.header))[0])
        else:
            container[key] = copy.deepcopy(chance.choice(JUNK))
    return table.encode()


def change_rows(chance: random.Random, content: bytes) -> bytes:
    table = Table.parse(content)
    for _ in range(chance.choice([1, 1, 2, 3])):
        name, letter, _ = chance.choice(COLUMNS)
        rows = table.columns[name]
        limit = {"Q": 2**64, "I": 2**32, "q": 2**63}.get(letter)
        if limit is None or not rows:
            continue
        row = chance.randrange(len(rows))
        new = chance.choice([*NUMBERS, rows[row] + 1, rows[row] - 1, rows[row] ^ 1 << 24])
        rows[row] = max(-limit if letter == "q" else 0, min(new, limit - 1))
        if chance.random() < 0.2:
            chance.shuffle(rows)
    return table.encode()


def change_bytes(chance: random.Random, content: bytes) -> bytes:
    body = bytearray(content[:-H128_BYTES])
    for _ in range(chance.choice([1, 2, 8])):
        at = chance.randrange(8, len(body))
        if chance.random() < 0.5:
            body[at] = chance.randrange(256)
        elif at < PREAMBLE_BYTES - 8:
            struct.pack_into("<Q", body, at & ~7, chance.choice(NUMBERS))
        else:
            del body[at : at + chance.choice([1, 8])]
    return bytes(body) + hash128(bytes(body))


@pytest.mark.parametrize("change", [change_json, change_rows, change_bytes])
def test_a_random_change_meets_our_own_errors_only(
    new_path: NewPath, change: Callable[[random.Random, bytes], bytes]
) -> None:
    path = new_path()
    save_truth(path)
    content = (path / "MANIFEST").read_bytes()
    for seed in range(ROUNDS):
        changed = change(random.Random(seed), content)
        (path / "MANIFEST").write_bytes(changed)
        try:
            use(path)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {changed[PREAMBLE_BYTES:]!r}") from error
    (path / "MANIFEST").write_bytes(content)
    assert holdfast.open(path).verify() == []
