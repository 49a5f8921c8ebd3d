"""What a person sees on a terminal: commands, what they are called on, and captures by tmux."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import holdfast
from holdfast.format.progress import RankProgress, encode_slot

from .conftest import data_files, flip_bit

SIZES = ((80, 24), (200, 50))
HOURS_S = 3600.0
VERBS = ["ls", "inspect", "diff", "watch", "report", "check-run", "verify", "scrub", "repair"]
VERBS += ["sign", "copy", "export", "import", "convert", "prune", "recompress", "rebase", "bench"]
VERBS += ["completion"]
COMMANDS = {
    "help": "--help",
    **{f"{verb}-help": f"{verb} --help" for verb in VERBS},
    "ls": "ls runs",
    "ls-run": "ls runs/a",
    "inspect-run": "inspect runs/a",
    "inspect": "inspect runs/a/step-00000300",
    "diff": "diff runs/a/step-00000200 runs/a/step-00000300",
    "watch-flight": "watch runs/flight --once",
    "watch-failed": "watch runs/failed --once",
    "check-run": "check-run runs/failed --durable-min 30 --disk-saves 0.001",
    "report": "report runs/bad -o page.html",
    "verify": "verify runs/a",
    "verify-bad": "verify runs/bad",
    "repair-bad": "repair runs/bad/step-00000300",
    "scrub-bad": "scrub runs/bad --mb-per-s 0",
    "prune": "prune runs/a --keep latest=1 --keep best=val_loss:1",
    "copy": "copy runs/a runs/copied",
    "recompress": "recompress runs/a runs/small --codec raw",
    "export": "export runs/a/step-00000300 model.safetensors --include model --strip model.",
    "no-verb": "inspct runs/a",
    "no-path": "inspect runs/aa",
    "no-run": "check-run runs",
}
_STYLES = re.compile(r"\x1b\[[0-9;]*m")
_CHANGES = [  # what differs from one machine or moment to the next → what the snapshots have
    (re.compile(r"[0-9.]+ (?:[kMGT]?B|EB) free"), "SIZE free"),
    (re.compile(r"\bsave [0-9a-f]{8}\b"), "save 01234567"),
    (re.compile(r"data/[0-9a-f]{8}…"), "data/01234567…"),
    (re.compile(r"\b(checksum|says)(\s+)[0-9a-f]{8}…"), r"\1\2abcdef01…"),
    (re.compile(r"^( +)[0-9a-f]{8}…"), r"\1abcdef01…"),
    (re.compile(r"[0-9.]+ MB/s   [0-9]+ s$"), "RATE   TIME"),
    (re.compile(r"\b(page\.html), [0-9.]+ kB"), r"\1, SIZE"),
    (re.compile(r"became durable [0-9.]+ min ago"), "became durable TIME ago"),
]


def make_runs(place: Path) -> None:
    """Make the runs that the commands are about: whole, damaged, in flight, failed."""
    torch.manual_seed(0)
    layers = {
        f"layers.{n}.{part}": torch.randn(96, 96) for n in range(8) for part in ("attn", "mlp")
    }
    for step in (100, 200, 300):
        layers["layers.3.mlp"] += 0.25
        metrics = {"val_loss": 1 / step, "accuracy": step / 1000}
        state = {"model": layers, "lr": 0.1, "step": step}
        holdfast.save(state, place / f"runs/a/step-{step:08d}", step=step, metrics=metrics)
    _measured(place / "runs/flight", failed=False)
    _measured(place / "runs/failed", failed=True)
    shutil.copytree(place / "runs/a", place / "runs/bad")
    (file,) = data_files(place / "runs/bad/step-00000300")
    flip_bit(file, 9000)
    now_s = time.time()
    for manifest in place.glob("runs/*/*/MANIFEST"):
        os.utime(manifest, (now_s - 5 * HOURS_S, now_s - 5 * HOURS_S))


def fly(place: Path) -> None:
    """Let the job of a run say right now that a save is in flight."""
    ranks = [_rank(n, time.time()) for n in range(4)]
    (place / "runs/flight/.progress-node").write_bytes(b"".join(map(encode_slot, ranks)))


def _measured(run: Path, *, failed: bool) -> None:
    run.mkdir(parents=True)
    lines = []
    for step in (1000, 1100):
        for rank in range(4):
            time_text = f"2027-01-15T07:{step // 100}:00.000+00:00"
            lines.append(
                f'{{"time":"{time_text}","verb":"save","step":{step},"rank":{rank},"stall_s":0.25,'
                f'"stored_bytes":1000000000,"seconds":{{"write":5.0,"total":{5.0 + rank}}}}}\n'
            )
        holdfast.save({"n": step}, run / f"step-{step:08d}", step=step)
    if failed:
        error = "NoSpaceError: write /data/runs/failed/step-00001200/data: No space left on device"
        lines.append(
            '{"time":"2027-01-15T07:12:00.000+00:00","verb":"failure","step":1200,"rank":0,'
            f'"host":"node-0","error":"{error}"}}\n'
        )
    (run / "metrics.jsonl").write_text("".join(lines))


def _rank(number: int, now_s: float) -> RankProgress:
    return RankProgress(
        host=f"node-{number // 2}",
        pid=100 + number,
        rank=number,
        world_size=4,
        time_s=now_s,
        step=1234,
        due_step=1300,
        save_step=1200,
        state="committing" if number == 3 else "writing",
        began_s=now_s - 10.0,
        staged_bytes=10**9,
        written_bytes=25 * 10**7 * (number + 1),
        total_bytes=10**9,
        committed_step=1100,
        committed_s=now_s - 300.0,
    )


def without_moments(text: str, place: Path) -> list[str]:
    """Return the lines of a screen, without what differs from one call to the next."""
    same_length = f"{place.parent}/{'holdfast':_<{len(place.name)}}"
    text = _STYLES.sub("", text.replace(str(place), same_length))
    lines = [line.rstrip() for line in text.splitlines()]
    for pattern, steady in _CHANGES:
        lines = [pattern.sub(steady, line) for line in lines]
    while lines and not lines[-1]:
        lines.pop()
    return lines


class Tmux:
    """A terminal of tmux, of a server of its own, with a shell in it."""

    def __init__(self, socket: Path, place: Path, columns: int, lines: int) -> None:
        self._socket = socket
        environment = {"PS1": "$ ", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        shell = ["env", *(f"{k}={v}" for k, v in environment.items()), "bash", "--norc"]
        size = ("-x", str(columns), "-y", str(lines))
        start = ("new-session", "-d", *size, "-c", str(place), shlex.join(shell))
        self._call("-f", "/dev/null", *start)
        self._call("set-option", "-g", "history-limit", "5000")

    def _call(self, *arguments: str) -> str:
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        command = ["tmux", "-S", str(self._socket), *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        return done.stdout

    def keys(self, *keys: str) -> None:
        """Type."""
        self._call("send-keys", *keys)

    def screen(self, *, history: bool = False) -> str:
        """Return what is on the screen, and above it."""
        return self._call("capture-pane", "-p", *(["-S", "-500"] if history else []))

    def shows(self, what: str, timeout_s: float = 60.0, *, history: bool = False) -> str:
        """Wait until the screen matches; return it."""
        until_s = time.monotonic() + timeout_s
        while not re.search(what, screen := self.screen(history=history), re.MULTILINE):
            assert time.monotonic() < until_s, f"{what} is not shown:\n{screen}"
            time.sleep(0.05)
        return screen

    def run(self, command: str) -> str:
        """Run a command; return what it printed."""
        self.keys(f"clear; {command}; echo [exit $?]", "Enter")
        text = self.shows(r"^\[exit \d+\]$", history=True)
        return text[: text.rindex("[exit")].rpartition("echo [exit $?]\n")[2].lstrip("\n")

    def cursor_is_shown(self) -> bool:
        """Whether the cursor is seen, and the main screen is the one in use."""
        return self._call("display-message", "-p", "#{cursor_flag}#{alternate_on}").strip() == "10"

    def close(self) -> None:
        """End the server."""
        self._call("kill-server")


@contextmanager
def tmux(place: Path, columns: int, lines: int) -> Iterator[Tmux]:
    """Open a terminal for a block."""
    terminal = Tmux(place / ".tmux", place, columns, lines)
    try:
        yield terminal
    finally:
        terminal.close()
