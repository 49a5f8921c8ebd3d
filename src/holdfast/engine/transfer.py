"""A checkpoint, as it is, from one store to another: the same files, checked while they stream.

The data comes first, MANIFEST last, by the steps of a commit (`docs/commit.md`). So what was cut
off is no checkpoint, and goes on where it was. Knows stores and the format, no tensors.
"""

import contextlib
import errno
import secrets
from collections.abc import Callable, Sequence
from typing import Protocol

from ..errors import AlreadyCommittedError, CorruptError, OptionError, ReplacedError, StoreError
from ..format import spec
from ..format.manifest import Manifest, decode_manifest
from ..format.table import content_digest
from ..layout import whole
from ..options import SLOT_BYTES, Options
from ..plan.load_plan import plan_load
from ..plan.reads import ReadRun
from ..stores.base import Store
from .check import check_files, check_names, read_manifest
from .commit import check_absent, check_base, check_present
from .marker import is_marker, put_marker
from .pool import Lease, lease
from .read import DataFileReader, open_data_file, still_there
from .trust import check_of


class Elsewhere(Protocol):
    """Hosts that have files of a checkpoint which this one lacks."""

    def ask(self, manifest: Manifest, data: bytes) -> None:
        """Let them bring these files."""

    def wait(self, manifest: Manifest, files: Sequence[int]) -> None:
        """Wait until these are there, durably; raises a HoldfastError when they do not come."""


Report = Callable[[int], None]
PIECE_BYTES = 1 << 20  # of headers and footers
PENDING_PREFIX = "copy-"  # of files that are not whole


def transfer(
    here: Store,
    there: Store,
    options: Options,
    report: Report,
    look: Callable[[], object] = lambda: None,
    use: str = "",
    elsewhere: "Elsewhere | None" = None,
) -> tuple[int, int]:
    """Copy a checkpoint; every byte is checked on the way. See `holdfast.copy_checkpoint`.

    Args:
        report: called with the bytes of data files done since the last call.
        look: called when all is durable there; raises when it may not be published after all.
        use: as for `lease`.
        elsewhere: brings the files that ``here`` lacks; None: it has to have all.

    Returns:
        The bytes of data files that were copied, and of those that were there already.
    """
    manifest = read_manifest(here, check_of(options.trust))
    data = _bytes_of(here, manifest)
    sizes = manifest.table.file_bytes.tolist()
    if _is_committed(there, data):
        report(sum(sizes))
        return 0, sum(sizes)
    _check_base(there, manifest)
    absent = list[int]()
    if elsewhere is not None:
        is_here = present(here, manifest)
        absent = [n for n, has in enumerate(is_here) if not has]
    if elsewhere is not None and absent:
        elsewhere.ask(manifest, data)
    files = sorted(set(range(len(sizes))) - set(absent))
    missing = [n for n in files if not _is_whole(there, manifest, n, options, use)]
    kept = sum(sizes[n] for n in files) - sum(sizes[n] for n in missing)
    report(kept)
    with still_there(here), lease(here, options, use) as leased:
        if files or elsewhere is None:
            check_names(here, manifest)
        try:
            _copy_files(here, there, leased, manifest, missing, report)
        except StoreError as error:  # another copy of it has ended, and swept
            if error.errno != errno.ENOENT or not _is_committed(there, data):
                raise
    if elsewhere is not None and absent:
        elsewhere.wait(manifest, absent)
    _commit(here, there, manifest, data, look)
    return sum(sizes[n] for n in missing), kept


def bring(
    here: Store, there: Store, manifest: Manifest, options: Options, report: Report, use: str
) -> int:
    """Copy those data files that this host has and the other place lacks; return their bytes."""
    files = [n for n, has in enumerate(present(here, manifest)) if has]
    missing = [n for n in files if not _is_whole(there, manifest, n, options, use)]
    if missing:
        with lease(here, options, use) as leased:
            _copy_files(here, there, leased, manifest, missing, report)
    return sum(manifest.table.file_bytes[missing].tolist())


