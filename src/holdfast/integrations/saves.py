"""The saves of a framework's training loop, one after the other, and the deletions between them.

A framework asks for a save, and in its next call deletes an older checkpoint. Here the deletion
waits until the save is durable. A checkpoint may be published under its own name only when it is
whole (`place_for`), for frameworks that take any directory for a checkpoint. Imports no framework.
"""

import contextlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from typing import Any

from ..engine.registry import find_codec
from ..errors import HoldfastError, OptionError, PeerError, StoreError, shown
from ..group.base import COORDINATOR
from ..group.phase import find_group
from ..options import Options, options_of
from ..saving.handle import SaveHandle
from ..saving.save import save
from ..stores.url import absolute
from .adapter import delete, finish_deletion, is_committed
from .begin import STAGES, begin

logger = logging.getLogger("holdfast")

_NEW, _OLD = ".new", ".old"


class Saves:
    """Saves of one loop. All ranks of the group call `save` and `wait` together.

    A save in the background that the disk or another rank fails is logged as an error, and training
    goes on; what was to be deleted after it stays until a later save is durable. `close` raises the
    error of the last save, if that failed. With ``stage="sync"`` each error is raised at once.

    Args:
        stage: "eager" or "lazy", as for `holdfast.save_async`; "sync" waits until it is durable.
        codec: as for `holdfast.save`; none of chains of deltas.
        group: as for `holdfast.save`.

    Raises:
        OptionError: an invalid stage or codec.
    """

    def __init__(
        self, *, stage: str = "eager", codec: Any = "raw", options: Any = None, group: Any = None
    ) -> None:
        if stage not in STAGES:
            raise OptionError(f"stage is {shown(stage)}; expected one of {', '.join(STAGES)}")
        if find_codec(codec).every > 1:
            raise OptionError(
                f"codec is {shown(codec)}, which makes each checkpoint from the one before it. The "
                "framework chooses names and deletes checkpoints by itself; expected a codec "
                'without a base, such as "raw" or "lossless"'
            )
        self.stage, self._codec, self._group = stage, codec, group
        self._options: Options = options_of(options)
        self._flight: SaveHandle | None = None
        self._failure: BaseException | None = None  # of the last save
        self._leaving: list[str] = []  # what goes when a save is durable
        self._lock = threading.Lock()  # of the list: a save's thread takes from it
        self._swept: set[str] = set()

    def place_for(self, path: "str | os.PathLike[str]") -> str:
        """Return the directory to save to, so that ``path`` only ever is a whole checkpoint.

        One rank asks, and tells the others. A committed checkpoint is replaced in its place.
        """
        final = absolute(path)
        parent, name = os.path.split(final)
        if parent not in self._swept:
            self._swept.add(parent)
            _sweep(parent)
        is_there = is_committed(final) and not os.path.islink(final)
        return final if is_there else os.path.join(parent, f".{name}{_NEW}")

    def save(
        self,
        state: Mapping[Any, Any],
        path: "str | os.PathLike[str]",
        *,
        place: str | None = None,
        step: int | None = None,
        now: bool = False,
    ) -> SaveHandle | None:
        """Save after the save in flight; return its handle, if it goes on in the background.

        Args:
            place: from `place_for`: where it is saved before it gets its path.
            now: wait until it is durable, and raise what it fails with.
        """
        self.wait()
        final, place = absolute(path), place or absolute(path)
        with self._lock:
            self._leaving = [other for other in self._leaving if other != final]
        ranks = find_group(self._group, writing=True)
        is_first, now = ranks.rank == COORDINATOR, now or self.stage == "sync"
        how: dict[str, Any] = {"step": step, "codec": self._codec, "options": self._options}

        def after(_: object) -> None:
            if is_first:
                self._conclude(place, final)

        self._failure = None
        try:
            if now:
                save(state, place, replace=True, group=self._group, **how)
                after(None)
            else:
                self._flight = begin(state, place, ranks, stage=self.stage, after=after, **how)
        except (StoreError, PeerError) as error:
            self._failure = error
            if now:
                raise
            logger.error("saving %s failed, and training goes on: %s", final, error)
        return self._flight

    def delete(self, path: "str | os.PathLike[str]") -> None:
        """Delete a checkpoint of any format, when what was saved before is durable. One rank asks.

        Raises:
            StoreError: it cannot be deleted; only if nothing had to be waited for.
        """
        name = absolute(path)
        with self._lock:
            flight = self._flight
            is_early = self._failure is not None or (flight is not None and not _is_durable(flight))
            if is_early or _is_linked(name):
                self._leaving += [name] if name not in self._leaving else []
                return
        _remove(name)

    def link(self, path: "str | os.PathLike[str]", name: "str | os.PathLike[str]") -> None:
        """Lead a link to a checkpoint in one step, when it is durable. One rank asks, after `wait`.

        After a failed save the link stays as it is, which is logged.
        """
        final, name = absolute(path), absolute(name)
        if final == name:
            return
        with _logging(f"linking {name} to {final}"):
            if not is_committed(final):
                raise StoreError(f"{final} is not saved, so {name} does not lead there")
            _link(final, name)
        if self._failure is None:
            self._delete_waiting(even_linked=True)

    def wait(self) -> None:
        """Wait until the save in flight has ended, well or not."""
        if self._flight is not None:
            self._failure = self._flight.exception()
            self._flight = None
        if self._failure is None:
            self._delete_waiting()

    def close(self) -> None:
        """Wait; raise the error of the last save, unless another exception is on its way.

        Raises:
            HoldfastError: the last save failed.
        """
        self.wait()
        if self._failure is None:
            self._delete_waiting(even_linked=True)
        failure, self._failure = self._failure, None
        if failure is not None and sys.exc_info()[0] is None:
            raise failure

    def _conclude(self, place: str, final: str) -> None:
        """Give a committed checkpoint its path, and delete what has waited for it."""
        if place != final:
            _publish(place, final)
        self._delete_waiting()

    def _delete_waiting(self, *, even_linked: bool = False) -> None:
        with self._lock:
            leaving, self._leaving = self._leaving, []
            if not even_linked:  # a link to it is about to be moved: it must lead somewhere
                self._leaving = [name for name in leaving if _is_linked(name)]
                leaving = [name for name in leaving if name not in self._leaving]
        for name in leaving:
            with _logging(f"deleting {name}"):
                _remove(name)


