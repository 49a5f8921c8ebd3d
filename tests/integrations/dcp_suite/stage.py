"""What a behaviour of the suite may use: directories, DCP's calls in three ways, outcomes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

WAYS = ("sync", "thread", "process")
KINDS = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}
THROUGH, LEFT, REFUSED, NONE = "through", "left to DCP", "refused", "no checkpoint"
NAMED = "another, as named"  # a difference that the page names


@dataclass(frozen=True)
class Stage:
    """Where a behaviour is played.

    Attributes:
        root: a directory that all ranks see, empty at first.
        way: how `save` saves.
    """

    root: Path
    way: str

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def ranks(self) -> int:
        return dist.get_world_size()

    def path(self, name: str = "step-1") -> Path:
        return self.root / name

    def save(self, state: dict[str, Any], name: str = "step-1", **options: Any) -> Any:
        """Save as the stage's way is; return the metadata."""
        if not options.keys() & {"storage_writer", "checkpoint_id"}:
            options["checkpoint_id"] = self.path(name)
        if self.way == "sync":
            return dcp.save(state, **options)
        future: Any = dcp.async_save(state, **options, async_checkpointer_type=KINDS[self.way])
        return future.result()

    def load(self, state: dict[str, Any], name: str = "step-1", **options: Any) -> dict[str, Any]:
        if not options.keys() & {"storage_reader", "checkpoint_id"}:
            options["checkpoint_id"] = self.path(name)
        dcp.load(state, **options)
        return state


@dataclass(frozen=True)
class Behaviour:
    """One thing that DCP does.

    Attributes:
        expected: where its saves go when all is routed.
        ranks, ways: on which it is played.
        options: of `install`, besides ``every``.
        why: for what is left or refused: the row of the table says it.
    """

    text: str
    play: Callable[[Stage], Any]
    expected: str = THROUGH
    ranks: tuple[int, ...] = (1, 2)
    ways: tuple[str, ...] = WAYS
    options: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


BEHAVIOURS: list[Behaviour] = []


def behaviour(text: str, expected: str = THROUGH, **given: Any) -> Callable[[Any], Any]:
    def add(play: Callable[[Stage], Any]) -> Callable[[Stage], Any]:
        BEHAVIOURS.append(Behaviour(text, play, expected, **given))
        return play

    return add


def plain(value: Any) -> Any:
    """Return what two outcomes are compared by: types, and every bit of tensors.

    Keys are sorted: of their order there is a behaviour of its own.
    """
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        data = whole.detach().cpu().contiguous()
        bits = data.reshape(-1).view(torch.uint8).tolist()
        return ("tensor", str(data.dtype), tuple(data.shape), bits)
    if isinstance(value, Mapping):
        return (
            type(value).__name__,
            sorted((repr(key), plain(item)) for key, item in value.items()),
        )
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [plain(item) for item in value])
    if type(value) in (set, frozenset):
        return (type(value).__name__, sorted(map(repr, value)))
    return (type(value).__name__, repr(value))
