"""Real ranks: processes with gloo over loopback, forked from a server that has torch loaded."""

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

TESTS = str(Path(__file__).parents[1])
TIMEOUT_S = 120


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run ``function(rank, *arguments)`` on each rank of a process group; return the results.

    ``function`` lives at the top of a module. A rank that raises fails the call with its traceback.
    """
    found = _run(world_size, world_size, function, arguments)
    return [found[rank] for rank in range(world_size)]


def run_survivor(
    world_size: int, victim: int, function: Callable[..., Any], *arguments: Any
) -> Any:
    """Do as `run_ranks` for two ranks of which one is killed; return the other's result."""
    return run_survivors(world_size, victim, function, *arguments)[0]


def run_survivors(
    world_size: int, victim: int, function: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """Do as `run_ranks` where one rank is killed; return the results of the others."""
    found = _run(world_size, world_size - 1, function, arguments)
    return [found[rank] for rank in range(world_size) if rank != victim]


def _run(
    world_size: int, answers_due: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> dict[int, Any]:
    context = multiprocessing.get_context("forkserver")
    start_server()
    port, are_all_due = _free_port(), answers_due == world_size
    answers: Queue[tuple[int, bool, Any]] = context.Queue()
    asked = (world_size, port, are_all_due, answers, function, arguments)
    processes = [context.Process(target=_main, args=(rank, *asked)) for rank in range(world_size)]
    for process in processes:
        process.start()
    try:
        results = dict(_checked(answers.get(timeout=TIMEOUT_S)) for _ in range(answers_due))
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    return results


def start_server() -> None:
    """Start what ranks are forked from, once, with `preloaded` in it.

    Python 3.11 tells the server nothing of `sys.path`, and the server passes over what it does not
    find: only the environment leads it to modules of tests.
    """
    forkserver.set_forkserver_preload(["distributed.preloaded"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([TESTS, *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _checked(answer: tuple[int, bool, Any]) -> tuple[int, Any]:
    rank, good, value = answer
    assert good, f"rank {rank}:\n{value}"
    return rank, pickle.loads(value)


def _main(
    rank: int,
    world_size: int,
    port: int,
    are_all_due: bool,
    answers: "Queue[tuple[int, bool, Any]]",
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        # As bytes: a queue would send tensors by descriptors that die with this process.
        answers.put((rank, True, pickle.dumps(function(rank, *arguments))))
        if are_all_due:
            dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, False, traceback.format_exc()))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
