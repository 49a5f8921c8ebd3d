"""What a step without MANIFEST is, by the names of its files. Knows no file system."""

from collections.abc import Iterable

COPY_PREFIX = "copy-"  # of data files that an upload or a copy has begun, until they are whole
COPY = ".copy-"  # in the name of a manifest that an upload or a copy is about to publish

WRITING = "it is being written, or a save died"
UPLOADING = "it is being uploaded or copied, or that was interrupted"
ELSEWHERE = "MANIFEST would be on the host of rank 0"
EITHER = "it is being saved or uploaded, or that was interrupted"


def unfinished(names: Iterable[str], *, tells: bool) -> str:
    """Say why a step is not committed.

    Args:
        names: of the files in its directory, and below.
        tells: whether files that are not whole have names of their own: not in object stores.
    """
    names = list(names)
    if any(name.startswith(COPY_PREFIX) or COPY in name for name in names):
        return UPLOADING
    return WRITING if tells and names else EITHER
