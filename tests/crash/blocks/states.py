"""What a power cut may leave of a disk with a volatile cache.

All writes before the last flush are there. Of those after it each is there, or not, or in part, and
where two overlap either may have come last. Nothing else is known of the file system.
"""

import bisect
import hashlib
import os
import random
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .write_log import Entry

Write = tuple[int, bytes]  # offset, data
STEP_BYTES = 1 << 20  # read, compared and written at once
PAGE_BYTES = 4096
AFTER_MARK = 8  # writes; a good part of what comes before the next flush


@dataclass(frozen=True, slots=True)
class Cut:
    """A power cut after so many entries of a log, and what it left of the volatile ones."""

    position: int
    kind: str
    kept: tuple[Write, ...]


def position_of(entries: Sequence[Entry], end: int) -> int:
    """Return how many entries lie within the first ``end`` bytes of their log."""
    return bisect.bisect_right(entries, end, key=lambda entry: entry.end)


def choose_cuts(
    entries: Sequence[Entry], begin: int, marks: Sequence[int], count: int, rng: random.Random
) -> list[int]:
    """Choose positions, ascending: every mark, then others where something is volatile.

    A third of those come soon after a mark.

    Args:
        begin: no cut comes before this position.
        marks: positions that matter most, where something was acknowledged.
    """
    volatile = [at for at in range(begin + 1, len(entries) + 1) if entries[at - 1].data]
    cuts = list(marks[:count])
    while volatile and len(cuts) < count:
        first = 0
        if marks and rng.random() < 1 / 3:
            first = bisect.bisect_left(volatile, rng.choice(marks))
        chosen = volatile[first : first + AFTER_MARK] if first else volatile
        cuts += [rng.choice(chosen)] if chosen else []
    return sorted(cuts)


def flushed_before(entries: Sequence[Entry], position: int) -> int:
    """Return the position after the last flush before a position."""
    while position and entries[position - 1].data is not None:
        position -= 1
    return position


def choose_kept(
    volatile: Sequence[Write], atomic: int, rng: random.Random
) -> tuple[str, tuple[Write, ...]]:
    """Choose what is kept of volatile writes, and say how."""
    if not volatile:
        return "none there", ()
    kind = rng.choice(_KINDS)
    return kind, tuple(_CHOOSE[kind](list(volatile), atomic, rng))


def _nothing(writes: list[Write], atomic: int, rng: random.Random) -> Iterable[Write]:
    return ()


def _everything(writes: list[Write], atomic: int, rng: random.Random) -> Iterable[Write]:
    return writes


def _all_but_one(writes: list[Write], atomic: int, rng: random.Random) -> Iterable[Write]:
    del writes[rng.randrange(len(writes))]
    return writes


def _only_one(writes: list[Write], atomic: int, rng: random.Random) -> Iterable[Write]:
    return [rng.choice(writes)]


def _dropped(writes: list[Write], atomic: int, rng: random.Random) -> Iterable[Write]:
    share = rng.choice((0.1, 0.5, 0.9))
    return [write for write in writes if rng.random() < share]


def _reordered(writes: list[Write], atomic: int, rng: random.Random) -> Iterable[Write]:
    kept = list(_dropped(writes, atomic, rng))
    rng.shuffle(kept)
    return kept


def _torn(writes: list[Write], atomic: int, rng: random.Random) -> Iterator[Write]:
    for offset, data in _dropped(writes, atomic, rng):
        parts = range(0, len(data), atomic)
        first, last = sorted((rng.randint(0, len(parts)), rng.randint(0, len(parts))))
        holds = rng.choice(
            (
                lambda n, last=last: n < last,
                lambda n, first=first: n >= first,
                lambda n: rng.random() < 0.5,
                lambda n: True,
            )
        )
        for number, at in enumerate(parts):
            if holds(number):
                yield offset + at, data[at : at + atomic]


