"""The settings of a save or a load, in one frozen record. Knows nothing but its own bounds."""

import os
from dataclasses import dataclass

from .errors import OptionError, shown

Keys = str | os.PathLike[str] | tuple[str | os.PathLike[str], ...]

SLOT_BYTES = 16 << 20  # holds the largest chunk (2^24 - 1 bytes), page-rounded
STREAM_BYTES = 128 << 20  # eight slots: one fills while the others are on their way


@dataclass(frozen=True, slots=True)
class Options:
    """What rarely needs changing.

    Attributes:
        chunk_elements: elements per chunk, the unit of checksum and ranged read; 1 to 2^20.
        file_bytes: a data file that would grow past this goes on in the next; at most 255 GiB.
        pool_bytes: host memory that a save or load passes through, at least two slots of 16 MiB;
            default: 128 MiB to stream, and for `save_async` what this rank's share of the state
            takes.
        block_bytes: size of one write or read; a multiple of 4 KiB.
        queue_depth: writes or reads in flight.
        io: "auto" probes, and a save or load takes files of less than one block through the page
            cache; or one of "io_uring", "direct", "buffered" for all files.
        writers: who writes what several ranks hold. "rank": all of them, in equal shares; "node":
            the lowest rank of each host; a number: so many ranks at most, evenly spread. Fewer
            writers make fewer and larger files. What none of these ranks holds is written by those
            that do.
        trust: Ed25519 public keys, as files or as OpenSSH's lines: `load`, `open` and restores take
            only what one of them has signed (SECURITY.md). None: whatever is whole.
    """

    chunk_elements: int = 1 << 20
    file_bytes: int = 255 << 30
    pool_bytes: int | None = None
    block_bytes: int = 2 << 20
    queue_depth: int = 16
    io: str = "auto"
    writers: str | int = "rank"
    trust: Keys | None = None

    def __post_init__(self) -> None:
        """Reject what cannot be."""
        _within("chunk_elements", self.chunk_elements, 1, 1 << 20)
        _within("file_bytes", self.file_bytes, 1 << 16, 255 << 30)
        if self.pool_bytes is not None:
            _within("pool_bytes", self.pool_bytes, 2 * SLOT_BYTES, 1 << 50)
        _within("block_bytes", self.block_bytes, 4096, SLOT_BYTES)
        _within("queue_depth", self.queue_depth, 1, 1024)
        if self.block_bytes % 4096:
            raise OptionError(f"block_bytes is {self.block_bytes}; it must be a multiple of 4096")
        if self.io not in ("auto", "io_uring", "direct", "buffered"):
            raise OptionError(
                f"io is {shown(self.io)}; there are auto, io_uring, direct and buffered"
            )
        if self.writers not in ("rank", "node") and not _is_count(self.writers):
            raise OptionError(
                f"writers is {shown(self.writers)}; there are 'rank', 'node' and numbers of ranks "
                "from 1"
            )
        if self.trust is not None:
            _check_keys(self.trust)


def options_of(given: Options | None) -> Options:
    """Return the options that a verb was given, or the defaults.

    Raises:
        OptionError: it was given something else.
    """
    if given is None:
        return _DEFAULT
    if not isinstance(given, Options):
        raise OptionError(
            f'options is {shown(given)}; expected a holdfast.Options, such as Options(io="direct")'
        )
    return given


def _check_keys(trust: Keys) -> None:
    keys = trust if isinstance(trust, tuple) else (trust,)
    named = [isinstance(key, (str, os.PathLike)) and os.fspath(key) != "" for key in keys]
    # An empty setting must not read as "trust everybody".
    if not (named and all(named)):
        raise OptionError(
            f"trust is {shown(trust)}; expected a public key's file or line, or a tuple of them, "
            "or None to load what nobody has signed"
        )


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _within(name: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise OptionError(f"{name} is {shown(value)}; it must be an integer from {low} to {high}")


_DEFAULT = Options()
