"""Lets DeepSpeed train on CPUs over gloo."""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed


def prepare() -> None:
    """Compile nothing, and take fp16 for a dtype of CPUs."""
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
