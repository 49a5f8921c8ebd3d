"""Bytes ⇄ bytes, pure. A codec knows chunks and their context; no files, no ranks."""
