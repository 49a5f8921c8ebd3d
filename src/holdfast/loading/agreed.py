"""Which step of a run all ranks load: the one that the coordinator found. Reads nothing."""

from collections.abc import Mapping, Sequence

from ..errors import MismatchError
from ..group.base import COORDINATOR


def agreed(replies: Sequence[Mapping[str, bytes]], where: str) -> str:
    """Return the name of the step that the coordinator has chosen, for all ranks.

    Raises:
        MismatchError: it found a checkpoint there, and another rank a run.
    """
    if chosen := replies[COORDINATOR].get("newest"):
        return chosen.decode()
    others = [rank for rank, reply in enumerate(replies) if "newest" in reply]
    raise MismatchError(
        f"nothing was loaded: {where} is a checkpoint on rank {COORDINATOR}, and has steps on rank "
        f"{others[0]}. Give all ranks the same directory"
    )
