"""Drop-in for torch.distributed.checkpoint (DCP): its calls, our checkpoints. See docs/dcp.md.

``dcp.save(state_dict, storage_writer=HoldfastWriter("runs/a/first"))``
"""

from ..routing import Routing, install
from .reader import HoldfastReader
from .writer import HoldfastWriter

__all__ = ["HoldfastReader", "HoldfastWriter", "Routing", "install"]
