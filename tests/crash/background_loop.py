"""Kill, stop or fill the disk of one of two ranks in the middle of a save in the background.

Each round: two ranks save while they train on; at a random moment of the save one of them is killed
(SIGKILL), stopped (SIGSTOP, until after the deadline), or its disk is full. The survivors have to
learn it by the deadline and five seconds, to have trained on meanwhile, and to save again: the two
together where both live, a new pair where one died. Nothing half-made may be visible.

``python tests/crash/background_loop.py --times 100``
"""

import argparse
import errno
import gc
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a run as a program

from distributed.ranks import start_server

DEADLINE_S = 1.0
LEARNT_S = DEADLINE_S + 5
IN_FLIGHT_S = 30.0  # longer than it takes to begin a save on the slowest machine
FAULTS = ("kill", "stop", "full")


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank saw of the save that went wrong.

    Attributes:
        error: name of what `result` raised, or "" when it was committed.
        learnt_s: from the call.
        steps: trained between the call and the outcome.
        threads, descriptors: of this process before the save.
    """

    error: str
    learnt_s: float
    steps: int
    threads: int
    descriptors: int


def serve(rank: int, port: int, pipe: "Connection[Any, Any]") -> None:
    """Be one rank: do what the pipe says until it says None."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    state = {f"t{i}": torch.full((200_000,), float(i)) for i in range(8)}
    state["own"] = {rank: torch.zeros(200_000)}  # what it trains
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        path, victim, fault, delay_ms, deadline_s = task
        mine = fault if rank == victim else ""
        pipe.send(save(state, path, mine, delay_ms, deadline_s))
    os._exit(0)  # gloo's threads may abort at the end of Python


def save(state: dict[str, Any], path: str, fault: str, delay_ms: int, deadline_s: float) -> Told:
    """Save in the background, with a fault of this rank's own, and train on meanwhile."""
    import holdfast
    from holdfast.errors import HoldfastError
    from holdfast.testing.faults import Fault, faulty

    # Every write takes a while, so that whatever strikes from outside strikes in the middle.
    faults = [Fault("write", persistent=True, action="delay", argument=delay_ms)]
    if fault == "full":
        faults = [Fault("write", nth=2, persistent=True, argument=errno.ENOSPC)]
    gc.collect()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    error, steps = "", 0
    with faulty(*faults):
        started = time.monotonic()
        handle = holdfast.save_async(state, path, options=holdfast.Options(deadline_s=deadline_s))
        asked = threading.Event()
        outcome: list[str] = []

        def ask() -> None:
            try:
                handle.result()
                outcome.append("")
            except HoldfastError as failure:
                outcome.append(type(failure).__name__)
            asked.set()

        asker = threading.Thread(target=ask)
        asker.start()
        while not asked.is_set():
            next(iter(state["own"].values())).add_(1)
            steps += 1
        learnt_s = time.monotonic() - started
        error = outcome[0]
        asker.join()
        handle._thread.join()  # type: ignore[union-attr]
    return Told(error, learnt_s, steps, threads, descriptors)


class Pair:
    """Two ranks in processes of their own."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        start_server()
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = int(found.getsockname()[1])
        self.pipes: list[Connection[Any, Any]] = []
        self.processes = []
        for rank in range(2):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, port, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()

    def end(self) -> None:
        """End both, whatever state they are in."""
        for process in self.processes:
            process.kill()
            process.join()

    def save(self, path: Path, victim: int, fault: str, chance: random.Random) -> list[Told | None]:
        """Save with a fault; return what each rank saw, None of one that died."""
        delay_ms = 30 if fault in ("kill", "stop") else 0
        deadline_s = DEADLINE_S if fault else 60.0
        for pipe in self.pipes:
            pipe.send((str(path), victim, fault, delay_ms, deadline_s))
        if fault in ("kill", "stop"):
            self._strike(path, victim, fault, chance)
        return [self._answer(rank, dead=fault == "kill" and rank == victim) for rank in range(2)]

    def _answer(self, rank: int, *, dead: bool) -> Told | None:
        if dead:
            self.processes[rank].join()
            return None
        told: Told = self.pipes[rank].recv()
        return told

    def _strike(self, path: Path, victim: int, fault: str, chance: random.Random) -> None:
        """Strike when the victim's file is there, or somewhat later."""
        pid = self.processes[victim].pid
        assert pid is not None
        # Not before: a rank that is stopped while all plan together holds up the others' call.
        until = time.monotonic() + IN_FLIGHT_S
        while not list(path.rglob(f"{victim:05d}-*")) and time.monotonic() < until:
            os.sched_yield()
        time.sleep(chance.random() * 0.05)
        os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        if fault == "stop":
            threading.Timer(LEARNT_S, os.kill, (pid, signal.SIGCONT)).start()


