"""Which codecs there are, besides storing chunks as they are."""

from ..errors import OptionError
from . import lossless
from .base import Codec

RAW = "raw"
CODECS: dict[str, Codec] = {lossless.NAME: lossless}


def check_codec(name: str) -> None:
    """Check that a codec exists.

    Raises:
        OptionError: it does not; the text lists those that do.
    """
    if name not in (RAW, *CODECS):
        raise OptionError(f"codec is {name!r}; there are {', '.join((RAW, *CODECS))}")
