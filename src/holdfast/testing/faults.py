"""Disks that misbehave, or that remember what was done to them.

Knows the seam, not what is saved through it. Whatever opens a store inside the block goes through
the disk given; the store itself is the real one, so what is tested is the code that ships.

Example::

    with faulty(Fault("sync", nth=1)):  # the first fsync fails with EIO
        holdfast.save(state, path)
"""

import errno
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass

from .._core import Vfs
from ..stores.local import use_vfs

# Every call that reaches the operating system; names of `Fault.operation`, "*" is any of them.
OPERATIONS = (
    *("create", "open", "close", "write", "read", "size", "allocate", "truncate"),
    *("sync", "sync_directory", "link", "rename", "unlink"),
    *("make_directory", "remove_directory", "list_directory"),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to misbehave.

    Attributes:
        operation: which calls; one of `OPERATIONS`, or "*".
        nth: the call that goes wrong, counted from 1 over the life of the disk.
        persistent: whether every later one does too.
        action: "fail" (argument: errno), "short" (a read or write does at most ``argument``
            bytes), "torn" (writes the first ``argument`` bytes, then fails with EIO), "lie" (does
            nothing and reports success), "delay" (milliseconds), "kill" (SIGKILL to this process
            before the call) or "kill_after".
        argument: as the action takes it.

    Example:
        ``no_space = Fault("write", nth=3, persistent=True, argument=errno.ENOSPC)``
    """

    operation: str
    nth: int = 1
    persistent: bool = False
    action: str = "fail"
    argument: int = errno.EIO


def faulty(*faults: Fault, base: Vfs | None = None) -> AbstractContextManager[Vfs]:
    """Make stores opened inside the block go through a disk with these faults.

    Args:
        faults: all that go wrong.
        base: the disk below; default: the real one. That of `recording` logs what was really done.

    Returns:
        A context manager that gives the disk. Its ``calls()`` lists the calls.

    Raises:
        OptionError: an unknown operation or action.

    Example::

        with faulty(Fault("sync", nth=1)) as disk:  # the first fsync fails with EIO
            try:
                holdfast.save(state, "runs/a/first")
            except holdfast.errors.StoreError:
                print(disk.calls())
    """
    return use_vfs(Vfs.faulty([astuple(fault) for fault in faults], base))


def recording() -> AbstractContextManager[Vfs]:
    """Make stores opened inside the block log every change to the disk, with its bytes, in memory.

    Returns:
        A context manager that gives the disk. Its ``trace()`` lists the changes.

    Example::

        with recording() as disk:
            holdfast.save(state, "runs/a/first")
        print(len(disk.trace()))
    """
    return use_vfs(Vfs.recording())
