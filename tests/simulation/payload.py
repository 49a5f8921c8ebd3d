"""Tiny files in place of tensors: what the C++ pipeline would write, through the simulated store.

What is replaced is the payload's path alone: flattening, plans, chunks, codecs, reading. A rank's
file is 640 bytes that say of which save, rank, number and value they are. The tables and the
MANIFEST are real ones, made and checked by the format's own code, which is asked once for the same
bytes. Files are opened, synced, given up and tried again by the real `DataFileWriter` and
`write_shards`.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from format.file_rows import FileRows
from holdfast.arguments import decode_arguments
from holdfast.chains import recompress as recompress_module
from holdfast.codecs.base import Codec
from holdfast.engine import chain as chains
from holdfast.engine import (
    check,
    commit,
    copied_files,
    known,
    ledger,
    retire,
    transfer,
    write_pipeline,
)
from holdfast.engine import replace as replace_module
from holdfast.engine.file_plan import WriterPlan
from holdfast.engine.registry import RAW
from holdfast.errors import CorruptError, NotCommittedError, StoreError
from holdfast.format import manifest as manifests
from holdfast.format import table as tables
from holdfast.format import tiling
from holdfast.format.coding import Coding
from holdfast.format.header import Header
from holdfast.format.links import Base
from holdfast.format.manifest import Manifest
from holdfast.format.names import data_file_name
from holdfast.format.rows import Planned, decode_written, encode_written, written_in
from holdfast.format.spec import MODE_UNCHANGED
from holdfast.format.table import Table
from holdfast.group.phase import Phase
from holdfast.group.replies import decode_replies
from holdfast.layout import Box, Shard, Tensor
from holdfast.loading import load as load_module
from holdfast.plan.shard_table import ShardTable, table_of
from holdfast.runs import described as described_module
from holdfast.runs import restore as restore_module
from holdfast.runs import tier_steps
from holdfast.saving import save as save_module
from holdfast.saving import share as share_module
from holdfast.saving.request import SaveRequest, check_room
from holdfast.stores.url import open_store

FILE_BYTES = 640  # more than a sector: it can be torn
ELEMENTS = 4  # of each rank
POOL = SimpleNamespace(address=lambda slot: 0, slots=1, slot_bytes=FILE_BYTES)
LEASE = SimpleNamespace(pool=POOL, queue=SimpleNamespace(pending=0))


def content_of(save_id: str, rank: int, number: int, value: int) -> bytes:
    """Return what stands in a data file."""
    return f"{save_id} {rank} {number} {value}\n".encode().ljust(FILE_BYTES, b".")


def value_in(content: bytes) -> int:
    """Return the value that a data file says it is of."""
    return int(content.split(b"\n")[0].split()[3])


@functools.cache
def planned_of(world_size: int) -> Planned:
    """Return the plan of all ranks: of one tensor, a piece each."""
    numbers = np.array([n for r in range(world_size) for n in (r * ELEMENTS, ELEMENTS)], np.int64)
    ranks, each = np.arange(world_size + 1, dtype=np.int64), np.ones(world_size, np.int64)
    return Planned(np.zeros(world_size, np.int64), numbers, each, ranks, 2 * ranks)


@functools.cache
def shard_of(rank: int, world_size: int) -> Shard:
    """Return the piece of a rank."""
    return Shard(Tensor(("t",), "f64", (ELEMENTS * world_size,)), Box((rank * ELEMENTS,), (4,)))


@functools.cache
def shards_of(rank: int, world_size: int) -> ShardTable:
    """Return all that a rank writes."""
    shard = shard_of(rank, world_size)
    return table_of([shard], [shard.tensor])


@functools.cache
def header_of(save_id: str, step: int | None, world_size: int, base: Base | None) -> Header:
    """Return the header of a save."""
    tensors = (shard_of(0, world_size).tensor,)
    chunk, codecs = 1 << 16, (Coding("lossless"),)
    return Header(
        save_id, step, world_size, None, {}, "simulated", chunk, tensors, (), (), codecs, (), base
    )


class WrittenFile(bytes):
    """What a rank tells of its data file, and which it is; see `holdfast.format.table.Table`."""

    header: Header
    file_rank: tuple[int]
    file_number: tuple[int]


_written: dict[Any, WrittenFile] = {}


def written_of(header: Header, rank: int, number: int, value: int, shards: list[Shard]) -> bytes:
    """Return what a rank tells of its data file."""
    key = header.save_id, rank, number, value, header.world_size, header.base is None, len(shards)
    if key not in _written:
        rows = FileRows(rank, number)
        mode, size = (MODE_UNCHANGED, 16) if header.base else (0, 32)
        for row, shard in enumerate(shards):
            rows.add_shard(shard, 1)
            rows.set_chunk(row, size, mode, 64 * (row + 1), 5)
            rows.set_digest(row, f"{value:08}{shard.box.offset[0]:08}".encode())
        sizes = np.array([FILE_BYTES], np.uint64)
        table = replace(rows.table(header), file_bytes=sizes, file_footer_checksum=sizes)
        told = _written[key] = WrittenFile(encode_written(written_in([table])))
        told.header, told.file_rank, told.file_number = header, (rank,), (number,)
    return _written[key]


_manifest_of = commit._manifest_of
_manifests: dict[Any, tuple[Manifest, bytes]] = {}
_decoded: dict[bytes, Manifest] = {}
_digests: dict[int, tuple[Table, str]] = {}  # which keep the tables too, so that ids are theirs
_tiled: dict[int, Manifest] = {}


def manifest_of(
    store: Any, header: Header, planned: Planned, written: Sequence[bytes]
) -> tuple[Manifest, bytes]:
    """Do as the commit does; what it has done before is known."""
    key = header.save_id, header.step, header.base, header.world_size, tuple(written)
    if key not in _manifests:
        columns = [*map(decode_written, written)]
        _manifests[key] = _manifest_of(store, header, planned, columns)
    return _manifests[key]


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Do as the format does; what was decoded before is known."""
    if data not in _decoded:
        _decoded[data] = manifests.decode_manifest(data, where)
    return _decoded[data]


