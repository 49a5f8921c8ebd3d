"""The settings of a save or a load, in one frozen record. Knows nothing but its own bounds."""

import os
from dataclasses import dataclass

from .brief import brief
from .errors import OptionError, shown
from .store_settings import StoreSettings

Keys = str | os.PathLike[str] | tuple[str | os.PathLike[str], ...]

SLOT_BYTES = 16 << 20  # holds the largest chunk (2^24 - 1 bytes), page-rounded
STREAM_BYTES = 128 << 20  # eight slots: one fills while the others are on their way


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a save or a load that rarely need to change.

    Attributes:
        chunk_elements: elements per chunk, from 1 to 2^20. Each chunk has a checksum, and is the
            smallest part that a load reads.
        file_bytes: largest size of a data file, at most 255 GiB. Further data goes to another file.
        pool_bytes: host memory that the data of a save or load passes through, at least 32 MiB.
            Default: 128 MiB; for `save_async`, the size of this rank's share of the state.
        block_bytes: size of one write or read; a multiple of 4 KiB.
        queue_depth: number of writes or reads in flight.
        io: "auto" tests what the file system supports, and uses the page cache for small files
            (docs/saving-inside.md says for which). "io_uring", "direct" and "buffered" hold for
            all files.
        writers: which ranks write a tensor that several ranks hold. "rank": all of them, in equal
            shares. "node": the lowest rank of each host. A number: at most so many ranks, evenly
            spread. Fewer writers make fewer and larger files. A tensor held by no rank in this set
            is written by the ranks that hold it.
        trust: Ed25519 public keys, as files or as OpenSSH lines. `load`, `open` and `restore` then
            accept only checkpoints signed by one of these keys (SECURITY.md). None: unsigned
            checkpoints are accepted too.
        deadline_s: seconds until a background save that is not committed fails on all ranks; the
            smallest value of any rank counts. In an object store, no request of a save takes
            longer either.
        store: settings of a bucket, or a tuple of these for several: `StoreSettings`. None: the
            environment has them.

    Raises:
        OptionError: an invalid option.

    Example:
        ``holdfast.load("runs/a/step-00001000", into=state, options=holdfast.Options(io="direct"))``
    """

    chunk_elements: int = 1 << 20
    file_bytes: int = 255 << 30
    pool_bytes: int | None = None
    block_bytes: int = 2 << 20
    queue_depth: int = 16
    io: str = "auto"
    writers: str | int = "rank"
    trust: Keys | None = None
    deadline_s: float = 1800.0
    store: StoreSettings | tuple[StoreSettings, ...] | None = None

    __repr__ = brief

    def __post_init__(self) -> None:
        """Reject invalid options."""
        _within("chunk_elements", self.chunk_elements, 1, 1 << 20)
        _within("file_bytes", self.file_bytes, 1 << 16, 255 << 30)
        if self.pool_bytes is not None:
            _within("pool_bytes", self.pool_bytes, 2 * SLOT_BYTES, 1 << 50)
        _within("block_bytes", self.block_bytes, 4096, SLOT_BYTES)
        _within("queue_depth", self.queue_depth, 1, 1024)
        if self.block_bytes % 4096:
            raise OptionError(f"block_bytes is {self.block_bytes}; expected a multiple of 4096")
        if self.io not in ("auto", "io_uring", "direct", "buffered"):
            raise OptionError(
                f"io is {shown(self.io)}; expected one of auto, io_uring, direct, buffered"
            )
        if self.writers not in ("rank", "node") and not _is_count(self.writers):
            raise OptionError(
                f"writers is {shown(self.writers)}; expected 'rank', 'node' or a number of ranks "
                "from 1"
            )
        limit = self.deadline_s
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
            raise OptionError(f"deadline_s is {shown(limit)}; expected a number of seconds above 0")
        if self.trust is not None:
            _check_keys(self.trust)
        if not all(isinstance(settings, StoreSettings) for settings in _settings_of(self)):
            raise OptionError(
                "store is no holdfast.StoreSettings, nor a tuple of these; expected one, such as "
                'StoreSettings("s3://bucket", region="eu-west-1")'
            )


def options_of(given: Options | None) -> Options:
    """Return the options that a verb was given, or `DEFAULTS`; use their settings of stores.

    Raises:
        OptionError: it was given something else, or settings that cannot hold.
    """
    if given is None:
        return DEFAULTS
    if not isinstance(given, Options):
        raise OptionError(
            f'options is {shown(given)}; expected a holdfast.Options, such as Options(io="direct")'
        )
    for settings in _settings_of(given):
        settings.use()
    return given


def _settings_of(options: Options) -> tuple[StoreSettings, ...]:
    if isinstance(options.store, tuple):
        return options.store
    return () if options.store is None else (options.store,)


def _check_keys(trust: Keys) -> None:
    keys = trust if isinstance(trust, tuple) else (trust,)
    named = [isinstance(key, (str, os.PathLike)) and os.fspath(key) != "" for key in keys]
    # An empty setting must not read as "trust everybody".
    if not (named and all(named)):
        raise OptionError(
            f"trust is {shown(trust)}; expected the file or line of a public key, or a tuple of "
            "these. None accepts unsigned checkpoints"
        )


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _within(name: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise OptionError(f"{name} is {shown(value)}; expected an integer from {low} to {high}")


DEFAULTS = Options()
