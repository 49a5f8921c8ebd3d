"""One atomic step from nothing to a committed checkpoint.

States: WRITING (data files, no manifest) → DURABLE (every rank has synced files and directories)
→ COMMITTED (manifest present) → RETIRED (manifest removed first, data after).

Invariants:
  1. Every file that a manifest names is durable, with its directory entry and its parents', before
     the manifest exists.
  2. The manifest appears by one atomic, exclusive step; a reader sees all of it or none.
  3. Nothing that a committed manifest names is ever rewritten.
  4. The base of a live delta is never retired.
  5. One failed rank: nobody commits, and every rank raises.
  6. No collectives in the background.
  7. After a failed fsync nothing is re-synced: the file is dropped and rewritten under a new name,
     once.
  8. The coordinator checks before committing that the boxes tile every tensor exactly, with no gap
     and no overlap, and that every file is where it will be looked for.
"""

import contextlib
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from types import TracebackType

import numpy as np

from ..errors import (
    AlreadyCommittedError,
    CorruptError,
    NotCommittedError,
    OptionError,
    StateError,
    StoreError,
)
from ..format import spec
from ..format.header import Header, check_paths
from ..format.links import Base
from ..format.manifest import Manifest, check_table, encode_manifest
from ..format.names import is_save_id, names_of_dcp, some, step_name, step_of
from ..format.rows import Planned, Written, join_written
from ..format.table import content_digest
from ..format.tiling import check_shapes, check_tiling
from ..stores.base import NOT_A_FILE, Store
from .around import check_above_none, within
from .check import read_manifest
from .discard import pending_name, remove_files
from .known import known_at, remember
from .marker import without_marker
from .retire import REVOKED as REVOKED
from .retire import is_leaving, revoke_save


@dataclass(frozen=True, slots=True)
class Begun:
    """What a `Commit` publishes: a checked manifest, its header and its bytes."""

    header: Header
    manifest: Manifest
    data: bytes


def begin(store: Store, header: Header, planned: Planned, written: Sequence[Written]) -> Begun:
    """Check the tables of all ranks, and write the manifest under another name, unsynced.

    If this is done before the data files are synced, a disk takes all of them at once. After a
    failure every file of this save is removed.

    Args:
        planned: what the ranks were to write.
        written: what every rank has written, in rank order.

    Raises:
        StateError: no reader would take the manifest, or the boxes do not tile every tensor.
    """
    pending = pending_name(header.save_id)
    try:
        begun = Begun(header, *_manifest_of(store, header, planned, written))
        with contextlib.suppress(StoreError):  # `prepare` tries again, and says why it fails
            store.begin(pending, begun.data)
    except BaseException:
        with contextlib.suppress(StoreError):
            store.remove(pending)
        remove_files(store, header.save_id)
        raise
    return begun


