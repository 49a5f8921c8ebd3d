"""What the header of a link says besides: its base, and what its tensors have lost."""

import math
from dataclasses import dataclass
from typing import Any

from ..errors import CorruptError
from . import spec
from .fields import count, entries, hex_digits, keys, text


@dataclass(frozen=True, slots=True)
class Base:
    """The checkpoint that a link was made from: it stands beside it, in the same directory.

    Attributes:
        name: of its directory.
        digest: of what it holds (`content_digest`), 32 hexadecimal digits.
        links: at most so many checkpoints are below the link; of its base there are fewer.
    """

    name: str
    digest: str
    links: int


@dataclass(frozen=True, slots=True)
class TensorLoss:
    """What a tensor has lost against what was saved.

    Attributes:
        tensor: its index.
        squared_error: sum of the squares of the errors.
        largest_error: of any element.
        energy: sum of the squares of what was coded: its difference from the base, or itself.
    """

    tensor: int
    squared_error: float
    largest_error: float
    energy: float


def decode_base(entry: Any) -> Base:
    """Check what a link says of its base."""
    if not isinstance(entry, dict):
        raise CorruptError("the base of its JSON header is not an object")
    keys(entry, {"name", "digest", "links"}, "base")
    name = text(entry["name"], "the name of the base")
    # A name of a directory, and of no other place: what is read lies beside the checkpoint.
    bad = not name or name in (".", "..") or "/" in name or "\0" in name
    if bad or len(name.encode()) > spec.BASE_NAME_BYTES_MAX:
        raise CorruptError(f"the name of the base is {name!r:.80}; expected that of a directory")
    links = count(entry["links"], 1, "links", spec.CHAIN_LINKS_MAX + 1)
    return Base(name, hex_digits(entry["digest"], "digest"), links)


def decode_losses(values: dict[str, Any], tensors: int) -> tuple[TensorLoss, ...]:
    """Check losses: each of another tensor, ascending."""
    found: list[TensorLoss] = []
    for entry in entries(values, "losses")[0]:
        keys(entry, {"tensor", "squared_error", "largest_error", "energy"}, "loss")
        least = found[-1].tensor + 1 if found else 0
        index = count(entry["tensor"], least, "the tensor of a loss", tensors)
        numbers = [entry[key] for key in ("squared_error", "largest_error", "energy")]
        if any(type(n) is not float or not 0 <= n < math.inf for n in numbers):
            raise CorruptError(f"a loss of its JSON header is {entry!r:.80}")
        found.append(TensorLoss(index, *numbers))
    if not found:
        raise CorruptError("its JSON header has the feature 'losses' and none of them")
    return tuple(found)
