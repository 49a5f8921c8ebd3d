"""What a store behind a local disk costs training, and how far it falls behind.

`loops`: two ranks (gloo) train, and save every few steps in the background: to the local disk
alone, and to the local disk with a store behind it. Rounds are shuffled pairs; the time is that of
the whole loop, from the first save to just before the one that would come next, so that it has as
many uploads as saves. By default a loop has one save and takes about 10 s, the time between the
saves of `lag`. Beside it stand the seconds that an upload adds to a loop, to the first tenth of its
steps and to the others, and to the processor time of all threads but those that train. The latter
is taken from training where no core is to spare, and is the same on a machine whose speed wanders.
An upload ends within the first tenth, and the time of its end is given: what the others differ by
is the machine. The store is the double of an S3 server, which
throws data away: a store is another machine, and takes none of the cores that train. Signatures do
not cover the bodies of requests, as docs/howto/stores-speed.md advises, but for `--signed`.

`lag`: one process saves a step of so many bytes every few seconds, and uploads it to the double at
a limited rate, after one step that warms its memory. It says how old the newest step of the store
was at most, and what the local disk held.

`halves`: restores a step of which half the files are on the local disk and half in the store alone,
beside a run of each half alone. The store is the double, as fast as it can be, or as if behind a
network card of 10 Gbit/s.

    python benchmarks/tiers.py halves --gb 1 --rounds 9
    python benchmarks/tiers.py loops --rounds 15
    python benchmarks/tiers.py lag --gb 2 --every-s 10 --rate 100e6 --minutes 10
"""

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import machine
import store_servers
import torch
import torch.distributed as dist

import holdfast
from holdfast import Keep, Options, StoreSettings
from holdfast.stores.url import open_store

RESAMPLES = 10_000
STEPS_WARM = 1  # rounds that are not counted
HALVES_TENSORS = 16


