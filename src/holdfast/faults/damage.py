"""What is damaged in a checkpoint, and which tensors cannot be read for it.

Knows one checkpoint, and the boxes that are lost in the one below it.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..arguments import check_torch
from ..boxes import Bools
from ..brief import brief
from ..engine.chain import Link, open_base, open_readable
from ..engine.uncommitted import lost_manifest
from ..errors import CorruptError
from ..format import spec
from ..format.manifest import Manifest
from ..format.names import display_names, misnamed
from ..layout import Box, Path, Shape
from ..options import Options
from ..stores.base import Store
from .reach import based_on, boxes_of, with_referring
from .survey import Fault, survey

Report = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Lost:
    """Lost elements of a tensor.

    Attributes:
        tensor: name of the tensor.
        boxes: (offset, shape) of each lost part, in elements of the whole tensor.

    Example::

        for fault in holdfast.verify("runs/a/step-00001000").damage:
            for lost in fault.lost:
                print(lost.tensor, lost.boxes)
    """

    tensor: str
    boxes: tuple[tuple[Shape, Shape], ...]

    __repr__ = brief


@dataclass(frozen=True, slots=True)
class Damage:
    """One fault of a checkpoint, as `Checkpoint.verify` returns it.

    Attributes:
        where: file or directory.
        what: the whole text, with file, bytes, tensor, chunk, found and expected values.
        tensor: name of the damaged tensor, or None.
        lost: all elements of this checkpoint that the fault makes unreadable.
        below: the fault of a base that is the cause, or None.

    Example::

        for fault in holdfast.verify("runs/a/step-00001000").damage:
            print(fault.where, fault.what)
    """

    where: str
    what: str
    tensor: str | None = None
    lost: tuple[Lost, ...] = ()
    below: "Damage | None" = None

    __repr__ = brief


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint whose MANIFEST has been read."""

    store: Store
    manifest: Manifest
    options: Options

    def names(self) -> dict[Path, str]:
        """Return how each path is shown."""
        return names_of(self.manifest)


def find_damage(subject: Subject, report: Report, *, patient: bool = False) -> Iterator[Damage]:
    """Check every byte under the directory of a checkpoint; yield all faults.

    Args:
        report: called with the number of payload bytes checked since the last call.
        patient: see `survey`.
    """
    yield from find_misnamed(subject)
    for part in survey(subject.store, subject.manifest, subject.options, patient=patient):
        yield from (of_fault(subject, fault) for fault in part.faults)
        report(part.size_bytes)


def find_misnamed(subject: Subject) -> list[Damage]:
    """Check that a step stands where its name says; a wrong one costs no tensors."""
    place = subject.store.location
    what = misnamed(os.path.basename(place), subject.manifest.table.header.step)
    return [Damage(place, f"{place} {what}")] if what else []


def of_fault(subject: Subject, fault: Fault) -> Damage:
    """Say which tensors a fault costs."""
    lost = lost_by(subject, _mask(subject.manifest, fault.rows))
    is_hit = len(fault.rows) == 1  # of more, no single tensor is named
    tensor = _tensor_of(subject, fault.rows[0]) if is_hit else None
    return Damage(fault.where, fault.what, tensor, lost)


def find_base_damage(subject: Subject) -> list[Damage]:
    """Check that what a link was made from is there, and is the same; read nothing of it."""
    try:
        manifest_below(subject)
    except CorruptError as error:
        return [of_base(subject, subject.store.location, error)]
    return []


def find_lost_manifest(store: Store) -> Damage | None:
    """Return that a step was committed and has no MANIFEST any more, if that is so."""
    what = lost_manifest(store)
    return Damage(f"{store.location}/{spec.MANIFEST_NAME}", what) if what else None


def manifest_below(subject: Subject) -> Manifest:
    """Read the MANIFEST of what a link was made from."""
    return open_base(Link(subject.store, subject.manifest)).manifest


def of_base(subject: Subject, where: str, error: CorruptError) -> Damage:
    """Say what it costs that the base of a link cannot be opened."""
    return Damage(where, error.args[0], None, lost_by(subject, subject.manifest.based))


def from_below(subject: Subject, damage: Damage, below: Manifest) -> Damage | None:
    """Say what damage of its base costs a link; None: nothing.

    Args:
        below: that of the base.
    """
    by_name = {name: path for path, name in names_of(below).items()}
    boxes = {by_name[lost.tensor]: [Box(*box) for box in lost.boxes] for lost in damage.lost}
    found = lost_by(subject, based_on(subject.manifest, boxes))
    if not found:
        return None
    cause = damage.below or damage
    what = f"{subject.store.location} is a delta of damaged data: {cause.what}"
    return Damage(cause.where, what, None, found, cause)


def lost_by(subject: Subject, rows: Bools) -> tuple[Lost, ...]:
    """Return the tensors that cannot be read whole without these chunks, and what of them."""
    if not np.any(rows):
        return ()
    manifest = subject.manifest
    names, tensors = subject.names(), manifest.table.header.tensors
    boxes = boxes_of(manifest, with_referring(manifest, rows))
    return tuple(
        Lost(names[tensors[index].path], tuple((b.offset, b.shape) for b in held))
        for index, held in sorted(boxes.items())
    )


def check_decodable() -> None:
    """Check that `find_wrong` has what it needs, before anything is read.

    Raises:
        OptionError: torch is missing.
    """
    check_torch("decoding a checkpoint", "Without torch, verify checks every byte, undecoded")


def find_wrong(subject: Subject, known: Iterable[Damage], report: Report) -> list[Damage]:
    """Decode what is not known to be lost; say what is not what was saved."""
    from ..engine.pool import lease
    from .deep import check_digests

    names, chain = subject.names(), open_readable(subject.store, subject.manifest)
    lost = {part.tensor for damage in known for part in damage.lost}
    skipped = {path for path, name in names.items() if name in lost}
    found: dict[str, dict[str, list[Box]]] = {}
    with lease(subject.store, subject.options) as leased:
        for shard, fault in check_digests(chain, leased, report, skipped):
            # One fault below may cost many shards: it is told once.
            held = found.setdefault(fault.args[0], {})
            held.setdefault(names[shard.tensor.path], []).append(shard.box)
    return [
        Damage(subject.store.location, what, next(iter(held)), _as_lost(held))
        for what, held in found.items()
    ]


def _as_lost(held: Mapping[str, list[Box]]) -> tuple[Lost, ...]:
    return tuple(Lost(name, tuple((b.offset, b.shape) for b in held[name])) for name in held)


def names_of(manifest: Manifest) -> dict[Path, str]:
    header = manifest.table.header
    paths = [t.path for t in header.tensors] + [path for path, _ in header.ties]
    return display_names([*paths, *(path for path, _ in header.objects)])


def _tensor_of(subject: Subject, row: int) -> str:
    manifest = subject.manifest
    shard = int(manifest.shard_first_row.searchsorted(row, "right")) - 1
    path = manifest.table.header.tensors[int(manifest.table.shard_tensor[shard])].path
    return subject.names()[path]


def _mask(manifest: Manifest, rows: Iterable[int]) -> Bools:
    mask = np.zeros(len(manifest.chunk_start), np.bool_)
    mask[list(rows)] = True
    return mask
