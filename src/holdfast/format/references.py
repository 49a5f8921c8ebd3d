"""Payloads that refer to others: which row each needs, and which need the base.

Knows columns; reads no file.
"""

import numpy as np

from ..boxes import I64, Bools, row_hashes, unflatten
from ..errors import CorruptError
from ..layout import ROLES
from . import spec
from .header import Header
from .table import U32, Table

NONE = -1


def find_references(table: Table, box_start: I64, first_row: I64) -> I64:
    """Find for each chunk the row of the chunk that its payload refers to.

    The chunk of the same number, of the shard of the same box in the same file, of the tensor of
    the group that the mode names.

    Returns:
        rows, `NONE` for those that refer to nothing; empty when all do.

    Raises:
        CorruptError: there is no such shard.
    """
    modes = table.chunk_size_mode >> np.uint32(24)
    wanted, other = _wanted_roles(table, modes)
    rows = np.flatnonzero(wanted != NONE)
    if not len(rows):
        return np.zeros(0, np.int64)
    shard = np.repeat(np.arange(len(first_row)), table.shard_chunks)[rows]
    unit, members = _units(table, box_start)
    needed = members[unit[shard] * len(ROLES) + wanted[rows]]
    second = members[unit[shard] * len(ROLES) + other[rows]]
    needed = np.where(needed == NONE, second, needed)
    if np.any(needed == NONE):
        raise CorruptError("a chunk refers to a shard that is not in its file")
    references = np.full(len(modes), NONE, np.int64)
    references[rows] = first_row[needed] + rows - first_row[shard]
    return references


def check_references(
    references: I64, file_first_chunk: I64, start: I64, size: I64, gap_start: I64
) -> None:
    """Check that payloads lie near those they refer to; let empty ones stand where these end.

    Args:
        references: of `find_references`, not empty.
    """
    rows = np.flatnonzero(references != NONE)
    needed = references[rows]
    if np.any(size[needed] == 0):
        raise CorruptError("a chunk refers to one of no payload")
    empty = rows[size[rows] == 0]
    start[empty] = gap_start[empty] = (start + size)[references[empty]]
    further = needed
    for _ in range(spec.REFERENCE_DEPTH_MAX):
        further = references[further[further != NONE]]
    if np.any(further != NONE):
        raise CorruptError("a chunk refers to one that refers to others in turn")
    # Ranges that overlap are one: what lies in it is read at once.
    low = np.minimum(start[rows], start[needed])
    high = np.maximum(start[rows] + size[rows], start[needed] + size[needed])
    file = np.searchsorted(file_first_chunk, rows, "right") << 40
    order = np.argsort(low + file)
    low, high = (low + file)[order], np.maximum.accumulate((high + file)[order])
    begins = np.flatnonzero(np.concatenate([[True], low[1:] >= high[:-1]]))
    ends = np.concatenate([begins[1:], [len(low)]]) - 1
    if np.any(high[ends] - low[begins] > spec.REFERENCE_BYTES_MAX):
        raise CorruptError("a chunk lies far from the one it refers to")


def find_based(table: Table) -> Bools:
    """Find for each chunk whether it refers to the base; empty when none does.

    Raises:
        CorruptError: there is no base.
    """
    modes = table.chunk_size_mode >> np.uint32(24)
    lookup = np.zeros((len(table.header.codecs), 256), np.int64)
    for number, codec in enumerate(table.header.codecs):
        for mode, roles in spec.MODES[codec.name].items():
            lookup[number, mode] = spec.BASE in roles
    based = _look_up(lookup, table, modes) > 0
    if not np.any(based):
        return np.zeros(0, np.bool_)
    if table.header.base is None:
        raise CorruptError("a chunk refers to a base, and it has none")
    return based


def _wanted_roles(table: Table, modes: U32) -> tuple[I64, I64]:
    """Return, for each chunk, the places in ROLES of what its mode refers to: one, or another."""
    first = np.full((len(table.header.codecs), 256), NONE, np.int64)
    second = first.copy()
    for number, codec in enumerate(table.header.codecs):
        for mode, roles in spec.MODES[codec.name].items():
            for role in roles:
                if role not in spec.FURTHER:
                    second[number, mode] = place = ROLES.index(role)
                    if first[number, mode] == NONE:
                        first[number, mode] = place
    return _look_up(first, table, modes), _look_up(second, table, modes)


def _look_up(lookup: I64, table: Table, modes: U32) -> I64:
    """Return what a table of (codecs, modes) says of each chunk."""
    if len(lookup) == 1:
        return np.asarray(lookup[0][modes])
    codec_of = np.array(table.header.codec_of or [0] * len(table.header.tensors), np.int64)
    shard_codec = codec_of[table.shard_tensor]
    return np.asarray(lookup[np.repeat(shard_codec, table.shard_chunks), modes])


def _units(table: Table, box_start: I64) -> tuple[I64, I64]:
    """Find the shards of the same box, in the same file, of the tensors of a group: a unit.

    Returns:
        (the unit of each shard; the shards of each unit by their roles, flat). The last unit has
        no shards: all that are of no group are of it.
    """
    group, role = _places(table.header)
    owner = table.shard_tensor.astype(np.int64)
    members = np.flatnonzero(group[owner] != NONE)
    ndim = (box_start[members + 1] - box_start[members]) // 2
    boxes = unflatten(table.shard_box, box_start[members], ndim)
    files = table.shard_file[members].astype(np.int64)
    columns = [group[owner[members]], files, *boxes.offset.T, *boxes.shape.T]
    # Shards of a unit mostly follow each other: only the first of such a run is looked up.
    begins = np.ones(len(members), np.bool_)
    begins[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    keys = np.column_stack([column[begins] for column in columns])
    _, first, unit = np.unique(row_hashes(keys), return_index=True, return_inverse=True)
    if not np.array_equal(keys, keys[first[unit]]):
        raise CorruptError("two shards of a group cannot be told apart")
    unit = unit[np.cumsum(begins) - 1]
    units = np.full(len(owner), len(first), np.int64)
    units[members] = unit
    by_role = np.full((len(first) + 1) * len(ROLES), NONE, np.int64)
    by_role[unit * len(ROLES) + role[owner[members]]] = members
    return units, by_role


def _places(header: Header) -> tuple[I64, I64]:
    """Return the number of each tensor's group, and its place in ROLES."""
    group = np.full(len(header.tensors), NONE, np.int64)
    role = np.zeros(len(header.tensors), np.int64)
    number = 0
    for codec in header.codecs:
        for members in codec.groups:
            for name, index in members.items():
                group[index], role[index] = number, ROLES.index(name)
            number += 1
    return group, role
