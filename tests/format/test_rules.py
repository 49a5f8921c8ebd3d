"""The core's one pass over a plain table, against the rules column by column.

Both derive the same of a table that is right. Whatever is changed in one, the core accepts nothing
that the rules do not, and derives the same of what it accepts.
"""

import random
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path as FilePath

import numpy as np
import pytest

import holdfast
from holdfast.errors import CorruptError
from holdfast.format.manifest import (
    Derived,
    Manifest,
    check_table,
    derive_at_once,
    derive_by_columns,
)
from holdfast.format.spec import MANIFEST_MAGIC
from holdfast.format.table import Table, decode_table

from .simulated_ranks import save_pieces
from .test_reader import random_states

TABLES = 24
CHANGES = 150  # of each table
COLUMNS = [field.name for field in fields(Table) if field.name != "header"]
# Nothing that is derived depends on them.
FREE = {"file_footer_checksum", "shard_digest", "chunk_checksum"}


def saved(path: FilePath, chance: random.Random) -> Table:
    """Save tensors of several ranks, some in several shards; return the MANIFEST's table."""
    states, _ = random_states(chance)
    options = holdfast.Options(
        chunk_elements=chance.choice([1 << 20, 64, 7, 1]),
        file_bytes=chance.choice([255 << 30, 1 << 16]),
        pool_bytes=32 << 20,
    )
    save_pieces(path, states, options=options)
    return decode_table(MANIFEST_MAGIC, (path / "MANIFEST").read_bytes())


def changed(table: Table, chance: random.Random) -> Table:
    """Change one number, or exchange two rows, or leave some out."""
    name = chance.choice([name for name in COLUMNS if name not in FREE])
    column = getattr(table, name).copy()
    if not column.size:
        return table
    at = chance.randrange(len(column))
    match chance.randrange(5):
        case 0:
            column[at] = abs(int(column[at]) + chance.choice([1, -1, 64, -64]))
        case 1:
            column[at] = chance.choice([0, 1, np.iinfo(column.dtype).max])
        case 2:
            other = chance.randrange(len(column))
            column[at], column[other] = column[other], column[at]
        case 3:
            column[at] = chance.choice(column.tolist())
        case 4:
            column[at:] = column[at:][::-1].copy()
    return replace(table, **{name: column})


def at_once(table: Table) -> Derived | None:
    manifest = check_table(GOOD[id(table.header)])
    return derive_at_once(table, manifest.item_bytes.tolist())


def by_columns(table: Table) -> Derived | None:
    manifest = check_table(GOOD[id(table.header)])
    try:
        return derive_by_columns(table, manifest.item_bytes)
    except (CorruptError, IndexError, ValueError):
        return None


GOOD: dict[int, Table] = {}  # by header


def assert_same(one: Derived, other: Derived) -> None:
    names = [field.name for field in fields(Manifest)]
    derived = names[names.index("chunk_elements") : names.index("is_cut") + 1]
    for name, a, b in zip(derived, one, other, strict=True):
        assert np.array_equal(a, b), name


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Table]]:
    path, chance = tmp_path_factory.mktemp("tables"), random.Random(11)
    tables = [saved(path / f"{number}", chance) for number in range(TABLES)]
    GOOD.update({id(table.header): table for table in tables})
    yield tables


def test_both_derive_the_same_of_a_table_that_is_right(tables: list[Table]) -> None:
    for table in tables:
        one, other = at_once(table), by_columns(table)
        assert one is not None and other is not None
        assert_same(one, other)
    assert max(len(table.file_bytes) for table in tables) > 3
    assert any(len(table.shard_tensor) > len(table.header.tensors) for table in tables)


def test_the_core_accepts_nothing_that_the_rules_refuse(tables: list[Table]) -> None:
    chance, refused, accepted = random.Random(12), 0, 0
    for table in tables:
        for _ in range(CHANGES):
            other = changed(table, chance)
            if (derived := at_once(other)) is None:
                refused += 1
                continue
            accepted += 1
            expected = by_columns(other)
            assert expected is not None
            assert_same(derived, expected)
    assert min(refused, accepted) > 1000


def test_a_table_of_no_tensor_is_right(tmp_path: FilePath) -> None:
    holdfast.save({"step": 1}, tmp_path / "a")
    table = decode_table(MANIFEST_MAGIC, (tmp_path / "a" / "MANIFEST").read_bytes())
    GOOD[id(table.header)] = table
    one, other = at_once(table), by_columns(table)
    assert one is not None and other is not None
    assert_same(one, other)


def test_columns_of_several_lengths_are_refused(tables: list[Table]) -> None:
    table = tables[0]
    with pytest.raises(ValueError, match="lengths"):
        at_once(replace(table, file_rank=np.append(table.file_rank, np.uint32(0))))
