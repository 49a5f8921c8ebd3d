"""A checkpoint, as it is, from one store to another: the same files, checked while they stream.

The data comes first, MANIFEST last, by the steps of a commit (`docs/commit.md`). So what was cut
off is no checkpoint, and goes on where it was. Knows stores and the format, no tensors.
"""

import contextlib
import errno
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace as with_fields
from typing import Protocol

from ..errors import (
    AlreadyCommittedError,
    CorruptError,
    OptionError,
    ReplacedError,
    StoreError,
    VersionError,
)
from ..format import spec
from ..format.manifest import Manifest, decode_manifest
from ..format.table import content_digest
from ..options import SLOT_BYTES, STREAM_BYTES, Options
from ..stores.base import Store
from .check import check_names, read_manifest
from .commit import check_absent, check_base, check_present
from .copied_files import GONE, Report, copy_files, is_whole, sweep_copies
from .marker import is_marker, put_marker
from .pool import lease
from .read import still_there
from .removal import announced, lift, pending_of_copy, revoke_copies
from .slot_writes import slots_for
from .trust import check_of


class Elsewhere(Protocol):
    """Hosts that have files of a checkpoint which this one lacks."""

    def ask(self, manifest: Manifest, data: bytes) -> None:
        """Let them bring these files."""

    def wait(self, manifest: Manifest, files: Sequence[int]) -> None:
        """Wait until these are there, durably; raises a HoldfastError when they do not come."""


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
    if there.shows_pending:
        lift(there, manifest.table.header.save_id)  # who removes what was there before stops here
        _check_not_announced(there, manifest.table.header.save_id)
    if elsewhere is not None and absent:
        elsewhere.ask(manifest, data)
    if options.pool_bytes is None:
        slots_bytes = slots_for(there) * SLOT_BYTES
        options = with_fields(options, pool_bytes=max(STREAM_BYTES, slots_bytes))
    files = sorted(set(range(len(sizes))) - set(absent))
    missing = [n for n in files if not is_whole(there, manifest, n, options, use)]
    kept = sum(sizes[n] for n in files) - sum(sizes[n] for n in missing)
    report(kept)
    with still_there(here), lease(here, options, use) as leased:
        if files or elsewhere is None:
            check_names(here, manifest)
        copy_files(here, there, leased, manifest, missing, report)
    if elsewhere is not None and absent:
        elsewhere.wait(manifest, absent)
    _commit(here, there, manifest, data, look)
    return sum(sizes[n] for n in missing), kept


def bring(
    here: Store, there: Store, manifest: Manifest, options: Options, report: Report, use: str
) -> int:
    """Copy those data files that this host has and the other place lacks; return their bytes."""
    files = [n for n, has in enumerate(present(here, manifest)) if has]
    missing = [n for n in files if not is_whole(there, manifest, n, options, use)]
    if missing:
        with lease(here, options, use) as leased:
            copy_files(here, there, leased, manifest, missing, report)
    return sum(manifest.table.file_bytes[missing].tolist())


def take_manifest(there: Store, data: bytes) -> None:
    """Publish a MANIFEST whose data files are on other hosts; what is none is passed over."""
    try:
        save_id = decode_manifest(data, spec.MANIFEST_NAME).table.header.save_id
    except CorruptError:
        return  # whoever restores it finds that
    if there.shows_pending:
        lift(there, save_id)
    pending = pending_of_copy(there, save_id)
    there.prepare(pending, data, spec.MANIFEST_NAME)
    there.sync_above(pending)
    _check_not_announced(there, save_id)
    there.publish(pending, spec.MANIFEST_NAME)


def _check_not_announced(there: Store, save_id: str) -> None:
    if name := announced(there, save_id):
        raise StoreError(
            f"{there.location} is being removed by another job, or such a removal left {name}. "
            "Copy again; if this error comes back, remove it"
        )


def is_same(here: Store, there: Store) -> bool | None:
    """Return whether both hold the same checkpoint; None: one of them cannot be read."""
    try:
        one, other = (s.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX) for s in (here, there))
        if one != other:
            decode_manifest(one, f"{here.location}/{spec.MANIFEST_NAME}")
    except (CorruptError, StoreError, VersionError):
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
            store.sync_directory()  # who published it may not have come so far
            return True
        raise AlreadyCommittedError(
            f"{store.location} holds another checkpoint; copy to a new directory, or delete it"
        )
    try:
        check_absent(store, with_dcp=True)
    except AlreadyCommittedError:
        if not store.exists(spec.MANIFEST_NAME):
            raise
        return _is_committed(store, data)  # it was published this moment
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


def _commit(
    here: Store, there: Store, manifest: Manifest, data: bytes, look: Callable[[], object]
) -> None:
    """Publish the copy, with what belongs beside it."""
    save_id = manifest.table.header.save_id
    pending = pending_of_copy(there, save_id)
    if here.exists(spec.SIGNATURE_NAME):
        signature = here.get(spec.SIGNATURE_NAME, spec.MANIFEST_BYTES_MAX)
        own = f"{spec.PENDING_MANIFEST_PREFIX}signature-{secrets.token_hex(8)}"
        there.prepare(own, signature)
        there.replace(own, spec.SIGNATURE_NAME)
    there.prepare(pending, data, spec.MANIFEST_NAME)
    try:
        there.sync_path(next(iter(manifest.file_names), spec.MANIFEST_NAME))
        there.sync_above(pending)
        _check_not_announced(there, save_id)
        check_present(there, manifest)
        check_base(there, manifest)
        look()
    except BaseException:
        there.remove(pending)
        raise
    try:
        is_ours = there.publish(pending, spec.MANIFEST_NAME)
    except StoreError as error:
        if error.errno not in GONE:
            raise
        is_ours = False
    if not is_ours and not _is_committed(there, data):
        raise StoreError(f"{there.location} was taken by another save during this copy")
    if is_marker(here):
        put_marker(there)
    with contextlib.suppress(StoreError):
        sweep_copies(there)
        revoke_copies(there, save_id)
