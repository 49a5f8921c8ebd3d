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
        # By name: the import takes a second, and the class is the one torch retires.
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(part).__mro__):
            yield name, part


def reshard(module: nn.Module) -> None:
    """Let modules under ``fully_shard`` (FSDP2) have their shards as parameters again.

    After a forward without a backward, an evaluation, the outermost still has what it has gathered.
    """
    for part in module.modules():
        # By name: the import takes a second.
        if any(kind.__name__ == "FSDPModule" for kind in type(part).__mro__):
            part.reshard()  # type: ignore[operator]
