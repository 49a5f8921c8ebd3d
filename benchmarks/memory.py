"""Peak memory of a save, each in a process of its own: what is resident beyond the state itself."""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine

OUT = Path(__file__).parent / "out"
SIZES_MIB = (256, 512, 1024, 2048, 4096)
ALLOWED_MIB = {"save": 128 + 64, "save_async": 256}  # pool + 64; what save_async adds to a copy

# Peak minus what was resident before; the imports, and a first small save of each kind, are over.
MEASURE = """
import re, sys, torch, holdfast
verb, mib, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
def save(state, path):
    if verb == "save":
        holdfast.save(state, path)
    else:
        holdfast.save_async(state, path).result()
state = {f"layer.{i}": torch.full((1 << 20,), float(i)) for i in range(mib // 4)}
holdfast.open  # what is imported late is no part of the save
import holdfast.loading.checkpoint
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
save(state, path + "/a")
save(state, path + "/b")
print(status("VmHWM") - before)
"""


def main() -> None:
    """Measure every size, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=OUT, help="on the disk to write to")
    parser.add_argument("--json", type=Path, default=OUT / "memory.json", help="result file")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES_MIB, help="MiB of the state")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"verb": verb, "mib": size, "peak_mib": _peak(verb, size, options.directory)}
        for verb in ALLOWED_MIB
        for size in options.sizes
    ]
    result = {
        "command": shlex.join(["python", "benchmarks/memory.py", *sys.argv[1:]]),
        "machine": machine.describe(options.directory),
        "rows": rows,
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))


def report(result: dict[str, Any]) -> str:
    """Return a result as Markdown."""
    lines = ["| | state, MiB | peak beyond the state, MiB | allowed, MiB |", "|---|---|---|---|"]
    for row in result["rows"]:
        copy = row["mib"] if row["verb"] == "save_async" else 0
        allowed = copy + ALLOWED_MIB[row["verb"]]
        lines.append(f"| {row['verb']} | {row['mib']} | {row['peak_mib']:.0f} | {allowed} |")
    return "\n".join(lines)


def _peak(verb: str, mib: int, directory: Path) -> float:
    with tempfile.TemporaryDirectory(prefix="memory-", dir=directory) as scratch:
        command = [sys.executable, "-c", MEASURE, verb, str(mib), scratch]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


if __name__ == "__main__":
    main()
