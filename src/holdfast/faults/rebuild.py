"""Footers → the table that a lost MANIFEST held, without what it alone knew. Guesses nothing.

What is contradictory is refused; what cannot be known is named. Reads no payload.
"""

import errno
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise

import numpy as np

from .._core import xxh3_64
from ..engine.check import check_files
from ..engine.read import open_data_file
from ..errors import CorruptError, StoreError, VersionError
from ..format import spec
from ..format.coding import Coding
from ..format.data_file import check_header, chunk_seed, decode_trailer
from ..format.header import Header, decode_header, encode_header
from ..format.manifest import Manifest, check_table, encode_manifest
from ..format.names import data_file_name, dotted, is_save_id
from ..format.order import merge_orders
from ..format.table import Table, decode_table, unpacked_bytes
from ..format.unfinished import COPY_PREFIX, UPLOADING
from ..layout import ROLES, Group, Path, Tensor, tiling_fault
from ..stores.base import Entry, Store

_FILE_NAME = re.compile(r"([0-9]{5,10})-(0|[1-9][0-9]{0,9})\.hf")
SHOWN_MAX = 5  # of many things of a kind, in a text


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What the data files of one save say.

    Attributes:
        manifest: checked, but for whether the shards tile the tensors.
        partial: what is wrong with tensors that they do not tile, by index.
        unreadable: data files whose own table is damaged, with the fault.
        silent: ranks and numbers of which there is no file, for people; empty: none is missing.
        ordered: whether the order of the tensors is known.
        proven: the MANIFEST as it was written, where that is known to the bit.
    """

    manifest: Manifest
    partial: Mapping[int, str]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    ordered: bool = True
    proven: bytes = b""


@dataclass(frozen=True, slots=True)
class _Footer:
    name: str
    size_bytes: int
    checksum: int
    table: Table
    table_bytes: int  # unpacked

    @property
    def place(self) -> tuple[int, int]:
        return int(self.table.file_rank[0]), int(self.table.file_number[0])


def find_saves(store: Store) -> list[str]:
    """List the saves that have a directory for data files here; what is a link is none."""
    try:
        kinds = {entry.name: entry.kind for entry in store.list()}
        if kinds.get(spec.DATA_DIRECTORY) != "directory":
            return []
        entries = store.list(spec.DATA_DIRECTORY)
    except StoreError:
        return []
    return sorted(e.name for e in entries if e.kind == "directory" and is_save_id(e.name))


def rebuild(store: Store, save_id: str, orders: Sequence[Sequence[Path]] = ()) -> Rebuilt:
    """Put the table of a checkpoint together from the footers of its data files.

    Args:
        orders: those of tensors of checkpoints like this one, to take this one's from.

    Raises:
        CorruptError: they do not make one table; the text says why.
        VersionError: a newer holdfast wrote one of them.
        StoreError: the disk or the network failed.
    """
    footers, unreadable = _read_footers(store, save_id)
    if not footers:
        is_copy = any(name.rpartition("/")[2].startswith(COPY_PREFIX) for name in unreadable)
        raise CorruptError(
            f"{store.location}: no data file of the save {save_id} has a readable footer"
            + (f", as {UPLOADING}" if is_copy else "")
        )
    first = footers[0]
    for other in footers[1:]:
        _check_alike(first, other)
    tensors, codec_of, ordered = _merge_tensors(footers, orders)
    index = {tensor.path: number for number, tensor in enumerate(tensors)}
    header = replace(
        first.table.header,
        tensors=tensors,
        codec_of=codec_of if any(codec_of) else (),
        ties=_merge_ties(footers, index),
        codecs=_merge_codecs(footers, index),
    )
    manifest = check_table(_join(header, footers, index))
    if len(encode_manifest(manifest.table)) > spec.MANIFEST_BYTES_MAX:
        raise CorruptError(f"{store.location}: the footers make a MANIFEST of more than 1 GiB")
    manifest = replace(manifest, size_bytes=spec.MANIFEST_BYTES_MAX)
    check_files(store, manifest, range(len(footers)))  # each footer is a part of the whole
    partial = {
        number: fault
        for number, tensor in enumerate(tensors)
        if (fault := _tiling_fault(manifest, number, tensor))
    }
    silent = _silent([footer.place for footer in footers], header.world_size)
    return Rebuilt(manifest, partial, unreadable, silent, ordered)


def mend(store: Store, damaged: bytes) -> bytes | None:
    """Give a damaged MANIFEST its right columns and preamble, from the footers.

    Returns:
        the MANIFEST as it was written, which its own H128 proves; None: something else is damaged.
    """
    for save_id in find_saves(store):
        try:
            footers, _ = _read_footers(store, save_id)
            # Where nothing is packed, what the columns leave is the JSON header.
            rows = [len(footer.table.shard_tensor) for footer in footers]
            numbers = sum(len(footer.table.shard_box) for footer in footers)
            chunks = sum(len(footer.table.chunk_offset) for footer in footers)
            columns = 28 * len(footers) + 32 * sum(rows) + 16 * chunks + 8 * numbers
            end = len(damaged) - spec.TABLE_CHECKSUM_BYTES - columns
            header = decode_header(damaged[spec.PREAMBLE_BYTES : end])
            index = {tensor.path: number for number, tensor in enumerate(header.tensors)}
            mended = encode_manifest(_join(header, footers, index))
        except (CorruptError, VersionError, KeyError):
            continue
        if mended[-spec.TABLE_CHECKSUM_BYTES :] == damaged[-spec.TABLE_CHECKSUM_BYTES :]:
            return mended
    return None


def _read_footers(store: Store, save_id: str) -> tuple[list[_Footer], dict[str, str]]:
    """Read the footers of a save, by rank and number; say what is wrong with the others."""
    footers, unreadable, room = list[_Footer](), dict[str, str](), spec.MANIFEST_BYTES_MAX
    for entry in store.list(f"{spec.DATA_DIRECTORY}/{save_id}"):
        match = _FILE_NAME.fullmatch(entry.name)
        name = f"{spec.DATA_DIRECTORY}/{save_id}/{entry.name}"
        if not match or data_file_name(save_id, int(match[1]), int(match[2])) != name:
            unreadable[name] = "it is not named as a data file"
            continue
        try:
            footer = _read_footer(store, name, entry, (int(match[1]), int(match[2])), room)
        except (CorruptError, StoreError) as error:
            if isinstance(error, StoreError) and error.errno != errno.EIO:
                raise
            unreadable[name] = str(error)
        except VersionError as error:
            raise VersionError(f"{store.location}/{name}: {error}") from error
        else:
            footers.append(footer)
            room -= footer.table_bytes
    return sorted(footers, key=lambda footer: footer.place), unreadable


def _read_footer(
    store: Store, name: str, entry: Entry, place: tuple[int, int], room: int
) -> _Footer:
    """Read and check the footer of one file."""
    save_id, (rank, number) = name.split("/")[1], place
    if entry.kind != "file":
        raise CorruptError("it is not a regular file")
    descriptor = open_data_file(store, name, direct=False)
    try:
        vfs, size = store.vfs, store.vfs.size(descriptor)
        check_header(vfs.read(descriptor, spec.DATA_HEADER_BYTES, 0), save_id, rank, number)
        start = max(size - spec.TRAILER_BYTES, 0)
        offset, footer_bytes, checksum = decode_trailer(
            vfs.read(descriptor, spec.TRAILER_BYTES, start), size
        )
        if footer_bytes > room:
            raise CorruptError(f"its footer takes {footer_bytes} bytes, more than a MANIFEST may")
        footer = vfs.read(descriptor, footer_bytes, offset)
    finally:
        store.vfs.close(descriptor)
    if xxh3_64(footer, chunk_seed(save_id, rank, number, spec.FOOTER_CHUNK)) != checksum:
        raise CorruptError(f"the checksum of its footer (at {offset}) does not match its bytes")
    table = decode_table(spec.FOOTER_MAGIC, footer)
    found = (table.file_rank.tolist(), table.file_number.tolist(), table.header.save_id)
    if found != ([rank], [number], save_id):
        raise CorruptError("its footer is of another file")
    if table.header.objects or table.header.losses:
        raise CorruptError("its footer has objects or losses, which only a MANIFEST has")
    check_table(replace(table, file_bytes=np.array([size], np.uint64)))
    taken = unpacked_bytes(footer)
    if taken > room:
        raise CorruptError(f"its footer takes {taken} bytes, more than a MANIFEST may")
    return _Footer(name, size, checksum, table, taken)


def _check_alike(first: _Footer, other: _Footer) -> None:
    """Check that two footers are of one save."""
    mine, theirs = (json.loads(encode_header(footer.table.header)) for footer in (first, other))
    own = ("codecs", "tensors", "ties", "objects")  # of each file
    differing = [key for key in mine if key not in own and mine[key] != theirs.get(key)]
    names = [[codec["name"] for codec in values["codecs"]] for values in (mine, theirs)]
    differing += ["codecs"] * (names[0] != names[1]) + sorted(theirs.keys() - mine.keys())
    if differing:
        raise CorruptError(
            f"the footers of {first.name} and {other.name} differ in {', '.join(differing)}, so "
            "they are of different saves"
        )


def _merge_tensors(
    footers: Sequence[_Footer], orders: Sequence[Sequence[Path]]
) -> tuple[tuple[Tensor, ...], tuple[int, ...], bool]:
    """Join the tensors of all footers, and where they have their codecs; is the order known?"""
    found: dict[Path, tuple[Tensor, int]] = {}
    for footer in footers:
        header = footer.table.header
        for tensor, codec in zip(
            header.tensors, header.codec_of or [0] * len(header.tensors), strict=True
        ):
            if found.setdefault(tensor.path, (tensor, codec)) != (tensor, codec):
                raise CorruptError(
                    f"the footer of {footer.name} has {dotted(tensor.path)} with another dtype, "
                    "shape or codec than an earlier footer"
                )
    lists = [[tensor.path for tensor in footer.table.header.tensors] for footer in footers]
    order, ordered = _merge(lists, "tensors")
    for other in () if ordered else orders:
        known = [path for path in other if path in found]
        if len(known) == len(found) and all(_follows(part, known) for part in lists):
            order, ordered = known, True
            break
    return tuple(found[p][0] for p in order), tuple(found[p][1] for p in order), ordered


def _follows(part: Sequence[Path], order: Sequence[Path]) -> bool:
    place = {path: number for number, path in enumerate(order)}
    return all(place[a] < place[b] for a, b in pairwise(part))


def _merge(lists: Sequence[Sequence[Path]], what: str) -> tuple[list[Path], bool]:
    order, certain = merge_orders(lists)
    if order is None:
        raise CorruptError(f"the footers name {what} in contradicting orders")
    return order, certain


def _merge_ties(
    footers: Sequence[_Footer], index: Mapping[Path, int]
) -> tuple[tuple[Path, int], ...]:
    found: dict[Path, int] = {}
    for footer in footers:
        header = footer.table.header
        for path, number in header.ties:
            target = index[header.tensors[number].path]
            if path in index or found.setdefault(path, target) != target:
                raise CorruptError(f"the footers contradict each other on {dotted(path)}")
    lists = [[path for path, _ in footer.table.header.ties] for footer in footers]
    return tuple((path, found[path]) for path in _merge(lists, "ties")[0])


def _merge_codecs(footers: Sequence[_Footer], index: Mapping[Path, int]) -> tuple[Coding, ...]:
    """Join the groups of each codec, of which every footer has the members that it has."""
    codings = []
    for number, coding in enumerate(footers[0].table.header.codecs):
        parts = [
            [
                {role: index[header.tensors[i].path] for role, i in group.items()}
                for group in header.codecs[number].groups
            ]
            for header in (footer.table.header for footer in footers)
        ]
        codings.append(Coding(coding.name, _merge_groups(parts)))
    return tuple(codings)


def _merge_groups(parts: Sequence[Sequence[Group]]) -> tuple[Group, ...]:
    joined: dict[int, dict[str, int]] = {}  # by each member
    for group in (group for part in parts for group in part):
        whole: dict[str, int] = {}
        for known in (group, *(joined.get(member, {}) for member in group.values())):
            for role, member in known.items():
                if whole.setdefault(role, member) != member:
                    raise CorruptError("the footers contradict each other on a group of tensors")
        for member in whole.values():
            joined[member] = whole
    # Each group goes by its lowest member.
    order, _ = merge_orders(
        [[min(joined[next(iter(group.values()))].values()) for group in part] for part in parts]
    )
    if order is None:
        raise CorruptError("the footers name groups in contradicting orders")
    return tuple(
        {role: joined[member][role] for role in ROLES if role in joined[member]} for member in order
    )


def _join(header: Header, footers: Sequence[_Footer], index: Mapping[Path, int]) -> Table:
    """Put the columns of all footers one behind the other."""
    tables = [footer.table for footer in footers]
    owners = [
        np.array([index[t.path] for t in table.header.tensors], np.uint32)[table.shard_tensor]
        for table in tables
    ]
    files = [np.full(len(t.shard_tensor), n, np.uint32) for n, t in enumerate(tables)]
    kept = ["file_rank", "file_number", "file_chunks", "shard_digest", "shard_box"]
    kept += ["shard_first_chunk", "shard_chunks"]
    kept += ["chunk_checksum", "chunk_size_mode", "chunk_offset"]
    columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in kept}
    return Table(
        header=header,
        file_bytes=np.array([footer.size_bytes for footer in footers], np.uint64),
        file_footer_checksum=np.array([footer.checksum for footer in footers], np.uint64),
        shard_tensor=np.concatenate(owners),
        shard_file=np.concatenate(files),
        **columns,
    )


def _tiling_fault(manifest: Manifest, index: int, tensor: Tensor) -> str | None:
    held = [manifest.shard(number).box for number in manifest.shards_of(index).tolist()]
    return tiling_fault(tensor.shape, held)


def _silent(places: Collection[tuple[int, int]], world_size: int) -> tuple[str, ...]:
    """Name ranks without a file, and numbers that are left out, the first of many."""
    found: list[str] = []
    ranks = {rank for rank, _ in places}
    missing = world_size - len(ranks)
    if missing:
        shown = list(islice((r for r in range(world_size) if r not in ranks), SHOWN_MAX))
        more = " …" * (missing > SHOWN_MAX)
        found.append(f"rank{'s' * (missing > 1)} {', '.join(map(str, shown))}{more}")
    for rank in sorted(ranks):
        numbers = {number for other, number in places if other == rank}
        if len(numbers) <= max(numbers):
            left_out = next(n for n in range(max(numbers)) if n not in numbers)
            found.append(f"file {left_out} of rank {rank}")
    return tuple(found[:SHOWN_MAX])
