"""Every byte under a checkpoint's directory, a part at a time: what is damaged, and which chunks.

Goes on behind each fault. Knows stores and the format; no names of tensors, no bases.
"""

import errno
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..engine.check import check_files, check_names
from ..engine.pool import Lease, lease
from ..engine.read import DataFileReader, open_data_file, still_there
from ..errors import CorruptError, StoreError
from ..format.manifest import Manifest
from ..format.spec import LARGE_ALIGN_BYTES
from ..layout import Extent, whole
from ..options import SLOT_BYTES, Options
from ..plan.load_plan import plan_load
from ..plan.reads import ChunkRead, ReadRun
from ..stores.base import Store

START = (0, 0)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is not as MANIFEST says.

    Attributes:
        where: file or directory.
        what: the whole text.
        rows: of the chunks that cannot be read for it.
    """

    where: str
    what: str
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """What was read at once.

    Attributes:
        end: (file, offset) from which a survey goes on.
        size_bytes: of payloads, and gaps between them.
    """

    end: tuple[int, int]
    size_bytes: int
    faults: tuple[Fault, ...]


def survey(
    store: Store,
    manifest: Manifest,
    options: Options,
    *,
    start: tuple[int, int] = START,
    patient: bool = False,
) -> Generator[Part, None, None]:
    """Check names, headers, footers, payloads and gaps; yield after each read.

    Args:
        start: `Part.end` of a survey that this one goes on with.
        patient: what the disk cannot read (EIO) is a fault of the chunks there, and no error.

    Raises:
        NotCommittedError: the checkpoint was retired meanwhile.
        StoreError: the disk or the network failed, which says nothing about the checkpoint.
    """
    with still_there(store):
        yield from _survey(store, manifest, options, start, patient=patient)


def _survey(
    store: Store, manifest: Manifest, options: Options, start: tuple[int, int], *, patient: bool
) -> Iterator[Part]:
    if start == START:
        yield Part(START, 0, _attempt(store.location, partial(check_names, store, manifest)))
    runs: dict[int, list[ReadRun]] = {}
    wanted = {t.path: (i, [whole(t.shape)]) for i, t in enumerate(manifest.table.header.tensors)}
    for run in plan_load(manifest, wanted, SLOT_BYTES):
        runs.setdefault(run.extent.file, []).append(run)
    for file in range(start[0], len(manifest.file_names)):
        offset = start[1] if file == start[0] else 0
        rest = [r for r in runs.get(file, ()) if r.extent.offset + r.extent.size_bytes > offset]
        if offset == 0:
            faults, rest = _look_at_file(store, manifest, file, rest, patient=patient)
            yield Part((file, 0), 0, faults)
        with lease(store, options) as leased:
            yield from _scan(store, leased, manifest, file, rest, patient=patient)
        yield Part((file + 1, 0), 0, ())


def _look_at_file(
    store: Store, manifest: Manifest, file: int, runs: Sequence[ReadRun], *, patient: bool
) -> tuple[tuple[Fault, ...], list[ReadRun]]:
    """Check what is no payload; return its faults, and what can be read of the file."""
    name = manifest.file_names[file]
    faults = _attempt(
        f"{store.location}/{name}", partial(check_files, store, manifest, [file]), patient=patient
    )
    if not faults:
        return (), list(runs)
    size = _size_of(store, name)
    rest, short = list[ReadRun](), list[int]()
    for run in runs:
        parts = [run] if _end(manifest, run) <= size else _each(manifest, run)
        rest += [part for part in parts if _end(manifest, part) <= size]
        short += [int(part.reads.rows[0]) for part in parts if _end(manifest, part) > size]
    return (replace(faults[0], rows=tuple(sorted(short))), *faults[1:]), rest


def _scan(
    store: Store,
    leased: Lease,
    manifest: Manifest,
    file: int,
    runs: Sequence[ReadRun],
    *,
    patient: bool,
) -> Iterator[Part]:
    """Check the payloads of one file and the gaps before them, in order."""
    where, rest = f"{store.location}/{manifest.file_names[file]}", deque(runs)
    while rest:
        try:
            with DataFileReader(store, leased, manifest) as reader:
                for run, slot in reader.stream(tuple(rest), in_order=True):
                    rest.popleft()
                    chunks = [] if reader.is_whole(run, slot) else run.chunks
                    faults = tuple(
                        Fault(where, error.args[0], (read.row,))
                        for read in chunks
                        if (error := _fault_of(reader, run, read, slot))
                    )
                    extent = run.extent
                    end = (file, extent.offset + extent.size_bytes)
                    yield Part(end, extent.size_bytes, faults)
        except (CorruptError, StoreError) as error:  # of the read that is next
            is_spared = isinstance(error, CorruptError) or (patient and error.errno == errno.EIO)
            if not (rest and is_spared):
                raise
            run = rest.popleft()
            if len(run.reads) > 1:
                rest.extendleft(reversed(_each(manifest, run)))
                continue
            rows, extent = tuple(run.reads.rows.tolist()), run.extent
            fault = Fault(where, error.args[0], rows)
            yield Part((file, extent.offset + extent.size_bytes), extent.size_bytes, (fault,))


def _fault_of(
    reader: DataFileReader, run: ReadRun, read: ChunkRead, slot: int
) -> CorruptError | None:
    try:
        reader.check(run, read, slot)
    except CorruptError as error:
        return error
    return None


def _each(manifest: Manifest, run: ReadRun) -> list[ReadRun]:
    """Return the reads of each chunk of a run and the gap before it, as they lie in the file."""
    rows, page, file = run.reads.rows, LARGE_ALIGN_BYTES, run.extent.file
    first = manifest.chunk_gap_start[rows] // page * page
    last = -(-(manifest.chunk_start[rows] + manifest.chunk_bytes[rows]) // page) * page
    extents = [Extent(file, a, b - a) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
    return [ReadRun(extents[n], run.reads[n : n + 1]) for n in np.argsort(rows).tolist()]


def _end(manifest: Manifest, run: ReadRun) -> int:
    """Return how large the file has to be for a run to be read, as the reader sees it."""
    extent = run.extent
    return min(extent.offset + extent.size_bytes, int(manifest.payload_end[extent.file]))


def _size_of(store: Store, name: str) -> int:
    """Return the bytes of a data file; -1 when there is none."""
    try:
        descriptor = open_data_file(store, name, direct=False)
    except (CorruptError, StoreError):
        return -1
    try:
        return store.vfs.size(descriptor)
    finally:
        store.vfs.close(descriptor)


def _attempt(
    where: str, check: Callable[[], object], *, patient: bool = False
) -> tuple[Fault, ...]:
    try:
        check()
    except CorruptError as error:
        return (Fault(where, error.args[0]),)
    except StoreError as error:
        if not patient or error.errno != errno.EIO:
            raise
        return (Fault(where, error.args[0]),)
    return ()
