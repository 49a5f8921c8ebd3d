"""Everything under a checkpoint's directory that is not a payload.

Names, sizes, headers, footers, trailers.
With the payloads and the gaps before them (`read`), that is every byte. Knows stores and the
format; no tensors.
"""

import errno
import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace

import numpy as np

from .._core import xxh3_64
from ..errors import (
    CorruptError,
    NotCommittedError,
    StoreError,
    TrustError,
    VersionError,
    damaged,
)
from ..format import spec
from ..format.data_file import check_header, chunk_seed, decode_trailer
from ..format.header import encode_header
from ..format.manifest import Manifest, decode_manifest
from ..format.names import (
    DCP_FIRST_NAME,
    DCP_METADATA_NAME,
    DCP_PATTERN,
    Foreign,
    foreign_of,
    names_of_dcp,
    some,
)
from ..format.signature import Statement
from ..format.table import Table, decode_table, encode_table, footer_of_all, renumbered_tensors
from ..format.tiling import check_tiling
from ..stores.base import NOT_A_FILE, Entry, Names, Store
from .marker import without_marker
from .read import open_data_file, still_there
from .removed import check_not_removed, check_not_replaced
from .trust import Check, read_signature
from .uncommitted import why_not_committed

SEEN_MAX = 1000  # names in a directory that a load looks at
_KINDS = {
    spec.MANIFEST_NAME: "file",
    spec.DATA_DIRECTORY: "directory",
    spec.SIGNATURE_NAME: "file",
}
MANIFEST_TRIES = 2  # one that is published between the look and the next one is read by that


def read_manifest(store: Store, check: Check | None = None) -> Manifest:
    """Read and check the MANIFEST: a checkpoint is there if and only if it is.

    Args:
        check: binds its bytes to what a trusted key has signed, before they are parsed.

    Raises:
        TrustError: nobody trusted has signed it.
        NotCommittedError: there is none.
        CorruptError: it fails a check.
        VersionError: a newer holdfast wrote it.
    """
    where, data = f"{store.location}/{spec.MANIFEST_NAME}", _get_manifest(store)
    signed = _check_signed(check, store, data) if check else None
    try:
        manifest = decode_manifest(data, where)
        if np.count_nonzero(manifest.is_cut):  # else each tensor is one shard, all of it
            check_tiling(manifest)
    except CorruptError as error:
        text = str(error) if str(error).startswith(where) else f"{where}: {error}"
        raise damaged(store.location, text) from error
    if signed is not None:
        if len(signed.payloads) != len(manifest.chunk_start):
            raise TrustError(
                f"{store.location}/{spec.SIGNATURE_NAME} does not match this checkpoint's "
                "contents. Get the checkpoint and its SIGNATURE again"
            )
        manifest = replace(manifest, signed=signed)
    return manifest


def _check_signed(check: Check, store: Store, data: bytes) -> Statement:
    with still_there(store):  # a SIGNATURE goes with its checkpoint
        return check(store, data)


def _get_manifest(store: Store) -> bytes:
    for _ in range(MANIFEST_TRIES):
        try:
            return store.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX)
        except StoreError as error:
            if not store.exists(spec.MANIFEST_NAME):
                raise NotCommittedError(why_not_committed(store)) from error
            if error.errno in (*NOT_A_FILE, errno.EFBIG):
                where = f"{store.location}/{spec.MANIFEST_NAME}"
                text = f"{where} is not a regular file of at most 1 GiB"
                raise damaged(store.location, text) from error
            if error.errno != errno.ENOENT:
                raise
            failure = error  # it was committed this moment
    raise failure


def check_share(
    store: Store, manifest: Manifest, rank: int, world_size: int, *, names: bool
) -> None:
    """Check a rank's part of all bytes that are no payload: each file is checked by one rank.

    Args:
        names: whether nothing else may lie under the directory.

    Raises:
        CorruptError: as `check_names` and `check_files`.
    """
    if rank == 0:
        check_names(store, manifest) if names else check_alone(store)
    check_files(store, manifest, range(rank, len(manifest.file_names), world_size))


