"""A property that is computed once. Knows nothing of what it computes."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

_Value = TypeVar("_Value")


class cached_property(functools.cached_property[_Value]):
    """`functools.cached_property` as it is since Python 3.12: without a lock.

    Before, all objects of a class share one. A child that is forked while another thread computes
    the property inherits that lock locked, and waits for ever. Without it two threads may both
    compute the value, and the last one's is kept.
    """

    def __init__(self, compute: Callable[[Any], _Value]) -> None:
        super().__init__(compute)
        self.lock = nullcontext()
