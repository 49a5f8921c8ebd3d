"""Which codecs there are."""

from ..errors import OptionError
from . import raw

CODECS = {raw.NAME: raw}


def check_codec(name: str) -> None:
    """Check that a codec exists.

    Raises:
        OptionError: it does not; the text lists those that do.
    """
    if name not in CODECS:
        raise OptionError(f"codec is {name!r}; there are {', '.join(CODECS)}")
