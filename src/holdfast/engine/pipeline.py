"""The streams: stage → encode → write, and read → decode → place, under one pool.

The only place that knows how the rooms overlap: the queue writes (or reads ahead) on its own
threads while the calling thread stages and encodes (or checks and places). The rooms know nothing
of it. How far a save has come, and whether it is to go on, stands in its `Ledger`.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import torch

from .. import worker
from .._core import xxh3_128
from ..codecs.base import Codec
from ..codecs.groups import units_of
from ..errors import CancelledError, CorruptError, StoreError
from ..format.header import Header
from ..format.manifest import Manifest
from ..format.names import dotted
from ..format.table import Table
from ..layout import Box, Path, Shard, chunk_count, chunks_of
from ..plan.runs import Run
from ..state.ambient import ordinary_torch
from ..stores.base import Store
from .ahead import Decoder, SlotThreads, encode_ahead, is_raw
from .basis import Basis
from .exchange import Exchange
from .place import place
from .pool import Lease
from .read import DataFileReader, still_there
from .stage import Sources, seal, stage
from .task import Encoded
from .write import DataFileWriter, Images, SyncError, WriterPlan

# What is held of a shard's tensor, and which box of it that is; asked for when its turn comes.
Source = Callable[[Shard], tuple[torch.Tensor, Box]]

NO_BASES: Mapping[int, int] = MappingProxyType({})
PARTS = ("plan", "stage", "encode", "write", "sync", "commit")


@dataclass(frozen=True, slots=True)
class Progress:
    """A save in flight, seen from outside; every count is of this rank's share.

    Attributes:
        state: "staging", "writing", "committing", "committed", "failed" or "skipped".
        staged_bytes: copied; `SaveHandle.wait_staged` says when their sources may change.
        written_bytes: handed over by the disk; durable only when committed.
        total_bytes: to be written in all.
    """

    state: str
    staged_bytes: int
    written_bytes: int
    total_bytes: int


class Ledger:
    """Counts and seconds of one save, or load, on one rank.

    Attributes:
        seconds: for each of `PARTS`; "write" is time spent waiting for the disk.
        waits: how often the thread had to wait for the disk.
        stall_s: how long the caller's thread was held up.
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.state = "staging"
        self.total_bytes = self.staged_bytes = self.written_bytes = self.waits = 0
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.stall_s = 0.0
        self._deadline = float("inf")
        self._is_cancelled = False
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the block's time for a part."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - started

    def end_at(self, deadline: float) -> None:
        """Set the time (of `time.monotonic`) after which `check` fails."""
        self._deadline = deadline

    def check(self) -> None:
        """Check that the save is to go on.

        Raises:
            CancelledError: it was cancelled.
            StoreError: its deadline has passed.
        """
        worker.check()
        if self._is_cancelled:
            raise CancelledError("the save was cancelled; nothing was committed")
        self.check_deadline()

    def check_deadline(self) -> None:
        """Check that the save's deadline has not passed.

        Raises:
            StoreError: it has.
        """
        if time.monotonic() > self._deadline:
            done, total = self.written_bytes / 1e9, self.total_bytes / 1e9
            raise StoreError(
                f"{done:.3f} of {total:.3f} GB were written when the save's deadline passed; give "
                "it more time (deadline_s), or save to a faster disk"
            )

    def note_writes(self, writer: DataFileWriter) -> None:
        """Take over what a writer has counted."""
        self.written_bytes, self.waits = writer.writes.done_bytes, writer.writes.waits
        self.seconds["write"], self.seconds["sync"] = writer.writes.wait_s, writer.sync_s

    def cancel(self) -> bool:
        """Ask for the end of the save; return False when it is too late for that."""
        with self._lock:
            if not self._closed:
                self._is_cancelled = True
            return not self._closed

    def close(self) -> None:
        """Rule out a cancellation from here on.

        Raises:
            CancelledError: it came before.
        """
        with self._lock:
            self.check()
            self._closed = True
            self.state = "committing"

    def progress(self) -> Progress:
        """Return how far it is."""
        return Progress(self.state, self.staged_bytes, self.written_bytes, self.total_bytes)

    def record(self) -> dict[str, object]:
        """Return everything as values of JSON; seconds to the microsecond."""
        seconds = {part: round(taken, 6) for part, taken in self.seconds.items()}
        return {
            "bytes": self.total_bytes,
            "stored_bytes": self.written_bytes,
            "seconds": seconds | {"total": round(time.perf_counter() - self.started, 6)},
            "waits": self.waits,
            "stall_s": round(self.stall_s, 6),
        }


