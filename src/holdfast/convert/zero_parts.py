"""Flat partitions of DeepSpeed's ZeRO → whole tensors. Knows no directories.

1. Stages 1 and 2: the parameters of a group stand one after the other in one flat array, which the
   ranks share in equal stretches. Each rank notes which stretch of which parameter it has.
2. Stage 3: every parameter is cut by itself, into as many equal parts as there are ranks; the last
   is padded. A rank's parts stand one after the other, over all its flat arrays.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from ..errors import CorruptError
from ..layout import Shape, boxes_of_range
from .inert import Inert
from .pieces import Piece, row_major
from .rebuild import StoredTensor
from .torch_archive import TorchArchive

Groups = Sequence[Mapping[str, Shape]]  # of parameters by name, as the optimizer has them
Stretch = tuple[int, int, int, int]  # rank, number of its flat array, first element, elements


class RankState(NamedTuple):
    """What one rank has: flat arrays of master weights, and the optimizer's state of each."""

    archive: TorchArchive
    flats: Sequence[StoredTensor]
    states: Sequence[Mapping[str, Any]]
    slices: "Sequence[Mapping[str, tuple[int, int]]] | None" = None


def stretches_of_groups(ranks: Sequence[RankState], groups: Groups) -> dict[str, list[Stretch]]:
    """Return where each parameter lies, in the order of its elements, for stages 1 and 2.

    Raises:
        CorruptError: a rank has not what the others leave to it, or gives something twice.
    """
    found: dict[str, list[Stretch]] = {}
    for number, group in enumerate(groups):
        noted = [rank.slices[number] for rank in ranks if rank.slices is not None]
        if len(noted) == len(ranks):
            for rank, slices in zip(ranks, noted, strict=True):
                _check_apart(rank.archive.where, slices)
            for name in group:
                found[name] = [
                    (r, number, *noted[r][name]) for r in range(len(ranks)) if name in noted[r]
                ]
            continue
        # Written before ranks noted it: one parameter after the other.
        sizes = [prod(rank.flats[number].shape) for rank in ranks]
        first = 0
        for name, shape in group.items():
            count = prod(shape)
            found[name] = [(r, number, a, n) for r, a, n in _over(sizes, first, count)]
            first += count
    return found


def _check_apart(where: str, slices: Mapping[str, tuple[int, int]]) -> None:
    """Check that no two parameters have the same elements of a flat array."""
    end, before = 0, ""
    for start, count, name in sorted((*place, name) for name, place in slices.items() if place[1]):
        if start < end:
            raise CorruptError(
                f"{where} gives the elements from {start} of its weights to {before:.80} and to "
                f"{name:.80}; expected one of them. Copy the file again"
            )
        end, before = start + count, name


def stretches_of_parameters(ranks: Sequence[RankState], groups: Groups) -> dict[str, list[Stretch]]:
    """Return where each parameter lies, in the order of its elements, for stage 3.

    Raises:
        CorruptError: the arrays of a rank are of another length than its parts.
    """
    sizes = [[prod(flat.shape) for flat in rank.flats] for rank in ranks]
    found: dict[str, list[Stretch]] = {}
    first = 0
    for name, shape in ((name, shape) for group in groups for name, shape in group.items()):
        count = prod(shape)
        part = -(-count // len(ranks))
        found[name] = [
            (r, number, a, n)
            for r in range(len(ranks))
            for number, a, n in _over(sizes[r], first, max(min(part, count - r * part), 0))
        ]
        first += part
    for rank, lengths in zip(ranks, sizes, strict=True):
        if sum(lengths) != first:
            raise CorruptError(
                f"{rank.archive.where} has {sum(lengths):,} master weights; expected {first:,} by "
                "the parameters' shapes. Use files of one save"
            )
    return found


def _over(sizes: Sequence[int], first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield (array, first element in it, elements) of a stretch of arrays that follow each other.

    ``[4, 4], 3, 3`` → ``(0, 3, 1), (1, 0, 2)``
    """
    for number, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        begin = max(first, end - size)
        stop = min(first + count, end)
        if begin < stop:
            yield number, begin - (end - size), stop - begin


def pieces_of(
    name: str, shape: Shape, stretches: Sequence[Stretch], ranks: Sequence[RankState], key: str
) -> list[Piece]:
    """Return where the elements of a parameter lie, or of its state.

    Args:
        key: "fp32", or a key of the optimizer's state.

    Raises:
        CorruptError: stretches leave an array, or have not as many elements as the parameter.
    """
    found: list[Piece] = []
    dtypes: set[Any] = set()
    done = 0
    for rank, number, start, count in stretches:
        archive, flats, states, _ = ranks[rank]
        flat: Any = flats[number] if key == "fp32" else states[number].get(key)
        is_flat = type(flat) is StoredTensor and len(flat.shape) == 1 and flat.is_contiguous
        if not is_flat or start < 0 or count < 0 or start + count > flat.shape[0]:
            raise CorruptError(
                f"{archive.where} has not the elements {start}:{start + count} of {name} ({key}). "
                "Use files of one save"
            )
        dtypes.add(flat.dtype)
        if len(dtypes) > 1:
            raise CorruptError(
                f"{archive.where} has {name} ({key}) in {flat.dtype}, other than the ranks before "
                "it. Use files of one save"
            )
        found += flat_pieces(archive, flat, start, count, shape, done)
        done += count
    if done != prod(shape):
        raise CorruptError(
            f"{ranks[0].archive.where} and the files of the other ranks have {done:,} elements of "
            f"{name} ({key}); expected {prod(shape):,}. Use files of one save"
        )
    return found


def flat_pieces(
    archive: TorchArchive, flat: StoredTensor, start: int, count: int, shape: Shape, first: int
) -> Iterator[Piece]:
    """Yield pieces of a tensor that are a stretch of a flat array.

    Args:
        start, count: of the stretch in the array.
        first: the element of the tensor that it begins with.
    """
    if first + count > prod(shape):
        raise CorruptError(
            f"{archive.where} has more elements than a tensor of {list(shape)}. Use files of one "
            "save"
        )
    base = archive.piece(flat)
    for before, box in boxes_of_range(shape, first, count):
        offset = base.offset + (start + before) * flat.dtype.itemsize
        yield Piece(box, base.file, offset, row_major(box.shape), base.record)


def slices_in(noted: Any, where: str) -> "list[dict[str, tuple[int, int]]] | None":
    """Read what a rank notes of its stretches, ``param_slice_mappings``; None where it does not.

    Raises:
        CorruptError: it is not what DeepSpeed writes.
    """
    if noted is None:
        return None
    found: list[dict[str, tuple[int, int]]] = []
    for group in noted if isinstance(noted, list) else [None]:
        if not isinstance(group, dict):
            raise CorruptError(f"{where} notes its slices of parameters in an unknown way")
        slices: dict[str, tuple[int, int]] = {}
        for name, place in group.items():
            fields = place.state if type(place) is Inert else None
            numbers: Any = [
                fields.get(k) if type(fields) is dict else None for k in ("start", "numel")
            ]
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise CorruptError(f"{where} notes its slice of {name!r:.80} in an unknown way")
            slices[name] = (numbers[0], numbers[1])
        found.append(slices)
    return found
