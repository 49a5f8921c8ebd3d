"""Feed every decoder with changed inputs for a while; say how many each has met, and what fell.

``python tests/fuzz/campaign.py --seconds 600`` after ``make build/fuzz/.built``. Each target begins
with its corpus beside this file and with what ``--keep`` has of earlier runs; what it finds is put
there. Exit 1 where an input makes a target crash, read what is not its own, disagree with itself,
take more memory than it may, or more than 20 seconds: the input is left in ``--keep``/crashes.
"""

import argparse
import hashlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
BUILD = HERE.parent.parent / "build" / "fuzz"
PAYLOADS = ("symbols", "lossless", "grid", "difference", "means", "steps", "excp", "replay")
PARSERS = ("value", "header", "table", "checkpoint")
TARGETS = (*PAYLOADS, "encode", "listed", *PARSERS)
MEMORY_MB = 1024  # of the process, with what a sanitizer takes for itself
RUNS = {"checkpoint": 30_000}  # of one process: atheris keeps some 10 KB for each of its inputs
ALLOCATION_MB = 64
INPUT_S = 20
# What is freed is kept apart for a while only: 256 MB of it would not fit a cache.
ASAN_OPTIONS = "allocator_may_return_null=1:quarantine_size_mb=4:malloc_context_size=4"
CORPUS_INPUT_BYTES = 1500


def command_of(target: str, build: Path) -> list[str] | None:
    """Return what runs a target: a program, or Python under atheris; None where that lacks."""
    if (build / f"{target}_fuzz").exists():
        return [str(build / f"{target}_fuzz"), f"-malloc_limit_mb={ALLOCATION_MB}"]
    if target in PARSERS and find_spec("atheris"):
        return [sys.executable, "-m", "fuzz.guided", target]
    return None


def inputs_of(target: str) -> list[bytes]:
    """Return the inputs of a target's corpus: each stands behind its length, a u16."""
    path = CORPUS / target
    content, inputs = path.read_bytes() if path.exists() else b"", []
    while content:
        end = 2 + int.from_bytes(content[:2], "little")
        inputs.append(content[2:end])
        content = content[end:]
    return inputs


def unpack(target: str, directory: Path) -> None:
    """Put the corpus into a directory, named as libFuzzer names inputs."""
    for data in inputs_of(target):
        (directory / hashlib.sha1(data).hexdigest()).write_bytes(data)


def shrink(target: str, command: list[str], keep: Path) -> None:
    """Make the corpus anew: of it and of what was kept, few small inputs that reach as much."""
    unpack(target, keep / target)
    with tempfile.TemporaryDirectory() as least:
        limits = [f"-max_len={CORPUS_INPUT_BYTES}", f"-rss_limit_mb={MEMORY_MB}"]
        subprocess.run(
            [*command, "-set_cover_merge=1", *limits, least, str(keep / target)],
            cwd=HERE.parent,
            capture_output=True,
            check=True,
        )
        inputs = sorted(path.read_bytes() for path in Path(least).iterdir())
    packed = b"".join(len(data).to_bytes(2, "little") + data for data in inputs)
    (CORPUS / target).write_bytes(packed)
    print(f"{target}: {len(inputs)} inputs, {len(packed):,} bytes")


def fuzz(target: str, command: list[str], keep: Path, seconds: float, seed: int) -> tuple[int, str]:
    """Run a target; return how many inputs it has met, and what it says where it fell."""
    until, all_met = time.monotonic() + seconds, 0
    while True:
        met, words = _fuzz_once(target, command, keep, until - time.monotonic(), seed)
        all_met, seed = all_met + met, seed + 1
        if words or not met or time.monotonic() > until - 1:
            return all_met, words


def _fuzz_once(
    target: str, command: list[str], keep: Path, seconds: float, seed: int
) -> tuple[int, str]:
    found, crashes = keep / target, keep / "crashes"
    for path in (found, crashes):
        path.mkdir(parents=True, exist_ok=True)
    unpack(target, found)
    options = {
        "max_total_time": max(1, round(seconds)),
        "runs": RUNS.get(target, -1),
        "rss_limit_mb": MEMORY_MB,
        "timeout": INPUT_S,
        "max_len": 4096,
        "print_final_stats": 1,
        "seed": seed,
        "artifact_prefix": f"{crashes}/{target}-",
    }
    done = subprocess.run(
        [*command, *(f"-{key}={value}" for key, value in options.items()), str(found)],
        cwd=HERE.parent,
        env=os.environ | {"ASAN_OPTIONS": ASAN_OPTIONS},
        capture_output=True,
        text=True,
        errors="replace",
    )
    count = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    told = re.findall(r".*(?:Done (\d+) runs).*", done.stderr)
    met = int(count[1]) if count else int(told[-1]) if told else 0
    return met, "" if done.returncode == 0 else done.stderr[-3000:] or f"exit {done.returncode}"


def main() -> int:
    """Share the time among the targets, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="in all")
    parser.add_argument("--targets", nargs="*", default=TARGETS, choices=TARGETS)
    parser.add_argument("--keep", type=Path, help="directory of what is found, for later runs")
    parser.add_argument("--build", type=Path, default=BUILD)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 1 << 30))
    parser.add_argument("--shrink", action="store_true", help="make the corpora anew from --keep")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        keep, fell = options.keep or Path(temporary), 0
        commands = {target: command_of(target, options.build) for target in options.targets}
        for target in [target for target, command in commands.items() if command is None]:
            print(f"{target}: not there; `make fuzz` builds it")
            del commands[target]
        for target, command in commands.items():
            if options.shrink:
                if target not in PARSERS:  # those begin with the golden files
                    shrink(target, command, keep)
                continue
            started = time.monotonic()
            seconds = options.seconds / len(commands)
            met, words = fuzz(target, command, keep, seconds, options.seed)
            took = time.monotonic() - started
            print(f"{target}: {met:,} inputs in {took:.0f} s, ", end="")
            print("none fell" if not words else f"one fell\n{words}", flush=True)
            fell += bool(words)
        if not options.shrink:
            print(f"seed {options.seed}; memory limit {MEMORY_MB} MB, {ALLOCATION_MB} MB at once")
        if fell and options.keep is None:
            print("again with --keep DIRECTORY, to have the input")
    return 1 if fell else 0


if __name__ == "__main__":
    sys.exit(main())
