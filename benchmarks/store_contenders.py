"""The contenders of `stores.py`: each saves one state to a bucket, and loads it again.

obstore alone moves the state's bytes as one object, from memory to memory: it has no tensors, no
checksums of its own and no commit. Its ranges are thrown away as they come. Its parts and how many
are in flight are those that were fastest in a sweep.
"""

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import torch
from obstore.store import S3Store
from store_servers import BUCKET, Up
from training_state import State, differences, flat, spoil, state_bytes

import holdfast
from holdfast._core import checksum, copy, copy_and_hash_chunk, hash_chunk

MIB = 1 << 20
CHUNK = 4 * MIB  # what holdfast hashes at once
RING = 12  # parts
# Body of an upload not signed, but a checksum that the server can check: less processor time.
LIGHT = {"unsigned_payload": True, "checksum_algorithm": "crc64nvme"}
PARTS = (8 * MIB, 16 * MIB, 32 * MIB)
IN_FLIGHT = (4, 8)
SHM = Path("/dev/shm")  # files of s5cmd: memory, as the others have


@dataclass(frozen=True)
class Contender:
    """One who saves and loads.

    Attributes:
        save: under a prefix of the bucket.
        load: what `save` has put under a prefix.
        check: raises when `load` gave other values.
        has_children: its processor time is that of child processes.
    """

    name: str
    settings: str
    save: Callable[[str], Any]
    load: Callable[[str], Any]
    check: Callable[[], None] = lambda: None
    has_children: bool = False


@dataclass(frozen=True)
class Track:
    """What all have in common: the server, the state, its bytes, and what a load fills."""

    up: Up
    state: State
    target: State
    payload: memoryview

    def check(self) -> None:
        """Compare what was loaded bit by bit, and spoil it for the next."""
        if wrong := differences(self.target, self.state):
            raise SystemExit(f"other values were loaded than saved: {', '.join(wrong)}")
        spoil(self.target)


def payload_of(state: State) -> memoryview:
    """Return a copy of the state's bytes, in one piece."""
    pieces = [tensor.flatten().view(torch.uint8) for tensor in flat(state).values()]
    return memoryview(torch.cat(pieces).numpy()).cast("B")


def holdfast_contender(track: Track, name: str = "holdfast", **settings: Any) -> Contender:
    """Return holdfast, with settings of its store or without."""
    base = f"s3://{BUCKET}"
    if settings:
        base = f"s3://{name.replace(' ', '-').replace(',', '')}@{BUCKET}"
        holdfast.StoreSettings(base, endpoint=track.up.endpoint, allow_http=True, **settings).use()
    return Contender(
        name,
        ", ".join(f"{key}={value}" for key, value in settings.items()) or "defaults",
        lambda prefix: holdfast.save(track.state, f"{base}/{prefix}"),
        lambda prefix: holdfast.load(f"{base}/{prefix}", into=track.target),
        track.check,
    )


def obstore_contender(
    track: Track, name: str, save: tuple[int, int], load: tuple[int, int], **config: Any
) -> Contender:
    """Return obstore alone.

    Args:
        save, load: bytes of a part, and parts in flight.
    """
    store = S3Store(BUCKET, config=config, client_options={"allow_http": True})

    def put(prefix: str) -> None:
        # From an iterator it takes memory as it is; from one buffer it would copy.
        obstore.put(
            store,
            f"{prefix}/object",
            _parts(track.payload, save[0]),
            use_multipart=True,
            chunk_size=save[0],
            max_concurrency=save[1],
        )

    def get(prefix: str) -> None:
        key, size = f"{prefix}/object", len(track.payload)

        def one(start: int) -> int:
            end = min(start + load[0], size)
            return len(obstore.get_range(store, key, start=start, end=end))

        with ThreadPoolExecutor(load[1]) as pool:
            assert sum(pool.map(one, range(0, size, load[0]))) == size

    said = f"save {_said(save)}; load {_said(load)}"
    return Contender(name, said, put, get)


def best_of_obstore(track: Track, **config: Any) -> Contender:
    """Try all parts and concurrencies, each twice; return obstore with the fastest."""
    best: dict[str, tuple[float, tuple[int, int]]] = {}
    for part_bytes in PARTS:
        for in_flight in IN_FLIGHT:
            setting = part_bytes, in_flight
            tried = obstore_contender(track, "", setting, setting, **config)
            for verb, call in (("save", tried.save), ("load", tried.load)):
                taken = min(_seconds(call, f"{track.up.kept}sweep") for _ in range(2))
                best[verb] = min(best.get(verb, (taken, setting)), (taken, setting))
    name = f"obstore{' ' if config else ''}{', '.join(config)}"
    return obstore_contender(track, name, best["save"][1], best["load"][1], **config)


