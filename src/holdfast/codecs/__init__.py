"""Bytes ⇄ bytes, pure. A codec knows chunks and their context; no files, no ranks."""

from .compact import Compact
from .excp import Excp
from .lossless import Delta

__all__ = ["Compact", "Delta", "Excp"]
