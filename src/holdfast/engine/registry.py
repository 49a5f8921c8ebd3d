"""Which codecs there are. Knows their names and options; no tensors, no files.

A new codec is a file like those of `codecs`, and one call of `register`.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args

from ..codecs import compact, excp, lossless, raw
from ..codecs.base import Codec, Decode
from ..codecs.compact import Compact, Quality
from ..codecs.excp import Excp
from ..codecs.lossless import Delta
from ..codecs.raw import Raw
from ..errors import OptionError, shown
from ..format import spec

RAW: Codec = Raw()
LOSSLESS: Codec = Delta(every=1)
MODE_MAX = 255

DECODE: dict[str, Decode] = {}  # by the name that stands in a checkpoint
_MAKE: dict[str, type[Any]] = {}  # by the same
CODECS: dict[str, Codec] = {}  # by the names that `save` takes


def register(
    make: type[Any],
    decode: Decode,
    named: Mapping[str, Codec],
    modes: Mapping[int, tuple[str, ...]] | None = None,
) -> None:
    """Add a codec.

    Args:
        make: its class, which takes the options that it describes.
        decode: decodes whatever it encodes.
        named: by the names that `save` takes; of all of them the checkpoint has one.
        modes: besides 0, and what each refers to, as `spec.MODES` has them; None: it has them.
            A number means one thing under all codecs. A reader without the codec says that the
            checkpoint is of a newer holdfast.

    Raises:
        OptionError: a mode is another codec's, or no byte.
    """
    (name,) = {codec.name for codec in named.values()}
    known = {number: refers for table in spec.MODES.values() for number, refers in table.items()}
    for number, refers in (modes or {}).items():
        if not 0 < number <= MODE_MAX or known.get(number, refers) != refers:
            raise OptionError(f"mode {number} of the codec {name} is taken; give it another")
    if modes is not None:
        spec.MODES[name] = dict(modes)
    DECODE[name], _MAKE[name] = decode, make
    CODECS.update(named)


register(Raw, raw.decode, {"raw": RAW})
register(
    Delta,
    lossless.decode,
    {"lossless": LOSSLESS, "delta": Delta(), "delta:replay": Delta(replay=True)},
)
register(
    Compact,
    compact.decode,
    {"compact": Compact()} | {f"compact:{word}": Compact(word) for word in get_args(Quality)},
)
register(Excp, excp.decode, {"excp": Excp()})


def find_codec(codec: str | Codec) -> Codec:
    """Return the codec of a name, or one that was made with options.

    Raises:
        OptionError: there is none; the text lists those that there are.
    """
    if not isinstance(codec, str) and isinstance(codec, tuple(_MAKE.values())):
        return codec
    if not isinstance(codec, str) or codec not in CODECS:
        names = ", ".join(CODECS)
        raise OptionError(
            f"codec is {shown(codec)}; expected one of {names}, or one of holdfast.codecs with "
            "options"
        )
    return CODECS[codec]


def show_codec(codec: Codec) -> str:
    """Return a codec as people write it: equal texts for equal codecs alone."""
    return next((name for name, other in CODECS.items() if other == codec), repr(codec))


def describe_codec(codec: Codec) -> dict[str, Any]:
    """Return a codec's name and options as values of JSON, for the other ranks."""
    made: Any = codec
    described: dict[str, Any] = {"name": codec.name}
    for field in fields(made):
        option = getattr(codec, field.name)
        described[field.name] = dict(option) if isinstance(option, Mapping) else option
    return described


def make_codec(described: dict[str, Any]) -> Codec:
    """Return the codec that `describe_codec` has described."""
    options = dict(described)
    made: Codec = _MAKE[options.pop("name")](**options)
    return made
