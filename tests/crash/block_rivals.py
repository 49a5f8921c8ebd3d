"""What a power cut leaves of checkpoints that others have acknowledged, by the same crash states.

One process saves ten steps of 64 KiB, six seconds apart, and the file system is synced at the end:
a journal commits every five seconds, and what nobody syncs is written after thirty. Cuts come right
at each acknowledgement, and at any write after the first.

    python tests/crash/block_rivals.py --states 150 --seed 1 --orbax-python /path/to/venv/bin/python
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from blocks import disks
from blocks.explore import Explorer, record, work_directory
from blocks.rival_worker import RIVALS

WORKER = Path(__file__).parent / "blocks" / "rival_worker.py"
STEPS, PAUSE_S = 10, 6.0


class Looker:
    """A process that loads what a rival has saved; it sees each state by a name of its own."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [*command, "look", str(STEPS)],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def look(self, where: Path) -> dict[int, str]:
        """Return the verdict on each step."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{where}\n")
        self._process.stdin.flush()
        return {
            int(step): word for step, word in json.loads(self._process.stdout.readline()).items()
        }

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def measure(name: str, python: str, kind: disks.FileSystem, states: int, seed: int) -> Counter[str]:
    """Count what was found of acknowledged saves, and of all that was visible."""
    command = [python, str(WORKER), name]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    found: Counter[str] = Counter()

    def save(where: Path, log: Path) -> list[tuple[int, int]]:
        run = [*command, "save", str(where), str(log), str(STEPS), str(PAUSE_S)]
        text = subprocess.check_output(run, env=environment, text=True, stderr=subprocess.DEVNULL)
        subprocess.check_call(["sync", "-f", where])
        return [(int(step), int(end)) for step, end in map(str.split, text.splitlines())]

    def judge(verdicts: dict[int, str], acknowledged: set[int]) -> list[str]:
        found["states"] += 1
        found["acknowledged"] += len(acknowledged)
        found["lost"] += sum(verdicts[step] != "good" for step in acknowledged)
        found.update(word for word in verdicts.values() if word not in ("good", "absent"))
        return []

    with work_directory() as work, _looker(command, environment) as looker:
        recording = record(kind, work, save)
        Explorer(work, looker.look, judge).explore(recording, states, random.Random(seed))
    return found


@contextlib.contextmanager
def _looker(command: list[str], environment: dict[str, str]) -> Iterator[Looker]:
    with contextlib.closing(Looker(command, environment)) as looker:
        yield looker


def main() -> int:
    """Measure those asked for; exit 2 when something for it is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--states", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--file-system", choices=list(disks.FILE_SYSTEMS), default="ext4")
    parser.add_argument("--of", nargs="+", choices=list(RIVALS), default=list(RIVALS))
    parser.add_argument("--orbax-python", help="a Python that has Orbax")
    arguments = parser.parse_args()
    kind = disks.FILE_SYSTEMS[arguments.file_system]
    if reason := disks.missing(kind):
        print(reason, file=sys.stderr)
        return 2
    disks.go_private()
    print(f"seed {arguments.seed}, {kind.name}", flush=True)
    for name in arguments.of:
        python = arguments.orbax_python if name == "Orbax" else sys.executable
        if python is None:
            print(f"{name}: left out; give --orbax-python", flush=True)
            continue
        found = measure(name, python, kind, arguments.states, arguments.seed)
        share = found["lost"] / max(found["acknowledged"], 1)
        print(
            f"{name}: {found['states']} states; of {found['acknowledged']} acknowledged saves "
            f"{found['lost']} lost ({share:.0%}); visible but not loadable {found['unloadable']}, "
            f"loaded wrong {found['wrong']}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