def check_names(store: Store, manifest: Manifest) -> None:
    """Check that what has a name of ours is ours, and that `data` holds nothing else.

    Foreign names beside it are let be: nothing of them is opened or followed.

    Raises:
        CorruptError: an unknown file; the text names it.
    """
    save_id = manifest.table.header.save_id
    is_signed, of_dcp = False, list[str]()
    for name, kind in _names_seen(store):
        if DCP_PATTERN.fullmatch(name):
            of_dcp.append(name)
        is_signed = is_signed or name == spec.SIGNATURE_NAME
        if kind != _KINDS.get(name, kind):
            raise _stranger(store, name, kind)
    if of_dcp and (of_dcp := without_marker(store, of_dcp)):
        raise two_checkpoints(store, of_dcp)
    for entry in _list_data(store, manifest, spec.DATA_DIRECTORY):
        # Directories of saves that died belong to no checkpoint, and are never read.
        if entry.kind != "directory":
            raise _stranger(store, f"{spec.DATA_DIRECTORY}/{entry.name}", entry.kind)
    below, names = f"{spec.DATA_DIRECTORY}/{save_id}", set(manifest.file_names)
    for entry in _list_data(store, manifest, below):
        if entry.kind != "file" or f"{below}/{entry.name}" not in names:
            raise _stranger(store, f"{below}/{entry.name}", entry.kind)
    signature = read_signature(store) if is_signed else None
    if signature and len(signature.statement.payloads) != len(manifest.chunk_start):
        raise CorruptError(
            f"{store.location}/{spec.SIGNATURE_NAME} is of another checkpoint; remove it"
        )


def check_alone(store: Store) -> None:
    """Check that PyTorch DCP has not saved another checkpoint into the same directory.

    Raises:
        CorruptError: it has; nobody can tell which of the two is newer.
    """
    with still_there(store):
        found = names_of_dcp(name for name, _ in _names_seen(store))
        if found and (found := without_marker(store, found)):
            raise two_checkpoints(store, found)


def _names_seen(store: Store) -> Names:
    """Return names in a checkpoint's directory, with their kinds.

    Others may have put a million files there. Then it is some of them, and all that have a name of
    ours; and what PyTorch DCP writes last, and what its first rank writes.
    """
    seen = store.some(SEEN_MAX)
    if len(seen) == SEEN_MAX:
        names = (*_KINDS, DCP_METADATA_NAME, DCP_FIRST_NAME)
        seen += [(name, kind) for name in names if (kind := store.kind(name))]
    return [*dict.fromkeys(seen)]


def two_checkpoints(store: Store, of_dcp: Sequence[str]) -> CorruptError:
    return CorruptError(
        f"{store.location} holds two checkpoints: holdfast's (MANIFEST) and one of PyTorch DCP "
        f"({some(of_dcp)}), which may be newer. Remove the files of one, and save each checkpoint "
        "to a directory of its own"
    )


def find_foreign(store: Store) -> Foreign:
    """Count the foreign names in a checkpoint's directory; what they name is not opened."""
    try:
        return foreign_of(store.scan())
    except StoreError as error:
        if error.errno != errno.ENOENT:
            raise
        return Foreign()  # it went meanwhile


def _list_data(store: Store, manifest: Manifest, name: str) -> list[Entry]:
    try:
        return store.list(name)
    except StoreError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        if manifest.file_names:
            check_not_replaced(store, manifest.file_names[0], error)
            raise damaged(
                store.location,
                f"{store.location}/{name} is missing, but MANIFEST names files in it",
            ) from error
        return []  # a checkpoint without elements needs no directory for them


def _stranger(store: Store, name: str, kind: str) -> CorruptError:
    found = {"file": "file", "directory": "directory"}.get(kind, "link or special file")
    return CorruptError(
        f"{store.location}/{name} is a {found} that does not belong to the checkpoint; remove it "
        "if you put it there"
    )


def check_files(store: Store, manifest: Manifest, files: Iterable[int], name: str = "") -> None:
    """Check size, header, footer and trailer of data files, and the gap before each footer.

    Args:
        name: of the one file, where it has another name yet.

    Raises:
        CorruptError: the text names the file and what differs.
    """
    for file in files:
        at = name or manifest.file_names[file]
        descriptor = open_data_file(store, at, direct=False)
        try:
            _check_file(store, manifest, file, descriptor)
        except CorruptError as error:
            raise damaged(store.location, f"{store.location}/{at}: {error}") from error
        except VersionError as error:
            raise VersionError(f"{store.location}/{at}: {error}") from error
        except StoreError as error:
            check_not_removed(store, at, error)
            raise
        finally:
            store.vfs.close(descriptor)


