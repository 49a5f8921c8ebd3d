"""What is wrong with a further value, before it is known where it stands. Knows nothing else."""

import binascii
import struct

from ..errors import CorruptError, StateError


class Inexact(StateError):
    """A value has something that its form does not keep; the text goes on from its type."""


class Unsupported(StateError):
    """A value is of another type than those that are saved.

    Attributes:
        kind: name of its type.
    """

    kind = ""


def unsupported(value: object, where: str) -> Unsupported:
    """Return the error for a value of another type."""
    kind = _kind_of(value)
    error = Unsupported(
        f"{where} is a {kind}; a state holds tensors, plain values (docs/format.md, Values) "
        "and objects with state_dict() and load_state_dict(). Convert it, give it those two "
        "methods, or leave it out"
    )
    error.kind = kind
    return error


def within(value: object, where: str, error: Inexact | Unsupported) -> StateError:
    """Return the error for a value that is wrong, or holds one of another type."""
    start = f"{where} is a {_kind_of(value)} that"
    if isinstance(error, Inexact):
        return StateError(f"{start} {error}; convert it")
    return StateError(
        f"{start} holds a {error.kind}; expected plain values (docs/format.md, Values). Make a "
        "dict of it, which may hold tensors, or leave it out"
    )


def _kind_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


class Malformed(CorruptError):
    """The content of a tag is not as the tag has it."""


# What reading a tag's content may raise.
MALFORMED = (
    *(ValueError, TypeError, struct.error, binascii.Error, AttributeError),
    *(ArithmeticError, LookupError, Malformed),
)
