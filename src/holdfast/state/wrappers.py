"""What wrappers of modules put between a module and its parameters. Knows no state, no files."""

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def canonical_name(key: str) -> str:
    """Drop the segments that wrappers put into names."""
    return ".".join(part for part in key.split(".") if part not in _SEGMENTS)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module within DDP, DataParallel and torch.compile."""
    while True:
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


def flat_wrappers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Find every FullyShardedDataParallel (FSDP1) in a module, with its name there."""
    for name, part in module.named_modules():
        if _is_kind(part, "FullyShardedDataParallel"):
            yield name, part


def show_shards(module: nn.Module) -> None:
    """Let modules of fully_shard have their sharded parameters, which optimizers know.

    After a forward without backward they have the gathered ones; ``state_dict()`` does the same.
    """
    for part in module.modules():
        if _is_kind(part, "FSDPModule"):
            part.reshard()  # type: ignore[operator]


def _is_kind(part: nn.Module, name: str) -> bool:
    # By name: the import takes a second.
    return any(kind.__name__ == name for kind in type(part).__mro__)
