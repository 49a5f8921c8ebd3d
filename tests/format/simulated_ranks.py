"""Several ranks as threads of one process, each with boxes of tensors of its own.

What they save goes through the real `holdfast.save`; only the step from Python state to leaves is
skipped, because a box of a tensor is a DTensor, and a DTensor takes real processes.
"""

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, TypeVar
from unittest.mock import patch

import torch

import holdfast
from holdfast.errors import PeerError
from holdfast.layout import Box, Path, Shape, Tensor
from holdfast.state.tensors import DTYPE_NAMES, LocalTensor
from holdfast.state.tree import Leaves

Result = TypeVar("Result")
MEETING_TIMEOUT_S = 60.0  # longer than any test; a rank that waits longer waits for a dead one


class ThreadGroup:
    """See `holdfast.group.base.Group`."""

    def __init__(self, rank: int, table: list[bytes], meeting: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(table)
        self._table, self._meeting = table, meeting

    def all_gather(self, data: bytes) -> list[bytes]:
        """Put the bytes on the table, wait for all, take all, wait until all have taken."""
        try:
            self._table[self.rank] = data
            self._meeting.wait(MEETING_TIMEOUT_S)
            found = list(self._table)
            self._meeting.wait(MEETING_TIMEOUT_S)
        except threading.BrokenBarrierError as error:
            raise PeerError("another rank is gone", rank=-1, cause="it ended") from error
        return found

    def gather(self, data: bytes) -> list[bytes] | None:
        """Do as `all_gather`; only the coordinator takes."""
        found = self.all_gather(data)
        return found if self.rank == 0 else None

    def announce(self, data: bytes) -> bytes:
        """Do as `all_gather`; take only what the coordinator put down."""
        return self.all_gather(data)[0]


def run_ranks(world_size: int, work: Callable[[ThreadGroup], Result]) -> list[Result]:
    """Run ``work`` on every rank at once; return what each returned, or raise the first error."""
    table, meeting = [b""] * world_size, threading.Barrier(world_size)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(rank, table, meeting))
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, PeerError)):
        raise error  # that of the rank that failed, before those of its peers
    return [results[rank] for rank in range(world_size)]


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's box of a global tensor."""

    shape: Shape
    offset: Shape
    data: torch.Tensor


def pieces(tensor: torch.Tensor, boxes: Sequence[tuple[Shape, Shape]]) -> list[Piece]:
    """Cut a tensor into (offset, shape) boxes."""
    cut = [Box(offset, shape) for offset, shape in boxes]
    return [Piece(tuple(tensor.shape), box.offset, tensor[box.slices()]) for box in cut]


def cut(
    chance: random.Random, offset: Shape, shape: Shape, parts: int
) -> list[tuple[Shape, Shape]]:
    """Cut a box at random until it is so many boxes."""
    boxes = [(offset, shape)]
    for _ in range(parts - 1):
        offset, shape = boxes.pop(chance.randrange(len(boxes)))
        sides = [d for d, n in enumerate(shape) if n > 1]
        if not sides:
            boxes.append((offset, shape))
            continue
        d = chance.choice(sides)
        at = chance.randrange(1, shape[d])
        second = (*offset[:d], offset[d] + at, *offset[d + 1 :])
        boxes.append((offset, (*shape[:d], at, *shape[d + 1 :])))
        boxes.append((second, (*shape[:d], shape[d] - at, *shape[d + 1 :])))
    return boxes


def save_pieces(
    path: FilePath,
    states: Sequence[Mapping[Path, Any]],
    *,
    ties: Mapping[Path, Path] | None = None,
    mesh: dict[str, Any] | None = None,
    **keywords: Any,
) -> None:
    """Save what each rank holds: pieces, whole tensors and values, by path.

    Args:
        states: one for each rank.
        ties: {further path: path of a tensor}.
        keywords: for `holdfast.save`.
    """
    with patch("holdfast.saving.save.flatten", lambda state: _leaves(state, ties or {}, mesh)):
        run_ranks(
            len(states),
            lambda group: holdfast.save(
                states[group.rank],
                path,
                group=group,  # type: ignore[arg-type]
                **keywords,
            ),
        )


def _leaves(
    state: Mapping[Path, Any], ties: Mapping[Path, Path], mesh: dict[str, Any] | None
) -> Leaves:
    leaves = Leaves(mesh=mesh)
    for path, value in state.items():
        if isinstance(value, (torch.Tensor, Piece)):
            leaves.tensors[path] = _local(path, path, value)
        else:
            leaves.objects[path] = value
    for path, target in ties.items():
        if target in state:
            leaves.tensors[path] = _local(path, target, state[target])
            leaves.ties[path] = target
    return leaves


def _local(path: Path, memory: Path, piece: "torch.Tensor | Piece") -> LocalTensor:
    if isinstance(piece, torch.Tensor):
        piece = Piece(tuple(piece.shape), (0,) * piece.ndim, piece)
    tensor = Tensor(path, DTYPE_NAMES[piece.data.dtype], piece.shape)
    box = Box(piece.offset, tuple(piece.data.shape))
    return LocalTensor(tensor, piece.data, ((piece.data, box),), memory, plain=False)
