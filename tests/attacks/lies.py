"""Every lie that a MANIFEST or a data file can tell, each with the error that it has to meet.

All lies start from one small checkpoint of two ranks, and are told with every checksum right.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from format.forge import HEAD_BYTES, Forgery
from format.simulated_ranks import pieces, save_pieces
from holdfast import Options

CORRUPT, NEWER = "CorruptError", "VersionError"
OPTIONS = Options(chunk_elements=4, pool_bytes=32 << 20)
HUGE = 2**63 - 1


def save_truth(path: Path) -> None:
    """A tensor in two boxes on two ranks, one more on the first, an empty one, a tie, a value."""
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    first, second = pieces(weight, [((0, 0), (2, 4)), ((2, 0), (1, 4))])
    bias = torch.arange(3, dtype=torch.bfloat16)
    save_pieces(
        path,
        [
            {("w",): first, ("b",): bias, ("e",): torch.zeros(0, 2), ("v",): [1, "x"]},
            {("w",): second},
        ],
        ties={("t", 1): ("b",)},
        options=OPTIONS,
        step=7,
    )


def target() -> dict[str, Any]:
    """What the checkpoint fits."""
    bias = torch.zeros(3, dtype=torch.bfloat16)
    weight = torch.zeros(3, 4)
    return {"w": weight, "b": bias, "e": torch.zeros(0, 2), "v": None, "t": {1: bias}}


@dataclass(frozen=True)
class Lie:
    """What is changed, and what holdfast says to it.

    Attributes:
        text: what the error's text has to match.
        error: its class.
    """

    tell: Callable[[Forgery], None]
    text: str
    error: str = CORRUPT


LIES: dict[str, Lie] = {}


def lie(name: str, text: str, error: str = CORRUPT) -> Callable[..., Any]:
    """Add a function of a `Forgery` to `LIES`."""

    def add(tell: Callable[[Forgery], None]) -> Callable[[Forgery], None]:
        assert name not in LIES
        LIES[name] = Lie(tell, text, error)
        return tell

    return add


def preamble(name: str, index: int, value: Any, text: str, error: str = CORRUPT) -> None:
    """A lie in one field of the MANIFEST's preamble."""
    lie(name, text, error)(lambda forgery: forgery.manifest.preamble.update({index: value}))


def key(name: str, key: str, value: Any, text: str, error: str = CORRUPT) -> None:
    """A lie in one key of the JSON header, told by the footers too."""

    def tell(forgery: Forgery) -> None:
        forgery.header[key] = value
        if key not in ("tensors", "ties", "objects"):
            for file in forgery.files:
                file.footer.header[key] = value

    lie(name, text, error)(tell)


def tensor(name: str, key: str, value: Any, text: str) -> None:
    """A lie about the first tensor in the JSON header."""
    lie(name, text)(lambda forgery: forgery.header["tensors"][0].update({key: value}))


def value(name: str, value: Any, text: str, error: str = CORRUPT) -> None:
    """A lie told as a value of the state."""
    lie(name, text, error)(lambda forgery: forgery.header["objects"][0].update({"value": value}))


def column(name: str, column: str, row: int, value: Any, text: str) -> None:
    """A lie in one number of the MANIFEST's columns."""

    def tell(forgery: Forgery) -> None:
        forgery.columns[column][row] = value
        forgery.kept.add(column)

    lie(name, text)(tell)


def text_of(forgery: Forgery, old: bytes, new: bytes) -> None:
    """Replace the text of the JSON header as it is written, padded again."""
    text = text_bytes(forgery).rstrip(b" ")
    assert text.count(old) >= 1
    text = text.replace(old, new, 1)
    forgery.manifest.header = text + b" " * (-len(text) % 8)


def text_bytes(forgery: Forgery) -> bytes:
    """The JSON header of the MANIFEST as it is written."""
    encoded = forgery.manifest.encode()
    (size,) = struct.unpack_from("<Q", encoded, 24)
    return encoded[72 : 72 + size]


def text(name: str, old: bytes, new: bytes, text: str) -> None:
    """A lie in how the JSON header is written."""
    lie(name, text)(lambda forgery: text_of(forgery, old, new))


def head(name: str, offset: int, value: bytes, text: str) -> None:
    """A lie in the header of the first data file."""
    lie(name, text)(lambda forgery: forgery.set_head(0, offset, value))


def trailer(name: str, index: int, change: Callable[[int], Any], text: str) -> None:
    """A lie in the trailer of the first data file; ``change`` gets its right footer offset."""

    def tell(forgery: Forgery) -> None:
        file = forgery.files[0]
        file.trailer[index] = change(HEAD_BYTES + len(file.body))

    lie(name, text)(tell)


def footer_column(name: str, column: str, row: int, value: Any, text: str) -> None:
    """A lie in one number of a footer's columns."""

    def tell(forgery: Forgery) -> None:
        forgery.files[0].footer.columns[column][row] = value
        forgery.footer_kept.add(column)

    lie(name, text)(tell)


def footer_key(name: str, key: str, value: Any, text: str) -> None:
    """A lie in one key of a footer's JSON header."""
    lie(name, text)(lambda forgery: forgery.files[0].footer.header.update({key: value}))
