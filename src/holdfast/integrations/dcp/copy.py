"""A state → a copy of it in host memory, for `dcp.async_save`. Knows no writer and no files."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands in a state for a ShardedTensor, which DCP's stager cannot copy (torch 2.13)."""

    number: int


def copy_state(state: dict[str, Any]) -> Any:
    """Copy a state to new host memory: when this returns, training may change the old one."""
    sharded: list[ShardedTensor] = []

    def take_out(value: Any) -> Any:
        if not isinstance(value, ShardedTensor):
            return value
        sharded.append(value)
        return _Place(len(sharded) - 1)

    def put_back(value: Any) -> Any:
        return copies[value.number] if isinstance(value, _Place) else value

    bare = _mapped(state, take_out)
    copies = [_copied(value) for value in sharded]
    staged = DefaultStager(StagingOptions(False, False, False, False)).stage(bare)
    return _mapped(staged, put_back) if sharded else staged


def _copied(value: ShardedTensor) -> ShardedTensor:
    """Copy a ShardedTensor to host memory; its own ``cpu`` returns itself where it is there."""
    moved = value.cpu()
    return copy.deepcopy(value) if moved is value else moved


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change the leaves of nested dicts, lists and tuples; what nothing changed in stays itself."""
    if isinstance(value, Mapping):
        items = {key: _mapped(item, change) for key, item in value.items()}
        return value if all(items[key] is item for key, item in value.items()) else items
    if type(value) in (list, tuple):
        found = [_mapped(item, change) for item in value]
        return (
            value if all(a is b for a, b in zip(found, value, strict=True)) else type(value)(found)
        )
    return change(value)
