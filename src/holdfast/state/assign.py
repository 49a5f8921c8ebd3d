"""Modules on the meta device → new parameters and buffers, which a load fills where they are to be.

Knows modules; no checkpoint.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .. import worker
from ..errors import OptionError, shown
from ..format.names import some
from ..layout import Path
from .new import check_device
from .wrappers import canonical_name, unwrap

logger = logging.getLogger("holdfast")


def device_of(assign: object) -> Any:
    """Return the device that ``assign=`` of `holdfast.load` asks for; None: none.

    Raises:
        OptionError: it is neither a bool nor a device.
    """
    if assign is False:
        return None
    if assign is not True and not isinstance(assign, (str, torch.device)):
        raise OptionError(f'assign is {shown(assign)}; expected True or a device, such as "cuda:0"')
    device = "cpu" if assign is True else assign
    check_device(device)
    return device


class Assignment:
    """New memory for what modules have on the meta device; tied parameters stay tied.

    Attributes:
        device: where it is.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self._made: dict[int, torch.Tensor] = {}  # by the id of what it is for
        self._old: dict[int, torch.Tensor] = {}  # so that these ids stay theirs

    def memory_for(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return new tensors by canonical name; on the meta device they would have no elements."""
        return {
            canonical_name(name): self._memory(tensor)
            for name, tensor in _tensors_of(unwrap(module)).items()
            if tensor.is_meta
        }

    def put(self, module: nn.Module, path: Path, filled: Callable[[Path], bool]) -> None:
        """Give a module what was filled, as ``load_state_dict(assign=True)`` does.

        Args:
            filled: whether the tensor at a path was.
        """
        inner = unwrap(module)
        new = {
            name: self._parameter(tensor)
            for name, tensor in _tensors_of(inner).items()
            if tensor.is_meta and filled((*path, canonical_name(name)))
        }
        worker.call_in_caller(lambda: inner.load_state_dict(new, strict=False, assign=True))
        if left := [name for name, tensor in _tensors_of(inner).items() if tensor.is_meta]:
            logger.warning(
                "%s of %s stay on the meta device: the checkpoint does not have them",
                *(some(left), type(inner).__name__),
            )

    def _memory(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            self._old[id(tensor)] = tensor
            self._made[id(tensor)] = torch.empty_like(
                tensor.detach(), dtype=tensor.dtype, device=self.device
            )
        return self._made[id(tensor)]

    def _parameter(self, old: torch.Tensor) -> torch.Tensor:
        made = self._made[id(old)]
        if isinstance(old, nn.Parameter) and not isinstance(made, nn.Parameter):
            made = nn.Parameter(made, requires_grad=old.requires_grad)
            vars(made).update(vars(old))  # what frameworks note on a parameter
            self._made[id(old)] = made
        return made


def _tensors_of(module: nn.Module) -> Mapping[str, torch.Tensor]:
    found = dict(module.named_parameters(remove_duplicate=False))
    return found | dict(module.named_buffers(remove_duplicate=False))
