"""Whether processes of this machine live. Knows no runs."""

import os


def pid_space() -> int:
    """Return the number of this process's PID namespace; 0: it is not known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def has_ended(host: str, pid: int, space: int) -> bool:
    """Return whether a process of this machine has ended; of others, nobody can tell.

    Nor of one whose pid counts elsewhere: containers may share the name of their host.

    Args:
        space: PID namespace of the process; 0: it is not known.
    """
    if host != os.uname().nodename or space not in (0, pid_space()):
        return False
    try:
        os.kill(pid, 0)  # /proc may hide what is another user's
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    return False


def has_lived_since(host: str, pid: int, since_s: float) -> bool:
    """Return whether a process of this machine lives, and did at a time in seconds since 1970."""
    return host == os.uname().nodename and 0 < _started_s(pid) <= since_s + 1


def _started_s(pid: int) -> float:
    """Return when a process of this machine began, in seconds since 1970; 0: there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/stat", encoding="ascii") as file:
            booted = next(int(line.split()[1]) for line in file if line.startswith("btime"))
    except (OSError, ValueError, IndexError, StopIteration):
        return 0.0
    return booted + ticks / os.sysconf("SC_CLK_TCK")
