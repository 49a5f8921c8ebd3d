"""What a chain needs to know of its checkpoints, by the bytes of their MANIFESTs.

A MANIFEST that this process has read or written is not parsed and checked once more for each link:
the same bytes say the same. Changes no answer; knows stores, no elements.
"""

from dataclasses import dataclass

from .._core import xxh3_128
from ..errors import StoreError
from ..format import spec
from ..format.links import Base
from ..format.manifest import Manifest
from ..format.table import content_digest
from ..stores.base import Store

KNOWN_MAX = 4 * spec.CHAIN_LINKS_MAX  # the chains of a few runs


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of one checkpoint.

    Attributes:
        content: digest of what it holds.
        links: that a link made from it has below, at most.
        base: what some of its chunks refer to; None: it needs no other checkpoint.
    """

    save_id: str
    content: str
    links: int
    base: Base | None


_known: dict[str, Known] = {}  # by the digest of a MANIFEST, the oldest first


def remember(manifest: Manifest, data: bytes = b"") -> Known:
    """Keep what is known of a manifest that has passed every check.

    Args:
        data: its bytes, if it was written here; else it was read, and has their digest.
    """
    header = manifest.table.header
    known = Known(
        header.save_id,
        content_digest(manifest.table),
        header.base.links + 1 if header.base else 1,
        header.base if len(manifest.based) else None,
    )
    while len(_known) >= KNOWN_MAX:
        _known.pop(next(iter(_known)), None)
    _known[xxh3_128(data).hex() if data else manifest.digest] = known
    return known


def known_at(store: Store) -> Known | None:
    """Return what is known of a checkpoint; None: nothing of what is there now, if it is there."""
    try:
        data = store.get(spec.MANIFEST_NAME, spec.MANIFEST_BYTES_MAX)
    except StoreError:
        return None
    return _known.get(xxh3_128(data).hex())


def known_chain(store: Store) -> Known | None:
    """Return what is known of a checkpoint, if all that it needs is there and known too."""
    newest = link = known_at(store)
    while link is not None and (base := link.base) is not None:
        link = known_at(store.sibling(base.name))
        is_it = link is not None and link.content == base.digest and link.links <= base.links
        link = link if is_it else None
    return newest if link is not None else None
