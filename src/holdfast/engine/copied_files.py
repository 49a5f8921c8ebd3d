"""Data files of a checkpoint, from one store to another: read, checked, written, then named.

On a disk and on HDFS, a file has another name until it is whole and durable, and none is removed
by its name: two that copy the same checkpoint, of which one may be frozen for long, harm neither
each other nor what they have committed. Knows stores and the format, no tensors.
"""

import contextlib
import errno
import secrets
from collections.abc import Callable, Iterator, Sequence

from ..errors import CorruptError, NoSpaceError, NotCommittedError, StoreError
from ..format import spec
from ..format.manifest import Manifest, decode_manifest
from ..format.unfinished import COPY_PREFIX
from ..layout import whole
from ..options import SLOT_BYTES, Options
from ..plan.load_plan import plan_load
from ..plan.reads import ReadRun
from ..stores.base import Store
from .check import check_files
from .pool import Lease, lease
from .read import DataFileReader, open_data_file
from .slot_writes import SlotWrites, slots_for

Report = Callable[[int], None]
PIECE_BYTES = 1 << 20  # of headers and footers
GONE = (errno.ENOENT, errno.ESTALE)


def is_whole(store: Store, manifest: Manifest, file: int, options: Options, use: str) -> bool:
    """Return whether a data file is there, left by a copy that was cut off.

    One that is broken stays until another takes its name: who removed it by that could be frozen
    before, and remove a whole one.
    """
    name = manifest.file_names[file]
    if store.kind(name) != "file":
        return False
    try:
        check_files(store, manifest, [file])
        if not store.can_link:
            return True  # what was uploaded is there whole, or not at all
        with (
            lease(store, options, use) as leased,
            DataFileReader(store, leased, manifest) as reader,
        ):
            for run, slot in reader.stream(_runs_of(manifest, [file], store.run_bytes)):
                _check(reader, run, slot)
    except CorruptError:
        return False
    return _made_durable(store, name)


def _made_durable(store: Store, name: str) -> bool:
    """Sync a file of which nobody knows whether it was; False: its pages may not be on the disk."""
    descriptor = store.open(name, direct=False)
    try:
        store.vfs.sync(descriptor)
    except StoreError:
        return False  # another attempt would find the pages clean, and succeed
    finally:
        store.vfs.close(descriptor)
    store.sync_made(name)
    return True


def _runs_of(manifest: Manifest, files: Sequence[int], run_bytes: int) -> list[ReadRun]:
    """Return what is to be read of some files, each from its beginning to its end."""
    tensors = manifest.table.header.tensors
    wanted = {t.path: (i, [whole(t.shape)]) for i, t in enumerate(tensors)}
    some = set(files)
    planned = plan_load(manifest, wanted, SLOT_BYTES, run_bytes)
    runs = [run for run in planned if run.extent.file in some]
    return sorted(runs, key=lambda run: (run.extent.file, run.extent.offset))


def _check(reader: DataFileReader, run: ReadRun, slot: int) -> None:
    if not reader.is_whole(run, slot):
        for read in run.chunks:
            reader.check(run, read, slot)


def copy_files(
    here: Store,
    there: Store,
    leased: Lease,
    manifest: Manifest,
    files: Sequence[int],
    report: Report,
) -> None:
    """Read files in their order, check what was read, and write it.

    What dead copies have left is removed where there is no room; else when this one has ended.
    """
    done = 0
    below = f"{spec.DATA_DIRECTORY}/{secrets.token_hex(16)}"  # as a save of its own: see `sweep`
    try:
        while done < len(files):
            try:
                for _ in _copy_some(here, there, leased, manifest, files[done:], report, below):
                    done += 1
            except NoSpaceError:
                if not sweep_copies(there):
                    raise
    except StoreError as error:  # another copy of it has ended, and swept
        if error.errno not in GONE or not _is_same_committed(there, manifest):
            raise
    finally:
        if there.shows_pending:
            with contextlib.suppress(StoreError):  # a file may be left in it
                there.remove_directory(below)


def _copy_some(
    here: Store,
    there: Store,
    leased: Lease,
    manifest: Manifest,
    files: Sequence[int],
    report: Report,
    below: str,
) -> Iterator[int]:
    """Yield each file when it is there."""
    # A slot that is sent from where it is should be full.
    runs = _runs_of(manifest, files, SLOT_BYTES if slots_for(there) else here.run_bytes)
    with (
        DataFileReader(here, leased, manifest) as reader,
        SlotWrites(there, leased.pool) as writes,
    ):
        stream = reader.stream(runs, in_order=True, clear=writes.clear, is_clear=writes.is_clear)
        at = 0
        for file in files:
            with _NewFile(here, there, manifest, file, below, writes) as new:
                while at < len(runs) and runs[at].extent.file == file:
                    run, slot = next(stream)
                    _check(reader, run, slot)
                    report(new.add(run.extent.offset, run.extent.size_bytes, slot))
                    at += 1
                report(new.finish())
            yield file


