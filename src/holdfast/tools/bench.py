"""`holdfast bench`: how fast the disk under a directory saves and loads, and with which settings.

holdfast's writer and reader run beside plain system calls and fio, in rounds, in another order each
time. First its backends by themselves; then blocks and depths of the fastest, and everybody else.
"""

import math
import os
import platform
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from .. import __version__
from ..errors import OptionError, StoreError
from ..options import Options
from ..stores.url import absolute
from .bench_contenders import (
    BACKENDS,
    BLOCK_BYTES,
    FIO_SETTINGS,
    Contender,
    Fio,
    Holdfast,
    Plain,
    fio_is_installed,
    grid,
    make_state,
)
from .bench_disk import (
    available_bytes,
    check_room,
    describe,
    failure,
    forget,
    remove,
    scratch_in,
    settle,
    touch_free_memory,
)
from .bench_report import Document, Figures, conclude, fastest
from .progress import Progress


def bench(path: str | os.PathLike[str], *, gib: float, rounds: int) -> Document:
    """Measure the disk of the directory ``path``; what is written there is removed, come what may.

    Args:
        gib: size of the state that is saved and loaded, in GiB.
        rounds: how often each setting is measured.

    Raises:
        OptionError: there is no such directory, no such size, or no room for it.
        StoreError: the disk failed, or may not be written.
        CorruptError: the disk gave back other bytes than it took.
    """
    directory, size_bytes = _directory(path), _size_bytes(gib)
    if rounds < 1:
        raise OptionError(f"--rounds is {rounds}; expected 1 or more")
    free_bytes = shutil.disk_usage(directory).free
    check_room(directory, size_bytes, free_bytes=free_bytes, memory_bytes=available_bytes())
    try:
        with scratch_in(directory) as scratch:
            measured = _Track(scratch, size_bytes).measure_all(rounds)
    except OSError as error:
        raise failure(f"measure in {directory}", error) from error
    return {
        "path": str(directory),
        "disk": describe(directory),
        "machine": f"{len(os.sched_getaffinity(0))} cores, Linux {platform.release()}, "
        f"holdfast {__version__}, torch {torch.__version__}",
        "size_bytes": size_bytes,
        "rounds": rounds,
        **measured,
    }


def _directory(path: str | os.PathLike[str]) -> Path:
    directory = Path(absolute(path))
    try:
        is_there, is_directory = directory.exists(), directory.is_dir()
    except OSError as error:
        raise failure(f"stat {directory}", error) from error
    if not is_directory:
        what = "is not a directory" if is_there else "does not exist"
        raise OptionError(f"{directory} {what}; expected a directory on the disk to measure")
    return directory


def _size_bytes(gib: float) -> int:
    if not 0 < gib < math.inf:
        raise OptionError(f"--gib is {gib:g}; expected a size in GiB, such as 1 or 0.5")
    return math.ceil(gib * 2**30 / BLOCK_BYTES) * BLOCK_BYTES


class _Track:
    """Where contenders run: one directory, one state, everybody under the same conditions."""

    def __init__(self, scratch: Path, size_bytes: int) -> None:
        self._path = scratch / "state"
        self._state = make_state(size_bytes)
        self._size_bytes = size_bytes
        self._skipped: dict[str, str] = {}

    def measure_all(self, rounds: int) -> Document:
        """Find the fastest backend, then the fastest setting; return the findings."""
        backends, others = self._backends(), self._others()
        # The first save and load touch memory, and blocks of the disk, that the others find ready.
        self._measure(backends[0])
        best = backends[0].options
        if len(backends) > 1:
            qualified = fastest(self._rounds("backends", backends, rounds))
            best = qualified.options or best
        losers = [one for one in backends if one.options != best]
        finalists = [*grid(best.io), *losers, *others]
        figures = self._rounds("settings", finalists, rounds)
        found = conclude(figures, backends[0].options, self._size_bytes)
        return {**found, "skipped": self._skipped}

    def _backends(self) -> list[Holdfast]:
        """Return holdfast with each backend that works here, otherwise as it is by default."""
        every = {io: Holdfast(Options(io=io)) for io in BACKENDS}
        works = [one for io, one in every.items() if self._works(one, f"holdfast {io}")]
        if not works:
            raise StoreError(next(iter(reversed(self._skipped.values()))))
        return works

    def _others(self) -> list[Contender]:
        plain = [one for one in (Plain(True), Plain(False)) if self._works(one, one.name)]
        fio = [Fio(*setting) for setting in FIO_SETTINGS]
        if not fio_is_installed():
            self._skipped["fio"] = "not installed"
            return [*plain]
        return [*plain, *fio] if self._works(fio[0], "fio") else [*plain]

    def _works(self, contender: Contender, name: str) -> bool:
        """Whether it can save and load a little here; otherwise note why not."""
        little = make_state(BLOCK_BYTES)
        try:
            contender.save(self._path, little)
            contender.load(self._path, little)
        except StoreError as error:
            self._skipped[name] = str(error)
        except OSError as error:
            self._skipped[name] = error.strerror or str(error)
        finally:
            remove(self._path)
        return name not in self._skipped

    def _rounds(self, what: str, contenders: Sequence[Contender], rounds: int) -> list[Figures]:
        """Measure each once a round, in another order each time."""
        found = [
            (one, Figures(one.name, one.options if isinstance(one, Holdfast) else None))
            for one in contenders
        ]
        moved_bytes = 2 * self._size_bytes
        with Progress(f"bench: {what}", rounds * len(found) * moved_bytes) as progress:
            for _ in range(rounds):
                for contender, figures in random.sample(found, len(found)):
                    save_s, load_s = self._measure(contender)
                    figures.save_s.append(save_s)
                    figures.load_s.append(load_s)
                    progress.advance(moved_bytes)
        return [figures for _, figures in found]

    def _measure(self, contender: Contender) -> tuple[float, float]:
        """Return the seconds of one durable save, and of one load of it from the disk."""
        remove(self._path)
        settle()
        if contender.cached:
            touch_free_memory(self._size_bytes)
        save_s = contender.save(self._path, self._state)
        forget(self._path)
        if contender.cached:
            touch_free_memory(self._size_bytes)
        return save_s, contender.load(self._path, self._state)
