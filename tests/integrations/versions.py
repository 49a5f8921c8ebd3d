"""What versions of torch differ in."""

import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def as_dcp_tells(error: str) -> str:
    """What `dcp.load` says of an error of its reader: DCP of torch 2.9 and 2.10 drops it."""
    return error if TORCH >= (2, 13) else "AssertionError"
