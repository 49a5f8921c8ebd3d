"""Lets the frameworks take the CPU for a device that they shard over: by themselves they do not."""

import os

from accelerate import PartialState
from accelerate.utils import DistributedType


def shard_on_cpu() -> None:
    """Let accelerate, and what is built on it, shard on the CPU."""
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_XPU
    os.environ["ACCELERATE_USE_FSDP"] = "true"
