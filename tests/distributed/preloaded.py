"""What the fork server loads once, so that a rank starts in a tenth of a second."""

import gc

import pytest
import torch._dynamo  # which FSDP2 and DTensor import when they are first used
import torch.distributed.checkpoint.state_dict
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torchdata.stateful_dataloader

import holdfast.data.data_state
import holdfast.integrations.dcp.reader
import holdfast.integrations.dcp.writer
import holdfast.loading.checkpoint
import holdfast.runs.checkpointer

LOADED = (holdfast, pytest, torch, torchdata)

gc.collect()
gc.freeze()  # or each rank's collections look through all of it, and copy its pages
