"""Elements of one dtype → another, in memory; what does not fit is noticed. Knows no names."""

import torch

from ..errors import OptionError, shown
from ..state.tensors import DTYPE_NAMES, TORCH_DTYPES

# What a cast changes: 8-bit and smaller floats are quantised, with scales that belong to them.
CAST_FROM = ("f64", "f32", "f16", "bf16")
CAST_TO = (*CAST_FROM, "f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz")


def dtype_named(dtype: "str | torch.dtype | None") -> str | None:
    """Return holdfast's name of a floating-point dtype that tensors are to be converted to.

    ``"bf16"``, ``"bfloat16"`` and ``torch.bfloat16`` → ``"bf16"``

    Raises:
        OptionError: it is none.
    """
    if dtype is None:
        return None
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
    named = getattr(torch, name, None) if name not in TORCH_DTYPES and name else dtype
    found = DTYPE_NAMES.get(named) if isinstance(named, torch.dtype) else name
    if found not in CAST_TO:
        raise OptionError(f"dtype is {shown(dtype)}; expected one of {', '.join(CAST_TO)}")
    return str(found)


def cast(source: memoryview, was: str, target: memoryview, becomes: str) -> float | None:
    """Convert elements.

    Args:
        source, target: bytes of as many elements.
        was, becomes: their dtypes.

    Returns:
        The largest number that became infinite, NaN or another by it, or None.
    """
    before = torch.frombuffer(source, dtype=TORCH_DTYPES[was])
    after = torch.frombuffer(target, dtype=TORCH_DTYPES[becomes])
    after.copy_(before)
    if after.itemsize == 1:  # of which some become the largest number instead of infinite
        lost = before.abs() > torch.finfo(after.dtype).max
    else:
        lost = ~torch.isfinite(after)
    if not lost.any():
        return None
    lost &= torch.isfinite(before)
    return float(before[lost].abs().max()) if lost.any() else None
