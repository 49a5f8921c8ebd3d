"""The state of an optimizer's parameter that is a run of another, or several in a flat one.

What has the parameter's shape in the checkpoint is a run of it in the optimizer; what has no shape
(a step counter) is the same for all. Knows one parameter of one optimizer at a time; no files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import MismatchError, StateError
from ..format.names import dotted
from ..layout import Key, Path, Tensor
from .flat import FlatRun
from .optimizers import ParameterState
from .source import Source
from .tensors import LocalTensor, local_tensor


def state_of_run(state: Mapping[Key, Any], run: FlatRun, path: Path) -> dict[Key, Any]:
    """Return what is a parameter's own of the state of the tensor that holds a run of it.

    A rank that holds no element has nothing: its counters may stand still.

    Raises:
        StateError: a tensor is neither as long as the one that is optimized nor a single number.
    """
    return {key: _own(value, run, (*path, key)) for key, value in state.items() if run.elements}


def _own(value: Any, run: FlatRun, path: Path) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == (run.length,):
        return run.of(value)
    if value.ndim:
        raise StateError(
            f"{dotted(path)} has shape {list(value.shape)}; expected [{run.length}] or one number, "
            "because FullyShardedDataParallel flattens its parameters. Use "
            "torch.distributed.fsdp.fully_shard"
        )
    # A copy for each name: the numbers are those of several parameters, which need not stay equal.
    return value.detach().clone() if run.elements < run.length else value


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """One of the parameters in a tensor that is optimized; where its state is in a checkpoint."""

    run: FlatRun
    path: Path
    form: ParameterState


@dataclass(slots=True)
class FlatState:
    """State that is going to be filled.

    Attributes:
        tensors: what to fill, by path.
        used: paths of the checkpoint that are taken.
        conflicts: what does not fit, one sentence each.
    """

    tensors: dict[Path, LocalTensor] = field(default_factory=dict)
    used: set[Path] = field(default_factory=set)
    conflicts: list[str] = field(default_factory=list)
    _whole: dict[Key, torch.Tensor] = field(default_factory=dict)
    _each: dict[Key, dict[Path, Any]] = field(default_factory=dict)

    def joined(self) -> dict[Key, Any]:
        """Return the state, once all is filled.

        Raises:
            MismatchError: the parameters have different numbers where a flat one has one number.
        """
        result: dict[Key, Any] = dict(self._whole)
        for key, values in self._each.items():
            (first, value), *others = values.items()
            for path, other in others:
                if not _same(value, other):
                    raise MismatchError(
                        f"{dotted(first)} is {value} in the checkpoint, {dotted(path)} is {other}, "
                        "and a flat parameter has one value for both; wrap the module with "
                        "use_orig_params=True. The tensors are loaded, this optimizer is not"
                    )
            result[key] = value
        return result


def bind_flat(pieces: Sequence[FlatPiece], source: Source, current: Mapping[Key, Any]) -> FlatState:
    """Match the parameters in one tensor of an optimizer with what a checkpoint offers."""
    result, keys = FlatState(), set[tuple[Key, ...]]()
    for piece in pieces:
        found = source.below(piece.path)
        result.used.update(found)
        if not piece.run.elements:
            continue
        keys.add(tuple(sorted((path[-1] for path in found), key=str)))
        for path in found:
            if len(path) != len(piece.path) + 1:
                result.conflicts.append(f"{dotted(path)} cannot be state of a flat parameter")
            elif path in source.objects:
                result._each.setdefault(path[-1], {})[path] = source.objects[path]
            else:
                _bind_tensor(result, piece, path, source.tensors[path], current)
    if len(keys) > 1:
        names = ", ".join(dotted(piece.path) for piece in pieces)
        result.conflicts.append(
            f"{names:.200} have different optimizer state, but are one flat parameter in the "
            "target; wrap the module with use_orig_params=True"
        )
    return result


def _bind_tensor(
    result: FlatState, piece: FlatPiece, path: Path, wanted: Tensor, current: Mapping[Key, Any]
) -> None:
    key, run = path[-1], piece.run
    if wanted.shape != run.shape and wanted.shape:
        result.conflicts.append(
            f"{dotted(path)} has shape {list(wanted.shape)} in the checkpoint, and its parameter "
            f"{list(run.shape)} in the target"
        )
        return
    if wanted.shape != run.shape or (not run.shape and key == "step"):
        tensor = piece.form.make(path, wanted)
        result._each.setdefault(key, {})[path] = tensor
        result.tensors[path] = local_tensor(tensor, path)
        return
    if key not in result._whole:
        dtype, now = piece.form.dtype_of(path, wanted), current.get(key)
        if isinstance(now, torch.Tensor) and (now.shape, now.dtype) == ((run.length,), dtype):
            result._whole[key] = now
        else:  # with zeros where a flat one is padded
            memory = piece.form.parameter.detach()
            result._whole[key] = memory.new_zeros(run.length, dtype=dtype)
    result.tensors[path] = local_tensor(run.of(result._whole[key]), path)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)
