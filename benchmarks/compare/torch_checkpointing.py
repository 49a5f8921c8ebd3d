"""torch_checkpointing + fsync: a synchronous save, buffered, for its O_DIRECT fails here.

Its O_DIRECT hands Python's unaligned buffers to the file, which ext4 refuses.
"""

from pathlib import Path

from durable import sync_all
from torch_checkpointing import CheckpointManager, CheckpointWriterConfig, SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
from training_state import State

from compare import Peer
from compare.torch_save import without_crc32

THREADS = 4


def peers() -> list[Peer]:
    """One contender."""
    settings = (
        f"use_direct_io=False, {THREADS} writer threads, no CRC-32, fsync; mmap, copied into place"
    )
    return [Peer("torch_checkpointing", settings, _save, _load)]


def _manager() -> CheckpointManager:
    writer = CheckpointWriterConfig(file_write_max_threads=THREADS)
    return CheckpointManager.Config(
        save=SyncCheckpointSaverConfig(writer_config=writer),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    ).build()


def _save(state: State, path: Path) -> None:
    with without_crc32():
        _manager().save(str(path), _items(state))
    sync_all(path)


def _load(path: Path, state: State) -> None:
    _manager().load(str(path), into=_items(state), strict=True)


def _items(state: State) -> State:
    """Name the rooms as it allows: without dots."""
    return {room.replace(".", "-"): tensors for room, tensors in state.items()}
