"""A checkpoint at another place, as it is. How it gets there is in `engine/transfer.py`."""

import os
from dataclasses import dataclass

from ..brief import brief
from ..engine.copied_files import Report
from ..engine.transfer import transfer
from ..errors import OptionError
from ..options import Options, options_of
from ..stores.url import open_store
from ..worker import in_worker


@dataclass(frozen=True, slots=True)
class Copied:
    """Results of `copy_checkpoint`.

    Attributes:
        location: where the copy is.
        copied_bytes: of data files, read, checked and written.
        kept_bytes: of data files that were there already.

    Example::

        done = holdfast.copy_checkpoint("runs/a/step-00001000", "copies/step-00001000")
        print(done.copied_bytes)
    """

    location: str
    copied_bytes: int
    kept_bytes: int

    __repr__ = brief


@in_worker
def copy_checkpoint(
    source: "str | os.PathLike[str]",
    target: "str | os.PathLike[str]",
    *,
    options: Options | None = None,
    report: Report = lambda _: None,
) -> Copied:
    """Copy a checkpoint to another place, a store too; every byte is checked on the way.

    The copy has the same files, with the same bytes, and its SIGNATURE if there is one. It is not
    there before it is whole. What an earlier call has copied stays, and is not copied again.

    Args:
        source: directory or URL of a checkpoint.
        target: a new directory or URL.
        options: settings such as ``io`` and ``trust``.
        report: called with the bytes of data files done since the last call.

    Returns:
        Where the copy is, and how many bytes were copied, or were there already.

    Raises:
        NotCommittedError: there is no checkpoint at ``source``.
        CorruptError: it is damaged; nothing was committed.
        AlreadyCommittedError: another checkpoint is at ``target``.
        OptionError: it is a delta checkpoint, and its base is not beside ``target``, or cannot be.
        StoreError: disk, network or permission.

    Example:
        ``holdfast.copy_checkpoint("runs/a/step-00001000", "copies/step-00001000")``
    """
    chosen = options_of(options)
    here, there = open_store(source, "source"), open_store(target, "target")
    if here.location == there.location:
        raise OptionError(f"target is the source itself, {here.location}; expected another place")
    copied, kept = transfer(here, there, chosen, report)
    return Copied(there.location, copied, kept)
