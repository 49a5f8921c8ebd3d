"""How much room a local disk before a store has for the next save, besides what is free.

Pure: knows no files. What is deleted for a save: `runs/upload_policy.py`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

LOCAL_ROOM = (
    "Keep.local(n) needs room for 2n + 2 steps, and for 3n + 2 with Keep.every or Keep.best. Keep "
    "fewer steps on the local disk, or free space"
)


@dataclass(frozen=True, slots=True)
class LocalRoom:
    """What a local disk does when it is full.

    Attributes:
        step_bytes: size of what the newest step has on this disk.
        old_bytes: size of the steps that are deleted before a save fails.
        is_shared: whether all ranks share the disk: else none is deleted.
    """

    step_bytes: int = 0
    old_bytes: int = 0
    is_shared: bool = False


def local_room(
    sizes: Mapping[int, int], waiting: Collection[int], *, is_shared: bool, is_delta: bool
) -> LocalRoom:
    """Return how much room the steps of a local disk leave for another.

    The newest stays. So may one that waits for its upload: it may be going up.

    Args:
        sizes: in bytes, of the steps that are committed on this disk.
        waiting: those of them that the store does not have yet.
        is_delta: whether the newest is one: what it is made from stays, too.
    """
    *older, newest = sorted(sizes) or [-1]
    going_up = [step for step in older if step in waiting][-1:]
    go = set(older) - set(going_up) if is_shared and not is_delta else set[int]()
    return LocalRoom(sizes.get(newest, 0), sum(sizes[step] for step in go), is_shared)
