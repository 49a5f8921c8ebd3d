"""torch.distributed.checkpoint in one process, with 1 and with 4 writer threads."""

import warnings
from pathlib import Path

from durable import sync_all
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
from training_state import State

from compare import Peer

# One process is what is meant here; it says so at every call.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def peers() -> list[Peer]:
    """Two contenders, which read alike but for the number of files."""
    return [_peer(1), _peer(4)]


def _peer(threads: int) -> Peer:
    def save_durably(state: State, path: Path) -> None:
        writer = FileSystemWriter(path, thread_count=threads, sync_files=True)
        save(state, storage_writer=writer, no_dist=True)
        # sync_files covers the data files, not .metadata as it stands at the end, nor directories.
        sync_all(path)

    name = f"DCP, {threads} thread{'s' if threads > 1 else ''}"
    return Peer(name, f"thread_count={threads}, sync_files, fsync", save_durably, _load)


def _load(path: Path, state: State) -> None:
    load(state, storage_reader=FileSystemReader(path), no_dist=True)
