"""Epochs, as far as one checkpoint has to know them: which job a run belongs to.

How a job takes one is in `runs/fence.py`. Knows no ranks.
"""

import errno
import json
import os

from ..errors import FencedError, OptionError, StoreError
from ..format.epoch import EPOCH_BYTES_MAX, epoch_of
from ..format.names import step_of
from ..stores.base import Store, list_if_there

_LOOKS = 5  # while other jobs take epochs

# Number, and what tells its file from another job's of that number; empty: that cannot be read.
Epoch = tuple[int, str]
NO_EPOCH: Epoch = (0, "")

held: dict[str, Epoch] = {}  # by this process, in each run
_names: list[str] = []  # of this process, once it has one
os.register_at_fork(after_in_child=held.clear)
os.register_at_fork(after_in_child=_names.clear)


def epoch_name(epoch: int) -> str:
    """Name the file of an epoch."""
    return f".epoch-{epoch:08d}"


def is_epoch(name: str) -> bool:
    """Return whether a file has the name of an epoch."""
    return epoch_of(name) is not None


def this_job() -> str:
    """Name this process, as no other is named."""
    if not _names:
        _names.append(os.urandom(8).hex())
    return _names[0]


def job_of(run: Store, epoch: int) -> str:
    """Return the name of the job that has taken an epoch; empty: it is not known."""
    return str(_read(run, epoch).get("job", ""))


def newest_job(run: Store) -> str | None:
    """Return the name of the job that has the run; None: none has taken it.

    Returns:
        An empty name, if an older holdfast has taken the epoch, which noted none.

    Raises:
        OptionError: the file of the epoch is empty or torn.
        StoreError: it cannot be read.
    """
    for last in (False,) * (_LOOKS - 1) + (True,):
        newest = max(epochs_of(run), default=0)
        if not newest:
            return None
        try:
            found = json.loads(run.get(epoch_name(newest), EPOCH_BYTES_MAX))
            return str(found.get("job", ""))
        except StoreError as error:
            if last or error.errno != errno.ENOENT:  # else a newer job has just taken its place
                raise
        except (ValueError, AttributeError) as error:
            raise OptionError(
                f"{run.location}/{epoch_name(newest)} is empty or torn, so it does not say which "
                "job has this run. If the last job that used this local disk was the last one of "
                "the run, delete that file; else give a new local directory"
            ) from error
    raise AssertionError("the last look returns or raises")


def epochs_of(run: Store) -> list[int]:
    """List the epochs of a run."""
    found = [epoch_of(entry.name) for entry in list_if_there(run) or []]
    return [epoch for epoch in found if epoch is not None]


def newest_epoch(run: Store) -> Epoch:
    """Return the newest epoch of a run; `NO_EPOCH`: it has none.

    The number alone does not do: a run may be deleted and begun again while a job writes to it.

    Raises:
        StoreError: the run cannot be listed.
    """
    for _ in range(_LOOKS):
        entries = {epoch_of(entry.name) or 0: entry for entry in list_if_there(run) or []}
        number = max(entries, default=0)
        if not number:
            return NO_EPOCH
        try:
            entry = entries[number]
            tag = entry.tag or run.get(entry.name, EPOCH_BYTES_MAX).decode(errors="replace")
            return number, tag
        except StoreError as error:
            if error.errno != errno.ENOENT:  # else a newer job has just taken its place
                break
    return number, ""


def is_same(one: Epoch, other: Epoch | None) -> bool:
    """Return whether two are the same, as far as can be told."""
    if other is None:
        return False
    return one[0] == other[0] and ("" in (one[1], other[1]) or one[1] == other[1])


def check_epoch(store: Store) -> None:
    """Check that this process may replace a checkpoint, which may be a step of a run.

    A step of a run that has epochs is replaced by its newest job alone. A checkpoint of another
    name, such as ``best``, is replaced by any process but one of an older job.

    Raises:
        FencedError: another job has the run.
    """
    run, name = store.above(), os.path.basename(store.location)
    newest, mine = newest_epoch(run), held.get(run.location)
    if is_same(newest, mine or NO_EPOCH) or (mine is None and step_of(name) is None):
        return
    who = f"this process has epoch {mine[0]}" if mine else "this process has no epoch of it"
    raise FencedError(
        f"{run.location} belongs to another job, with {describe(run, newest[0])}; {who}, and may "
        f"not replace or delete {name}. Do that in that job, or save under another step or path"
    )


def describe(run: Store, epoch: int) -> str:
    """Say who has taken an epoch."""
    found = _read(run, epoch)
    host, pid, started = (found.get(key, "?") for key in ("host", "pid", "started"))
    return f"epoch {epoch}, taken at {started} by process {pid} on {host}"


def _read(run: Store, epoch: int) -> dict[str, object]:
    try:
        found = json.loads(run.get(epoch_name(epoch), EPOCH_BYTES_MAX))
    except (StoreError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
