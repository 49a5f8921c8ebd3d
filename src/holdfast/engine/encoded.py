"""Encoded payloads, made some ahead in threads: segment by segment into data files.

How long a payload is, and with it which file it goes into, is known when it has been made. Knows
rows and segments; no tensors.
"""

from collections.abc import Iterable, Sequence
from contextlib import closing

from .._core import copy, xxh3_128
from ..codecs.base import Codec
from ..codecs.groups import units_of
from ..format import spec
from ..format.data_file import align_payload, chunk_seed
from ..format.rows import FileRows, Place
from ..layout import Shard, chunk_count
from ..plan.shard_table import ShardTable
from .ahead import encode_ahead
from .basis import Basis
from .file_plan import CHUNK_ROW_BYTES, TENSOR_ROW_BYTES
from .ledger import Ledger
from .origin import Origin
from .stream import FileStream
from .task import Encoded
from .workspace import Segment
from .write import DataFileWriter

COPIED_BYTES = 1 << 20  # below, a segment is copied: pages of its own would be too much of it


def write_encoded(
    writer: DataFileWriter,
    shards: ShardTable,
    origin: Origin,
    codec: Codec,
    basis: Basis | None,
    ledger: Ledger,
    *,
    is_staged: bool,
) -> None:
    """Append, in order, what is staged and encoded in threads.

    Args:
        basis: what is known of the base; it becomes what is known of these.
        is_staged: the elements have been counted as staged already.
    """
    header, every = writer.plan.header, shards.shards()
    groups = [group for coding in header.codecs for group in coding.groups]
    units = units_of(every, header.tensors, groups)
    number = {shard: place for place, shard in enumerate(every)}
    rows = _Rows(writer)
    encoded = encode_ahead(
        units,
        rows.begin,
        rows.seed,
        lambda shard: origin.part(number[shard]),
        codec,
        header.chunk_elements,
        basis,
    )
    with closing(encoded):
        for segment, chunks in encoded:
            rows.add(segment, (row for made in chunks for row in made.rows))
            for made in chunks:
                _note(made, rows, basis, ledger)
                if not is_staged:
                    ledger.staged_bytes += made.decoded_bytes
            ledger.note_writes(writer)
            ledger.check()
    rows.close_file()


def _note(made: Encoded, rows: "_Rows", basis: Basis | None, ledger: Ledger) -> None:
    """Take down what chunks lost, and the digests of shards that end with them."""
    work = made.work
    if basis is not None:
        for (_, shard), loss in zip(work.unit, made.losses, strict=True):
            if loss is not None:
                basis.lose(shard.tensor.path, loss)
    if made.is_last:
        for place, digests in zip(work.places, work.digests, strict=True):
            rows.end(place, xxh3_128(b"".join(digests)))
    ledger.seconds["stage"] += made.stage_s
    ledger.seconds["encode"] += made.encode_s


class _Rows:
    """The rows of the file that is being written; begins the next file when one is full."""

    def __init__(self, writer: DataFileWriter) -> None:
        self._writer = writer
        self._remaining_bytes = writer.plan.payload_bytes
        self._rows: FileRows
        self._rows_bytes = 0
        self._stream: FileStream

    def begin(self, shards: Sequence[Shard], ahead_bytes: int = 0) -> Sequence[Place] | None:
        """Start the rows of shards; goes on in a new file when this one would grow too large.

        Args:
            ahead_bytes: what has rows already, and is still to be added, has so many at most.

        Returns:
            their places; None: what is ahead has to be added before it is known whether they fit.
        """
        plan = self._writer.plan
        counts = [chunk_count(shard, plan.header.chunk_elements) for shard in shards]
        more = [_bytes_of(*each) for each in zip(shards, counts, strict=True)]
        end = self._rows_bytes + sum(map(sum, more))
        if not self._writer.is_open:
            self._open_file()
        elif not plan.has_room(self._stream.position + ahead_bytes + end):
            if ahead_bytes:
                return None
            self.close_file()
            self._open_file()
        self._rows_bytes += sum(rows for _, rows in more)
        return [self._rows.add_shard(*each) for each in zip(shards, counts, strict=True)]

    def end(self, place: Place, digest: bytes) -> None:
        """Take the digest of a shard, all of whose chunks have been added."""
        self._rows.set_digest(place.shard, digest)

    def seed(self, row: int) -> int:
        """Return the checksum seed of a row's chunk."""
        plan = self._writer.plan
        return chunk_seed(plan.header.save_id, plan.rank, self._rows.number, row)

    def add(self, segment: Segment, rows: Iterable[tuple[int, int, int, int, int]]) -> None:
        """Add what a segment holds, and close it when it has been written.

        Args:
            rows: (row, bytes of its payload, mode, offset in the segment, checksum).
        """
        stream, size = self._stream, segment.size_bytes
        if size < COPIED_BYTES:
            target = self._writer.base + self._claim(size, segment.raw_bytes)
            copy(target, segment.address, size)
            begin = stream.position
            stream.advance(size)
            segment.close()
        else:
            size = segment.fill_page()
            begin = stream.lend(segment.address, size, segment.close)
        self._remaining_bytes -= size
        for row, size, mode, at, payload_checksum in rows:
            self._rows.set_chunk(row, size, mode, begin + at if size else 0, payload_checksum)

    def close_file(self) -> None:
        """Write what the footer says."""
        self._writer.close(self._rows.table(self._writer.plan.header))

    def _open_file(self) -> None:
        self._stream = self._writer.open(self._remaining_bytes, is_exact=False)
        self._rows = FileRows(self._writer.plan.rank, self._writer.number)
        self._rows_bytes = 0

    def _claim(self, size_bytes: int, raw_bytes: int) -> int:
        """Find room for bytes aligned as a payload of mode 0 that has ``raw_bytes``."""
        stream = self._stream
        at = align_payload(stream.position, raw_bytes)
        if not stream.fits(at, size_bytes):
            stream.turn()
            at = align_payload(stream.position, raw_bytes)
        return stream.room(at, size_bytes)


def _bytes_of(shard: Shard, chunks: int) -> tuple[int, int]:
    """Return the bytes a shard takes at most: payloads; in the footer, rows and tensor's name."""
    rows = chunks + 2 + len(shard.box.shape)
    rows_bytes = CHUNK_ROW_BYTES * rows + 4 * len(repr(shard.tensor.path)) + TENSOR_ROW_BYTES
    return chunks * spec.LARGE_ALIGN_BYTES + shard.size_bytes, rows_bytes
