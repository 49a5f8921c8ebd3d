"""What all ranks load where no checkpoint of holdfast is: a run's newest step, another format.

Each rank says what it found; the coordinator's step counts. Reads no elements.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..engine.newest import newest_in
from ..errors import MismatchError, NotCommittedError, StoreError
from ..group.base import COORDINATOR
from ..options import Options
from ..stores.base import Store

Reply = Mapping[str, bytes]


def what_else(
    path: Any, store: Store, options: Options, error: NotCommittedError | StoreError
) -> dict[str, bytes]:
    """Return what this rank tells the others: the newest step, or that it is of another format.

    Args:
        error: says that there is no checkpoint of holdfast; raised if there is nothing else.

    Raises:
        NotCommittedError, StoreError: this ``error``.
        CorruptError: the newest step has lost its MANIFEST.
    """
    from ..convert.kinds import is_foreign  # which most programs do not need

    if is_foreign(path, options):
        return {"foreign": b"1"}
    if isinstance(error, NotCommittedError):
        return {"newest": newest_in(store, error).encode()}
    raise error


def agreed(replies: Sequence[Reply], where: str) -> str | None:
    """Return the name of the step that the coordinator has chosen; None: it is of another format.

    Raises:
        MismatchError: the ranks found different things there.
    """
    found = [*map(_kind, replies)]
    if set(found) == {"another format"}:
        return None
    if set(found) == {"a run"}:
        return replies[COORDINATOR]["newest"].decode()
    first = found[COORDINATOR]
    rank, other = next((rank, kind) for rank, kind in enumerate(found) if kind != first)
    raise MismatchError(
        f"nothing was loaded: {where} is {first} on rank {COORDINATOR}, and {other} on rank "
        f"{rank}. Give all ranks the same path"
    )


def _kind(reply: Reply) -> str:
    if "foreign" in reply:
        return "another format"
    return "a run" if "newest" in reply else "a checkpoint"
