"""What is known of a checkpoint whose MANIFEST is lost, besides its files: what stands beside it.

Names what nobody can know.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from math import prod

from ..engine.check import read_manifest
from ..errors import HoldfastError
from ..faults.damage import Damage, names_of
from ..faults.rebuild import Rebuilt
from ..format import spec
from ..format.manifest import Manifest
from ..format.table import content_digest
from ..stores.base import Store

NEIGHBOURS_MAX = 8  # that are asked for the order of their tensors
VALUES_LOST = "all values that are no tensors (such as step numbers and schedulers)"
LOSSES_LOST = "how far the tensors are from what was saved, if that was noted"
EMPTY_LOST = "tensors without elements"


def neighbours_of(store: Store) -> dict[str, Manifest]:
    """Read what stands beside a checkpoint, the nearest by name first, by its name."""
    own = os.path.basename(store.location)
    names = sorted({own, *store.above().scan()})
    place = names.index(own)
    near = [name for _, name in sorted((abs(n - place), name) for n, name in enumerate(names))]
    found: dict[str, Manifest] = {}
    for name in near[1:]:
        with contextlib.suppress(HoldfastError):
            if len(found) < NEIGHBOURS_MAX and store.sibling(name).exists(spec.MANIFEST_NAME):
                found[name] = read_manifest(store.sibling(name))
    return found


def doubts_of(
    store: Store, rebuilt: Rebuilt, damage: Sequence[Damage]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Say what is not recovered, and why MANIFEST is not rebuilt in its place."""
    if rebuilt.proven:
        return (), ("payloads are damaged",) if any(fault.lost for fault in damage) else ()
    own, neighbours = os.path.basename(store.location), neighbours_of(store)
    digest = content_digest(rebuilt.manifest.table)
    links = {
        name: base.digest == digest
        for name, manifest in neighbours.items()
        if (base := manifest.table.header.base) and base.name == own
    }
    alike, missing = _compared(rebuilt.manifest, neighbours)
    proven = any(links.values())
    refused = [*rebuilt.unreadable] and ["a data file cannot be read"]
    if rebuilt.partial:
        refused.append(f"parts of {len(rebuilt.partial)} tensors are missing")
    if any(fault.lost for fault in damage):
        refused.append("payloads are damaged")
    if not (proven or alike):
        refused += [missing] if missing else []
        refused += [f"there is nothing of {what}, which may be lost" for what in rebuilt.silent]
    lost = [VALUES_LOST, LOSSES_LOST]
    if not proven:
        lost.append(EMPTY_LOST)
        if not rebuilt.ordered:
            lost.append("the order of the tensors: it is one that fits all files")
        if missing:
            lost.append(missing)
        elif not alike:
            lost.append("whether there were tensors of which no file is left")
            lost += [f"whether {what} was written" for what in rebuilt.silent]
    lost += [
        f"the base of {name}: it is another checkpoint" for name, ok in links.items() if not ok
    ]
    return tuple(lost), tuple(refused)


def _compared(manifest: Manifest, neighbours: Mapping[str, Manifest]) -> tuple[str, str]:
    """Look for the tensors of the nearest checkpoint of the same kind.

    Returns:
        (its name, if there are all of them; what is missing, in words).
    """
    known = set(manifest.table.header.tensors)
    for name, other in neighbours.items():
        header = other.table.header
        there = {tensor for tensor in header.tensors if prod(tensor.shape)}
        if header.is_repaired or known.isdisjoint(there):
            continue
        names = names_of(other)
        gone = [names[t.path] for t in header.tensors if t in there and t not in known]
        if not gone:
            return name, ""
        shown = ", ".join(gone[:3]) + " …" * (len(gone) > 3)
        return "", f"tensors of which no file is left: {name} beside it has {shown}"
    return "", ""
