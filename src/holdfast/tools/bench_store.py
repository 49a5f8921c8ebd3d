"""`holdfast bench s3://bucket`: how fast a store saves and loads, with parts of which size.

Saves a state of random bytes under a new name, loads it, and removes it: with each setting once a
round, in another order each time. The size follows from the time there is. Knows no disks.
"""

import random
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from statistics import median
from typing import NamedTuple

import torch

from .. import StoreSettings, __version__, load, save
from ..errors import CorruptError, OptionError, StoreError
from ..format import spec
from ..options import SLOT_BYTES, STREAM_BYTES, Options
from ..stores.url import is_remote, open_store
from .bench_contenders import BLOCK_BYTES, State, make_state
from .bench_report import FINE_SHARE, Document, Figures, fastest
from .progress import Progress
from .text import columns, printable, screen_size, show_bytes, show_count

SCHEMES = ("s3", "az", "gs")
FIRST_BYTES = 64 << 20  # of the trial that shows how long the others may take
SIZE_BYTES_MIN = 32 << 20


class Setting(NamedTuple):
    """What is tried; fields are named as those of `StoreSettings`."""

    part_bytes: int
    parts_in_flight: int

    @property
    def name(self) -> str:
        """Say it on the screen."""
        return f"{self.part_bytes >> 20} MiB x {self.parts_in_flight}"

    @property
    def pool_bytes(self) -> int:
        """Bytes of a pool in which so many parts are in flight while the next is filled."""
        slots = -(-self.part_bytes * self.parts_in_flight // SLOT_BYTES) + 2
        return max(STREAM_BYTES, slots * SLOT_BYTES)


DEFAULT = Setting(16 << 20, 8)
SETTINGS = (
    DEFAULT,
    *(Setting(part << 20, flying) for part in (8, 16) for flying in (4, 16, 32)),
    *(Setting(32 << 20, flying) for flying in (4, 8, 16)),
    *(Setting(64 << 20, flying) for flying in (4, 8)),
)
POOL_BYTES = max(one.pool_bytes for one in SETTINGS)  # of all: the first use of memory is slow


def measures(path: str) -> bool:
    """Return whether a path is a URL of a store, not a directory."""
    return is_remote(path)


def bench_store(url: str, *, gib: float, rounds: int, limit_s: float) -> Document:
    """Measure a bucket, or what is below a prefix in it; what is written is removed, come what may.

    Args:
        gib: size of the state at most, in GiB.
        rounds: how often each setting is measured at most.
        limit_s: when no further trial begins, in seconds.

    Raises:
        OptionError: an invalid argument, or a URL of another kind.
        StoreError: the store failed, or may not be written.
        CorruptError: it gave back other bytes than it took.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.strip("/").partition("/")
    if scheme not in SCHEMES or not bucket or "@" in bucket:
        raise OptionError(
            f"bench cannot measure {url}; expected the URL of a bucket, with one of "
            f"{', '.join(SCHEMES)}, or a directory"
        )
    if rounds < 1 or not limit_s > 0 or not gib > 0:
        raise OptionError(
            f"found --gib {gib:g}, --rounds {rounds}, --seconds {limit_s:g}; expected numbers "
            "above 0"
        )
    name = f"{f'{prefix}/' if prefix else ''}holdfast-bench-{secrets.token_hex(8)}"
    trials = _Trials(f"{scheme}://{bucket}", f"{scheme}://{bucket}/{name}", limit_s)
    measured = trials.measure_all(int(gib * 2**30), rounds)
    machine = f"holdfast {__version__}, torch {torch.__version__}"
    return {"path": url, "bucket": f"{scheme}://{bucket}", "machine": machine, **measured}


class _Trials:
    """Where all settings run: one bucket, one state."""

    def __init__(self, bucket: str, path: str, limit_s: float) -> None:
        self._bucket, self._path = bucket, path
        self._limit_s, self._end_s = limit_s, time.monotonic() + limit_s

    def measure_all(self, bytes_max: int, rounds: int) -> Document:
        """Find the fastest setting; return the findings."""
        first = make_state(min(FIRST_BYTES, _whole(bytes_max)))
        self._measure(DEFAULT, first)  # connects, and touches memory
        took_s = sum(self._measure(DEFAULT, first))
        share_s = self._limit_s / (rounds * len(SETTINGS) + 2)
        size = _whole(min(bytes_max, max(SIZE_BYTES_MIN, int(FIRST_BYTES * share_s / took_s))))
        state, found = make_state(size), {one: Figures(one.name) for one in SETTINGS}
        with Progress("bench", rounds * len(SETTINGS) * 2 * size) as progress:
            for _ in range(rounds):
                for setting in random.sample(SETTINGS, len(SETTINGS)):
                    if time.monotonic() > self._end_s and found[DEFAULT].save_s:
                        continue
                    save_s, load_s = self._measure(setting, state)
                    found[setting].save_s.append(save_s)
                    found[setting].load_s.append(load_s)
                    progress.advance(2 * size)
        return conclude({one: figures for one, figures in found.items() if figures.save_s}, size)

    def _measure(self, setting: Setting, state: State) -> tuple[float, float]:
        """Return the seconds of one save, and of one load of it."""
        store = StoreSettings(self._bucket, **setting._asdict())
        options = Options(pool_bytes=POOL_BYTES, store=store)
        target = {
            name: torch.zeros_like(tensor, dtype=tensor.dtype) for name, tensor in state.items()
        }
        try:
            started = time.perf_counter()
            save(state, self._path, options=options)
            saved = time.perf_counter()
            load(self._path, into=target, options=options)
            loaded = time.perf_counter()
        finally:
            self._remove()
        if not _are_equal(state, target):
            raise CorruptError(f"{self._bucket} gave back other bytes than were saved")
        return saved - started, loaded - saved

    def _remove(self) -> None:
        """Remove what was saved, MANIFEST first; or what is there of it."""
        store = open_store(self._path)
        store.remove(spec.MANIFEST_NAME)
        store.unbar(spec.MANIFEST_NAME)
        with suppress(StoreError):  # nothing is there
            for entry in store.list(spec.DATA_DIRECTORY):
                below = f"{spec.DATA_DIRECTORY}/{entry.name}"
                store.remove_all([f"{below}/{file.name}" for file in store.list(below)])


def _are_equal(state: State, target: State) -> bool:
    bits = ((tensor, target[name]) for name, tensor in state.items())
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in bits)


def _whole(size_bytes: int) -> int:
    return max(1, size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def conclude(found: dict[Setting, Figures], size_bytes: int) -> Document:
    """Compare settings that were measured in the same rounds; say which wins.

    Args:
        size_bytes: moved in each direction.
    """
    best_figures = fastest([*found.values()])
    best = next(one for one, figures in found.items() if figures is best_figures)
    default = found[DEFAULT]
    return {
        "size_bytes": size_bytes,
        "rounds": max(len(figures.save_s) for figures in found.values()),
        "settings": [
            {
                "name": one.name,
                **one._asdict(),
                "default": one == DEFAULT,
                "save_gbps": size_bytes / median(figures.save_s) / 1e9,
                "load_gbps": size_bytes / median(figures.load_s) / 1e9,
                "share": best_figures.both_s / figures.both_s,
                "save_s": figures.save_s,
                "load_s": figures.load_s,
            }
            for one, figures in sorted(found.items(), key=lambda pair: pair[1].both_s)
        ],
        "best": best._asdict() | {"pool_bytes": best.pool_bytes},
        "default_share": best_figures.both_s / default.both_s,
        "default_is_fine": best_figures.both_s / default.both_s >= FINE_SHARE,
    }


def render(document: Document) -> list[str]:
    """Return a document of `bench_store` as lines: where, the table, who wins, how to set it."""
    rows = [("parts in flight", "save GB/s", "load GB/s", "of the best")]
    for setting in document["settings"]:
        name = f"{setting['name']}{' (default)' if setting['default'] else ''}"
        saves, loads = (f"{setting[key]:.2f}" for key in ("save_gbps", "load_gbps"))
        rows.append((name, saves, loads, f"{setting['share']:.0%}"))
    size, rounds = show_bytes(document["size_bytes"]), show_count(document["rounds"], "round")
    return [
        printable(document["path"]),
        printable(document["machine"]),
        f"{size} saved and loaded; medians of {rounds}",
        "",
        *columns(rows, right=(1, 2, 3), width=screen_size()[0]),
        "",
        *_verdict(document),
    ]


def _verdict(document: Document) -> Iterable[str]:
    best, share = document["best"], document["default_share"]
    if document["default_is_fine"]:
        return [f"The default is fine here: it has {share:.0%} of the best speed. Nothing to set."]
    settings = (
        f'StoreSettings("{document["bucket"]}", part_bytes={best["part_bytes"] >> 20} << 20, '
        f"parts_in_flight={best['parts_in_flight']})"
    )
    lines = [f"Fastest: {settings}"]
    if best["pool_bytes"] > STREAM_BYTES:
        lines.append(f"with Options(pool_bytes={best['pool_bytes'] >> 20} << 20, store=...)")
    return [*lines, f"The default has {share:.0%} of that."]
