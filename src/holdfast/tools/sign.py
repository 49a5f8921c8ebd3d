"""`holdfast sign`: what a checkpoint holds, to the byte, comes from whoever has the key."""

import os
from typing import Any

from .. import sign as sign_checkpoint
from .. import signer
from ..stores.url import open_store
from .progress import Progress
from .run_listing import disk_bytes
from .text import printable, show_count

Document = dict[str, Any]


def sign(path: str | os.PathLike[str], key: str | os.PathLike[str]) -> Document:
    """Check and sign a checkpoint and its bases.

    Raises:
        NotCommittedError: there is none.
        CorruptError: it is damaged; then nothing of it is signed.
        OptionError: the key cannot be used.
    """
    store = open_store(path)
    with Progress("sign", disk_bytes(store, "")) as progress:
        signed = sign_checkpoint(path, key=key, report=progress.advance)
    return {"path": store.location, "signed": signed, "signer": signer(path)}


def render(document: Document) -> list[str]:
    """Show what was signed as lines for the terminal."""
    below = len(document["signed"]) - 1
    more = f", and {show_count(below, 'base')}" if below else ""
    return [f"signed {printable(document['path'])}{more}, with {document['signer']}"]
