"""Lets the frameworks take the CPU for a device that they shard over: by themselves they do not."""

import os

from accelerate import PartialState
from accelerate.utils import DistributedType


def drive_on_cpu() -> None:
    """Let DeepSpeed's engines train on the CPU under a Trainer, over gloo."""
    import deepspeed_cpu
    import transformers.training_args as arguments

    deepspeed_cpu.prepare()
    arguments.is_torch_bf16_gpu_available = lambda: True
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)


def shard_on_cpu() -> None:
    """Let accelerate, and what is built on it, shard on the CPU."""
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_XPU
    os.environ["ACCELERATE_USE_FSDP"] = "true"