def _is_same_committed(there: Store, manifest: Manifest) -> bool:
    """Return whether the checkpoint is there by now."""
    if not there.exists(spec.MANIFEST_NAME):
        return False
    data = there.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX)
    found = decode_manifest(data, f"{there.location}/{spec.MANIFEST_NAME}")
    return found.table.header.save_id == manifest.table.header.save_id


class _NewFile:
    """One data file at the target, which gets its name when it is whole.

    Two that bring the same file, one of which may be frozen and go on when the other has ended,
    write two files; each removes its own alone.
    """

    def __init__(
        self,
        here: Store,
        there: Store,
        manifest: Manifest,
        file: int,
        below: str,
        writes: SlotWrites,
    ) -> None:
        self._here, self._there = here, there
        self._name = self._pending = manifest.file_names[file]
        if there.shows_pending:
            self._pending = f"{below}/{COPY_PREFIX}{self._name.rpartition('/')[2]}"
        self._size = int(manifest.table.file_bytes[file])
        self._end = int(manifest.payload_end[file])
        self._manifest, self._file, self._writes = manifest, file, writes
        self._at = 0  # written so far

    def __enter__(self) -> "_NewFile":
        self._from = open_data_file(self._here, self._name, direct=False)
        try:
            self._to = self._there.create(self._pending, direct=False)
        except BaseException:
            self._here.vfs.close(self._from)
            raise
        try:
            self._there.vfs.allocate(self._to, self._size)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._here.vfs.close(self._from)
        finally:
            self._there.vfs.close(self._to)
        if error is not None and self._pending != self._name:
            with contextlib.suppress(StoreError):  # what has failed says more
                self._there.remove(self._pending)

    def add(self, offset: int, size: int, slot: int) -> int:
        """Write what was read at an offset, up to the end of the payloads; return its size."""
        before = self._at
        self._fill(offset)
        size = min(self._end, offset + size) - self._at
        if size > 0:
            start, where = self._at - offset, f"{self._there.location}/{self._pending}"
            self._writes.write(self._to, slot, start, size, self._at, where)
            self._at += size
        return self._at - before

    def finish(self) -> int:
        """Write the rest, make it durable, check what is no payload; return its size."""
        before, there, vfs = self._at, self._there, self._there.vfs
        self._fill(self._size)
        vfs.truncate(self._to, self._size)
        if self._pending == self._name:
            check_files(self._here, self._manifest, [self._file])  # the next line names it
        vfs.sync(self._to)
        self._check()
        if self._pending != self._name:
            if there.exists(spec.MANIFEST_NAME):
                error = StoreError(f"{there.location} was committed by another copy meanwhile")
                error.errno = errno.ENOENT
                raise error
            there.move(self._pending, self._name)
        there.sync_made(self._name)
        return self._at - before

    def _check(self) -> None:
        """Check what is no payload, as it was written.

        Raises:
            CorruptError: the source is damaged.
            StoreError: what was written is another by now, or gone.
        """
        there = self._there
        try:
            check_files(there, self._manifest, [self._file], self._pending)
        except (CorruptError, NotCommittedError) as cause:
            check_files(self._here, self._manifest, [self._file])
            where = f"{there.location}/{self._pending}"
            error = StoreError(f"{where} differs from the bytes written: {cause}. Copy again")
            error.errno = None if there.exists(self._pending) else errno.ENOENT
            raise error from cause

    def _fill(self, end: int) -> None:
        """Write what no run holds: header, footer, trailer, and gaps between files' parts."""
        while self._at < end:
            size = min(PIECE_BYTES, end - self._at)
            found = self._here.vfs.read(self._from, size, self._at)
            if len(found) != size:
                raise CorruptError(
                    f"{self._here.location}/{self._name} ends at byte {self._at + len(found)}; "
                    f"expected {self._size}"
                )
            self._write(memoryview(found))

    def _write(self, data: memoryview) -> None:
        self._there.vfs.write(self._to, data, self._at)
        self._at += len(data)


def sweep_copies(there: Store) -> bool:
    """Remove what copies have begun beside the files that are whole; return whether any had."""
    if not there.shows_pending or not there.exists(spec.DATA_DIRECTORY):
        return False
    found = False
    for save in there.list(spec.DATA_DIRECTORY):
        below = f"{spec.DATA_DIRECTORY}/{save.name}"
        names = [entry.name for entry in there.list(below)] if save.kind == "directory" else []
        if names and all(name.startswith(COPY_PREFIX) for name in names):
            there.remove_all([f"{below}/{name}" for name in names])
            there.remove_directory(below)
            found = True
    return found