def take_manifest(there: Store, data: bytes) -> None:
    """Publish a MANIFEST whose data files are on other hosts; what is none is passed over."""
    try:
        save_id = decode_manifest(data, spec.MANIFEST_NAME).table.header.save_id
    except CorruptError:
        return  # whoever restores it finds that
    pending = f"{spec.PENDING_MANIFEST_PREFIX}{save_id}"
    there.prepare(pending, data, spec.MANIFEST_NAME)
    there.sync_above(pending)
    there.publish(pending, spec.MANIFEST_NAME)


def is_same(here: Store, there: Store) -> bool | None:
    """Return whether both hold the same checkpoint; None: one of them cannot be read."""
    try:
        one, other = (s.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX) for s in (here, there))
        if one != other:
            decode_manifest(one, f"{here.location}/{spec.MANIFEST_NAME}")
    except (CorruptError, StoreError):
        return None
    return one == other


def present(store: Store, manifest: Manifest) -> list[bool]:
    """Return, for each data file, whether it is in a store, at its size."""
    below = f"{spec.DATA_DIRECTORY}/{manifest.table.header.save_id}"
    try:
        sizes = {f"{below}/{entry.name}": entry.size_bytes for entry in store.list(below)}
    except StoreError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        sizes = {}
    wanted = zip(manifest.file_names, manifest.table.file_bytes.tolist(), strict=True)
    return [sizes.get(name) == size for name, size in wanted]


def _bytes_of(store: Store, manifest: Manifest) -> bytes:
    """Return the bytes of a MANIFEST that was read."""
    data = store.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX)
    header = decode_manifest(data, f"{store.location}/{spec.MANIFEST_NAME}").table.header
    if header.save_id != manifest.table.header.save_id:
        raise ReplacedError(
            f"{store.location} was replaced by another checkpoint while it was read. Copy again"
        )
    return data


def _is_committed(store: Store, data: bytes) -> bool:
    """Return whether the same checkpoint is there.

    Raises:
        AlreadyCommittedError: another one is.
        OptionError: something else is.
    """
    if store.exists(spec.MANIFEST_NAME):
        if store.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX) == data:
            return True
        raise AlreadyCommittedError(
            f"{store.location} holds another checkpoint; copy to a new directory, or delete it"
        )
    check_absent(store, with_dcp=True)
    return False


def _check_base(there: Store, manifest: Manifest) -> None:
    base = manifest.table.header.base
    if base is None:
        return
    if not there.can_link:
        raise OptionError(
            f"this is a delta checkpoint of {base.name}, and {there.location} cannot hold chains "
            "of deltas. Write it again first: holdfast recompress SOURCE NEW --codec lossless"
        )
    beside = there.sibling(base.name)
    is_there = beside.exists(spec.MANIFEST_NAME)
    if not is_there or content_digest(read_manifest(beside).table) != base.digest:
        raise OptionError(
            f"this is a delta checkpoint of {base.name}, and {beside.location} is not that "
            "checkpoint. Copy the base there first, or copy the whole run"
        )


def _is_whole(store: Store, manifest: Manifest, file: int, options: Options, use: str) -> bool:
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
            for run, slot in reader.stream(_runs_of(manifest, [file])):
                _check(reader, run, slot)
    except CorruptError:
        return False
    return True


def _runs_of(manifest: Manifest, files: Sequence[int]) -> list[ReadRun]:
    """Return what is to be read of some files, each from its beginning to its end."""
    tensors = manifest.table.header.tensors
    wanted = {t.path: (i, [whole(t.shape)]) for i, t in enumerate(tensors)}
    some = set(files)
    runs = [run for run in plan_load(manifest, wanted, SLOT_BYTES) if run.extent.file in some]
    return sorted(runs, key=lambda run: (run.extent.file, run.extent.offset))


def _check(reader: DataFileReader, run: ReadRun, slot: int) -> None:
    if not reader.is_whole(run, slot):
        for read in run.chunks:
            reader.check(run, read, slot)


