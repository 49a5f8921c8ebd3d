"""torchsnapshot + fsync: a file for each tensor, faster here than its slabs of small ones."""

import os
from pathlib import Path

from durable import sync_all
from torchsnapshot import Snapshot, StateDict
from training_state import State

from compare import Peer

os.environ.setdefault("TORCHSNAPSHOT_DISABLE_BATCHING", "1")  # read at each save


def peers() -> list[Peer]:
    """One contender."""
    return [Peer("torchsnapshot", "batching disabled, fsync", _save, _load)]


def _save(state: State, path: Path) -> None:
    Snapshot.take(str(path), {"state": StateDict(state)})
    sync_all(path)


def _load(path: Path, state: State) -> None:
    Snapshot(str(path)).restore({"state": StateDict(state)})
