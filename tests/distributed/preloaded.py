"""What the fork server loads once, so that a rank starts in a tenth of a second."""

import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.tensor

import holdfast._checkpointer

LOADED = (holdfast, torch)