def write_shards(
    store: Store,
    lease: Lease,
    plan: WriterPlan,
    shards: Iterable[Shard],
    origin: Source | Images,
    codec: Codec | None,
    basis: Basis | None,
    ledger: Ledger,
) -> list[Table]:
    """Write one rank's shards into durable data files; return the table of each.

    Nothing is left behind when it fails. After a failed fsync the files are dropped and everything
    is written again under other numbers, once.

    Args:
        origin: gives the elements to stage, shard by shard and once for each attempt; or where in
            the pool every chunk stands already.
        codec: of all of them; None: they are stored as they are.
        basis: what is known of the base; it becomes what is known of these.
    """
    shards = list(shards)
    if not shards:
        return []
    images = origin if isinstance(origin, Images) else None
    source = None if isinstance(origin, Images) else origin
    writer = DataFileWriter(store, lease, plan, images)
    for last_attempt in (False, True):
        try:
            if codec is None:
                for shard in shards:
                    _write_shard(writer, lease, shard, source, plan.header, ledger)
            else:
                _write_encoded(writer, lease, shards, origin, codec, basis, plan.header, ledger)
            tables = writer.finish()
            ledger.note_writes(writer)
            return tables
        except SyncError:
            writer.abandon()
            if last_attempt:
                raise
            if basis is not None:
                basis.forget()
            again = plan.starting_at(writer.next_number)
            writer = DataFileWriter(store, lease, again, images)
        except BaseException:
            writer.abandon()
            raise
    raise AssertionError("the loop returns or raises")


def _write_shard(
    writer: DataFileWriter,
    lease: Lease,
    shard: Shard,
    source: Source | None,
    header: Header,
    ledger: Ledger,
) -> None:
    """Stage a shard's chunks where they are written from: raw payloads are the chunks."""
    places = writer.begin([shard])
    assert places is not None  # nothing is ahead of it
    place, row = places[0], places[0].first_chunk
    digests: list[bytes] = []
    base, clock = lease.pool.address(0), time.perf_counter
    held = source(shard) if source else None
    for chunk in chunks_of(shard, header.chunk_elements):
        at, seed = writer.reserve(row + len(digests), chunk.size_bytes)
        started = clock()
        if held is None:
            staged = seal(base + at, chunk.size_bytes, seed)
        else:
            staged = stage(*held, chunk, base + at, seed)
            ledger.staged_bytes += chunk.size_bytes
        ledger.seconds["stage"] += clock() - started
        writer.append(row + len(digests), staged.size_bytes, staged.checksum)
        ledger.note_writes(writer)
        ledger.check()
        digests.append(staged.digest)
    writer.end(place, xxh3_128(b"".join(digests)))


def _write_encoded(
    writer: DataFileWriter,
    lease: Lease,
    shards: Sequence[Shard],
    origin: Source | Images,
    codec: Codec,
    basis: Basis | None,
    header: Header,
    ledger: Ledger,
) -> None:
    """Append, in order, what is staged and encoded in threads."""
    groups = [group for coding in header.codecs for group in coding.groups]
    units = units_of(shards, header.tensors, groups)
    find = _staged_at(lease, shards, origin, header) if isinstance(origin, Images) else origin
    elements = header.chunk_elements
    encoded = encode_ahead(units, writer.begin, writer.seed, find, codec, elements, basis)
    with closing(encoded):
        for segment, chunks in encoded:
            writer.add(segment, (row for made in chunks for row in made.rows))
            for made in chunks:
                _note(made, writer, basis, ledger)
                if not isinstance(origin, Images):
                    ledger.staged_bytes += made.decoded_bytes
            ledger.note_writes(writer)
            ledger.check()


