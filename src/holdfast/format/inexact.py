"""What is wrong with a further value, before it is known where it stands. Knows nothing else."""

import binascii
import struct

from ..errors import CorruptError, StateError


class Inexact(StateError):
    """A value has something that its form does not keep; the text goes on from its type."""


class Malformed(CorruptError):
    """The content of a tag is not as the tag has it."""


# What reading a tag's content may raise.
MALFORMED = (
    *(ValueError, TypeError, struct.error, binascii.Error, AttributeError),
    *(ArithmeticError, LookupError, Malformed),
)