def main() -> None:
    """Measure one of the two."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("loops", "lag", "halves", "rank"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=128, help="of each rank's state")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--every", type=int, default=160)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--every-s", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=100e6)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--signed", action="store_true", help="signatures cover the bodies")
    parser.add_argument("--root", type=Path, help="on the disk to measure")
    given = parser.parse_args()
    if given.what == "rank":
        _rank(given)
        return
    with tempfile.TemporaryDirectory(dir=given.root, prefix="holdfast-tiers-") as root:
        print(*machine.describe(Path(root)).values(), sep="; ")
        {"lag": _lag, "loops": _loops, "halves": _halves}[given.what](given, root)


def _loops(given: argparse.Namespace, root: str) -> None:
    with store_servers.discarding() as server:
        port = str(random.randrange(20_000, 60_000))
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        arguments = ["--rounds", given.rounds, "--mib", given.mib, "--steps", given.steps]
        arguments += ["--every", given.every, "--root", root]
        arguments += ["--signed"] if given.signed else []
        command = [sys.executable, __file__, "rank", *map(str, arguments)]
        ranks = [
            subprocess.Popen(
                command,
                env=environment
                | {
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "STORE": f"s3://{store_servers.BUCKET}/tiers",
                },
            )
            for rank in range(2)
        ]
        codes = [rank.wait() for rank in ranks]
        print(f"processor time of the double: {server.cpu_s():.2f} s")
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")


def _rank(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, store = dist.get_rank(), os.environ["STORE"]
    state = {f"w{rank}.{n}": torch.randn(1 << 20) for n in range(given.mib // 4)}
    measured: dict[str, dict[str, list[float]]] = {
        part: {"local": [], "tiers": []} for part in ("loop", "begin", "rest", "busy")
    }
    ends: list[float] = []  # of uploads, as shares of their loops
    times, busy = measured["loop"], measured["busy"]
    chance = random.Random(1)
    for number in range(given.rounds + STEPS_WARM):
        names = list(times)
        chance.shuffle(names)
        for name in names:
            where = f"{given.root}/{name}-{number}"
            parts, end = _loop(given, state, name, where, f"{store}/{number}")
            if number >= STEPS_WARM:
                for part, value in parts.items():
                    measured[part][name].append(value)
                ends += [end / parts["loop"]] if name == "tiers" else []
        dist.barrier()
    if rank == 0:
        ratios = [b / a for a, b in zip(times["local"], times["tiers"], strict=True)]
        low, high = _interval(ratios)
        print(
            f"{given.rounds} rounds of {given.steps} steps, a save every {given.every}, "
            f"2 ranks x {given.mib} MiB"
        )
        for name, values in times.items():
            print(
                f"{name}: median {median(values):.3f} s, other threads {median(busy[name]):.3f} s"
            )
        print(
            f"tiers / local: median {median(ratios):.4f}, 95 % of medians {low:.4f} to {high:.4f}"
        )
        saves = given.steps // given.every
        print(f"the last upload ended at {median(ends):.3f} of a loop, at most {max(ends):.3f}")
        for what, part in {
            "an upload adds to a loop": "loop",
            "to its first tenth": "begin",
            "to the rest": "rest",
            "to processor time": "busy",
        }.items():
            held = measured[part]
            more_s = [(b - a) / saves for a, b in zip(held["local"], held["tiers"], strict=True)]
            low, high = _interval(more_s)
            print(f"{what}: median {median(more_s):.3f} s, 95 % of medians {low:.3f} to {high:.3f}")
    dist.destroy_process_group()


def _loop(
    given: argparse.Namespace, state: dict[str, torch.Tensor], name: str, local: str, store: str
) -> tuple[dict[str, float], float]:
    """Train once.

    Returns:
        the seconds of the loop, of its first tenth and of the rest, and the processor time of other
        threads of both ranks; and when the last upload ended, in seconds from the begin.
    """
    ends = [0.0]

    def observe(event: holdfast.Event) -> None:
        if event.kind == "uploaded":
            ends.append(time.perf_counter())

    matrix = torch.randn(700, 700)
    keep = Keep.latest(1) | Keep.local(1) if name == "tiers" else Keep.latest(1)
    where = {"root": store, "local": local} if name == "tiers" else {"root": local}
    checkpointer = holdfast.Checkpointer(
        **where,
        every=given.every,
        keep=keep,
        signals=(),
        observe=[observe],
        options=_options(given),
    )
    dist.barrier()
    started, busy = time.perf_counter(), _others_s()
    tenth_s = 0.0
    for step in range(given.every, given.every + given.steps):
        for _ in range(8):
            matrix = torch.nn.functional.normalize(matrix @ matrix)
        loss = matrix.sum()
        dist.all_reduce(loss)
        checkpointer.step(step, state)
        if step == given.every + given.steps // 10:
            tenth_s = time.perf_counter() - started
    took_s = time.perf_counter() - started
    busy_s = torch.tensor(_others_s() - busy)
    dist.all_reduce(busy_s)
    checkpointer.close()
    parts = {"loop": took_s, "begin": tenth_s, "rest": took_s - tenth_s, "busy": busy_s.item()}
    return parts, max(ends) - started


def _options(given: argparse.Namespace) -> Options:
    light = {"unsigned_payload": True, "checksum_algorithm": "crc64nvme"}
    return Options(
        store=StoreSettings(f"s3://{store_servers.BUCKET}", **({} if given.signed else light))
    )


def _halves(given: argparse.Namespace, root: str) -> None:
    torch.set_num_threads(1)
    count = int(given.gb * 1e9 / 4 / HALVES_TENSORS)
    state = {f"w{n}": torch.randn(count) for n in range(HALVES_TENSORS)}
    half = {name: state[name] for name in list(state)[::2]}
    options = Options(file_bytes=int(given.gb * 1e9 / HALVES_TENSORS))
    for name, rate in (("as fast as it can be", 0), ("10 Gbit/s", 1_250_000_000)):
        with store_servers.discarding(bytes_per_s=rate) as server:
            store = f"s3://{store_servers.BUCKET}/{server.kept}{random.randrange(10**9)}"
            local = f"{root}/{rate}"
            runs: dict[str, tuple[dict[str, str], dict[str, torch.Tensor]]] = {
                "half, local disk": ({"root": f"{local}/half"}, half),
                "half, store": ({"root": f"{store}/half"}, half),
                "both halves": ({"root": f"{store}/all", "local": f"{local}/all"}, state),
            }
            for where, held in runs.values():
                with holdfast.Checkpointer(**where, options=options, signals=()) as checkpointer:
                    checkpointer.save(1, held)
            files = sorted(Path(local, "all").rglob("*.hf"))
            for file in files[::2]:
                file.unlink()
            print(f"store: {name}; {len(files)} files of {given.gb} GB")
            _restore_all(given, runs, options)


def _restore_all(
    given: argparse.Namespace,
    runs: dict[str, tuple[dict[str, str], dict[str, torch.Tensor]]],
    options: Options,
) -> None:
    times: dict[str, list[float]] = {name: [] for name in runs}
    into = {
        name: {key: torch.zeros_like(value) for key, value in held.items()}
        for name, (_, held) in runs.items()
    }
    chance = random.Random(1)
    for number in range(given.rounds + STEPS_WARM):
        names = list(runs)
        chance.shuffle(names)
        for name in names:
            where, held = runs[name]
            with holdfast.Checkpointer(**where, options=options, signals=()) as checkpointer:
                started = time.perf_counter()
                assert checkpointer.restore(into[name]) == 1
                took_s = time.perf_counter() - started
            assert all(torch.equal(into[name][key], value) for key, value in held.items())
            if number >= STEPS_WARM:
                times[name].append(took_s)
    halves = [max(pair) for pair in zip(*list(times.values())[:2], strict=True)]
    ratios = [b / a for a, b in zip(halves, times["both halves"], strict=True)]
    for name, values in times.items():
        print(f"{name}: median {median(values):.3f} s")
    low, high = _interval(ratios)
    print(f"both / the slower half: median {median(ratios):.3f}, 95 % {low:.3f} to {high:.3f}")


def _others_s() -> float:
    """Return the processor time of all threads but this one."""
    return time.process_time() - time.thread_time()


def _interval(ratios: list[float]) -> tuple[float, float]:
    """Return where 95 % of the medians of resampled rounds lie (the percentile bootstrap)."""
    chance = random.Random(2)
    medians = sorted(median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[RESAMPLES // 40], medians[-RESAMPLES // 40]


def _lag(given: argparse.Namespace, root: str) -> None:
    torch.set_num_threads(1)
    count = int(given.gb * 1e9 / 4 / 16)
    state = {f"w{n}": torch.randn(count) for n in range(16)}
    made: dict[int, float] = {}
    up: list[tuple[float, int]] = []
    disk_bytes = [0]
    done = threading.Event()

    def observe(event: holdfast.Event) -> None:
        if event.kind == "uploaded" and event.step is not None:
            up.append((time.monotonic(), event.step))

    def weigh() -> None:
        while not done.wait(1.0):
            size = sum(p.stat().st_size for p in Path(root, "local").rglob("*.hf") if p.exists())
            disk_bytes[0] = max(disk_bytes[0], size)

    threading.Thread(target=weigh, daemon=True).start()
    keep = Keep.latest(2) | Keep.local(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with store_servers.discarding():
        store = f"s3://{store_servers.BUCKET}/lag"
        checkpointer = holdfast.Checkpointer(
            store,
            local=f"{root}/local",
            every=1,
            keep=keep,
            signals=(),
            upload_bytes_s=given.rate,
            observe=[observe],
            durable="local",
            options=_options(given),
        )
        checkpointer.step(1, state)  # warms the memory that saves and uploads pass through
        checkpointer.wait(tier="store")
        began, step = time.monotonic(), 1
        made[1] = began
        while time.monotonic() - began < 60 * given.minutes:
            step += 1
            made[step] = time.monotonic()
            checkpointer.step(step, state)
            time.sleep(max(0.0, began + (step - 1) * given.every_s - time.monotonic()))
        ended = time.monotonic()
        checkpointer.close()
        run = open_store(store)
        steps = [entry.name for entry in run.list() if entry.name.startswith("step-")]
        begun = [name for name in steps if not run.exists(f"{name}/MANIFEST")]
        left = [name for name in begun if run.exists(f"{name}/data")]  # else it was deleted
    done.set()
    # Just before each step appears, the one before it is the oldest that the newest ever was.
    seen = [*[moment for moment, _ in up], ended]
    ages = [later - made[s] for (_, s), later in zip(up, seen[1:], strict=False) if later <= ended]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{step - 1} saves of {given.gb} GB, {len(up)} uploaded at {given.rate / 1e6:.0f} MB/s")
    print(f"newest step of the store: at most {max(ages):.1f} s old, median {median(ages):.1f}")
    print(f"local disk: at most {disk_bytes[0] / 1e9 / given.gb:.1f} steps")
    print(
        f"memory: {(peak - before) / 1e6:.2f} GB above the state; parts left in the store: {left}"
    )


if __name__ == "__main__":
    main()
