"""Stores that tests run against: each a function that gives a new, empty place in one.

Those of this process are always there. The others are real servers, which ``pytest --store moto``
starts; `servers.py` and `hdfs_server.py` say which there are.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stores import hdfs_server, servers

Place = Callable[[], str]  # of a new, empty place
HERE = ("local", "memory")
KINDS = (*HERE, "hdfs", *servers.SERVERS.keys() - servers.REFUSED)
_numbers = itertools.count()


@contextmanager
def place_of(kind: str) -> Iterator[Place]:
    """Give what makes places in a store of a kind, while it is up."""
    if kind == "local":
        with tempfile.TemporaryDirectory() as root:
            yield lambda: str(Path(root, f"p{next(_numbers)}"))
    elif kind == "memory":
        yield lambda: f"memory://tests/p{next(_numbers)}"
    elif kind == "hdfs":
        with hdfs_server.running() as base:
            yield lambda: f"{base}/p{next(_numbers)}"
    else:
        with servers.running(kind) as base:
            yield lambda: f"{base}/p{next(_numbers)}"
