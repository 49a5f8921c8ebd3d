"""What a damaged checkpoint still offers, put where it can be used. Guesses nothing.

A MANIFEST that is lost is rebuilt from the footers; the whole tensors of a damaged checkpoint are
written to a new one. What is not recovered is named, in the new MANIFEST too.
"""

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..brief import brief
from ..engine.chain import Chain, open_readable
from ..engine.check import read_manifest
from ..engine.commit import begin, check_absent, check_present, commit
from ..engine.discard import remove_files
from ..engine.retire import replacer_of
from ..engine.write import sync_files
from ..errors import (
    AlreadyCommittedError,
    CorruptError,
    NotCommittedError,
    OptionError,
    StateError,
    StoreError,
    VersionError,
)
from ..faults.damage import Damage, Subject, names_of
from ..faults.rebuild import Rebuilt, find_saves, mend, rebuild
from ..format import spec
from ..format.header import REPAIRED, Header, marked_names
from ..format.manifest import Manifest, decode_manifest, encode_manifest
from ..format.names import misnamed, step_name
from ..format.tiling import check_tiling
from ..options import Options, options_of
from ..stores.base import Store
from ..stores.url import open_store
from ..worker import in_worker
from .evidence import doubts_of, neighbours_of
from .verify import Known, Verified, verify, verify_subject

Report = Callable[[int], None]
Box = tuple[tuple[int, ...], tuple[int, ...]]

YOUNG_S = 3600.0  # a save ends within half an hour, and then removes files that are not its own