def check_tiling(manifest: Manifest) -> None:
    """Do as the format does, once for each."""
    if id(manifest) not in _tiled:
        tiling.check_tiling(manifest)
        _tiled[id(manifest)] = manifest


def content_digest(table: Table) -> str:
    """Do as the format does, once for each."""
    if id(table) not in _digests:
        _digests[id(table)] = table, tables.content_digest(table)
    return _digests[id(table)][1]


@dataclass(frozen=True, slots=True)
class TinyAgreed:
    """See `holdfast.saving.agreement.Agreed`."""

    store: Any
    files: WriterPlan
    shards: ShardTable
    value: int
    cached: Any
    codec: Codec
    objects: None = None
    size_bytes: int = FILE_BYTES

    @property
    def writing(self) -> "TinyAgreed":
        """What there is to know of its base."""
        return self


def agree(mine: Any, told: Any, ranks_rank: int) -> TinyAgreed:
    """Plan, on every rank alike."""
    firsts = [decode_arguments(reply["arguments"]) for reply in decode_replies(told.answers)]
    word, settings = firsts[0]["word"], firsts[0]["settings"]
    world_size, base = settings["world_size"], word["base"]
    check_room(mine.store.location, FILE_BYTES * world_size, word.get("free_bytes"))
    links = Base(base["name"], base["digest"], base["links"]) if base else None
    header = header_of(word["save_id"], word["step"], world_size, links)
    files = WriterPlan(header, ranks_rank, 0, FILE_BYTES, 1 << 20)
    shards = shards_of(ranks_rank, world_size)
    plan = SimpleNamespace(planned=planned_of(world_size), objects=())
    cached = SimpleNamespace(plan=plan, shards=shards)
    codec: Any = LINKED if settings["codec"].get("every", 1) > 1 else RAW
    return TinyAgreed(mine.store, files, shards, mine.leaves.value, cached, codec)


