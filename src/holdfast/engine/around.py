"""What is around a place that is to be written: no checkpoint above it, and no run right below."""

import contextlib
import errno
from collections.abc import Sequence

from ..errors import OptionError, StoreError
from ..format import spec
from ..format.names import is_foreign, some, step_of
from ..stores.base import Entry, Store
from .epochs import is_epoch

LOOKED_MAX = 64  # directories that are listed; one where each listing is a request to a server


def within(location: str, above: str) -> OptionError:
    """Return the error of a place in a checkpoint, which is at ``above``."""
    return OptionError(
        f"{location} is within a committed checkpoint, {above}, and would damage it; choose a "
        f"place beside it, or elsewhere. If {above} was saved by mistake, delete its "
        f"{spec.MANIFEST_NAME} first, then its {spec.DATA_DIRECTORY}"
    )


def check_outside(store: Store) -> None:
    """Check that a place is not among the files of a checkpoint; beside them it may be.

    Raises:
        OptionError: it is.
        StoreError: that cannot be found out, or it is within a file.
    """
    try:
        above = store.above_with(spec.MANIFEST_NAME, spec.MANIFEST_MAGIC)
    except StoreError as error:
        if error.errno == errno.ENOTDIR:
            text = f"{store.location} is within a file; choose another place"
            raise StoreError(text) from error
        raise
    if above and not is_foreign(store.location[len(above) :].strip("/").partition("/")[0]):
        raise within(store.location, above)


def check_above_none(store: Store, entries: Sequence[Entry]) -> None:
    """Check that no run is right below: nothing can be saved below a checkpoint.

    Args:
        entries: of the store's root.

    Raises:
        OptionError: one is.
    """
    where = store.location.rstrip("/")
    if not where:
        raise OptionError(
            "/ is the root of the file system. Below a checkpoint nothing can be saved. Save to a "
            "new directory"
        )
    names = [entry.name for entry in entries if entry.kind != "file" and is_foreign(entry.name)]
    names.sort(key=lambda name: name.startswith("."))
    for name in names[: LOOKED_MAX if store.shows_pending else 1]:
        if found := _found_in(store.below(name)):
            raise OptionError(
                f"{where} is one directory too high: {name} in it is {found}. Below a checkpoint "
                f"nothing can be saved. Save to a new directory, such as {where}/new"
            )


def _found_in(store: Store) -> str:
    """Say which run a directory of another name is; empty: none, or nobody can tell."""
    with contextlib.suppress(StoreError):
        names = [entry.name for entry in store.list()]
        if steps := [name for name in names if step_of(name) is not None]:
            return f"a run, with {some(steps)}"
        if any(map(is_epoch, names)):
            return "a run"
    return ""