Choose = Callable[[list[Write], int, random.Random], Iterable[Write]]
_CHOOSE: dict[str, Choose] = {
    "nothing": _nothing,
    "everything": _everything,
    "all but one": _all_but_one,
    "only one": _only_one,
    "dropped": _dropped,
    "reordered": _reordered,
    "torn": _torn,
}
_KINDS = ("nothing", "everything", "all but one", "only one") + 2 * ("dropped", "reordered", "torn")


class Replay:
    """An image that is turned into one crash state after another, forwards through a log.

    What a mount changes in it is undone by comparing it with what is durable.

    Attributes:
        image: the file; sparse, of the size of the disk.
    """

    def __init__(self, base: Path, entries: Sequence[Entry], image: Path) -> None:
        subprocess.run(["cp", "--sparse=always", base, image], check=True)
        self.image, self._entries, self._done = image, entries, 0
        self._file = os.open(image, os.O_RDWR)
        self._durable = np.zeros(os.fstat(self._file).st_size, np.uint8)
        self._buffer = np.empty(STEP_BYTES, np.uint8)
        for begin, end in self._extents():
            os.preadv(self._file, [self._durable[begin:end]], begin)

    def close(self) -> None:
        """Remove the image."""
        os.close(self._file)
        self.image.unlink()

    def states(
        self, positions: Iterable[int], atomic: int, rng: random.Random
    ) -> Iterator[tuple[Cut, bytes]]:
        """Make the image a crash state at each position, ascending; yield it and a digest of it."""
        for position in positions:
            flushed = flushed_before(self._entries, position)
            self._advance(flushed)
            volatile = [(e.offset, e.data) for e in self._entries[flushed:position] if e.data]
            kind, kept = choose_kept(volatile, atomic, rng)
            self._put(kept)
            yield Cut(position, kind, kept), self._digest(kept)

    def _advance(self, flushed: int) -> None:
        for entry in self._entries[self._done : flushed]:
            if entry.data:
                part = self._durable[entry.offset : entry.offset + len(entry.data)]
                part[:] = np.frombuffer(entry.data, np.uint8)
                # Where the durable bytes are not zero, the image has an extent: `_put` looks there.
                os.pwrite(self._file, entry.data, entry.offset)
        self._done = max(self._done, flushed)

    def _put(self, kept: Iterable[Write]) -> None:
        for begin, end in self._extents():
            for at in range(begin, end, STEP_BYTES):
                self._restore(at, min(at + STEP_BYTES, end))
        for offset, data in kept:
            os.pwrite(self._file, data, offset)

    def _restore(self, begin: int, end: int) -> None:
        found, wanted = self._buffer[: end - begin], self._durable[begin:end]
        os.preadv(self._file, [found], begin)
        if np.array_equal(found, wanted):
            return
        pages = (found != wanted).reshape(-1, PAGE_BYTES).any(1)
        for page in np.flatnonzero(pages).tolist():
            at = begin + page * PAGE_BYTES
            os.pwrite(self._file, self._durable[at : at + PAGE_BYTES], at)

    def _extents(self) -> Iterator[tuple[int, int]]:
        at, size = 0, os.fstat(self._file).st_size
        while at < size:
            try:
                begin = os.lseek(self._file, at, os.SEEK_DATA)
            except OSError:  # nothing but a hole is left
                return
            at = os.lseek(self._file, begin, os.SEEK_HOLE)
            yield begin, at

    def _digest(self, kept: Iterable[Write]) -> bytes:
        """Tell states of one log apart: by what is durable, and what differs from that."""
        found = hashlib.blake2b(self._done.to_bytes(8, "little"), digest_size=16)
        pages = {
            page
            for offset, data in kept
            for page in range(offset // PAGE_BYTES, -(-(offset + len(data)) // PAGE_BYTES))
        }
        for page in sorted(pages):
            at = page * PAGE_BYTES
            data = os.pread(self._file, PAGE_BYTES, at)
            if data != self._durable[at : at + PAGE_BYTES].tobytes():
                found.update(at.to_bytes(8, "little") + data)
        return found.digest()
