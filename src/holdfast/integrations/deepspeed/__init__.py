"""DeepSpeed's engines, saved natively: `attach` for one of them, `hook` for all."""

from .engine import Attached, attach, hook

__all__ = ["Attached", "attach", "hook"]