@dataclass(frozen=True, slots=True)
class Repair:
    """Results of `repair`.

    Attributes:
        location: directory of the checkpoint.
        damage: all faults, also those of its MANIFEST.
        whole: names of the tensors that are whole.
        lost: names of the damaged tensors, and the lost boxes of each; empty: all of it.
        rebuilt: True if MANIFEST is lost or damaged, and was rebuilt from the data files.
        not_recovered: what else is lost with MANIFEST, in words.
        refused: why MANIFEST cannot be rebuilt in place; empty if it can, or is whole.
        written: directory of the checkpoint that was written, or None.
        kept: path of the damaged MANIFEST that was replaced, or None.
        repaired: True if an earlier repair wrote this checkpoint without some tensors.

    Example::

        result = holdfast.repair("runs/a/step-00001000")
        print(len(result.whole), "whole, lost:", dict(result.lost))
    """

    location: str
    damage: tuple[Damage, ...]
    whole: tuple[str, ...]
    lost: Mapping[str, tuple[Box, ...]]
    rebuilt: bool = False
    not_recovered: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    written: str | None = None
    kept: str | None = None
    repaired: bool = False

    __repr__ = brief


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint as far as it can be read."""

    subject: Subject
    verified: Verified
    rebuilt: Rebuilt | None
    not_recovered: tuple[str, ...]
    refused: tuple[str, ...]

    def lost(self) -> dict[str, tuple[Box, ...]]:
        lost: dict[str, tuple[Box, ...]] = {}
        names = names_of(self.subject.manifest)
        tensors = self.subject.manifest.table.header.tensors
        for index in self.rebuilt.partial if self.rebuilt else ():
            lost[names[tensors[index].path]] = ()
        for damage in self.verified.damage:
            for part in damage.lost:
                known = lost.get(part.tensor, ())
                lost[part.tensor] = tuple(dict.fromkeys([*known, *part.boxes]))
        return lost


@in_worker
def repair(
    path: "str | os.PathLike[str]",
    *,
    to: "str | os.PathLike[str] | None" = None,
    write: bool = False,
    options: Options | None = None,
    report: Report = lambda _: None,
    known: Known | None = None,
) -> Repair:
    """Find the whole tensors of a damaged checkpoint; with ``to`` or ``write``, save them.

    Args:
        path: directory of the checkpoint.
        to: new directory for a checkpoint of all whole tensors; the old one is unchanged.
        write: rebuild a lost or damaged MANIFEST in place, if all else is whole.
        options: settings such as ``io``.
        report: called with the bytes read since the last call.
        known: as for `verify`.

    Returns:
        Which tensors are whole, which are lost, and what was written.

    Raises:
        NotCommittedError: there is no checkpoint.
        AlreadyCommittedError: there is a checkpoint at ``to``; or another one was committed here.
        CorruptError: nothing can be recovered; nothing was written.
        VersionError: a newer holdfast wrote it.
        OptionError: ``to`` and ``write``; ``to`` named as another step; or torch is missing.

    Example:
        ``print(holdfast.repair("runs/a/step-00001000").whole)``
    """
    if write and to is not None:
        raise OptionError(
            "write= (rebuild MANIFEST in place) and to= (write elsewhere) are given; expected one"
        )
    options, store = options_of(options), open_store(path)
    found = _find(store, options, report, known, deep=write or to is not None)
    lost, names = found.lost(), names_of(found.subject.manifest)
    tensors = found.subject.manifest.table.header.tensors
    done = Repair(
        store.location,
        found.verified.damage,
        tuple(name for t in tensors if (name := names[t.path]) not in lost),
        lost,
        found.rebuilt is not None,
        found.not_recovered,
        found.refused,
        repaired=found.subject.manifest.table.header.is_repaired,
    )
    if to is not None:
        return replace(done, written=_salvage(found, lost, open_store(to, "to"), options, report))
    if write and found.rebuilt is not None:
        if found.refused:
            raise CorruptError(
                f"the MANIFEST of {store.location} is not rebuilt: {'; '.join(found.refused)}. "
                "'holdfast repair … --to NEW' writes all whole tensors to a new directory"
            )
        return replace(done, written=store.location, kept=_put(store, found))
    return done


def _find(
    store: Store, options: Options, report: Report, known: Known | None, *, deep: bool
) -> _Found:
    """Read MANIFEST, or what it has to be rebuilt from; check everything."""
    try:
        manifest = read_manifest(store)
    except NotCommittedError:
        if not find_saves(store):
            raise
        what = (
            f"{store.location} has data files but no MANIFEST: it is lost, or its save never ended"
        )
        fault = Damage(f"{store.location}/{spec.MANIFEST_NAME}", what)
    except (CorruptError, StoreError) as error:
        if isinstance(error, StoreError) and error.errno != errno.EIO:
            raise
        fault = Damage(f"{store.location}/{spec.MANIFEST_NAME}", error.args[0])
    else:
        found = verify(
            store.location, deep=deep, patient=True, options=options, report=report, known=known
        )
        verified = replace(found, damage=found.damage + found.elsewhere)
        return _Found(Subject(store, manifest, options), verified, None, (), ())
    rebuilt = _mend(store) or _rebuild(store)
    subject = Subject(store, rebuilt.manifest, options)
    # Decoded too: of footers alone, nothing else says that they are of these payloads.
    known = {} if known is None else known
    seen = verify_subject(subject, report, known, deep=True, patient=True)
    # Files that were not read are told as such; that nobody names them is no news.
    damage = [d for d in seen.damage if d.where != store.location or d.lost]
    damage += [
        Damage(f"{store.location}/{name}", f"{store.location}/{name}: {what}")
        for name, what in rebuilt.unreadable.items()
    ]
    verified = replace(seen, damage=(fault, *damage))
    return _Found(subject, verified, rebuilt, *doubts_of(store, rebuilt, damage))


def _mend(store: Store) -> Rebuilt | None:
    """Return what MANIFEST was to the bit, where it can be proven.

    Its own checksum may prove it. Or it stands whole where a commit that died was to publish it,
    and no other save has data here.
    """
    candidates, saves = list[bytes | None](), find_saves(store)
    with contextlib.suppress(StoreError):
        candidates.append(mend(store, store.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX)))
    for entry in store.list() if len(saves) == 1 else ():
        is_pending = entry.name.startswith(spec.PENDING_MANIFEST_PREFIX) and entry.kind == "file"
        if is_pending and not replacer_of(entry.name):  # what a mark holds was replaced
            with contextlib.suppress(StoreError):
                candidates.append(store.get(entry.name, spec.MANIFEST_BYTES_MAX))
    found: dict[bytes, Manifest] = {}
    for data in candidates:
        with contextlib.suppress(CorruptError, VersionError):
            manifest = decode_manifest(data or b"", spec.MANIFEST_NAME)
            check_tiling(manifest)
            if not manifest.table.header.is_repaired:
                found[data or b""] = manifest
    if len(found) != 1:  # of several saves, nobody knows which it was
        return None
    data, manifest = next(iter(found.items()))
    return Rebuilt(manifest, {}, proven=data)


def _rebuild(store: Store) -> Rebuilt:
    """Rebuild the one save of which there is enough; refuse to choose.

    Raises:
        CorruptError: there are none, or several.
    """
    orders = [
        [tensor.path for tensor in manifest.table.header.tensors]
        for manifest in neighbours_of(store).values()
    ]
    found, faults = dict[str, Rebuilt](), list[str]()
    for save_id in find_saves(store):
        try:
            found[save_id] = rebuild(store, save_id, orders)
        except CorruptError as error:
            faults.append(str(error))
    complete = {s: r for s, r in found.items() if not (r.partial or r.unreadable)}
    chosen = complete or found
    if not chosen:
        raise CorruptError(
            f"the MANIFEST of {store.location} cannot be rebuilt: "
            f"{'; '.join(faults) or 'there are no data files'}. Use another checkpoint"
        )
    if len(chosen) > 1:
        raise CorruptError(
            f"{store.location} has data files of {len(chosen)} saves ({', '.join(chosen)}); "
            "expected one. Keep the directory of one save in data/, and move the others away"
        )
    return next(iter(chosen.values()))


def _marked(header: Header, not_recovered: Sequence[str], lost: Mapping[str, Any]) -> Header:
    """Add a value that says what was not recovered, here and by an earlier repair."""
    earlier = dict(header.objects).get(REPAIRED)
    told = {
        "not_recovered": [
            *dict.fromkeys([*marked_names(earlier, "not_recovered"), *not_recovered])
        ],
        "lost": sorted({*marked_names(earlier, "lost"), *lost}),
    }
    objects = [(path, value) for path, value in header.objects if path != REPAIRED]
    return replace(header, objects=(*objects, (REPAIRED, told)))


def _put(store: Store, found: _Found) -> str | None:
    """Publish a rebuilt MANIFEST in its place; return where the damaged one is kept.

    Raises:
        AlreadyCommittedError: there is a good one by now.
        StateError: a save may be under way.
    """
    table = found.subject.manifest.table
    header = _marked(table.header, found.not_recovered, {})
    proven = found.rebuilt.proven if found.rebuilt else b""
    data = proven or encode_manifest(replace(table, header=header))
    manifest = decode_manifest(data, spec.MANIFEST_NAME)
    check_tiling(manifest)
    check_present(store, manifest)
    sync_files(store, manifest.file_names)
    pending = f"{spec.PENDING_MANIFEST_PREFIX}{secrets.token_hex(16)}"
    if not store.exists(spec.MANIFEST_NAME):
        _check_settled(store, manifest)
        store.sync_path(manifest.file_names[0])
        store.sync_above(manifest.file_names[0])
        store.prepare(pending, data)
        if not store.publish(pending, spec.MANIFEST_NAME):
            raise AlreadyCommittedError(
                f"{store.location} was committed by a save meanwhile, and needs no repair"
            )
        return None
    kept = _keep_damaged(store)
    try:
        read_manifest(store)
    except (CorruptError, StoreError):
        store.prepare(pending, data)
        store.replace(pending, spec.MANIFEST_NAME)
        return kept
    raise AlreadyCommittedError(
        f"the MANIFEST of {store.location} was replaced meanwhile, and needs no repair"
    )


def _check_settled(store: Store, manifest: Manifest) -> None:
    """Check that nobody is saving here: who finds a MANIFEST of others removes its own files."""
    age = time.time() - max(map(store.modified_s, manifest.file_names))
    if age < YOUNG_S:
        raise StateError(
            f"the newest data file of {store.location} is {max(age, 0) / 60:.0f} minutes old: its "
            "save may still run, and would delete its files. Wait until the file is an hour old "
            "(a job in this run deletes it after a day), or write to a new directory (--to)"
        )


def _keep_damaged(store: Store) -> str:
    """Give a damaged MANIFEST a second name, beside the checkpoint."""
    above, name = store.above(), os.path.basename(store.location)
    for number in range(1000):
        kept = f".damaged-MANIFEST{f'-{number}' if number else ''}"
        try:
            above.link(f"{name}/{spec.MANIFEST_NAME}", name + kept)
        except StoreError as error:
            if error.errno != errno.EEXIST:
                raise
            continue
        above.sync_directory()
        return store.location + kept
    kept = f"{store.location}.damaged-MANIFEST"
    raise StoreError(f"{kept} and 999 numbered copies exist; remove some of them")


def _salvage(
    found: _Found,
    lost: Mapping[str, Any],
    there: Store,
    options: Options,
    report: Report,
) -> str:
    """Write the whole tensors to a new checkpoint, which needs no other; return its place.

    Raises:
        CorruptError: there is nothing whole.
        OptionError: the new directory is named as another step.
    """
    from ..chains.recompress import make_writing, rewritten_header, write_again
    from ..engine.registry import LOSSLESS, RAW

    check_absent(there)
    subject = found.subject
    step = subject.manifest.table.header.step
    name = os.path.basename(there.location)
    if step is not None and misnamed(name, step):
        raise OptionError(
            f"{name} is the name of another step, but {subject.store.location} holds step {step}; "
            f"nothing was written. Give --to a path that ends in {step_name(step)}, or in no "
            "step's name"
        )
    chain: Chain = open_readable(subject.store, subject.manifest)
    old, names = subject.manifest.table.header, names_of(subject.manifest)
    kept = [n for n, tensor in enumerate(old.tensors) if names[tensor.path] not in lost]
    if old.tensors and not kept:
        raise CorruptError(
            f"no tensor of {subject.store.location} is whole; nothing was written. Read its other "
            "values with holdfast.open(…).objects()"
        )
    index = {number: place for place, number in enumerate(kept)}
    losses = tuple(
        replace(loss, tensor=index[loss.tensor]) for loss in old.losses if loss.tensor in index
    )
    part = replace(old.part(kept), objects=old.objects, losses=losses)
    codec = RAW if all(coding.name == RAW.name for coding in old.codecs) else LOSSLESS
    header = rewritten_header(part, codec, None)
    if lost or found.not_recovered:
        header = _marked(header, found.not_recovered, lost)
    try:
        made = write_again(chain, make_writing(there, header, chain, codec, ""), options, report)
        commit(there, begin(there, header, *made.told))
    except BaseException:
        if not there.exists(spec.MANIFEST_NAME):
            remove_files(there, header.save_id)
        raise
    return there.location
