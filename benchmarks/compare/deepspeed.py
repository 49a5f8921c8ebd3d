"""DeepSpeed's FastFileWriter, known as FastPersist: torch.save through O_DIRECT and libaio.

Two things of it are missing without a GPU and stand here instead: seeing tensors as bytes, and a
page-locked buffer. Storages reach the writer whole, for which DeepSpeed patches torch.
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from durable import sync_all
from training_state import State, fill

from compare import Peer

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported

from deepspeed.io import FastFileWriter, FastFileWriterConfig, fast_file_writer
from deepspeed.ops.op_builder import AsyncIOBuilder

BLOCK_BYTES, QUEUE_DEPTH, THREADS = 8 << 20, 8, 2
BUFFER_BYTES = 512 << 20  # page-locked; one half is filled while the other is written
SETTINGS = f"8 MiB blocks, queue depth {QUEUE_DEPTH}, {THREADS} threads, 512 MiB buffer; torch.load"


def peers() -> list[Peer]:
    """One contender; the first call builds its native part, which takes minutes.

    A build that is killed leaves a lock in ~/.cache/torch_extensions, and the next waits for it.
    """
    try:
        native = AsyncIOBuilder().load(verbose=False)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ImportError(f"its native part cannot be built: {reason}") from error
    handle = native.aio_handle(BLOCK_BYTES, QUEUE_DEPTH, False, True, THREADS)
    buffer = handle.new_cpu_locked_tensor(BUFFER_BYTES, torch.empty(0, dtype=torch.uint8))
    utils = SimpleNamespace(load=lambda: SimpleNamespace(cast_to_byte_tensor=_as_bytes))
    fast_file_writer.UtilsBuilder = lambda: utils

    def save(state: State, path: Path) -> None:
        writer = FastFileWriter(str(path), FastFileWriterConfig(handle, buffer))
        with patch.object(torch.UntypedStorage, "_write_file", _write_storage):
            torch.save(state, writer, _use_new_zipfile_serialization=False)
        writer.close()
        sync_all(path)

    return [Peer("DeepSpeed FastFileWriter", f"fsync; {SETTINGS}", save, _load)]


def _load(path: Path, state: State) -> None:
    fill(state, torch.load(path, weights_only=True))


def _write_storage(
    storage: torch.UntypedStorage, writer: Any, is_file: bool, save_size: bool, element_bytes: int
) -> None:
    """Hand a storage of 4-byte elements, as all of the state are, over to FastFileWriter."""
    writer.save_torch_storage_object_list([(storage, torch.float32)], save_size)


def _as_bytes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
