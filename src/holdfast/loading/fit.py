"""Does a target fit a checkpoint? All differences, on all ranks, in one error. Reads no data."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import MismatchError
from ..format.manifest import Manifest
from ..format.names import display_names, dotted
from ..layout import Box, Path, Tensor
from ..state.source import Source
from ..state.target import Target

_REPAIRED_ADVICE = (
    "Load another step; or take what there is, strict=False: what the report's .missing names "
    "stays as it was. "
)
NAMES_MAX = 50  # in a text; a program finds all in `LoadReport` of a load with strict=False


def source_of(manifest: Manifest) -> Source:
    """Return what a checkpoint offers, tied names included."""
    header = manifest.table.header
    tensors = {tensor.path: tensor for tensor in header.tensors}
    tensors |= {path: header.tensors[index] for path, index in header.ties}
    return Source(tensors, dict(header.objects))


def wanted_of(
    manifest: Manifest, targets: Mapping[Path, Sequence[tuple[Any, Box]]]
) -> dict[Path, tuple[int, tuple[Box, ...]]]:
    """Return the index of the tensor behind each target, and the boxes wanted of it."""
    header = manifest.table.header
    index = {tensor.path: i for i, tensor in enumerate(header.tensors)} | dict(header.ties)
    return {path: (index[path], tuple(box for _, box in parts)) for path, parts in targets.items()}


def describe_fit(manifest: Manifest, target: Target, *, cast: bool) -> bytes:
    """Tell the other ranks how this rank's target fits: faults, missing names, names it takes."""
    others = _of_other_kinds(target, manifest)
    known = target.used | others.keys()
    used = np.packbits(np.array([path in known for path in _paths(manifest)], bool))
    names = display_names(target.missing)
    missing = sorted(name for path, name in names.items() if path not in others)
    faults = [*_faults(target, manifest, cast=cast), *others.values()]
    values = {"faults": faults, "missing": missing}
    return json.dumps(values | {"used": used.tobytes().hex()}).encode()


def check_fit(
    where: str, manifest: Manifest, answers: Sequence[bytes], *, strict: bool, partial: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Join what all ranks said.

    Returns:
        (missing names, unexpected names).

    Raises:
        MismatchError: on every rank, with every difference of any rank.
    """
    said = [json.loads(answer) for answer in answers]
    faults = sorted({fault for rank in said for fault in rank["faults"]})
    missing = tuple(sorted({name for rank in said for name in rank["missing"]}))
    unexpected = _unexpected(manifest, [bytes.fromhex(rank["used"]) for rank in said])
    problems = []
    if faults:
        problems.append(
            f"{len(faults)} do not fit: {_listed(faults, '; ')} (a target needs the checkpoint's "
            "shapes, and its dtypes unless cast=True)"
        )
    if strict and missing:
        problems.append(f"{len(missing)} are missing in the checkpoint: {_listed(missing)}")
    if strict and not partial and unexpected:
        problems.append(f"{len(unexpected)} are missing in the target: {_listed(unexpected)}")
    if problems:
        names = (
            "Make the names the same, or let holdfast.load take less: partial=True, strict=False. "
        )
        advice = names if not faults else ""
        advice = _parts_of_ranks(manifest, len(answers), [*missing, *unexpected]) or advice
        is_repaired = manifest.table.header.is_repaired
        what = f"{where} was repaired, and lacks what was lost; it" if is_repaired else where
        error = MismatchError(
            f"{what} does not fit the target. Of its names, {'. And '.join(problems)}. "
            f"{_REPAIRED_ADVICE if is_repaired else advice}Nothing was loaded"
        )
        error.is_repaired = is_repaired
        raise error
    return missing, unexpected


def _parts_of_ranks(manifest: Manifest, ranks: int, differing: Sequence[str]) -> str:
    """Say how many ranks can load what has a part for each rank, when there are others now."""
    saved = manifest.table.header.world_size
    if ranks == saved:
        return ""
    below: dict[Path, set[str]] = {}
    for path in _paths(manifest):
        for depth, key in enumerate(path[:-1]):
            below.setdefault(path[:depth], set()).add(str(key))
    numbers = {str(rank) for rank in range(saved)}
    parted = [dotted(path) for path, keys in below.items() if path and keys == numbers]
    found = [place for place in parted if any(name.startswith(f"{place}.") for name in differing)]
    if not found:
        return ""
    return (
        f"{', '.join(found)} has a part for each rank, {saved} when it was saved, and {ranks} load "
        f"it: load on {saved}, or take it out of the target and give partial=True. "
    )


def _listed(names: Sequence[str], between: str = ", ") -> str:
    more = f"{between}… {len(names) - NAMES_MAX:,} more" if len(names) > NAMES_MAX else ""
    return between.join(names[:NAMES_MAX]) + more


def _of_other_kinds(target: Target, manifest: Manifest) -> dict[Path, str]:
    """Say what is a tensor on one side, and no tensor on the other."""
    source, found = source_of(manifest), dict[Path, str]()
    for path, name in display_names(target.missing).items():
        if path in source.tensors:
            form = _form(source.tensors[path])
            found[path] = f"{name} is a tensor there, {form}, and none here: give a torch.Tensor"
    for path, name in display_names(target.values).items():
        kind = type(source.objects[path]).__name__
        found[path] = f"{name} is of type {kind} there, and a tensor here"
    return found


def _faults(target: Target, manifest: Manifest, *, cast: bool) -> list[str]:
    source = source_of(manifest).tensors
    faults = list(target.conflicts)
    names = display_names(source)
    for path, leaf in target.tensors.items():
        wanted, stored = leaf.tensor, source[path]
        fits = wanted.dtype == stored.dtype or (cast and converts(stored.dtype, wanted.dtype))
        if wanted.shape != stored.shape or not fits:
            faults.append(f"{names[path]} is {_form(stored)} there and {_form(wanted)} here")
    return faults


def converts(stored: str, wanted: str) -> bool:
    """Whether ``cast`` may convert: never an imaginary part away, nor two numbers in a byte."""
    complex_dtypes = ("c32", "c64", "c128")
    packed = "f4_e2m1fn_x2" in (stored, wanted)
    return not packed and (stored not in complex_dtypes or wanted in complex_dtypes)


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _paths(manifest: Manifest) -> list[Path]:
    header = manifest.table.header
    tensors = [tensor.path for tensor in header.tensors] + [path for path, _ in header.ties]
    return tensors + [path for path, _ in header.objects]


def _unexpected(manifest: Manifest, used: Sequence[bytes]) -> tuple[str, ...]:
    paths = _paths(manifest)
    bits = np.array([np.frombuffer(rank, np.uint8) for rank in used])
    taken = np.unpackbits(np.bitwise_or.reduce(bits, axis=0), count=len(paths))
    names = display_names(paths)
    return tuple(sorted(names[path] for path, bit in zip(paths, taken, strict=True) if not bit))
