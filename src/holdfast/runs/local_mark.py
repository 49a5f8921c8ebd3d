"""Reads and writes what a local run says of itself: see `format/local_mark.py`."""

import os
from collections.abc import Iterable
from dataclasses import replace

from ..errors import OptionError, StoreError
from ..format.local_mark import (
    JOBS_MAX,
    MARK_BYTES_MAX,
    MARK_NAME,
    LocalMark,
    decode_mark,
    encode_mark,
    job_name,
    jobs_in,
)
from ..stores.base import Store, list_if_there

PENDING_MARK_PREFIX = ".store-"


def read_mark(local: Store) -> LocalMark:
    """Read what a local run says of itself.

    Raises:
        OptionError: its file is none of ours.
        StoreError: it cannot be read.
    """
    if not local.exists(MARK_NAME):
        return LocalMark()
    mark = decode_mark(local.get(MARK_NAME, MARK_BYTES_MAX))
    if mark is None:
        raise OptionError(
            f"{local.location}/{MARK_NAME} does not say which store this local run belongs to; "
            "expected what a Checkpointer with local= writes. Give another local directory, or "
            "delete this one"
        )
    jobs = jobs_in(entry.name for entry in list_if_there(local) or ())
    return replace(mark, jobs=jobs)


def check_apart(local: str, store: str, found: str, behind: str) -> None:
    """Check that neither of two places is within the other.

    Args:
        local, store: as they were given.
        found, behind: the same, to be compared; any links in them followed, or not.

    Raises:
        OptionError: one is, or both are the same.
    """
    outer, inner = sorted((f"{place.rstrip('/')}/" for place in (found, behind)), key=len)
    if inner.startswith(outer):
        raise OptionError(
            f"local is {local}, and the run is {store}: one is within the other, or both are the "
            "same; expected another directory"
        )


def check_order(local: str, store: Store) -> None:
    """Check that a directory that is given as the store is one, and the local disk another.

    Raises:
        OptionError: it is a local disk, so the two may have been swapped; or a link leads from one
            to the other.
        StoreError: that cannot be found out.
    """
    check_apart(local, store.location, *map(os.path.realpath, (local, store.location)))
    if behind := read_mark(store).store:
        raise OptionError(
            f"the run is {store.location}, which is the local disk of {behind}; expected the store "
            f"first: Checkpointer({behind!r}, local={store.location!r})"
        )


def write_mark(
    local: Store, mark: LocalMark, jobs: Iterable[str], *, forgets: bool = False
) -> None:
    """Write what a local run says of itself, durably, and add jobs to it.

    Args:
        forgets: whether the job that has the newest epoch is among these: then the oldest others
            are forgotten. While the store cannot be read, any of them may have it.
    """
    data = encode_mark(mark)
    if not local.exists(MARK_NAME) or local.get(MARK_NAME, MARK_BYTES_MAX) != data:
        pending = f"{PENDING_MARK_PREFIX}{os.urandom(8).hex()}"
        local.prepare(pending, data)
        local.replace(pending, MARK_NAME)
    mine = jobs_in(map(job_name, jobs))  # what an epoch names may be anything
    for job in sorted(mine):
        local.claim(job_name(job), b"")
    local.sync_made(MARK_NAME)
    local.sync_path(MARK_NAME)  # the directory itself may be new: an epoch in a store is durable
    local.sync_above(MARK_NAME)
    if not forgets:
        return
    others = [job_name(job) for job in jobs_in(entry.name for entry in local.list()) - mine]
    if len(others) > JOBS_MAX:
        others.sort(key=lambda name: _time_of(local, name))
        for name in others[:-JOBS_MAX]:
            local.remove(name)


def lost_marks(local: Store, jobs: Iterable[str]) -> list[str]:
    """Return which files that `write_mark` writes for these jobs are not there."""
    names = [MARK_NAME, *map(job_name, sorted(jobs_in(map(job_name, jobs))))]
    return [name for name in names if not local.exists(name)]


def _time_of(local: Store, name: str) -> float:
    try:
        return local.modified_s(name)
    except StoreError:
        return 0.0  # another job has just forgotten it
