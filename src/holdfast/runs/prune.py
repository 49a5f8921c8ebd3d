"""Delete the steps of a run that a policy does not keep, from outside of a job.

Refuses a run that a job writes to. Else it takes the run's next epoch first, so that a job that was
frozen meanwhile is refused and cannot save beside the deletion.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..brief import brief
from ..engine.epochs import NO_EPOCH, epoch_name, held, newest_epoch
from ..engine.transfer import is_same
from ..errors import BusyError, NotCommittedError, OptionError, StoreError, shown
from ..format.epoch import EPOCH_BYTES_MAX, decode_taker
from ..format.names import some, step_name
from ..processes import has_ended, has_lived_since
from ..stores.base import Store, list_if_there
from ..stores.tail import read_head
from ..stores.url import open_store
from .check_run import read_progress
from .directory import Run
from .local_mark import read_mark
from .retention import Keep

LIVE_S = 300.0  # a job that was silent for longer does not run, or its clock is far off


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `prune` deleted, or would delete.

    Attributes:
        path: directory of the run.
        removed: steps that were deleted; with ``dry_run``, that would be.
        kept: steps that stay.
        freed_bytes: size of what was removed.
        dry_run: True if nothing was deleted.
        spared: steps that the policy does not keep, and that stay since only this local disk has
            them.
        store: the store behind this local disk; empty: there is none.

    Example:
        ``print(holdfast.prune("runs/a", holdfast.Keep.latest(3)).removed)``
    """

    path: str
    removed: tuple[int, ...]
    kept: tuple[int, ...]
    freed_bytes: int
    dry_run: bool
    spared: tuple[int, ...] = ()
    store: str = ""

    __repr__ = brief


def prune(path: str | os.PathLike[str], keep: Keep, *, dry_run: bool = True) -> Pruned:
    """Delete the steps of a run that a policy does not keep.

    The newest step stays, and so do the bases of delta checkpoints that stay. A step that cannot be
    read stays too, with all before it that it may need. So does a step of a local disk that the
    store behind it does not have.

    Args:
        path: directory of the run.
        keep: the policy, as for `holdfast.Checkpointer`.
        dry_run: only say which steps would be deleted. Give False to delete them.

    Returns:
        The steps that went, or would go, and those that stay.

    Raises:
        OptionError: an invalid argument, or no step has the metric that the policy needs.
        NotCommittedError: this is no run, or it has no steps.
        BusyError: a job runs there.
        FencedError: a job has begun there meanwhile.
        StoreError: the disk or the network failed, or the store behind a local disk cannot be read.

    Example:
        ``holdfast.prune("runs/a", holdfast.Keep.latest(3), dry_run=False)``
    """
    if not isinstance(keep, Keep):
        raise OptionError(f"keep is {shown(keep)}; expected a Keep, such as Keep.latest(3)")
    run, store = Run(path, keep), open_store(path)
    _check_quiet(store)
    before = run.steps()
    if not before:
        raise NotCommittedError(
            f"{store.location} has no committed step; give the directory that holds step-00001000 "
            "and others"
        )
    run.fence.look()
    run.fence.inherits = True
    judged = run.doomed()
    _check_metrics(run, keep)
    behind = read_mark(store).store
    spared = _only_here(store, behind, judged) if behind else set[int]()
    doomed = run.doomed(spared)
    sizes = {step: run.disk_bytes(step) for step in doomed}
    if not dry_run and doomed:
        run.fence.hold()
        run.make_room(spared)
        after = run.steps()
        doomed = [step for step in doomed if step not in after]
    kept = tuple(step for step in before if step not in doomed)
    freed_bytes = sum(sizes[step] for step in doomed)
    removed, stay = tuple(sorted(doomed)), tuple(sorted(spared))
    return Pruned(store.location, removed, kept, freed_bytes, dry_run, stay, behind)


def _only_here(local: Store, behind: str, steps: Sequence[int]) -> set[int]:
    """Return those steps of a local disk that the store behind it does not have, or not the same.

    Raises:
        StoreError: the store cannot be read.
    """
    try:
        store = open_store(behind)
        there = set(Run(behind, Keep.all()).steps())
    except (OptionError, StoreError) as error:
        raise StoreError(
            f"{local.location} is the local disk before {behind}, which cannot be read: {error}. "
            "So it is not known which steps only this disk has, and nothing was deleted. Prune "
            "again when the store can be read"
        ) from error
    below = {step: step_name(step) for step in steps}
    return {
        step
        for step, name in below.items()
        if step not in there or not is_same(local.below(name), store.below(name))
    }


def _check_metrics(run: Run, keep: Keep) -> None:
    """Check that some step has what the policy compares: else it would keep next to nothing."""
    known = run.metric_names()
    if lacking := sorted(keep.metrics - known):
        raise OptionError(
            f"no step of {run.root} has the metric {', '.join(lacking)}, so {keep!r} would delete "
            f"nearly all of them; found {some(sorted(known)) or 'no metrics'}"
        )


def _check_quiet(store: Store) -> None:
    names = [entry.name for entry in list_if_there(store) or ()]
    if (who := _running(store, names)) is not None:
        raise BusyError(
            f"{store.location} is in use by {who}; nothing was deleted. Give that job keep=, or "
            "prune when it has ended"
        )


def _running(store: Store, names: Sequence[str]) -> str | None:
    """Say which job runs there, as far as can be told; None: none does."""
    for said in read_progress(store, names):
        is_fresh = abs(time.time() - said.time_s) < LIVE_S
        if is_fresh and not has_ended(said.host, said.pid, said.pid_space):
            return f"process {said.pid} on {said.host}, which said so at step {said.step}"
    newest = newest_epoch(store)
    if newest in (NO_EPOCH, held.get(store.location)):
        return None
    try:
        taker = decode_taker(read_head(store, epoch_name(newest[0]), EPOCH_BYTES_MAX))
    except StoreError:
        return None
    if taker is None or not has_lived_since(taker.host, taker.pid, taker.since_s):
        return None
    return f"process {taker.pid} on this machine, which has taken its epoch {newest[0]}"
