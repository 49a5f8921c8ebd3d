"""Copies of a lazy save: by the kernel, which tells of memory that is gone, beside a plain copy.

    python benchmarks/copies.py

From a tensor into a pool, warm memory, shuffled rounds: GB/s at the median, and the ratio to a
plain copy by one thread, paired round by round, with its quartiles. A copy by the kernel is one
call of `process_vm_writev`. Where that is forbidden it goes through a pipe; here a filter of
seccomp forbids it to one thread, and to those that this one starts. Then whole lazy saves, with the
plain copy in the place of the kernel's.
"""

import argparse
import ctypes
import errno
import gc
import platform
import random
import shutil
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import numpy as np
import torch
from machine import describe
from ratios import quartiles
from save_load import OUT

import holdfast
from holdfast._core import Pool, copy_and_hash_if_there, copy_if_there, copy_pieces
from holdfast.engine import staging

SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20, "1 GiB": 1 << 30}
PLAIN = "plain, 1 thread"
MOVED_BYTES = 64 << 20  # at least, in one measurement
PROCESS_VM_WRITEV = {"x86_64": 311, "aarch64": 271}
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
ERRNO, ALLOW = 0x00050000, 0x7FFF0000

Copy = Callable[[int, int, int], None]  # target, source, bytes


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=20240614, help="of the order")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    for key, value in describe(OUT).items():
        print(f"- {key}: {value}")
    ways = _ways()
    order = random.Random(options.seed)
    source = torch.ones(max(SIZES.values()), dtype=torch.uint8)
    pool = Pool(max(SIZES.values()), 1)
    print("\n| | " + " | ".join(ways) + " |\n" + "|---" * (len(ways) + 1) + "|")
    for name, size in SIZES.items():
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(options.rounds + 1):
            for way in order.sample(list(ways), len(ways)):
                gc.collect()
                taken = _measure(ways[way], pool.address(0), source.data_ptr(), size)
                if number:  # the first fills caches
                    seconds[way].append(taken)
        cells = [_cell(seconds[way], seconds[PLAIN], size) for way in ways]
        print(f"| {name} | " + " | ".join(cells) + " |")
    del source, pool
    _saves(options.rounds, order)


def _saves(rounds: int, order: random.Random) -> None:
    """Measure whole lazy saves of 1 GiB of AdamW, with each way of copying."""
    weights = [torch.nn.Parameter(torch.randn(1 << 19)) for _ in range(171)]
    optimizer = torch.optim.AdamW(weights)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    optimizer.zero_grad()
    state = {"weights": dict(enumerate(weights)), "optimizer": optimizer}
    ways: dict[str, Any] = {
        PLAIN: _plain,
        "kernel, 1": lambda *table: copy_and_hash_if_there(*table[:3], 1, *table[4:]),
        "kernel, 2": lambda *table: copy_and_hash_if_there(*table[:3], 2, *table[4:]),
    }
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(rounds + 2):
        for way in order.sample(list(ways), len(ways)):
            shutil.rmtree(OUT / "copies", ignore_errors=True)
            gc.collect()
            staging.copy_and_hash_if_there = ways[way]
            started = time.perf_counter()
            handle = holdfast.save_async(state, OUT / "copies", stage="lazy")
            handle.wait_staged()
            staged = time.perf_counter() - started
            handle.result()
            if number > 1:
                seconds[way].append((staged, time.perf_counter() - started))
    shutil.rmtree(OUT / "copies")
    print("\n| | until staged s | ratio | until committed s | ratio |\n|---|---|---|---|---|")
    for way, found in seconds.items():
        cells = []
        for mine, base in zip(
            zip(*found, strict=True), zip(*seconds[PLAIN], strict=True), strict=True
        ):
            paired = [one / other for one, other in zip(mine, base, strict=True)]
            low, high = quartiles(paired)
            cells.append(f"{median(mine):.3f} | {median(paired):.2f} ({low:.2f} to {high:.2f})")
        print(f"| {way} | " + " | ".join(cells) + " |")


def _plain(*table: Any) -> int:
    """Copy with one thread; what is copied is hashed when it is written."""
    copy_pieces(*table[:3], 1)
    table[7][:] = 0
    return len(table[0])


def _ways() -> dict[str, Copy]:
    forbidden = ThreadPoolExecutor(1, initializer=_forbid)

    def plain(threads: int) -> Copy:
        return lambda *piece: copy_pieces(*_columns(*piece), threads)

    def kernel(threads: int) -> Copy:
        return lambda *piece: _check(copy_if_there(*_columns(*piece), threads))

    def pipe(threads: int) -> Copy:
        return lambda *piece: forbidden.submit(kernel(threads), *piece).result()

    return {
        PLAIN: plain(1),
        "kernel, 1": kernel(1),
        "kernel, 2": kernel(2),
        "pipe, 1": pipe(1),
        "pipe, 2": pipe(2),
    }


def _columns(*piece: int) -> list[Any]:
    """Return one piece as the core takes several."""
    return [np.array([number], np.uint64) for number in piece]


def _check(missing: int) -> None:
    if missing != 1:
        raise RuntimeError("the source is not there")


def _measure(copy: Copy, target: int, source: int, size: int) -> float:
    """Return the seconds of one copy."""
    times = max(1, MOVED_BYTES // size)
    started = time.perf_counter()
    for _ in range(times):
        copy(target, source, size)
    return (time.perf_counter() - started) / times


def _cell(seconds: list[float], base: list[float], size: int) -> str:
    paired = [other / mine for mine, other in zip(seconds, base, strict=True)]
    low, high = quartiles(paired)
    return f"{size / median(seconds) / 1e9:.1f}, {median(paired):.2f} ({low:.2f} to {high:.2f})"


def _forbid() -> None:
    """Make the call fail in this thread, as containers do."""
    rules = [
        struct.pack("=HBBI", 0x20, 0, 0, 0),
        struct.pack("=HBBI", 0x15, 0, 1, PROCESS_VM_WRITEV[platform.machine()]),
        struct.pack("=HBBI", 0x06, 0, 0, ERRNO | errno.EPERM),
        struct.pack("=HBBI", 0x06, 0, 0, ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(rules))
    given = ctypes.create_string_buffer(struct.pack("@HP", len(rules), ctypes.addressof(code)))
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, given) != 0:
        raise RuntimeError("no filter can be set here")


if __name__ == "__main__":
    main()
