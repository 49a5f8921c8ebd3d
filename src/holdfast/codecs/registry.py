"""Which codecs there are, besides storing chunks as they are."""

from typing import Any, get_args

from ..errors import OptionError, shown
from . import compact, excp, lossless
from .base import Codec, Decode
from .compact import Compact, Quality
from .excp import Excp
from .lossless import Delta

RAW = "raw"
LOSSLESS: Codec = Delta(every=1)
DECODE: dict[str, Decode] = {
    lossless.NAME: lossless.decode,
    excp.NAME: excp.decode,
    compact.NAME: compact.decode,
}
_NAMED: dict[str, Codec] = {
    "lossless": LOSSLESS,
    "delta": Delta(),
    "delta:replay": Delta(replay=True),
    "compact": Compact(),
    **{f"compact:{quality}": Compact(quality) for quality in get_args(Quality)},
    "excp": Excp(),
}
_CLASSES = {lossless.NAME: Delta, excp.NAME: Excp, compact.NAME: Compact}


def find_codec(codec: str | Codec) -> Codec | None:
    """Return the codec of a name, or one that was made with options; None is raw.

    Raises:
        OptionError: there is none; the text lists those that there are.
    """
    if isinstance(codec, (Compact, Delta, Excp)):
        return codec
    if codec == RAW:
        return None
    if not isinstance(codec, str) or codec not in _NAMED:
        names = ", ".join((RAW, *_NAMED))
        raise OptionError(
            f"codec is {shown(codec)}; there are {names}, and those of holdfast.codecs with options"
        )
    return _NAMED[codec]


def show_codec(found: Codec | None) -> str:
    """Return a codec as people write it: equal texts for equal codecs alone."""
    if found is None:
        return RAW
    return next((name for name, codec in _NAMED.items() if codec == found), repr(found))


def describe_codec(found: Codec | None) -> dict[str, Any]:
    """Return a codec's name and options as values of JSON, for the other ranks."""
    return {"name": RAW} if found is None else {"name": found.name} | found.describe()


def make_codec(described: dict[str, Any]) -> Codec | None:
    """Return the codec that `describe_codec` has described; None is raw."""
    options = dict(described)
    name = options.pop("name")
    return None if name == RAW else _CLASSES[name](**options)