def _check_file(store: Store, manifest: Manifest, file: int, descriptor: int) -> None:
    table, vfs = manifest.table, store.vfs
    size, expected = vfs.size(descriptor), int(table.file_bytes[file])
    if size != expected:
        raise CorruptError(f"it has {size} bytes, MANIFEST says {expected}")
    header = vfs.read(descriptor, spec.DATA_HEADER_BYTES, 0)
    rank, number = int(table.file_rank[file]), int(table.file_number[file])
    check_header(header, table.header.save_id, rank, number)
    trailer = vfs.read(descriptor, spec.TRAILER_BYTES, size - spec.TRAILER_BYTES)
    offset, footer_bytes, checksum = decode_trailer(trailer, size)
    if footer_bytes > manifest.size_bytes + spec.SMALL_ALIGN_BYTES:
        raise CorruptError(f"its footer takes {footer_bytes} bytes, more than the whole MANIFEST")
    end = int(manifest.payload_end[file])
    if not end <= offset < end + spec.GAP_BYTES_LIMIT:
        raise CorruptError(f"its footer begins at {offset}, its payloads end at {end}")
    tail = vfs.read(descriptor, offset - end + footer_bytes, end)
    if any(tail[: offset - end]):
        raise CorruptError(f"the padding before its footer, from byte {end}, is not zero")
    if checksum != int(table.file_footer_checksum[file]):
        raise CorruptError("its trailer has another footer checksum than MANIFEST")
    footer = tail[offset - end :]
    seed = chunk_seed(table.header.save_id, rank, number, spec.FOOTER_CHUNK)
    if xxh3_64(footer, seed) != checksum:
        raise CorruptError(f"the checksum of its footer (at {offset}) does not match its bytes")
    is_raw, has_more = table.header.is_raw, table.header.objects or table.header.losses
    is_all = is_raw and len(manifest.file_names) == 1 and not has_more
    if is_all and manifest.data and footer_of_all(manifest.data) == footer:
        return
    wanted = _footer_of(manifest, file)
    if is_raw and encode_table(spec.FOOTER_MAGIC, wanted) == footer:
        return
    try:
        _check_footer(decode_table(spec.FOOTER_MAGIC, footer, wanted.header), wanted)
    except VersionError as error:
        raise CorruptError(f"its footer is of another version than MANIFEST: {error}") from error


def _check_footer(footer: Table, expected: Table) -> None:
    """Check that a footer says of its file what MANIFEST says."""
    differing = [
        field.name
        for field in fields(Table)
        if field.name != "header"
        and not np.array_equal(getattr(footer, field.name), getattr(expected, field.name))
    ]
    if footer.header is not expected.header:
        # As JSON, where NaN equals itself.
        found, wanted = (json.loads(encode_header(t.header)) for t in (footer, expected))
        differing += [key for key in wanted if found[key] != wanted[key]]
    if differing:
        raise CorruptError(f"its footer and MANIFEST differ in {', '.join(differing)}")


def _footer_of(manifest: Manifest, file: int) -> Table:
    """Return the table that the footer of a file has to be: a part of the manifest's."""
    table = manifest.table
    rows = slice(int(manifest.file_first_chunk[file]), int(manifest.file_first_chunk[file + 1]))
    shards = np.arange(*np.searchsorted(table.shard_file, [file, file + 1]))  # ordered by file
    tensors, numbers = renumbered_tensors(table.shard_tensor[shards], len(table.header.tensors))
    return Table(
        header=table.header.part(tensors),
        file_bytes=np.zeros(1, np.uint64),
        file_footer_checksum=np.zeros(1, np.uint64),
        file_rank=table.file_rank[[file]],
        file_number=table.file_number[[file]],
        file_chunks=table.file_chunks[[file]],
        shard_digest=table.shard_digest[shards],
        shard_box=table.shard_box[_box_rows(manifest, shards)],
        shard_tensor=numbers.astype(np.uint32),
        shard_file=np.zeros(len(shards), np.uint32),
        shard_first_chunk=table.shard_first_chunk[shards],
        shard_chunks=table.shard_chunks[shards],
        chunk_checksum=table.chunk_checksum[rows],
        chunk_size_mode=table.chunk_size_mode[rows],
        chunk_offset=table.chunk_offset[rows],
    )


def _box_rows(manifest: Manifest, shards: "np.ndarray[tuple[int], np.dtype[np.intp]]") -> slice:
    """Return the numbers of consecutive shards' boxes; shards of one file follow each other."""
    if not len(shards):
        return slice(0, 0)
    return slice(int(manifest.box_start[shards[0]]), int(manifest.box_start[int(shards[-1]) + 1]))