@dataclass(frozen=True, slots=True)
class TinyLeaves:
    """See `holdfast.state.tree.Leaves`."""

    value: int

    @property
    def tensors(self) -> int:
        """What is to be written."""
        return self.value


# What is written as links: as raw is, but what was saved last is remembered.
LINKED = SimpleNamespace(every=2, is_plain=True)


def begin_link(writing: Any, options: Any) -> Any:
    """Return what stands for what is known of the base."""
    return SimpleNamespace(forget=lambda: None, losses=())


def flatten(state: Mapping[str, int]) -> TinyLeaves:
    """Take what a state holds."""
    return TinyLeaves(state["value"])


def stage(
    agreed: TinyAgreed, leaves: TinyLeaves, handle: Any, request: SaveRequest
) -> Callable[[], Any]:
    """Return what writes in the background."""
    handle.staged()

    def write(begin: Any) -> Any:
        parts: Any = agreed.store, LEASE, agreed.files, agreed.shards, agreed.value
        basis = begin_link(agreed, request.options) if agreed.codec.every > 1 else None
        tables = write_pipeline.write_shards(*parts, RAW, None, handle.ledger)
        begin(tables, basis)
        return tables, basis

    return write


def write_raw(writer: Any, shards: Any, value: int, images: Any, ledger: Any) -> None:
    """Write one data file, which `finish` makes durable."""
    plan, store = writer.plan, writer._store
    writer.number += 1
    name = data_file_name(plan.header.save_id, plan.rank, writer.number)
    writer._descriptor = store.create(name, direct=False)
    writer._names.append(name)
    content = content_of(plan.header.save_id, plan.rank, writer.number, value)
    store.vfs.write(writer._descriptor, content, 0)
    writer.tables.append(written_of(plan.header, plan.rank, writer.number, value, list(shards)))


def write_again(chain: Any, writing: Any, options: Any, report: Any) -> Any:
    """Write all pieces of a checkpoint as the first rank."""
    link = chain[-1]
    value = value_in(link.store.get(link.manifest.file_names[0], FILE_BYTES))
    plan = WriterPlan(writing.header, 0, 0, FILE_BYTES, 1 << 20)
    parts: Any = writing.store, LEASE, plan, writing.shards, value
    tables: Any = write_pipeline.write_shards(*parts, RAW, None, ledger.Ledger())
    world_size = len(writing.shards)
    first = np.array([0, world_size], np.int64)
    planned = replace(planned_of(world_size), first=first, first_number=2 * first)
    return SimpleNamespace(told=(planned, [tables[0]]), basis=None)


def checked_value(name: str, content: bytes) -> int:
    """Return the value of a data file, each byte of which is checked."""
    save_id, file_name = name.split("/")[1:]
    rank, number = file_name.removesuffix(".hf").split("-")
    if not content.startswith(f"{save_id} {int(rank)} {number} ".encode()):
        raise CorruptError(f"{name} is torn")
    try:
        value = value_in(content)
    except (ValueError, IndexError) as error:
        raise CorruptError(f"{name} is torn") from error
    if content != content_of(save_id, int(rank), int(number), value):
        raise CorruptError(f"{name} is torn")
    return value


def check_files(store: Any, manifest: Manifest, files: Sequence[int], name: str = "") -> None:
    """Check whole files, as a transfer does what is no payload; one may have another name yet."""
    for file in files:
        known = manifest.file_names[file]
        checked_value(known, store.get(name or known, FILE_BYTES))


class NoPayloads:
    """Reads no chunks: a transfer copies whole files then, and checks them at the target."""

    def __init__(self, *given: Any) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def stream(self, runs: Any, **how: Any) -> Any:
        return iter(())


