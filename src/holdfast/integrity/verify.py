"""A checkpoint with everything below it, checked: what is damaged, and what that costs."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..brief import brief
from ..engine.check import find_foreign, two_checkpoints
from ..engine.other_hosts import files_elsewhere
from ..errors import CorruptError, NotCommittedError
from ..faults.damage import (
    Damage,
    Subject,
    check_decodable,
    find_damage,
    find_lost_manifest,
    find_wrong,
    from_below,
    manifest_below,
    of_base,
)
from ..format import spec
from ..loading.checkpoint import Checkpoint
from ..options import Options, options_of
from ..stores.base import Store
from ..stores.url import open_store
from ..worker import in_worker

Report = Callable[[int], None]
Known = dict[str, "Verified"]  # by location
ATTEMPTS = 3  # at a checkpoint that is rebased while it is looked at


@dataclass(frozen=True, slots=True)
class Verified:
    """Results of `verify`.

    Attributes:
        location: directory of the checkpoint.
        checkpoint: the open checkpoint, or None if its MANIFEST is damaged.
        damage: all faults of the checkpoint, and those of its bases that affect it.
        below: number of its bases.
        spared: faults of its bases that do not affect it.
        foreign: names in its directory that are none of holdfast's; they were not opened. The
            first 1,000.
        foreign_count: of all of them.
        elsewhere: what cannot be read here of a step of a run whose hosts have a disk each: its
            data files on the other disks.

    Example::

        result = holdfast.verify("runs/a/step-00001000")
        print("whole" if not result.damage else result.damage[0].what)
    """

    location: str
    checkpoint: Checkpoint | None
    damage: tuple[Damage, ...]
    below: int = 0
    spared: tuple[Damage, ...] = ()
    foreign: tuple[str, ...] = ()
    foreign_count: int = 0
    elsewhere: tuple[Damage, ...] = ()

    __repr__ = brief


@in_worker
def verify(
    path: "str | os.PathLike[str]",
    *,
    deep: bool = False,
    patient: bool = False,
    options: Options | None = None,
    report: Report = lambda _: None,
    known: Known | None = None,
) -> Verified:
    """Check every byte that holdfast wrote of a checkpoint and of all its bases.

    Args:
        path: directory of the checkpoint.
        deep: also decode everything, and compare it with the digests of the saved state.
        patient: count bytes that the disk cannot read (EIO) as damage, not as an error.
        options: settings such as ``io`` and ``trust``.
        report: called with the number of encoded bytes checked since the last call.
        known: a dict of earlier results by location, which is extended: with the same dict in
            several calls, a common base is read once.

    Returns:
        The faults in ``damage``; it is empty if the checkpoint is whole. The names of files that
        are not holdfast's in ``foreign``.

    Raises:
        NotCommittedError: there is no checkpoint, or it was deleted meanwhile.
        VersionError: a newer holdfast wrote it, or one of its bases.
        StoreError: the disk or the network failed; the checkpoint may be whole.
        OptionError: ``deep`` is given, and torch is not installed.

    Example:
        ``print([fault.what for fault in holdfast.verify("runs/a/step-00001000").damage])``
    """
    options = options_of(options)
    store, known = open_store(path), {} if known is None else known
    location = store.location
    if location in known and not deep:
        return known[location]
    for _ in range(ATTEMPTS):
        try:
            checkpoint = Checkpoint(location, options)
        except NotCommittedError:
            if (lost := find_lost_manifest(store)) is None:
                raise
            return known.setdefault(location, Verified(location, None, (lost,)))
        except CorruptError as error:
            where = f"{location}/{spec.MANIFEST_NAME}"
            return known.setdefault(
                location, Verified(location, None, (Damage(where, error.args[0]),))
            )
        found = verify_subject(checkpoint.subject, report, known, deep=deep, patient=patient)
        found = _with_foreign(replace(found, checkpoint=checkpoint), store)
        if options.trust is None:  # nobody signs what says which files are elsewhere
            found = _without_elsewhere(found, checkpoint.subject)
        if not found.damage or _is_still(checkpoint):
            break
    known[location] = found
    return found


def _without_elsewhere(found: Verified, subject: Subject) -> Verified:
    """Take no file of another host for damage."""
    absent = files_elsewhere(subject.store, subject.manifest) if found.damage else frozenset()
    here = tuple(fault for fault in found.damage if fault.where not in absent)
    elsewhere = tuple(fault for fault in found.damage if fault.where in absent)
    return replace(found, damage=here, elsewhere=elsewhere)


def _with_foreign(found: Verified, store: Store) -> Verified:
    """Add the foreign names; a checkpoint of DCP behind those that a load sees is a fault."""
    foreign = find_foreign(store)
    if foreign.of_dcp and not found.damage:
        fault = Damage(found.location, two_checkpoints(store, foreign.of_dcp).args[0])
        found = replace(found, damage=(fault,))
    return replace(found, foreign=foreign.names, foreign_count=foreign.count)


def verify_subject(
    subject: Subject, report: Report, known: Known, *, deep: bool = False, patient: bool = False
) -> Verified:
    """Do as `verify`, with a MANIFEST that has been read."""
    if deep:
        check_decodable()
    location, header = subject.store.location, subject.manifest.table.header
    # A file that is missing may be found so twice.
    damage = list(dict.fromkeys(find_damage(subject, report, patient=patient)))
    below, spared = 0, list[Damage]()
    if header.base is not None and len(subject.manifest.based):
        place = os.path.join(os.path.dirname(location), header.base.name)
        try:
            manifest = manifest_below(subject)
        except CorruptError as error:
            damage.append(of_base(subject, place, error))
        else:
            try:
                found = verify(
                    place, patient=patient, options=subject.options, report=report, known=known
                )
            except NotCommittedError as error:  # it went meanwhile
                found = Verified(place, None, ())
                damage.append(of_base(subject, place, CorruptError(str(error))))
            below = found.below + 1
            spared += found.spared
            for fault in found.damage:
                hit = from_below(subject, fault, manifest)
                (spared if hit is None else damage).append(hit or fault)
    if deep:
        damage += find_wrong(subject, damage, lambda _: None)
    return Verified(location, None, tuple(damage), below, tuple(spared))


def _is_still(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint that was looked at is there yet: what goes away looks damaged.

    Raises:
        NotCommittedError: it was retired.
    """
    subject = checkpoint.subject
    if not subject.store.exists(spec.MANIFEST_NAME):
        raise NotCommittedError(
            f"{checkpoint.location} was deleted while it was verified; verify a newer checkpoint"
        )
    try:
        return Checkpoint(checkpoint.location).save_id == checkpoint.save_id
    except CorruptError:
        return False
