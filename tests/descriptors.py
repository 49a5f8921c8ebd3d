"""What this process holds open, for tests that nothing stays open, and nothing else is closed.

The collector is run before each look. Else it may end an object of an earlier test between two
looks: that closes a file, which feigns a fault or hides one.
"""

import gc
import os


def open_descriptors() -> dict[int, str]:
    """Each open descriptor, and what it is: ``{0: "/dev/null", 3: "socket:[4711]"}``."""
    gc.collect()
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one of the listing itself, or closed by another thread
            continue
    return found


def opened_since(before: dict[int, str]) -> dict[int, str]:
    """The descriptors that are open now and were not then, or were of something else."""
    return {
        number: what for number, what in open_descriptors().items() if before.get(number) != what
    }