def _note(made: Encoded, writer: DataFileWriter, basis: Basis | None, ledger: Ledger) -> None:
    """Take down what chunks lost, and the digests of shards that end with them."""
    work = made.work
    if basis is not None:
        for (_, shard), loss in zip(work.unit, made.losses, strict=True):
            if loss is not None:
                basis.lose(shard.tensor.path, loss)
    if made.is_last:
        for place, digests in zip(work.places, work.digests, strict=True):
            writer.end(place, xxh3_128(b"".join(digests)))
    ledger.seconds["stage"] += made.stage_s
    ledger.seconds["encode"] += made.encode_s


def _staged_at(
    lease: Lease, shards: Sequence[Shard], images: Images, header: Header
) -> Callable[[Shard], list[int]]:
    """Return where the chunks of a shard stand in the pool."""
    base, offsets = lease.pool.address(0), iter(images.offsets)
    places = {
        shard: [base + next(offsets) for _ in range(chunk_count(shard, header.chunk_elements))]
        for shard in shards
    }
    return places.__getitem__


@dataclass(frozen=True, slots=True)
class Done:
    """What reading came to.

    Attributes:
        read_bytes: by this rank, gaps included, for others too; of bases too.
        sent_bytes, damage: as `Exchange.run` returns them.
    """

    read_bytes: int
    sent_bytes: int = 0
    damage: CorruptError | None = None

    def check(self) -> None:
        """Raise what was found to be damaged."""
        if self.damage is not None:
            raise self.damage


@ordinary_torch()
def read_shards(
    store: Store,
    lease: Lease,
    manifest: Manifest,
    runs: Iterable[Run],
    targets: Sources,
    exchange: Exchange | None = None,
    *,
    bases: Mapping[int, int] = NO_BASES,
) -> Done:
    """Read runs, check every chunk and the gap before it, and place its elements.

    A chunk is placed only after it has been checked.

    Args:
        exchange: what other ranks need too; they all call this.
        bases: by row, the address of the elements that a chunk needs of the base.

    Raises:
        CorruptError: a check failed; what was placed before it was good.
        NotCommittedError: the checkpoint was removed meanwhile.
    """
    filled: dict[Path, None] = {}
    runs = tuple(runs)

    def place_run(run: Run, slot: int) -> None:
        view = lease.tensor(slot)
        with closing(Decoder(run, manifest, bases)) as decoder:
            for read in run.chunks:
                payload = reader.check(run, read, slot)
                elements = decoder.decode(payload, read, view)
                for path, number in read.targets:
                    place(elements, read.chunk, *targets[path][number])
                    filled[path] = None

    sent_bytes, damage = 0, None
    try:
        with still_there(store), DataFileReader(store, lease, manifest) as reader:
            if exchange is not None:
                sent_bytes, damage = exchange.run(reader, lease, place_run)
            if is_raw(manifest):
                for run, slot in reader.stream(runs):
                    place_run(run, slot)
            else:
                with SlotThreads() as threads:
                    stream = reader.stream(runs, clear=threads.clear, is_clear=threads.is_clear)
                    for run, slot in stream:
                        threads.start(slot, place_run, run, slot)
    except CorruptError as error:
        raise _with_filled(error, filled) from error
    read = [*runs, *(exchange.read_here if exchange is not None else ())]
    read_bytes = sum(run.extent.size_bytes for run in read)
    return Done(read_bytes, sent_bytes, damage and _with_filled(damage, filled))


def _with_filled(error: CorruptError, paths: Iterable[Path]) -> CorruptError:
    """Say which tensors a load that failed half-way has filled."""
    filled = tuple(dotted(path) for path in paths)
    shown = f"{', '.join(filled[:5])}{' …' if len(filled) > 5 else ''}" if filled else "none"
    told = type(error)(f"{error}. Tensors filled, with verified bytes, before that: {shown}")
    told.filled = filled
    return told
