"""The contenders of `small.py`: how each saves durably and loads into tensors that exist.

Every file is fsynced once, the directories that name it too.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from compare.torch_save import without_crc32
from safetensors.torch import load_file, save_file
from small_states import Sample
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import load as load_dcp
from torch.distributed.checkpoint import save as save_dcp
from training_state import fill, flat

import holdfast
from holdfast.testing import faulty

# One process is what is meant where there is no group; it says so at every call.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

HOLDFAST = "holdfast"


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to save and load, alone or as one rank of the process group.

    Attributes:
        save: returns when all is durable on every rank.
        load: fills a state of the same shapes in place.
        syncs: saves, and returns how many fsyncs this process made.
    """

    name: str
    settings: str
    save: Callable[[Sample, Path], None]
    load: Callable[[Path, Sample], None]
    syncs: Callable[[Sample, Path], int]


def peers() -> dict[str, Peer]:
    """Return the contenders by name, holdfast first."""
    crc = "no CRC-32; mmap=True, copied into place"
    found = [
        Peer(HOLDFAST, "defaults; verified load", _save_holdfast, _load_holdfast, _syncs_holdfast),
        Peer("torch.save", crc, _save_torch, _load_torch, _counted(_save_torch)),
        Peer("safetensors", "load_file, copied", _save_safe, _load_safe, _counted(_save_safe)),
        _dcp(1),
        _dcp(4),
    ]
    return {peer.name: peer for peer in found}


def in_group() -> bool:
    """Return whether this process is a rank among others."""
    return dist.is_initialized() and dist.get_world_size() > 1


def _save_holdfast(sample: Sample, path: Path) -> None:
    holdfast.save(sample.given, path)


def _load_holdfast(path: Path, sample: Sample) -> None:
    holdfast.load(path, into=sample.given)


def _syncs_holdfast(sample: Sample, path: Path) -> int:
    counts = []
    with faulty() as disk:  # without a fault: it counts
        # The first save of a process syncs young directories above, too: no round measures it.
        for place in (path, path.with_name(f"{path.name}-again")):
            _save_holdfast(sample, place)
            calls = disk.calls()
            counts.append(calls.get("sync", 0) + calls.get("sync_directory", 0))
    return counts[1] - counts[0]


def _save_torch(sample: Sample, path: Path) -> None:
    file = _own_file(path)
    with without_crc32():
        torch.save(sample.tensors(), file)
    _make_durable(file)


def _load_torch(path: Path, sample: Sample) -> None:
    fill(sample.tensors(), torch.load(_own_file(path), mmap=True, weights_only=True))


def _save_safe(sample: Sample, path: Path) -> None:
    file = _own_file(path)
    save_file(flat(sample.tensors()), file)
    _make_durable(file)


def _load_safe(path: Path, sample: Sample) -> None:
    found = load_file(_own_file(path))
    for name, tensor in flat(sample.tensors()).items():
        tensor.copy_(found[name])


def _dcp(threads: int) -> Peer:
    def save(sample: Sample, path: Path) -> None:
        # sync_files covers the data files and .metadata, before it gets its name.
        writer = FileSystemWriter(path, thread_count=threads, sync_files=True)
        save_dcp(sample.tensors(), storage_writer=writer, no_dist=not in_group())
        if not in_group() or dist.get_rank() == 0:
            _sync(path)
            _sync(path.parent)
        if in_group():
            dist.barrier()

    def load(path: Path, sample: Sample) -> None:
        reader = FileSystemReader(path)
        load_dcp(sample.tensors(), storage_reader=reader, no_dist=not in_group())

    name = f"DCP, {threads} thread{'s' if threads > 1 else ''}"
    settings = f"thread_count={threads}, sync_files, directories fsynced"
    return Peer(name, settings, save, load, _counted(save))


def _own_file(path: Path) -> Path:
    """Return the file of this process: a file for each rank where there are several."""
    return path.with_name(f"{path.name}-{dist.get_rank()}") if in_group() else path


def _make_durable(file: Path) -> None:
    _sync(file)
    if in_group():
        dist.barrier()  # then one fsync of the directory is enough for all files
    if not in_group() or dist.get_rank() == 0:
        _sync(file.parent)
    if in_group():
        dist.barrier()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _counted(save: Callable[[Sample, Path], None]) -> Callable[[Sample, Path], int]:
    """Return what saves and counts: these formats fsync through Python's os.fsync alone."""

    def syncs(sample: Sample, path: Path) -> int:
        with _fsyncs() as found:
            save(sample, path)
        return len(found)

    return syncs


@contextlib.contextmanager
def _fsyncs() -> Iterator[list[int]]:
    found: list[int] = []
    fsync: Any = os.fsync

    def count(descriptor: int) -> None:
        found.append(descriptor)
        fsync(descriptor)

    os.fsync = count
    try:
        yield found
    finally:
        os.fsync = fsync
