"""``holdfast://`` paths for fsspec: list, read and delete checkpoints. See docs/fsspec.md.

A checkpoint is there from its commit to its deletion, never in part. Knows stores, no tensors.
"""

import contextlib
import io
import os
from collections.abc import Iterator
from typing import IO, Any

from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped]

from ..engine.epochs import check_epoch, held
from ..engine.marker import is_marker
from ..engine.retire import is_pending, leaving, retire
from ..errors import NotCommittedError, OptionError, StoreError
from ..format.names import (
    DCP_METADATA_NAME,
    LATEST_BYTES_MAX,
    LATEST_NAME,
    is_save_id,
    step_of,
)
from ..format.spec import DATA_DIRECTORY, MANIFEST_NAME, MARKER
from ..stores.base import Store, list_if_there
from ..stores.url import SCHEME, absolute, open_store
from .adapter import check_no_base
from .dcp.word import NAME as WORD_NAME

Info = dict[str, Any]


class NotThereError(NotCommittedError, FileNotFoundError):
    """Nothing committed has this path; also the built-in error that fsspec's callers catch."""


class HoldfastFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The file system of ``holdfast://`` paths, which ``fsspec.filesystem("holdfast")`` returns.

    It shows committed checkpoints, and the directories and files around them. What is being saved
    or deleted, and what a dead save left, is not there. Only `holdfast.save`, a `Checkpointer` and
    DCP's calls write. ``rm`` deletes whole checkpoints.

    Raises:
        NotThereError: nothing committed has the path; it is a FileNotFoundError too.
        OptionError: an invalid path, or a call that would write.
        StoreError: the disk or the network failed; no method takes that for "not there".

    Example::

        fs = fsspec.filesystem("holdfast")
        steps = fs.ls("holdfast://runs/a", detail=False)
        committed = fs.isfile("holdfast://runs/a/step-00001000/MANIFEST")
        fs.rm("holdfast://runs/a/step-00001000", recursive=True)
    """

    protocol = "holdfast"
    root_marker = "/"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """Return the path from the root: ``holdfast://a`` begins in the working directory."""
        if isinstance(path, (list, tuple)):
            return [cls._strip_protocol(item) for item in path]
        name = os.fspath(path) if isinstance(path, os.PathLike) else path
        return absolute(name.removeprefix(SCHEME) if isinstance(name, str) else name)

    def info(self, path: Any, **_: Any) -> Info:
        """Return name, size and type ("file" or "directory") of what is there."""
        name = self._strip_protocol(path)
        return _info(name, _checkpoint_at(name))

    def ls(self, path: Any, detail: bool = True, **_: Any) -> list[Any]:
        """List a directory: of a run, its committed steps."""
        name = self._strip_protocol(path)
        checkpoint = _checkpoint_at(name)
        found = [top := _info(name, checkpoint)]
        if top["type"] == "directory":
            with _errors_of(name):
                names = {os.path.join(name, entry) for entry in os.listdir(name)}
            if name == checkpoint:
                names.add(os.path.join(name, DCP_METADATA_NAME))
            found = [*_entries(sorted(names), checkpoint)]
        return found if detail else [item["name"] for item in found]

    def exists(self, path: Any, **_: Any) -> bool:
        """Return whether something is there."""
        return bool(self._type_of(path))

    def isfile(self, path: Any) -> bool:
        """Return whether it is a file: MANIFEST and .metadata are in every committed checkpoint."""
        return self._type_of(path) == "file"

    def isdir(self, path: Any) -> bool:
        """Return whether it is a directory, such as a committed checkpoint."""
        return self._type_of(path) == "directory"

    def _type_of(self, path: Any) -> str:
        try:
            return str(self.info(path)["type"])
        except NotThereError:
            return ""

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete checkpoints: MANIFEST first, durably, and the data after it.

        Args:
            path: directory of a checkpoint, several of them, or a pattern such as ``step-*``.
            recursive: has to be True, as for other directories.
            maxdepth: has no meaning here.

        Raises:
            AlreadyCommittedError: a delta checkpoint is made from it.
            FencedError: this process is of an older job of the run.
            OptionError: it is no checkpoint.
        """
        for name in reversed(self.expand_path(path)):  # the newest first: bases are older
            _delete(name, recursive=recursive)

    def rm_file(self, path: Any) -> None:
        """Refuse: only whole checkpoints are deleted."""
        _delete(self._strip_protocol(path), recursive=False)

    def rmdir(self, path: Any) -> None:
        """Refuse: only whole checkpoints are deleted."""
        _delete(self._strip_protocol(path), recursive=False)

    def mkdir(self, path: Any, create_parents: bool = True, **_: Any) -> None:
        """Do nothing: a save makes its directories."""

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """Do nothing: a save makes its directories."""

    def touch(self, path: Any, truncate: bool = True, **_: Any) -> None:
        """Refuse: only saves write."""
        raise _refusal(self._strip_protocol(path))

    def cp_file(self, path1: Any, path2: Any, **_: Any) -> None:
        """Refuse: only saves write."""
        raise _refusal(self._strip_protocol(path2))

    def mv(self, path1: Any, path2: Any, **_: Any) -> None:
        """Refuse: only saves write."""
        raise _refusal(self._strip_protocol(path2))

    def _open(self, path: Any, mode: str = "rb", *_: Any, **__: Any) -> IO[bytes]:
        if mode != "rb":
            raise _refusal(path)
        found = self.info(path)
        if found["type"] != "file":
            raise OptionError(f"{path} is a directory; expected a file in it")
        try:
            with _errors_of(path):
                return open(path, "rb")
        except NotThereError:
            if os.path.basename(path) != DCP_METADATA_NAME:
                raise
            return io.BytesIO(MARKER)


def _info(name: str, checkpoint: str) -> Info:
    """Describe what is at a path.

    Args:
        checkpoint: that it is, or is in, or empty.

    Raises:
        NotThereError: nothing that is shown.
    """
    above, last = os.path.split(name)
    if last == DCP_METADATA_NAME and above != checkpoint:
        raise _not_there(name)  # of a checkpoint of PyTorch DCP, which nothing reads by this path
    if checkpoint and above == checkpoint and is_pending(last):
        raise _not_there(name)
    try:
        with _errors_of(name):
            found = os.stat(name)
    except NotThereError:
        if last != DCP_METADATA_NAME:
            raise
        return {"name": name, "size": len(MARKER), "type": "file"}  # a crash came before it
    if os.path.isdir(name):
        return {"name": name, "size": 0, "type": "directory"}
    return {"name": name, "size": found.st_size, "type": "file"}


def _entries(names: list[str], checkpoint: str) -> Iterator[Info]:
    for name in names:
        with contextlib.suppress(NotThereError):
            yield _info(name, checkpoint or _checkpoint_here(name))


def _checkpoint_at(name: str) -> str:
    """Return the checkpoint that a path is, or is in; empty: it is in none.

    Raises:
        NotThereError: it is in what is no checkpoint yet, or none any more.
    """
    place = name
    while not (found := _checkpoint_here(place)) and place != "/":
        place = os.path.dirname(place)
    return found


def _checkpoint_here(name: str) -> str:
    """Return a path where it is a checkpoint; empty: it is something else, or nothing.

    Raises:
        NotThereError: it is no checkpoint yet, or none any more.
    """
    store = open_store(name)
    if store.exists(MANIFEST_NAME):
        return name
    if os.path.isdir(name) and _is_unfinished(store):
        raise _not_there(name)
    return ""


def _is_unfinished(store: Store) -> bool:
    """Return whether a directory without MANIFEST is of a save, which is not over or has died."""
    if step_of(os.path.basename(store.location)) is not None or is_marker(store):
        return True
    if store.exists(WORD_NAME):
        return True
    if store.kind(DATA_DIRECTORY) != "directory":
        return False
    data = list_if_there(store.below(DATA_DIRECTORY)) or []
    return any(is_save_id(entry.name) for entry in data)


def _delete(name: str, *, recursive: bool) -> None:
    """Delete a checkpoint, as a run deletes a step."""
    checkpoint = _checkpoint_at(name)
    _info(name, checkpoint)
    if name != checkpoint:
        where = f"is a part of the checkpoint {checkpoint}" if checkpoint else "is no checkpoint"
        raise OptionError(
            f"{name} {where}, and is not deleted. holdfast:// deletes whole checkpoints; give the "
            "directory of one, or delete the file by its path without holdfast://"
        )
    if not recursive:
        raise OptionError(f"{name} is a directory; delete it with rm(…, recursive=True)")
    store, run = open_store(name), open_store(os.path.dirname(name))
    if store.kind("") != "directory":
        raise OptionError(
            f"{name} is a symlink, and its checkpoint may be the base of deltas elsewhere. Give "
            f"the directory that it leads to, {os.path.realpath(name)}"
        )
    with leaving(store):
        check_no_base(store)
        if run.location in held:
            check_epoch(store)
        if _latest(run) == os.path.basename(name):
            # Of a step without MANIFEST, it says that MANIFEST is lost.
            run.remove(LATEST_NAME)
            run.sync_directory()
        retire(store)


def _latest(run: Store) -> str:
    if not run.exists(LATEST_NAME):
        return ""
    return run.get(LATEST_NAME, LATEST_BYTES_MAX).decode(errors="replace").strip()


@contextlib.contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Raise what the system says of a path as our errors."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _not_there(name) from error
    except OSError as error:
        failure = StoreError(f"read {name}: {error.strerror}")
        failure.errno = error.errno
        raise failure from error


def _not_there(name: str) -> NotThereError:
    return NotThereError(
        f"{name} is not there: expected a committed checkpoint, or a file or directory in or above "
        "one. What is being saved or deleted is not shown"
    )


def _refusal(name: str) -> OptionError:
    return OptionError(
        f"{name} is not written: holdfast:// reads and deletes checkpoints, and only saves write "
        "them. To save there through PyTorch DCP, call holdfast.integrations.dcp.install() or set "
        "HOLDFAST_DCP=1"
    )
