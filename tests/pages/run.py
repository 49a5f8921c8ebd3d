"""Runs the blocks of a page, one after the other, in a directory of its own.

The Python blocks share one namespace, as one reader would type them. Commands see what the blocks
above have written.
"""

import multiprocessing
import os
import shlex
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import holdfast.cli
from distributed.ranks import start_server

from .blocks import Block

TIMEOUT_S = 110
DIFFERENT = 1  # the exit code of a verdict that is not good


def run_blocks(place: Path, blocks: list[Block], before: str = "", after: str = "") -> None:
    """Run blocks in ``place``, which is made when needed.

    Args:
        before: code that writes what the page takes for granted.
        after: code that checks what the page promises, with the names of its blocks.

    Raises:
        AssertionError: one failed; the text says which, why, and what was printed.
    """
    place.mkdir(exist_ok=True)
    start_server()
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=_main, args=(there, str(place), blocks, before, after))
    process.start()
    there.close()
    try:
        answer = here.recv() if here.poll(TIMEOUT_S) else "it takes too long"
    except EOFError:
        answer = "the process ended"
    finally:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
    assert answer is None, f"{answer}\n{_printed(place)}"


def _main(answers: Connection, place: str, blocks: list[Block], before: str, after: str) -> None:
    import torch

    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    os.chdir(place)
    output = os.open(".printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    names: dict[str, Any] = {"__name__": "__main__"}
    where = "what the page takes for granted"
    try:
        exec(compile(before, "before", "exec"), names)
        for block in blocks:
            where = f"{block.page}:{block.line}"
            _run(block, names)
        where = "what the page promises"
        exec(compile(after, "after", "exec"), names)
        sys.stdout.flush()
        answers.send(None)
    except BaseException:
        sys.stdout.flush()
        answers.send(f"{where}:\n{traceback.format_exc()}")
    answers.close()


def _run(block: Block, names: dict[str, Any]) -> None:
    if block.language == "bash":
        for command in block.commands:
            _run_command(command, may_differ=block.mark == "exit")
    elif block.mark == "ranks":
        for count in block.value.split(","):
            _run_ranks(int(count), block)
    else:
        # Lines of a traceback are then those of the page.
        code = "\n" * block.line + block.code
        exec(compile(code, block.page, "exec"), names)


def _run_command(command: str, *, may_differ: bool) -> None:
    if command.startswith("holdfast "):  # in a fork, which has torch loaded already
        words = shlex.split(command, comments=True)[1:]
        code = _wait(_fork(lambda: holdfast.cli.main(words)))
        may_differ |= words[0] == "diff"
    else:
        code = subprocess.run(["bash", "-c", command], stdin=subprocess.DEVNULL).returncode
    assert code in (0, *[DIFFERENT] * may_differ), f"{command} exits with {code}"


def _run_ranks(count: int, block: Block) -> None:
    """Run a program as `torchrun` starts it, in forks of this process."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])

    def run(rank: int) -> int:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        _run(Block(block.page, block.line, "python", block.code), {"__name__": "__main__"})
        return 0

    children = [_fork(partial(run, rank)) for rank in range(count)]
    codes = [_wait(child) for child in children]
    assert codes == [0] * count, f"the ranks exit with {codes}"


def _fork(work: Callable[[], int]) -> int:
    """Start a process that works and ends with the code; one that raises ends with 3."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 3
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _printed(place: Path) -> str:
    path = place / ".printed"
    return path.read_text(errors="replace")[-6000:] if path.exists() else ""
