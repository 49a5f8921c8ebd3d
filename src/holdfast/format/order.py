"""Several orders of some of the same things → one of all of them. Pure."""

import heapq
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)


def merge_orders(lists: Iterable[Sequence[Item]]) -> tuple[list[Item] | None, bool]:
    """Put the things of all lists into one order that every list follows.

    Returns:
        (the order, or None where two lists contradict each other; whether there is no other).
    """
    place: dict[Item, int] = {}
    behind: dict[Item, set[Item]] = {}
    waits: dict[Item, int] = {}
    for items in lists:
        for item in items:
            if item not in place:
                place[item], behind[item], waits[item] = len(place), set(), 0
        for before, after in pairwise(items):
            if after not in behind[before]:
                behind[before].add(after)
                waits[after] += 1
    ready = [(place[item], item) for item, count in waits.items() if count == 0]
    heapq.heapify(ready)
    order, certain = list[Item](), True
    while ready:
        certain = certain and len(ready) == 1
        _, item = heapq.heappop(ready)
        order.append(item)
        for after in behind[item]:
            waits[after] -= 1
            if waits[after] == 0:
                heapq.heappush(ready, (place[after], after))
    return (order if len(order) == len(place) else None), certain
