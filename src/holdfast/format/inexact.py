"""What is wrong with a further value, before it is known where it stands. Knows nothing else."""

from ..errors import CorruptError, StateError


class Inexact(StateError):
    """A value has something that its form does not keep; the text goes on from its type."""


class Malformed(CorruptError):
    """The content of a tag is not as the tag has it."""
