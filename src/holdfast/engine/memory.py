"""How much memory this process may still take. Knows only what the kernel tells."""

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Return the memory that is free without swapping, within the limit of the control group."""
    available = 1 << 62
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for group in _groups():
        limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
        if limit and used and limit[0] != "max":
            # Clean pages of files count as used, and are given back when they are needed.
            cached = sum(
                int(line.split()[1])
                for line in _lines(group / "memory.stat")[:80]
                if line.startswith(("inactive_file ", "active_file "))
            )
            available = min(available, int(limit[0]) - int(used[0]) + cached)
    return available


def _groups() -> list[Path]:
    """Return the control groups this process is in, innermost first (cgroup v2)."""
    for line in _lines(Path("/proc/self/cgroup")):
        if line.startswith("0::"):
            here = _CGROUP / line[3:].lstrip("/")
            return [g for g in (here, *here.parents) if g.is_relative_to(_CGROUP)]
    return []


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return []
