"""Which group a call is of: a process group, one of the caller's own, or this process alone."""

import os
import sys

from ..errors import OptionError
from .base import Group, SingleGroup


def find_group(group: object, *, writing: bool = False) -> Group:
    """Return the given group, the default process group where there is one, or a group of one.

    ``"alone"`` is this process by itself, whatever process group there is.

    Args:
        group: a process group of torch.distributed, a `Group`, ``"alone"`` or None.
        writing: refuse to go alone where a launcher says that there are others.

    Raises:
        OptionError: ``group`` is neither a process group nor a holdfast group, or cannot be used.
    """
    if group == "alone":
        return SingleGroup()
    dist = sys.modules.get("torch.distributed")  # nobody has a process group without it
    if dist is not None and dist.is_available():
        from .torch import TorchGroup

        if isinstance(group, dist.ProcessGroup) or (group is None and dist.is_initialized()):
            return TorchGroup(group)
    if group is None:
        if writing:
            _check_alone()
        return SingleGroup()
    if not hasattr(group, "all_gather"):
        kind = type(group).__name__
        raise OptionError(
            f"group is a {kind}; expected a process group of torch.distributed, 'alone' (this "
            "process by itself), or None (the default process group)"
        )
    return group  # type: ignore[return-value]


def _check_alone() -> None:
    """Check that no launcher (torchrun) started this process as one of several."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and int(size) > 1:
        raise OptionError(
            f"this is rank {rank} of {size} (RANK and WORLD_SIZE in the environment), but there is "
            "no process group, so each rank would save to the same path alone. Call "
            'torch.distributed.init_process_group first, or give group="alone" and another path '
            "to each rank"
        )
