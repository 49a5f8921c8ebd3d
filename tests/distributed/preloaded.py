"""What the fork server loads once, so that a rank starts in a tenth of a second."""

import torch.distributed.checkpoint.state_dict
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

import holdfast._checkpointer
import holdfast.integrations.dcp

LOADED = (holdfast, torch)
