"""What the next link of a chain is made from: elements and digests of the last one, in memory.

While a link is written they become its own, chunk by chunk. Knows shards and addresses; no files.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .._core import copy
from ..boxes import U64, Bools
from ..codecs.base import Loss
from ..layout import Chunk, Path, Shard


@dataclass(slots=True)
class _Kept:
    """Of one shard: the digests of its chunks, and perhaps the elements; and whether these are."""

    digests: U64
    memory: torch.Tensor | None
    is_known: bool = False
    is_filled: bool = False


@dataclass(slots=True)
class Basis:
    """What one rank has kept of a checkpoint.

    Attributes:
        location: of the checkpoint; empty: of none, or of one half of which is replaced.
        save_id: of the checkpoint.
        is_base: whether what is being written is a link, made from this.
        losses: of each tensor of the link that is not what it was.
        digests: of all chunks of the shards, in order: the base's, until the link's replace them.
        kept: of each shard.
    """

    chunk_elements: int
    location: str = ""
    save_id: str = ""
    is_base: bool = False
    losses: dict[Path, Loss] = field(default_factory=dict)
    digests: U64 = field(default_factory=lambda: np.zeros((0, 2), np.uint64))
    kept: dict[Shard, _Kept] = field(default_factory=dict)

    def begin(
        self,
        shards: Sequence[Shard],
        counts: Sequence[int],
        keeps: Collection[Shard],
        *,
        is_link: bool,
        is_kept: bool,
    ) -> list[Shard]:
        """Make room for what a rank is about to write, and let go of everything else.

        Args:
            counts: chunks of each shard.
            keeps: those whose elements are kept, besides the digests of their chunks.
            is_link: what is written is made from a base.
            is_kept: what is kept is that base.

        Returns:
            Shards whose elements it is made from, and that have to be read: `fill` them.
        """
        before, self.kept = self.kept, {}
        self.location, self.save_id, self.is_base = "", "", is_link
        self.losses = {}
        self.digests, end = np.zeros((sum(counts), 2), np.uint64), 0
        for shard, count in zip(shards, counts, strict=True):
            digests, end = self.digests[end : end + count], end + count
            kept = before.get(shard)
            if kept is None or (kept.memory is None) == (shard in keeps):
                room = (
                    torch.empty(shard.size_bytes, dtype=torch.uint8, device="cpu")
                    if shard in keeps
                    else None
                )
                kept = _Kept(digests, room)
            if not is_kept:
                kept.is_filled = kept.is_known = False
            if kept.is_known:
                digests[:] = kept.digests
            kept.digests = digests
            self.kept[shard] = kept
        return [s for s, k in self.kept.items() if k.memory is not None and not k.is_filled]

    def room(self, shard: Shard) -> torch.Tensor:
        """Return the memory that the elements of the base are to be read into."""
        memory = self.kept[shard].memory
        assert memory is not None  # `begin` has returned this shard
        return memory

    def fill(self, shard: Shard) -> None:
        """Note that they have been."""
        self.kept[shard].is_filled = True

    def forget(self) -> None:
        """Let nothing be a base any more: half of it may be of the link already."""
        self.is_base, self.losses = False, {}
        for kept in self.kept.values():
            kept.is_filled = kept.is_known = False

    def columns(self) -> tuple[U64, Bools, Bools]:
        """Return, of each shard, where it has memory or 0, and whether that and digests are known.

        The shards are those of `begin`, in order.
        """
        every = self.kept.values()
        addresses = [0 if kept.memory is None else kept.memory.data_ptr() for kept in every]
        return (
            np.array(addresses, np.uint64),
            np.array([kept.is_filled for kept in every], np.bool_),
            np.array([kept.is_known for kept in every], np.bool_),
        )

    def address(self, chunk: Chunk) -> int:
        """Return where the base's elements of a chunk are; 0: they are not known."""
        kept = self.kept[chunk.shard]
        if kept.memory is None or not kept.is_filled:
            return 0
        return kept.memory.data_ptr() + self._offset(chunk)

    def digest(self, chunk: Chunk, number: int) -> bytes:
        """Return the digest of the base's elements; empty: it is not known."""
        kept = self.kept[chunk.shard]
        return kept.digests[number].tobytes() if kept.is_known else b""

    def replace(self, chunk: Chunk, number: int, digest: bytes, address: int) -> None:
        """Put the link's elements in the place of the base's."""
        kept = self.kept[chunk.shard]
        kept.digests[number] = np.frombuffer(digest, "<u8")
        if kept.memory is not None:
            copy(kept.memory.data_ptr() + self._offset(chunk), address, chunk.size_bytes)

    def lose(self, path: Path, loss: Loss) -> None:
        """Add what was lost of some elements of a tensor."""
        self.losses[path] = self.losses.get(path, Loss()) + loss

    def _offset(self, chunk: Chunk) -> int:
        return chunk.first * chunk.size_bytes // chunk.elements


# By the directory of a run, and rank: ranks that are threads of one process keep each their own.
# No lock, which a child of fork might inherit locked: each of these is one step of Python's.
_kept: dict[tuple[str, int], Basis] = {}  # the newest last
RUNS_MAX = 4  # a process may write to several runs in turn; each keeps a copy of the weights


def take_basis(run: str, rank: int, chunk_elements: int) -> Basis:
    """Take what is kept of the last checkpoint of a run; `keep_basis` gives it back."""
    found = _kept.pop((run, rank), None)
    return found if found and found.chunk_elements == chunk_elements else Basis(chunk_elements)


def keep_basis(run: str, rank: int, basis: Basis, location: str, save_id: str) -> None:
    """Keep what is written, now committed: it is what the next link is made from."""
    basis.location, basis.save_id = location, save_id
    for kept in basis.kept.values():
        kept.is_filled, kept.is_known = kept.memory is not None, True
    _kept[run, rank] = basis
    if len(_kept) > RUNS_MAX:
        _let_go_of_old()


def last_link(run: str, rank: int) -> str:
    """Return the location of the checkpoint that is kept; empty when there is none."""
    found = _kept.get((run, rank))
    return found.location if found else ""


def _let_go_of_old() -> None:
    runs = dict.fromkeys(run for run, _ in reversed([*_kept]))
    for run, rank in [*_kept]:
        if run in [*runs][RUNS_MAX:]:
            forget_basis(run, rank)


def forget_basis(run: str, rank: int) -> None:
    """Give the memory of a run back, which nothing is written to any more."""
    _kept.pop((run, rank), None)


def forget_bases() -> None:
    """Give all memory back; the next link of each run reads its base."""
    _kept.clear()