def judge(path: Path, told: list[Told | None], victim: int, fault: str) -> list[str]:
    """Say what is wrong with the outcome of a save that a fault struck."""
    faults = []
    committed = (path / "MANIFEST").exists()
    for rank, seen in enumerate(told):
        if seen is None:
            continue
        if rank != victim and seen.learnt_s > LEARNT_S:
            faults.append(f"rank {rank} learnt it after {seen.learnt_s:.2f} s")
        if rank != victim and not seen.steps:
            faults.append(f"rank {rank} did not train on")
        if not seen.error and not committed:
            faults.append(f"rank {rank} was told of a commit that is not there")
    if fault == "full" and (committed or any(seen and not seen.error for seen in told)):
        faults.append("a full disk was not told of")
    if committed:
        faults += _damage(path)
    return faults


def _damage(path: Path) -> list[str]:
    import holdfast

    with holdfast.open(path) as checkpoint:
        return [str(damage) for damage in checkpoint.verify()]


def _leaks(first: list[Told | None], now: list[Told | None]) -> list[str]:
    """Say on which ranks threads or descriptors pile up."""
    return [
        f"rank {rank} had {old.threads} threads and {old.descriptors} fds, now {new.threads} and "
        f"{new.descriptors}"
        for rank, (old, new) in enumerate(zip(first, now, strict=False))
        if old and new and (new.threads > old.threads or new.descriptors > old.descriptors)
    ]


def run(times: int, seed: int, directory: Path, faults: tuple[str, ...] = FAULTS) -> list[str]:
    """Strike so many times in each way; return everything that was wrong."""
    chance, wrong, slowest = random.Random(seed), [], 0.0
    pair, committed = Pair(), 0
    warm, first = False, list[Told | None]()  # what the present pair had open after two saves
    for number in range(times * len(faults)):
        fault, victim = faults[number // times], chance.randrange(2)
        struck, again = directory / f"{number}-struck", directory / f"{number}-again"
        told = pair.save(struck, victim, fault, chance)
        found = judge(struck, told, victim, fault)
        committed += (struck / "MANIFEST").exists()
        slowest = max([slowest, *(t.learnt_s for r, t in enumerate(told) if t and r != victim)])
        if fault == "kill":
            pair.end()
            pair, first, warm = Pair(), [], False
        after = pair.save(again, 0, "", chance)
        if any(seen is None or seen.error for seen in after) or _damage(again):
            found.append(f"the next save failed: {after}")
        found += _leaks(first, after)
        first, warm = first or (after if warm else []), True
        wrong += [f"round {number} ({fault} rank {victim}, seed {seed}): {text}" for text in found]
    pair.end()
    print(
        f"seed {seed}: {times} times each {', '.join(faults)}; {committed} saves were committed "
        f"before they were struck; slowest survivor told after {slowest:.2f} s (deadline "
        f"{DEADLINE_S:.0f} s); {len(wrong)} faults"
    )
    return wrong


def main() -> int:
    """Strike, and say what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=100, help="of each fault")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        wrong = run(options.times, options.seed, Path(directory))
    print("\n".join(wrong[:20]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