def _is_durable(flight: SaveHandle) -> bool:
    return flight.done() and flight.failure is None


def _is_linked(name: str) -> bool:
    """Return whether a link beside a checkpoint leads to it."""
    parent = os.path.dirname(name)
    if os.path.islink(name):
        return False
    try:
        links = [entry.path for entry in os.scandir(parent) if entry.is_symlink()]
    except OSError:
        return False
    return any(os.path.realpath(link) == os.path.realpath(name) for link in links)


def _link(final: str, name: str) -> None:
    """Make a link, or move it, in one step: at no moment does it lead nowhere.

    Raises:
        HoldfastError: it cannot be made.
    """
    parent, base = os.path.split(name)
    pending = os.path.join(parent, f".{base}{_NEW}")
    if os.path.lexists(pending):
        _remove(pending)
    try:
        os.symlink(os.path.relpath(final, parent), pending)
        if os.path.isdir(name) and not os.path.islink(name):
            _remove(name)
        os.replace(pending, name)
    except OSError as error:
        failure = StoreError(f"symlink {name} to {final}: {error.strerror}")
        failure.errno = error.errno
        raise failure from error


def _publish(place: str, final: str) -> None:
    """Rename a committed checkpoint to its path; what is there already is moved away first."""
    parent, name = os.path.split(final)
    old = os.path.join(parent, f".{name}{_OLD}")
    is_there = os.path.lexists(final)
    try:
        if is_there:
            os.rename(final, old)
        os.rename(place, final)
        directory = os.open(parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        failure = StoreError(
            f"rename {place} to {final}: {error.strerror}. The checkpoint is whole"
        )
        failure.errno = error.errno
        raise failure from error
    if is_there:
        with _logging(f"deleting {old}"):
            _remove(old)


def _remove(name: str) -> None:
    """Delete what a framework takes for a checkpoint: ours first its MANIFEST, durably."""
    if is_committed(name) and not os.path.islink(name):
        delete(name)
        return
    try:
        if os.path.isdir(name) and not os.path.islink(name):
            shutil.rmtree(name)
        else:
            os.remove(name)
    except FileNotFoundError:
        return
    except OSError as error:
        failure = StoreError(f"delete {name}: {error.strerror}")
        failure.errno = error.errno
        raise failure from error


def _sweep(parent: str) -> None:
    """Finish or delete what saves of a dead job have left under names of their own."""
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(parent)):  # .new before .old
            path, (final, ending) = os.path.join(parent, name), os.path.splitext(name)
            with _logging(f"tidying {path}"):
                finish_deletion(path)
            if not name.startswith(".") or ending not in (_NEW, _OLD):
                continue
            with _logging(f"tidying {path}"):
                final = os.path.join(parent, final.removeprefix("."))
                if not os.path.lexists(final) and (ending == _OLD or is_committed(path)):
                    os.rename(path, final)
                else:
                    _remove(path)


@contextlib.contextmanager
def _logging(what: str) -> Any:
    """Log an error of ours: the checkpoint it follows is committed."""
    try:
        yield
    except HoldfastError as error:
        logger.warning("%s failed: %s", what, error)
