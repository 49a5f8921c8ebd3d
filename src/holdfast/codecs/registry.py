"""Which codecs there are."""

from ..errors import OptionError
from . import lossless, raw
from .base import Codec

CODECS: dict[str, Codec] = {raw.NAME: raw, lossless.NAME: lossless}


def check_codec(name: str) -> None:
    """Check that a codec exists.

    Raises:
        OptionError: it does not; the text lists those that do.
    """
    if name not in CODECS:
        raise OptionError(f"codec is {name!r}; there are {', '.join(CODECS)}")
