"""Exports that are killed at random moments, a full disk, and a large one in little memory.

``python tests/convert/campaign.py [--kills 200] [--gb 10]``. It prints its seed. The large export
runs in a process whose memory may not exceed `LIMIT_BYTES` beyond what it has when it is idle.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS)] if str(TESTS) not in sys.path else []

LIMIT_BYTES = 512 << 20
FILES = ("a.safetensors", "a.pt", "a.npz")

# Anonymous memory counts, and that of files too: what is mapped and read is resident.
MEASURED = """
import re, sys, torch, holdfast
import holdfast.convert.export, holdfast.convert.importing, holdfast.convert.own
import holdfast.convert.safetensors, holdfast.convert.to_safetensors
torch.set_num_threads(1)
def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) << 10
verb, source, target = sys.argv[1:4]
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
if verb == "import":
    holdfast.import_checkpoint(source, target)
else:
    holdfast.export_checkpoint(source, target, dtype="f16" if verb == "cast" else None)
print(status("VmHWM") - before)
"""

MAKE = """
import sys, torch, holdfast
path, size_bytes, codec = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
torch.manual_seed(0)
block = torch.randn(1 << 20)
rows = max(1, size_bytes // 4 // 2 // (1 << 20))
large = block.repeat(rows).view(rows, 1 << 20)  # half of it is one tensor
small = {f"layer.{n}": block.view(1024, 1024) + n for n in range(rows)}
holdfast.save({"large": large, **small}, path, codec=codec)
"""


def run(code: str, *arguments: object) -> str:
    """Run Python in a process of its own; return what it prints."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def peak_bytes(verb: str, source: Path, target: Path) -> int:
    """Return what an export or import takes beyond an idle process."""
    return int(run(MEASURED, verb, source, target))


def check_memory(root: Path, size_bytes: int, codec: str) -> dict[str, int]:
    """Export, convert and import a checkpoint of a size; return the peak of each.

    Raises:
        AssertionError: one took too much.
    """
    source, peaks = root / "source", dict[str, int]()
    run(MAKE, source, size_bytes, codec)
    for verb, target in (("export", "a.safetensors"), ("cast", "b.safetensors")):
        peaks[verb] = peak_bytes(verb, source, root / target)
    shutil.rmtree(source)
    (root / "b.safetensors").unlink()
    peaks["import"] = peak_bytes("import", root / "a.safetensors", root / "imported")
    for verb, peak in peaks.items():
        assert peak <= LIMIT_BYTES, f"{verb} of {size_bytes} bytes, {codec}: {peak} bytes"
    return peaks


def check_full_disk(root: Path) -> int:
    """Export and import onto a disk that is full before the end; return how often.

    Raises:
        AssertionError: it did not fail as it should, or left something.
    """
    import holdfast
    from holdfast.stores.local import LocalStore

    source, file, disk = root / "source", root / "a.safetensors", root / "disk"
    run(MAKE, source, 64 << 20, "raw")
    holdfast.export_checkpoint(source, file)
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "holdfast", disk], check=True)
    room, LocalStore.free_bytes = LocalStore.free_bytes, lambda self: None  # type: ignore[assignment, method-assign]
    try:
        verbs: list[Callable[[], object]] = [
            *(lambda n=n: holdfast.export_checkpoint(source, disk / n) for n in FILES),
            lambda: holdfast.export_checkpoint(
                source, disk / "shards", to="safetensors", shard_size="8MB"
            ),
            lambda: holdfast.import_checkpoint(file, disk / "imported"),
        ]
        for verb in verbs:
            try:
                verb()
            except holdfast.errors.NoSpaceError:
                left = os.listdir(disk)
                assert not left, f"it left {left}"
            else:
                raise AssertionError("it fitted onto a disk that is too small")
    finally:
        LocalStore.free_bytes = room  # type: ignore[method-assign]
        subprocess.run(["umount", "-l", disk], check=True)
    return len(verbs)


def main() -> int:
    """Run all."""
    from convert.test_export import kill_exports

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--gb", type=float, default=10.0, help="size of the large one")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--directory", type=Path, default=Path("."), help="for what is written")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        if options.kills:
            (root := Path(scratch) / "kills").mkdir()
            killed = kill_exports(root, options.kills, options.seed)
            print(f"{options.kills} exports, {killed} killed in the middle: nothing is left")
        if os.geteuid() == 0:  # only root may mount
            (root := Path(scratch) / "full").mkdir()
            print(f"{check_full_disk(root)} times a disk was full: nothing is left", flush=True)
        if options.gb:
            (root := Path(scratch) / "large").mkdir()
            peaks = check_memory(root, int(options.gb * 1e9), "raw")
            shown = ", ".join(f"{verb} {peak >> 20} MiB" for verb, peak in peaks.items())
            print(f"{options.gb:g} GB, beyond an idle process: {shown}")
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
