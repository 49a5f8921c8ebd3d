"""What this process holds open, for tests that nothing stays open.

Compare what was opened since, not how many are open: the collector may end, between the two
looks, an object of an earlier test that still held a file, and that would hide a leak or feign one.
"""

import os


def open_descriptors() -> dict[int, str]:
    """Each open descriptor, and what it is: ``{0: "/dev/null", 3: "socket:[4711]"}``."""
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
