"""One place that a step can be restored from, and why it cannot."""

from typing import NamedTuple


class Place(NamedTuple):
    """One directory of a step, or two that complete each other.

    Attributes:
        path: the directory.
        second: where files are that it lacks; empty: nowhere.
        owner: the rank that has its MANIFEST.
    """

    path: str
    second: str = ""
    owner: int = 0

    def __str__(self) -> str:
        return self.path


class Lack(NamedTuple):
    """Why a step cannot be restored from a place.

    Attributes:
        is_damage: what is left is not what was saved; else a part is on a disk that is not here.
        is_gone: another process has deleted it since it was found.
    """

    text: str
    is_damage: bool = False
    is_gone: bool = False


GONE = Lack("it was deleted meanwhile", is_gone=True)