def load_from(path: str, ranks: Any, into: Any, *how: Any) -> load_module.LoadReport:
    """Read a rank's share of a checkpoint and what it is made from; each byte is checked."""
    reach = how[-1]
    store = open_store(path) if reach is None else reach.store
    if reach is not None and reach.holders is not None:
        return _load_from_hosts(path, store, reach.holders, ranks, into)
    chain = chains.open_chain(store)
    value = 0
    for link in chain:
        names = link.manifest.file_names
        name = names[ranks.rank % len(names)]
        try:
            content = link.store.get(name, FILE_BYTES)
        except StoreError as error:
            if not store.exists("MANIFEST"):
                raise NotCommittedError(f"{path} was retired") from error
            if error.errno == 2:
                raise CorruptError(f"{name} is gone") from error
            raise
        value = checked_value(name, content)
    into["value"] = value
    return load_module.LoadReport(path, None, 1, (), (), FILE_BYTES, FILE_BYTES, 0)


def _load_from_hosts(
    path: str, store: Any, holders: Any, ranks: Any, into: Any
) -> load_module.LoadReport:
    """Do so where a file is on the disk of some ranks alone: the first of them sends it to all."""
    manifest = decode_manifest(store.get("MANIFEST", 1 << 20), path)
    with Phase(ranks) as sent:
        mine = {}
        for number, name in enumerate(manifest.file_names):
            if ranks.rank == (holders.set_of(int(holders.of_file[number])) or (0,))[0]:
                mine[name] = checked_value(name, store.get(name, FILE_BYTES))
        sent.answer = json.dumps(mine).encode()
    values = set().union(*(json.loads(answer).values() for answer in sent.answers))
    (into["value"],) = values
    return load_module.LoadReport(path, None, 1, (), (), FILE_BYTES, FILE_BYTES, 0)


PATCHES: list[tuple[Any, str, Any]] = [
    (save_module, "flatten", flatten),
    (save_module, "local_state_for", lambda leaves, compare: SimpleNamespace(value=leaves.value)),
    (save_module, "encode_local_state", lambda local_state: b""),
    (save_module, "agree", agree),
    (save_module, "_stage", stage),
    (save_module, "LiveTensors", lambda shards, value, chunk_elements: value),
    (save_module, "lease", lambda *place: nullcontext(LEASE)),
    (save_module, "begin_link", begin_link),
    (save_module, "objects_from", lambda plan, rank, objects: []),
    (save_module, "losses_of", lambda basis, header: []),
    (save_module, "written_in", lambda tables: tables[0]),
    (share_module, "encode_written", lambda written: written),
    (share_module, "decode_written", lambda data: data),
    (write_pipeline, "write_raw", write_raw),
    (commit, "_manifest_of", manifest_of),
    (described_module, "decode_manifest", decode_manifest),
    (retire, "decode_manifest", decode_manifest),
    (check, "decode_manifest", decode_manifest),
    (check, "check_tiling", check_tiling),
    (transfer, "decode_manifest", decode_manifest),
    (transfer, "lease", lambda *place: nullcontext(LEASE)),
    (copied_files, "decode_manifest", decode_manifest),
    (copied_files, "check_files", check_files),
    (copied_files, "lease", lambda *place: nullcontext(LEASE)),
    (copied_files, "_runs_of", lambda manifest, files, run_bytes: []),
    (copied_files, "DataFileReader", NoPayloads),
    (tier_steps, "decode_manifest", decode_manifest),
    (commit, "content_digest", content_digest),
    (replace_module, "content_digest", content_digest),
    (chains, "content_digest", content_digest),
    (known, "content_digest", content_digest),
    (recompress_module, "content_digest", content_digest),
    (recompress_module, "write_again", write_again),
    (restore_module, "load_from", load_from),
]