def checked_contender(track: Track, *, copies: bool = False) -> Contender:
    """Return obstore, light, with the least that a checked state costs: it has no commit either.

    Each 4 MiB are hashed before they are sent. What is loaded is hashed, then copied to its place.

    Args:
        copies: what is saved too, in the pass that hashes: a state that changes meanwhile is whole.
    """
    store = S3Store(BUCKET, config=LIGHT, client_options={"allow_http": True})
    target = np.ones(len(track.payload), np.uint8)
    ring = np.ones((RING, 16 * MIB), np.uint8)  # more than are in flight

    def hashed(by: Callable[[int, int, int], Any], data: np.ndarray[Any, Any]) -> None:
        for at in range(0, len(data), CHUNK):
            by(data[at:].ctypes.data, min(CHUNK, len(data) - at), 0)

    def parts() -> Iterator[memoryview]:
        for number, part in enumerate(_parts(track.payload, 16 * MIB)):
            if not copies:
                hashed(hash_chunk, np.frombuffer(part, np.uint8))
                yield part
                continue
            held = ring[number % RING][: len(part)]
            to, source = held.ctypes.data, np.frombuffer(part, np.uint8).ctypes.data
            for at in range(0, len(part), CHUNK):
                copy_and_hash_chunk(to + at, source + at, min(CHUNK, len(part) - at), 0)
            yield memoryview(held)

    def put(prefix: str) -> None:
        obstore.put(
            store,
            f"{prefix}/object",
            parts(),
            use_multipart=True,
            chunk_size=16 * MIB,
            max_concurrency=8,
        )

    def get(prefix: str) -> None:
        key, size = f"{prefix}/object", len(track.payload)

        def one(start: int) -> None:
            end = min(start + 8 * MIB, size)
            data = np.frombuffer(obstore.get_range(store, key, start=start, end=end), np.uint8)
            hashed(checksum, data)
            copy(target[start:end].ctypes.data, data.ctypes.data, len(data))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(one, range(0, size, 8 * MIB)))

    name = f"{'copied and ' * copies}hashed obstore {', '.join(LIGHT)}"
    return Contender(name, "save 16 MiB x 8; load 8 MiB x 4, copied", put, get)


def boto3_contender(track: Track) -> Contender:
    """Return boto3's transfer manager."""
    import boto3
    from boto3.s3.transfer import TransferConfig

    client = boto3.client("s3", endpoint_url=track.up.endpoint)
    config = TransferConfig(multipart_chunksize=16 * MIB, max_concurrency=8)
    memory = memoryview(bytearray(len(track.payload)))

    class Target(io.RawIOBase):
        def __init__(self) -> None:
            self.position = 0

        def writable(self) -> bool:
            return True

        def seekable(self) -> bool:
            return True

        def seek(self, offset: int, whence: int = 0) -> int:
            self.position = offset
            return offset

        def write(self, data: Any) -> int:
            memory[self.position : self.position + len(data)] = data
            self.position += len(data)
            return len(data)

    source = io.BytesIO(track.payload)

    def save(prefix: str) -> None:
        source.seek(0)
        # It closes what it has read.
        kept = _Unclosed(source)
        client.upload_fileobj(kept, BUCKET, f"{prefix}/object", Config=config)

    def load(prefix: str) -> None:
        client.download_fileobj(BUCKET, f"{prefix}/object", Target(), Config=config)

    return Contender("boto3, TransferConfig", "16 MiB, 8 in flight", save, load)


class _Unclosed:
    def __init__(self, file: io.BytesIO) -> None:
        self.read, self.seek, self.tell = file.read, file.seek, file.tell


def s5cmd_contender(track: Track) -> Contender:
    """Return s5cmd, with files in memory."""
    program = Path(sys.executable).parent / "s5cmd"
    if not program.exists():
        raise ImportError("s5cmd is not installed")
    source, target = SHM / f"stores-{os.getpid()}.in", SHM / f"stores-{os.getpid()}.out"
    source.write_bytes(track.payload)

    def copy(*words: str) -> None:
        command = [str(program), "--endpoint-url", track.up.endpoint, "--log", "error", "cp"]
        subprocess.run([*command, "-p", "16", "-c", "8", *words], check=True)

    return Contender(
        "s5cmd",
        "-p 16 -c 8, files in memory",
        lambda prefix: copy(str(source), f"s3://{BUCKET}/{prefix}/object"),
        lambda prefix: copy(f"s3://{BUCKET}/{prefix}/object", str(target)),
        has_children=True,
    )


def dcp_contender(track: Track) -> Contender:
    """Return PyTorch DCP with its writer for fsspec, and s3fs."""
    import s3fs  # noqa: F401 - whether it is there
    from torch.distributed.checkpoint import load as dcp_load
    from torch.distributed.checkpoint import save as dcp_save
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    settings = {"endpoint_url": track.up.endpoint}

    def save(prefix: str) -> None:
        writer = FsspecWriter(f"s3://{BUCKET}/{prefix}/dcp", thread_count=4, **settings)
        dcp_save(track.state, storage_writer=writer, no_dist=True)

    def load(prefix: str) -> None:
        reader = FsspecReader(f"s3://{BUCKET}/{prefix}/dcp", **settings)
        dcp_load(track.target, storage_reader=reader, no_dist=True)

    return Contender("DCP, FsspecWriter", "thread_count=4, s3fs", save, load, track.check)


PEERS = {
    "checked": checked_contender,
    "copied": partial(checked_contender, copies=True),
    "boto3": boto3_contender,
    "s5cmd": s5cmd_contender,
    "DCP": dcp_contender,
}


def remove_files() -> None:
    """Remove what s5cmd has read and written."""
    for file in SHM.glob(f"stores-{os.getpid()}.*"):
        file.unlink()


def track_of(up: Up, state: State, target: State) -> Track:
    """Return what all have in common."""
    assert state_bytes(state) == state_bytes(target)
    return Track(up, state, target, payload_of(state))


def _parts(payload: memoryview, size: int) -> Iterator[memoryview]:
    return (payload[at : at + size] for at in range(0, len(payload), size))


def _seconds(call: Callable[[str], Any], prefix: str) -> float:
    started = time.perf_counter()
    call(prefix)
    return time.perf_counter() - started


def _said(setting: tuple[int, int]) -> str:
    return f"{setting[0] // MIB} MiB x {setting[1]}"
