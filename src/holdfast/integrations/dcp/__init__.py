"""Drop-in for torch.distributed.checkpoint (DCP): its calls, our checkpoints. See docs/dcp.md.

``dcp.save(state_dict, storage_writer=HoldfastWriter("runs/a/first"))``
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .reader import HoldfastReader
    from .routing import Routing, install
    from .writer import HoldfastWriter

__all__ = ["HoldfastReader", "HoldfastWriter", "Routing", "install"]

_HOME = {
    "HoldfastReader": "reader",
    "HoldfastWriter": "writer",
    "Routing": "routing",
    "install": "routing",
}


# Lazily, as ``import torch`` may route DCP's calls while this package is being imported.
def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
