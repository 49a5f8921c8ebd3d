"""The directory of a run → its newest step. Reads no data."""

from collections.abc import Callable

from ..errors import CorruptError, NotCommittedError, StoreError
from ..format import spec
from ..format.names import LATEST_BYTES_MAX, LATEST_NAME, step_name, step_of
from ..stores.base import Store, list_if_there
from .uncommitted import lost_manifest


def steps_in(store: Store, names: Callable[[], list[str]]) -> list[int]:
    """List the committed steps of a run, ascending.

    Args:
        names: lists the directories in it that are named as steps are.
    """
    before: list[str] | None = None
    while True:
        now = names()
        steps = sorted(step for name in now if (step := step_of(name)) is not None)
        there = store.having([*map(step_name, steps)], spec.MANIFEST_NAME) if steps else ()
        found = sorted(step for name in there if (step := step_of(name)) is not None)
        # What went between the two looks made way for a newer one, which the next look finds.
        if found or now == before:
            return found
        before = now


def newest_in(store: Store, error: NotCommittedError) -> str:
    """Return the name of a run's newest step.

    Args:
        error: says that the run itself is no checkpoint.

    Raises:
        NotCommittedError: this ``error``, where no step is committed.
        CorruptError: LATEST names a newer step, which has lost its MANIFEST.
    """

    def names() -> list[str]:
        try:
            entries = list_if_there(store) or []
        except StoreError as failure:
            raise error from failure
        return [e.name for e in entries if e.kind == "directory" and step_of(e.name) is not None]

    steps = steps_in(store, names)
    try:
        latest = store.get(LATEST_NAME, LATEST_BYTES_MAX).decode(errors="replace").strip()
    except StoreError:
        latest = ""
    named = step_of(latest)
    is_gone = named is not None and named not in steps
    if is_gone and (lost := lost_manifest(store.below(latest))):
        older = f". To load an older step, name it: {step_name(steps[-1])}" if steps else ""
        raise CorruptError(f"{lost}{older}")
    if not steps:
        raise error
    return step_name(steps[-1])
