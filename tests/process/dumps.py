"""What faulthandler writes of a process that hangs, in a line."""

import signal

DUMP = signal.SIGRTMIN + 5  # a process that hangs is asked for its threads; no thread does that
DUMP_S = 0.5
FRAMES_MAX = 60


def frames(dump: str) -> str:
    """Return the innermost frames of each thread of a dump; nothing if there is none."""
    found = []
    for line in dump.splitlines():
        if line.startswith(("Thread", "Current")):
            found.append(" | ")
        elif line.startswith("  File"):
            name, number, function = line.split(",")[0], line.split()[3], line.split()[-1]
            found.append(f"{name.split('/')[-1].strip(chr(34))}:{number.strip(',')} {function} < ")
    return "".join(found[:FRAMES_MAX])
