"""The seam between the engine and the codecs.

A codec turns a chunk's bytes into a payload and back.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Payload:
    """An encoded chunk in memory: ``size_bytes`` at ``address``, stored under ``mode``."""

    address: int
    size_bytes: int
    mode: int
