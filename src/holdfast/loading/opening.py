"""A path → an open checkpoint. Reads its MANIFEST, no data."""

import os
from collections.abc import Iterable

from ..options import Options
from .checkpoint import Checkpoint


def open(
    path: "str | os.PathLike[str]",
    *,
    types: Iterable[type] = (),
    options: Options | None = None,
) -> Checkpoint:
    """Open a committed checkpoint, to read any part of it.

    Args:
        path: directory of the checkpoint.
        types: enumerations and dataclasses that values come back as; of others you get
            `holdfast.format.natives.Tagged`. No constructor is called.
        options: settings such as ``io`` and ``trust``.

    Returns:
        The open checkpoint: ``names()``, ``tensor()``, ``tensors()``, ``state()``, ``verify()``.

    Raises:
        NotCommittedError: there is no checkpoint at ``path``.
        CorruptError: its MANIFEST fails a check.
        VersionError: a newer holdfast wrote it.

    Example:
        ``weight = holdfast.open("runs/a/step-00001000").tensor("model.weight")``
    """
    return Checkpoint(path, options, types)