def _copy_files(
    here: Store,
    there: Store,
    leased: Lease,
    manifest: Manifest,
    files: Sequence[int],
    report: Report,
) -> None:
    """Read files in their order, check what was read, and write it."""
    runs = _runs_of(manifest, files)
    below = f"{spec.DATA_DIRECTORY}/{secrets.token_hex(16)}"  # as a save of its own: see `sweep`
    try:
        with DataFileReader(here, leased, manifest) as reader:
            stream = reader.stream(runs, in_order=True)
            at = 0
            for file in files:
                with _NewFile(here, there, manifest, file, below) as new:
                    while at < len(runs) and runs[at].extent.file == file:
                        run, slot = next(stream)
                        _check(reader, run, slot)
                        view = leased.pool.view(slot)[: run.extent.size_bytes]
                        report(new.add(run.extent.offset, view))
                        at += 1
                    report(new.finish())
    finally:
        if there.shows_pending:
            with contextlib.suppress(StoreError):  # a file may be left in it
                there.remove_directory(below)


class _NewFile:
    """One data file at the target, which gets its name when it is whole.

    Two that bring the same file, one of which may be frozen and go on when the other has ended,
    write two files; each removes its own alone.
    """

    def __init__(
        self, here: Store, there: Store, manifest: Manifest, file: int, below: str
    ) -> None:
        self._here, self._there = here, there
        self._name = self._pending = manifest.file_names[file]
        if there.shows_pending:
            self._pending = f"{below}/{PENDING_PREFIX}{self._name.rpartition('/')[2]}"
        self._size = int(manifest.table.file_bytes[file])
        self._end = int(manifest.payload_end[file])
        self._manifest, self._file = manifest, file
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
        self._here.vfs.close(self._from)
        self._there.vfs.close(self._to)
        if error is not None and self._pending != self._name:
            self._there.remove(self._pending)

    def add(self, offset: int, view: memoryview) -> int:
        """Write what was read at an offset, up to the end of the payloads; return its size."""
        before = self._at
        self._fill(offset)
        size = min(self._end, offset + len(view)) - self._at
        if size > 0:
            self._write(view[self._at - offset : self._at - offset + size])
        return self._at - before

    def finish(self) -> int:
        """Write the rest, make it durable, check what is no payload; return its size."""
        before = self._at
        self._fill(self._size)
        vfs = self._there.vfs
        vfs.truncate(self._to, self._size)
        vfs.sync(self._to)
        if self._pending != self._name:
            self._there.move(self._pending, self._name)
        self._there.sync_made(self._name)
        check_files(self._there, self._manifest, [self._file])
        return self._at - before

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


def _commit(
    here: Store, there: Store, manifest: Manifest, data: bytes, look: Callable[[], object]
) -> None:
    """Publish the copy, with what belongs beside it."""
    pending = f"{spec.PENDING_MANIFEST_PREFIX}{manifest.table.header.save_id}"
    if here.exists(spec.SIGNATURE_NAME):
        signature = here.get(spec.SIGNATURE_NAME, spec.MANIFEST_BYTES_MAX)
        there.prepare(f"{pending}.signature", signature)
        there.replace(f"{pending}.signature", spec.SIGNATURE_NAME)
    there.prepare(pending, data, spec.MANIFEST_NAME)
    try:
        there.sync_path(next(iter(manifest.file_names), spec.MANIFEST_NAME))
        there.sync_above(pending)
        check_present(there, manifest)
        check_base(there, manifest)
        look()
    except BaseException:
        there.remove(pending)
        raise
    if not there.publish(pending, spec.MANIFEST_NAME) and not _is_committed(there, data):
        raise StoreError(f"{there.location} was taken by another save during this copy")
    if is_marker(here):
        put_marker(there)
    if there.shows_pending:
        with contextlib.suppress(StoreError):
            _sweep(there)


def _sweep(there: Store) -> None:
    """Remove what copies that died have left beside the one that is committed."""
    for save in there.list(spec.DATA_DIRECTORY):
        below = f"{spec.DATA_DIRECTORY}/{save.name}"
        names = [entry.name for entry in there.list(below)] if save.kind == "directory" else []
        if names and all(name.startswith(PENDING_PREFIX) for name in names):
            there.remove_all([f"{below}/{name}" for name in names])
            there.remove_directory(below)
