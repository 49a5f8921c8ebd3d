"""Targets of a load that share memory: no order of filling them is right. Knows no files.

Ranges of addresses are compared all at once. Only views whose ranges overlap are looked at one by
one: columns of one matrix lie within each other's range and share no element.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import gcd
from typing import Any

import numpy as np
import torch

from ..format.names import dotted
from ..layout import Path
from .memory import share_memory, spread
from .tensors import LocalTensor

PAIRS_MAX = 1000  # that are named: n views of one element are n * (n - 1) / 2 pairs


@dataclass(slots=True)
class _Views:
    """Memory that is to be filled on one device, in parallel lists.

    Attributes:
        paths: of which target a view is.
        first, end: addresses of the first byte, and behind the last one.
    """

    paths: list[Path] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)


def find_overlaps(targets: Mapping[Path, LocalTensor]) -> list[str]:
    """Say of each target that overlaps itself, and of each two that overlap, that they do.

    Two names of one memory that is the same part of one tensor (`LocalTensor.tie`) are one target.
    """
    faults: list[str] = []
    devices: dict[torch.device, _Views] = {}
    for path, leaf in targets.items():
        # All parts are views of one tensor, or each has its own.
        for data in (leaf.data,) if leaf.data.numel() else [data for data, _ in leaf.boxed]:
            first, size = data.data_ptr(), data.nbytes
            if not size:
                continue
            if not data.is_contiguous():
                elements, kind = spread(data)
                size = elements * data.element_size()
                faults += [f"{dotted(path)} is {kind}, and cannot be filled"] if kind else []
            if (views := devices.get(data.device)) is None:
                views = devices[data.device] = _Views()
            views.paths.append(path)
            views.tensors.append(data)
            views.first.append(first)
            views.end.append(first + size)
    pairs = (pair for views in devices.values() for pair in _overlapping(views, targets))
    for one, other in islice(pairs, PAIRS_MAX):
        faults.append(
            f"{dotted(one)} and {dotted(other)} overlap in memory, and one load cannot fill both: "
            "give each its own memory, or load only one of them"
        )
    return faults


def _overlapping(views: _Views, targets: Mapping[Path, LocalTensor]) -> Iterator[tuple[Path, Path]]:
    """Find the views that share a byte, first of all by the ranges that they lie in."""
    if not _in_range(np.array(views.first), np.array(views.end)).any():
        return
    seen: Counter[Path] = Counter()
    ties: dict[object, int] = {}
    for number, path in enumerate(views.paths):
        ties.setdefault((targets[path].tie or object(), seen[path]), number)
        seen[path] += 1
    own = sorted(ties.values(), key=lambda i: views.first[i])
    first, end = (np.array(values)[own] for values in (views.first, views.end))
    counts = _in_range(first, end)
    rows = np.array([_rows(views.tensors[i]) for i in own], np.int64).reshape(-1, 2)
    for i in np.flatnonzero(counts):
        rest = slice(i + 1, i + 1 + counts[i])
        period = np.gcd(rows[i, 1], rows[rest, 1])
        shift = (first[rest] - first[i]) % np.maximum(period, 1)
        beside = (rows[i, 0] <= shift) & (shift + rows[rest, 0] <= period)
        for j in np.flatnonzero(~beside) + i + 1:
            one, other = own[i], own[j]
            if share_memory(views.tensors[one], views.tensors[other]):
                yield views.paths[one], views.paths[other]


def _in_range(first: Any, end: Any) -> Any:
    """Count for each range, sorted by where it begins, those behind it that begin in it."""
    order = np.argsort(first, kind="stable")
    return np.searchsorted(first[order], end[order]) - np.arange(1, len(first) + 1)


def _rows(data: torch.Tensor) -> tuple[int, int]:
    """Return (bytes of a row that lies in one piece, a period of bytes after which all rows begin).

    The period is 0 where there is only one row.
    """
    size, period = data.element_size(), 0
    sides = sorted((s, n) for s, n in zip(data.stride(), data.shape, strict=True) if n > 1)
    for step, count in ((step * data.element_size(), count) for step, count in sides):
        if step == size:
            size *= count
        else:
            period = gcd(period, step)
    return size, period
