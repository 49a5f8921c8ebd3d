"""Where the files of a checkpoint are, if not all of them are in one directory of one disk."""

from dataclasses import dataclass

from ..plan.share_plan import Holders
from ..stores.base import Store


@dataclass(frozen=True, slots=True)
class Reach:
    """What a rank can read of a checkpoint.

    Attributes:
        store: reads files where they are; the same MANIFEST on every rank.
        holders: which ranks can read which files; None: all can read all.
    """

    store: Store
    holders: Holders | None = None
