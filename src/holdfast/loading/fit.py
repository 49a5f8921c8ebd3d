"""Does a target fit a checkpoint? All differences, on all ranks, in one error. Reads no data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from operator import attrgetter, itemgetter, or_
from typing import Any

import numpy as np

from ..engine.place import Targets, targets_of
from ..errors import MismatchError
from ..format.header import REPAIRED, Header, marked_names
from ..format.manifest import Manifest
from ..format.names import display_names, dotted, escaped
from ..layout import Path, Tensor
from ..plan.load_plan import Wants, wants_of
from ..state.filled import Target
from ..state.new import converts
from ..state.source import Source
from .advice import advise
from .lookalikes import lookalikes
from .request import LoadRequest

_PATH = attrgetter("path")
_REPAIRED_ADVICE = (
    "Load another step; or call holdfast.load of this one with strict=False: the names in the "
    "report's .missing then keep their values. "
)
Fit = Mapping[str, Any]  # how the target of one rank fits; JSON
DIFFERENCES_MAX = 3  # in a text, of those that are a sentence each
NAMES_MAX = 50  # in a text; a program finds all in `LoadReport` of a load with strict=False


def source_of(
    header: Header, types: Mapping[str, type], request: LoadRequest, where: str
) -> Source:
    """Return what a checkpoint offers, tied names included.

    Args:
        types: that values come back as, by name.
        where: the checkpoint is.

    Raises:
        MismatchError: a class of ``types`` is not as it was saved, or a pattern means nothing.
        OptionError: ``include``, ``exclude`` or ``rename`` is invalid.
    """
    tensors = dict(zip(map(_PATH, header.tensors), header.tensors, strict=True))
    for path, index in header.ties:
        tensors[path] = header.tensors[index]
    objects = dict(header.objects)
    if types:
        from ..format.revive import revive_objects

        objects = revive_objects(objects, types, where)
    source = Source(tensors, objects)
    if REPAIRED in objects:
        lost = tuple(sorted(marked_names(objects[REPAIRED], "lost")))
        source = Source(tensors, objects, is_repaired=True, gone=lost)
    return source if request.selection is None else request.selection.of(source, where)


def wanted_of(manifest: Manifest, target: Target, source: Source) -> tuple[Wants, Targets]:
    """Return what is wanted of a checkpoint, and where it goes: parallel columns."""
    header, plain = manifest.table.header, target.plain
    paths = map(_PATH, header.tensors)
    index = dict(zip(paths, range(len(header.tensors)), strict=True)) | dict(header.ties)
    if source.origins:
        index = {path: index[at] for path, at in source.origins.items() if at in index}
    tensor = np.fromiter(map(index.__getitem__, plain.paths), np.int64, len(plain.paths))
    address = np.array(plain.addresses, np.uint64)
    if not target.tensors:
        return Wants(tensor), Targets(plain.paths, plain.tensors, None, address)
    parts = target.targets()
    others = wants_of({p: (index[p], [box for _, box in held]) for p, held in parts.items()})
    dtypes = [header.tensors[i].dtype for i in others.tensor.tolist()]
    more = targets_of(parts, dtypes)
    assert others.boxes is not None  # as boxes were given
    boxes = manifest.whole_boxes(tensor)[0].and_also(others.boxes)
    joined = Targets(
        [*plain.paths, *more.paths],
        [*plain.tensors, *more.tensors],
        boxes,
        np.concatenate([address, more.address]),
    )
    return Wants(np.concatenate([tensor, others.tensor]), boxes), joined


@dataclass(slots=True)
class Faults:
    """What of a target does not fit, by path, one sentence each.

    Attributes:
        shapes: that differ, or the kinds.
        dtypes: that differ, and that ``cast`` could convert.
        others: dtypes that nothing converts.
    """

    shapes: dict[Path, str] = field(default_factory=dict)
    dtypes: dict[Path, str] = field(default_factory=dict)
    others: dict[Path, str] = field(default_factory=dict)


def describe_fit(header: Header, target: Target, source: Source, request: LoadRequest) -> Fit:
    """Say how this rank's target fits: faults, missing names, names it takes.

    Without ``strict``, what has another shape is taken out of the target.
    """
    if source.left_out:
        target.missing = source.not_left_out(target.missing)
    others = _of_other_kinds(target, source) if target.missing or target.values else {}
    known, paths = target.used | others.keys(), _paths(header)
    if source.origins:
        target.conflicts += _filled_twice(target, source)
        known = {source.origins.get(path, path) for path in known}
    known |= {*source.left_out}
    used = "".join(map("01".__getitem__, map(known.__contains__, paths)))
    missing, alike, found = list[str](), list[str](), Faults()
    if target.missing:
        names = display_names(target.missing)
        missing = sorted(name for path, name in names.items() if path not in others)
        stayed = (path for path in paths if source.moves.new.get(path, path) == path)
        alike = lookalikes(target.missing, (path for path in stayed if path not in known))
    if target.tensors:  # what is plain fits
        found = _faults(target, source, cast=request.cast)
    found.shapes |= others
    if target.skipped or (found.shapes and not request.strict):
        _skip(target, found)
    values: dict[str, Any] = {
        "faults": [*target.conflicts, *found.others.values()],
        "missing": missing,
        "alike": alike,
        "used": f"{int(used or '0', 2):x}",
    }
    values |= {"shapes": [*found.shapes.values()], "dtypes": [*found.dtypes.values()]}
    if target.skipped:
        names = display_names(target.skipped)
        values["skipped"] = {name: target.skipped[path] for path, name in names.items()}
    return values


def _filled_twice(target: Target, source: Source) -> list[str]:
    """Say which names of the target mean one and the same of the checkpoint."""
    filled: dict[Path, list[str]] = {}
    for path in target.used & source.origins.keys():
        filled.setdefault(source.origins[path], []).append(escaped(path))
    return [
        f"{' and '.join(sorted(names))} in the target would both be {escaped(known)} of the "
        "checkpoint: take one out of the target"
        for known, names in filled.items()
        if len(names) > 1
    ]


def _skip(target: Target, found: Faults) -> None:
    """Leave out what does not fit."""
    for path, why in found.shapes.items():
        target.skipped[path] = why
        target.tensors.pop(path, None)
    found.shapes = {}


def check_fit(
    where: str, header: Header, said: Sequence[Fit], request: LoadRequest
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
    """Join what all ranks said.

    Returns:
        (missing names, unexpected names, why others were left out).

    Raises:
        MismatchError: on every rank, with the differences of all ranks.
    """
    found: dict[str, tuple[str, ...]] = {}
    for kind in ("faults", "shapes", "dtypes", "missing", "alike"):
        found[kind] = tuple(sorted(set(chain.from_iterable(map(itemgetter(kind), said)))))
    unexpected = _unexpected(header, [int(answer["used"], 16) for answer in said])
    skipped: dict[str, str] = {}
    for answer in said:
        skipped |= answer.get("skipped", {})
    differing = sorted({*found["faults"], *found["shapes"], *found["dtypes"]})
    missing = found["missing"] if request.strict else ()
    extra = unexpected if request.strict and not request.partial else ()
    if not (differing or missing or extra):
        return found["missing"], unexpected, skipped
    problems = [
        f"{len(differing)} differ: {_first(differing)}" if differing else "",
        f"{_are(missing)} missing in the checkpoint: {_listed(missing)}" if missing else "",
        f"{_are(extra)} missing in the target: {_listed(extra)}" if extra else "",
    ]
    alike = found["alike"] if missing else ()
    only = f"But some only look the same: {_first(alike)}. " if alike else ""
    is_repaired = header.is_repaired
    advice = _REPAIRED_ADVICE
    if not is_repaired:
        advice = _parts_of_ranks(header, len(said), [*missing, *extra])
    what = f"{where} was repaired, and lacks the lost tensors; it" if is_repaired else where
    error = MismatchError(
        f"{what} does not fit the target. Of its names, {'. And '.join(filter(None, problems))}. "
        f"{only}{advice or advise(found, missing, extra, unexpected)}Nothing was loaded"
    )
    error.is_repaired = is_repaired
    raise error


def _are(names: Sequence[str]) -> str:
    return f"{len(names)} {'is' if len(names) == 1 else 'are'}"


def _parts_of_ranks(header: Header, ranks: int, differing: Sequence[str]) -> str:
    """Say how many ranks can load what has a part for each rank, when there are others now."""
    saved = header.world_size
    if ranks == saved:
        return ""
    below: dict[Path, set[str]] = {}
    for path in _paths(header):
        for depth, key in enumerate(path[:-1]):
            below.setdefault(path[:depth], set()).add(str(key))
    numbers = {str(rank) for rank in range(saved)}
    parted = [dotted(path) for path, keys in below.items() if path and keys == numbers]
    found = [place for place in parted if any(name.startswith(f"{place}.") for name in differing)]
    if not found:
        return ""
    return (
        f"{', '.join(found)} has one part per rank: {saved} ranks saved it, and {ranks} load it. "
        f"Load on {saved} ranks, or take it out of the target and give partial=True. "
    )


def _listed(names: Sequence[str]) -> str:
    more = f", … {len(names) - NAMES_MAX:,} more" if len(names) > NAMES_MAX else ""
    return ", ".join(names[:NAMES_MAX]) + more


def _first(differences: Sequence[str]) -> str:
    """Show the first of many sentences: where a size of a model differs, all its layers do."""
    more = len(differences) - DIFFERENCES_MAX
    return "; ".join(differences[:DIFFERENCES_MAX]) + (f"; and {more:,} more" if more > 0 else "")


def _of_other_kinds(target: Target, source: Source) -> dict[Path, str]:
    """Say what is a tensor on one side, and no tensor on the other."""
    found: dict[Path, str] = {}
    for path, name in display_names(target.missing).items():
        if path in source.tensors:
            form = _form(source.tensors[path])
            there = f"{name} is a tensor in the checkpoint, {form}"
            found[path] = f"{there}, and none in the target: give a torch.Tensor"
    for path, name in display_names(target.values).items():
        kind = type(source.objects[path]).__name__
        found[path] = f"{name} is of type {kind} in the checkpoint, and a tensor in the target"
    return found


def _faults(target: Target, source: Source, *, cast: bool) -> Faults:
    found = Faults()
    differing: dict[Path, dict[Path, str]] = {}
    for path, leaf in target.tensors.items():
        wanted, stored = leaf.tensor, source.tensors[path]
        if wanted.shape != stored.shape:
            differing[path] = found.shapes
        elif wanted.dtype != stored.dtype:
            if not converts(stored.dtype, wanted.dtype):
                differing[path] = found.others
            elif not cast:
                differing[path] = found.dtypes
    names = display_names({**dict.fromkeys(source.tensors), **differing}) if differing else {}
    for path, kind in differing.items():
        there, here = _form(source.tensors[path]), _form(target.tensors[path].tensor)
        kind[path] = f"{names[path]} is {there} in the checkpoint and {here} in the target"
    return found


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _paths(header: Header) -> list[Path]:
    return [*map(_PATH, header.tensors), *map(itemgetter(0), (*header.ties, *header.objects))]


def _unexpected(header: Header, used: Sequence[int]) -> tuple[str, ...]:
    """Return the names that no rank takes.

    Args:
        used: by each rank, a bit for each name; that of the last name is the lowest.
    """
    paths, taken = _paths(header), reduce(or_, used)
    if taken == (1 << len(paths)) - 1:
        return ()
    names, bits = display_names(paths), f"{taken:0{len(paths)}b}"
    return tuple(sorted(names[path] for path, bit in zip(paths, bits, strict=True) if bit == "0"))