class Commit(contextlib.AbstractContextManager["Commit"]):
    """One commit, as a context manager: `prepare`, a last look, `publish`.

    Run by the coordinator alone. When no manifest names them in the end, every file of this save is
    removed: from here on nobody else knows whether one does.

    Attributes:
        manifest: after `prepare`.
        may_stand: whether a MANIFEST of this save may be there, after a failure.
    """

    manifest: Manifest
    may_stand = False

    def __init__(self, store: Store, save_id: str, here: frozenset[int] | None = None) -> None:
        """Prepare; ``here`` are the ranks whose files are on this disk; None: all."""
        self._store, self._save_id, self._here = store, save_id, here
        self._pending = pending_name(save_id)
        self._data = b""
        self._may_be_there = False  # MANIFEST, whatever is said
        self._is_refused = False  # for good: what was to be replaced by it has gone

    def prepare(self, begun: Begun, content: str = "") -> None:
        """Make a manifest durable under another name, and the names of what it names.

        Args:
            content: digest of what it has to hold; empty: anything.

        Raises:
            StateError: it holds something else.
            StoreError: the disk failed, a rank wrote somewhere else, or the base is let go of.
        """
        store = self._store
        self.manifest, self._data = manifest, _ = begun.manifest, begun.data
        if content and content != content_digest(manifest.table):
            raise StateError(
                f"the elements read from {store.location} differ from its MANIFEST; the checkpoint "
                "is unchanged. Check it with 'holdfast verify --deep'"
            )
        store.prepare(self._pending, self._data, spec.MANIFEST_NAME)
        store.sync_path(next(iter(manifest.file_names), spec.MANIFEST_NAME))
        store.sync_above(self._pending)
        check_present(store, manifest, self._here)
        check_base(store, manifest)
        if begun.header.base is not None:  # the next link is made from this; it may still fail
            remember(manifest, self._data)

    def publish(self) -> None:
        """Let the manifest appear; return when it is durable.

        Raises:
            AlreadyCommittedError: this checkpoint exists already.
            StoreError: the disk failed, or another job has revoked what was prepared.
        """
        self._may_be_there = True
        if not self._store.publish(self._pending, spec.MANIFEST_NAME):
            self._is_refused = not self._store.shows_pending
            _settle_race(self._store, self._data)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tidy up after what went wrong."""
        if error is None:
            return
        if not self._may_be_there:
            with contextlib.suppress(StoreError):
                self._store.remove(self._pending)
        # Who is refused bars nothing: whoever has the bar is about to publish.
        is_lost = self._is_refused or isinstance(error, AlreadyCommittedError)
        if not self._may_be_there or self._will_never_be_there(is_lost):
            remove_files(self._store, self._save_id)
        else:
            self.may_stand = True
            error.add_note(
                f"MANIFEST of {self._store.location} may exist nevertheless. If so, the checkpoint "
                "is whole and loads, but may not survive a power cut"
            )
        if isinstance(error, StoreError) and error.errno in REVOKED:
            error.add_note(REVOKED[error.errno])

    def _will_never_be_there(self, is_lost: bool) -> bool:
        """Return whether MANIFEST is certainly not this save's; False when none can tell.

        Args:
            is_lost: whether the store has said that another one has its name.
        """
        store = self._store
        try:
            # On another machine, what was sent may still be on its way.
            is_over = store.can_link or is_lost or self._is_taken_back()
        except StoreError:
            return False
        return is_over and _certainly_not_published(store, self._data)

    def _is_taken_back(self) -> bool:
        """Keep what was sent from taking effect; return False when that cannot be done."""
        if self._store.shows_pending:
            self._store.remove(self._pending)  # a rename finds nothing from here on
            return True
        return revoke_save(self._store, self._save_id)


def commit(
    store: Store,
    begun: Begun,
    look: Callable[[], object] = lambda: None,
    here: frozenset[int] | None = None,
) -> None:
    """Publish a checkpoint.

    Args:
        here: as for `Commit`.
        look: called when all is durable; raises when it may not be published after all.
    """
    with Commit(store, begun.header.save_id, here) as made:
        made.prepare(begun)
        look()
        made.publish()


def check_absent(store: Store, *, with_dcp: bool = False, reclaims: bool = True) -> None:
    """Check that no checkpoint is here yet.

    Args:
        with_dcp: whether files of PyTorch DCP are the caller's affair.
        reclaims: take the place over from who began to save here before, dead or alive. Whoever may
            be refused afterwards does that later, or a save that may be made here fails.

    Raises:
        AlreadyCommittedError: there is one.
        OptionError: the directory holds something else, or is within a checkpoint or above one.
    """
    try:
        above = store.above_with(spec.MANIFEST_NAME, spec.MANIFEST_MAGIC)
        entries = store.list() if store.exists("") else None
    except StoreError as error:
        if error.errno == errno.ENOENT:
            return  # it went this moment
        if error.errno == errno.ENOTDIR:
            text = (
                f"{store.location} is not a directory, or is within a file; save to a new directory"
            )
            raise StoreError(text) from error
        raise
    if above:
        raise within(store.location, above)
    if entries is None:
        return
    names = [entry.name for entry in entries]
    if reclaims:
        store.reclaim(spec.MANIFEST_NAME)
    if spec.MANIFEST_NAME in names:
        raise AlreadyCommittedError(
            f"{store.location} holds a committed checkpoint; save under another step or path, or "
            "replace it with holdfast.save(..., replace=True)"
        )
    steps = [name for name in names if step_of(name) is not None]
    if steps:
        raise OptionError(
            f"{store.location} is a run, with {some(steps)}; save to one of its steps, such "
            f"as {store.location}/{step_name((step_of(steps[-1]) or 0) + 1)}"
        )
    found = [] if with_dcp else names_of_dcp(names)
    if found and (found := without_marker(store, found)):
        raise OptionError(
            f"{store.location} holds a checkpoint of PyTorch DCP ({some(found)}); save to another "
            "directory, or delete it first"
        )
    if spec.DATA_DIRECTORY in names and (others := _others_in_data(store)):
        raise OptionError(
            f"{store.location}/{spec.DATA_DIRECTORY} is not a checkpoint's: it "
            f"{others}. Save to a directory without the name {spec.DATA_DIRECTORY}"
        )
    check_above_none(store, entries)


def _others_in_data(store: Store) -> str:
    """Say what is in the place of our data files, and not ours; empty: nothing is."""
    try:
        entries = store.list(spec.DATA_DIRECTORY)
    except StoreError as error:
        if error.errno not in NOT_A_FILE and error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        return "is not a directory"
    foreign = [e.name for e in entries if e.kind != "directory" or not is_save_id(e.name)]
    return f"holds {some(foreign)}" if foreign else ""


def _manifest_of(
    store: Store, header: Header, planned: Planned, written: Sequence[Written]
) -> tuple[Manifest, bytes]:
    """Join what the ranks wrote; check it as a reader will: what that refuses is not committed."""
    try:
        table = join_written(header, planned, written)
        check_paths(header)
        if 0 in chain.from_iterable(map(attrgetter("shape"), header.tensors)):
            check_shapes(header.tensors)
        manifest, data = check_table(table), encode_manifest(table)
        if len(data) > spec.MANIFEST_BYTES_MAX:
            raise CorruptError(f"it takes {len(data)} bytes, at most {spec.MANIFEST_BYTES_MAX}")
    except CorruptError as error:
        raise StateError(
            f"the MANIFEST of this state cannot be read back: {error}. Nothing was committed; save "
            "fewer tensors or values, shorter names, or smaller shapes"
        ) from error
    try:
        if np.count_nonzero(manifest.is_cut):  # any other tensor is one shard, which is all of it
            check_tiling(manifest)
    except CorruptError as error:
        raise StateError(
            f"the shards of all ranks do not make whole tensors: {error}. Give each rank its part "
            "as a DTensor or a holdfast.Shard, or the same whole tensor on every rank"
        ) from error
    return manifest, data


def check_present(store: Store, manifest: Manifest, ranks: frozenset[int] | None = None) -> None:
    """Check that every file the manifest will name is here, at its size, whoever wrote it.

    Args:
        ranks: look for the files of these alone.
    """
    below = f"{spec.DATA_DIRECTORY}/{manifest.table.header.save_id}"
    writers = manifest.table.file_rank.tolist()
    is_any = bool(writers if ranks is None else ranks.intersection(writers))
    entries = store.list(below) if is_any else []
    found = {f"{below}/{entry.name}": entry.size_bytes for entry in entries}
    columns = (writers, manifest.table.file_bytes.tolist())
    for name, rank, size in zip(manifest.file_names, *columns, strict=True):
        if found.get(name) != size and (ranks is None or rank in ranks):
            seen = f"has {found[name]} bytes" if name in found else "is not there"
            error = StoreError(
                f"{store.location}/{name} has {size} bytes on the rank that wrote it, but {seen} "
                "on rank 0. Let all ranks save to one directory of a shared disk"
            )
            error.errno = None if name in found else errno.ENOENT
            raise error


def check_base(store: Store, manifest: Manifest) -> None:
    """Check, with the manifest pending, that what a link is made from is there and stays.

    Who lets go of it from here on finds the pending manifest, or the published one
    (`engine/retire.py`).
    """
    base = manifest.table.header.base
    if base is None or not len(manifest.based) or _stays(store.sibling(base.name), base):
        return
    error = StoreError(
        f"{store.location} is a delta of {base.name}, which was deleted or replaced during this "
        "save. Nothing was committed. Save again: the next save takes another base, or is a full "
        "checkpoint"
    )
    error.errno = errno.ENOENT
    raise error


def _stays(store: Store, base: Base) -> bool:
    """Return whether a base is there, unmarked; the mark first: it goes after MANIFEST."""
    try:
        if is_leaving(store):
            return False
        known = known_at(store) or remember(read_manifest(store))
        return known.content == base.digest
    except (CorruptError, NotCommittedError):
        return False


def _settle_race(store: Store, data: bytes) -> None:
    """Find out whose MANIFEST is there: the reply to our own link may have been lost (NFS).

    Raises:
        AlreadyCommittedError: it is another save's.
        StoreError: that cannot be found out; a save that cannot tell is not acknowledged.
    """
    name = spec.MANIFEST_NAME
    is_there = store.exists(name)
    if not is_there and not store.can_link:
        error = StoreError(
            f"{store.location}: another job kept this save from being published, and its files "
            "were deleted. Let one job save to each path; then save again"
        )
        error.errno = errno.EEXIST
        raise error
    if not is_there or store.get(name, spec.MANIFEST_BYTES_MAX) != data:
        raise AlreadyCommittedError(
            f"{store.location} was taken by another save during this one. The files of this save "
            "were deleted, and those of the other one kept. Let one job save to each path"
        )
    store.sync_directory()


def _certainly_not_published(store: Store, data: bytes) -> bool:
    """Return whether MANIFEST is absent for good or another save's; False when none can tell."""
    name = spec.MANIFEST_NAME
    try:
        if not store.exists(""):
            return True
        if store.exists(name) and store.get(name, spec.MANIFEST_BYTES_MAX) == data:
            return False
        store.sync_directory()  # it may have been there, until another job let go of it
    except StoreError:
        return False
    return True
