"""What a measurement ran on: processor, memory, kernel, file system, disk, versions."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "holdfast-checkpoint",
    "torch",
    "numpy",
    "safetensors",
    "torchsnapshot",
    "torch_checkpointing",
    "deepspeed",
    "bytecheckpoint",
    "orbax-checkpoint",
    "tensorstore",
    "transformers",
    "accelerate",
    "lightning",
    "torchtitan",
)


def describe(directory: Path) -> dict[str, str]:
    """Return facts about the machine and the disk of ``directory``, as far as the system tells."""
    versions = [f"{name} {found}" for name in PACKAGES if (found := _version(name))]
    return {
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "file system": _file_system(directory),
        "disk": _disk(directory),
        "load average": f"{os.getloadavg()[0]:.2f} before the run",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Hardware")):
            return " ".join(line.split(":", 1)[1].split())
    return platform.processor() or "unknown processor"


def _file_system(directory: Path) -> str:
    """Find the mount that holds a directory: type and options."""
    device = _device_number(directory)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ", 1)
        if before.split()[2] == device:
            kind, _, options = after.split(" ", 2)
            return f"{kind} ({options})"
    return "unknown"


def _disk(directory: Path) -> str:
    place = Path("/sys/dev/block") / _device_number(directory)
    if not place.exists():
        return "no block device"
    disk = place.resolve()
    if (disk / "partition").exists():
        disk = disk.parent
    facts = [disk.name, _link(disk / "device" / "driver"), _text(disk / "device" / "model")]
    facts += [f"write cache: {_text(disk / 'queue' / 'write_cache')}"]
    facts += [f"scheduler: {_text(disk / 'queue' / 'scheduler')}"]
    return ", ".join(fact for fact in facts if fact)


def _device_number(directory: Path) -> str:
    device = directory.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def _link(path: Path) -> str:
    return path.resolve().name if path.exists() else ""


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
