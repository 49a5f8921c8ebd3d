"""A path → an open checkpoint, of holdfast or of another format. Reads no elements."""

import os
from collections.abc import Iterable
from typing import Any

from ..engine.newest import newest_in
from ..errors import NotCommittedError, StoreError
from ..options import Options, options_of
from ..plan.choice import Patterns
from ..plan.rename import Rename
from ..stores.url import open_store
from .checkpoint import Checkpoint


def open(
    path: "str | os.PathLike[str]",
    *,
    types: Iterable[type] = (),
    include: Patterns = (),
    exclude: Patterns = (),
    rename: Rename | None = None,
    options: Options | None = None,
) -> Checkpoint:
    """Open a committed checkpoint, to read any part of it.

    Args:
        path: directory of the checkpoint; or of a run, whose newest step is opened; or one of
            another format: a file ``*.safetensors``, or a directory of them.
        types: enumerations and dataclasses that values come back as; of others you get
            `holdfast.format.natives.Tagged`. No constructor is called.
        include, exclude, rename: the names that the checkpoint is opened with, as for
            `holdfast.load`.
        options: settings such as ``io`` and ``trust``.

    Returns:
        The open checkpoint: ``names()``, ``tensor()``, ``tensors()``, ``state()``, ``verify()``.

    Raises:
        NotCommittedError: there is no checkpoint at ``path``.
        CorruptError: its MANIFEST fails a check.
        VersionError: a newer holdfast wrote it.
        MismatchError: a pattern means no name, or ``rename`` makes one name of two.
        OptionError: an invalid argument.

    Example:
        ``weight = holdfast.open("runs/a/step-00001000").tensor("model.weight")``
    """
    how: dict[str, Any] = {"include": include, "exclude": exclude, "rename": rename}
    try:
        return Checkpoint(path, options, types, **how)
    except (NotCommittedError, StoreError) as error:
        from ..convert.kinds import is_foreign  # which most programs do not need

        if is_foreign(path, options_of(options)):
            from .foreign import ForeignCheckpoint  # it imports torch

            return ForeignCheckpoint(path, options_of(options), types, **how)
        if not isinstance(error, NotCommittedError):
            raise
        store, cause = open_store(path), error
    try:
        return Checkpoint(f"{store.location}/{newest_in(store, cause)}", options, types, **how)
    except NotCommittedError as error:  # it was retired meanwhile: there is a newer one
        if error is cause:
            raise
    return Checkpoint(f"{store.location}/{newest_in(store, cause)}", options, types, **how)
