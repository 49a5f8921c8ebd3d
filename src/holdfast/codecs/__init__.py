"""Bytes ⇄ bytes, pure. A codec knows chunks and their context; no files, no ranks."""

from .excp import Excp
from .lossless import Delta

__all__ = ["Delta", "Excp"]
