"""Checkpoints in directories that a framework names itself, such as ``checkpoint-500``.

Each is one commit. Small files that the framework wants beside it are in the commit too, and are
written from there. Knows no framework.
"""

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..engine.registry import find_codec
from ..engine.retire import GRACE_S, sweep
from ..errors import (
    AlreadyCommittedError,
    CorruptError,
    HoldfastError,
    NotCommittedError,
    OptionError,
    PeerError,
    StoreError,
    VersionError,
    shown,
)
from ..format.names import is_foreign
from ..format.spec import DATA_DIRECTORY, MANIFEST_NAME
from ..group.base import COORDINATOR, Group
from ..group.phase import Phase, find_group
from ..loading.checkpoint import Checkpoint
from ..options import Options, options_of
from ..saving.handle import SaveHandle
from ..saving.save import save
from ..stores.url import absolute, open_store
from .adapter import (
    bases_of,
    check_mark,
    delete,
    finish_deletion,
    is_committed,
    is_half_deleted,
    mark,
    marked,
)
from .begin import STAGES, begin

if TYPE_CHECKING:
    from ..codecs.base import Codec

logger = logging.getLogger("holdfast")

UINT8 = torch.uint8
FILES = "files"  # of a state: the files that stand beside it, by name
# A framework that trains is not ended by these: the checkpoints before are whole.
SURVIVED = (StoreError, PeerError, AlreadyCommittedError)


@dataclass(frozen=True)
class Saving:
    """How checkpoints are saved.

    Args:
        codec: as for `holdfast.save`.
        stage: "eager" copies the state and writes it in the background; "lazy" copies it during
            the next forward and backward; "sync" writes it at once, without a copy.
        options: as for `holdfast.save`.

    Raises:
        OptionError: an invalid codec, stage or options.
    """

    codec: "str | Codec" = "raw"
    stage: Literal["eager", "lazy", "sync"] = "eager"
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise OptionError(f"stage is {shown(self.stage)}; expected one of {', '.join(STAGES)}")
        options_of(self.options)
        find_codec(self.codec)


def saving_of(options: Mapping[str, Any]) -> Saving:
    """Return how checkpoints are saved, from the options of an integration.

    Raises:
        OptionError: an unknown or invalid one.
    """
    known = [each.name for each in fields(Saving)]
    if unknown := [name for name in options if name not in known]:
        raise OptionError(
            f"install() has no option {shown(unknown[0])}; expected one of {', '.join(known)}"
        )
    return Saving(**options)


class Directories:
    """The checkpoints that one framework saves and resumes, with all ranks together.

    Args:
        framework: name of the integration, and of the mark.
        version: of the framework.
        pattern: of the directories' names; its first group is a number.
        saving: how they are saved.
    """

    def __init__(self, framework: str, version: str, pattern: str, saving: Saving) -> None:
        self.framework, self.saving = framework, saving
        self._version, self._pattern = version, re.compile(pattern)
        self._handle: SaveHandle | None = None
        self._orders: dict[str, int] = {}  # the last one given, by directory
        self._failure: tuple[str, BaseException] | None = None  # of the last save
        self._said: set[str] = set()  # paths of which the log says that they are not deleted

    def save(
        self,
        state: Mapping[str, Any],
        path: str,
        *,
        step: int | None,
        files: Mapping[str, bytes],
        limit: int | None = None,
        spare: str | None = None,
        **more: Any,
    ) -> None:
        """Save a state as one commit; afterwards write its files and delete old checkpoints.

        If the disk or another rank fails, that is logged, and training goes on; `close` raises it.

        Args:
            state: of this rank, without files and mark.
            files: small ones that stand beside the commit; those of rank 0 count.
            limit: how many checkpoints are kept in the directory above; None or 0: all.
            spare: a checkpoint that is kept besides the newest.
            more: values that the mark keeps.

        Raises:
            HoldfastError: the state cannot be saved, or a newer job writes there.
        """
        self.wait()
        self._failure = None
        ranks = find_group(None, writing=True)
        root, is_first = os.path.dirname(absolute(path)), ranks.rank == COORDINATOR
        whole: dict[str, Any] = dict(state)
        if is_first:
            whole[FILES] = {name: as_tensor(data) for name, data in files.items()}
        order = self._next_order(root, ranks)
        whole |= mark(self.framework, self._version, order=order, **more)

        def after(_: object) -> None:
            if is_first:
                self._tidy(path, root, limit, spare)

        saving, stage = self.saving, self.saving.stage
        how: dict[str, Any] = {"step": step, "codec": saving.codec, "options": saving.options}
        with self._surviving(path):
            if stage == "sync":
                save(whole, path, replace=True, **how)
                after(None)
            else:
                self._handle = begin(whole, path, ranks, stage=stage, after=after, **how)

    def wait(self) -> None:
        """Wait for the save in flight. If the disk or another rank failed, that has been logged.

        Raises:
            HoldfastError: it failed for another reason.
        """
        handle, self._handle = self._handle, None
        if handle is None:
            return
        with self._surviving(handle.path):
            handle.result()

    def close(self) -> None:
        """Wait for the save in flight, when training is over.

        Raises:
            HoldfastError: the last save failed.
        """
        self.wait()
        if self._failure is None:
            return
        (path, error), self._failure = self._failure, None
        found = self.committed(os.path.dirname(absolute(path)))
        newest = f"the newest checkpoint is {found[-1]}" if found else "there is no checkpoint"
        raise StoreError(
            f"training is over, but its last checkpoint {path} is not saved: {error}. Beside it "
            f"{newest}. The model is still in memory: catch this error, and save it elsewhere"
        ) from error

    def newest(self, root: str) -> str | None:
        """Return the checkpoint in a directory that was committed last; the same on all ranks."""
        ranks = find_group(None, writing=True)
        with Phase(ranks) as asked:
            if ranks.rank == COORDINATOR:
                found = self.committed(root)
                asked.answer = os.fsencode(found[-1]) if found else b""
        return os.fsdecode(asked.answers[COORDINATOR]) or None

    def committed(self, root: str) -> list[str]:
        """List the framework's committed checkpoints in a directory, in the order of their saves.

        That is not the order of their numbers, where training went back to an earlier one.
        """
        found = []
        for path, number in self._paths(root):
            if not is_committed(path):
                continue
            try:
                known = marked(path)
            except NotCommittedError:  # it was deleted meanwhile
                continue
            except (CorruptError, StoreError, VersionError) as error:
                logger.warning("%s is left alone: %s", path, error)
                continue
            if known.get("name") == self.framework:
                found.append((_order_of(known), number, path))
        return [path for _, _, path in sorted(found)]

    def numbers(self, root: str) -> list[int]:
        """List the numbers of the committed checkpoints in a directory, whoever saved them."""
        return [number for path, number in self._paths(root) if is_committed(path)]

    def open(self, path: str) -> dict[str, Any]:
        """Prepare to resume: check the mark, and write the files that are missing or differ.

        Returns:
            The mark.

        Raises:
            MismatchError: another framework saved it.
            NotCommittedError: it is not whole.
        """
        ranks = find_group(None)
        with Phase(ranks):
            found = check_mark(path, self.framework)
            if ranks.rank == COORDINATOR:
                heal(path)
        return found

    def is_torn(self, path: str) -> bool:
        """Return whether holdfast began to save or delete here, and has not ended."""
        if is_committed(path):
            return False
        return os.path.isdir(os.path.join(path, DATA_DIRECTORY)) or is_half_deleted(path)

    def check_whole(self, path: str) -> None:
        """Check that a checkpoint by name is committed, or not one of holdfast.

        Raises:
            NotCommittedError: its save was never committed.
        """
        if not self.is_torn(path):
            return
        what = "was never committed: its save ended too early"
        if is_half_deleted(path):
            what = "was being deleted when its process ended"
        newest = self.newest(os.path.dirname(os.path.abspath(path)))
        hint = f"The newest committed one is {newest}" if newest else "There is no committed one"
        raise NotCommittedError(f"{path} {what}. {hint} beside it")

    def _paths(self, root: str) -> list[tuple[str, int]]:
        try:
            names = os.listdir(root)
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = [(name, match) for name in names if (match := self._pattern.fullmatch(name))]
        return [(os.path.join(root, name), int(match[1])) for name, match in found]

    def _next_order(self, root: str, ranks: Group) -> int:
        """Return a number above those of all checkpoints in a directory; the same on all ranks."""
        if root not in self._orders:
            with Phase(ranks) as asked:
                if ranks.rank == COORDINATOR:
                    found = self.committed(root)
                    last = _order_of(marked(found[-1])) if found else 0
                    asked.answer = str(last).encode()
            self._orders[root] = int(asked.answers[COORDINATOR])
        self._orders[root] += 1
        return self._orders[root]

    def _tidy(self, path: str, root: str, limit: int | None, spare: str | None) -> None:
        """Write the files of what is committed, and delete old checkpoints; errors are logged."""
        try:
            heal(path)
            self.keep(root, limit, spare)
        except (HoldfastError, OSError) as error:
            logger.warning("%s is saved, but tidying %s failed: %s", path, root, error)

    def keep(self, root: str, limit: int | None, spare: str | None = None) -> None:
        """Delete the oldest checkpoints above a number; the newest stays, and a spared one."""
        found = self.committed(root)
        if limit and found:
            kept = {found[-1], *([os.path.abspath(spare)] if spare else [])}
            others = [path for path in found if os.path.abspath(path) not in kept]
            room = max(0, limit - (len(found) - len(others)))
            self._delete_all(others[: len(others) - room], found)
        torn = [path for path, _ in self._paths(root) if self.is_torn(path)]
        for path in torn:
            finish_deletion(path)
        torn = [path for path in torn if self.is_torn(path)]
        if torn and found:  # the newest was committed just now, by the clock of their server
            now_s = open_store(found[-1]).modified_s(MANIFEST_NAME)
            for path in torn:
                sweep(open_store(path), now_s - GRACE_S)

    def delete_others(self, root: str, kept: str) -> None:
        """Delete all checkpoints of a directory but one."""
        found = self.committed(root)
        self._delete_all([p for p in found if os.path.abspath(p) != os.path.abspath(kept)], found)

    def _delete_all(self, leaving: list[str], found: list[str]) -> None:
        """Delete checkpoints but those that others need; a delta goes before its base.

        Args:
            found: all in the directory, those that leave too.
        """
        needed = bases_of([path for path in found if path not in leaving])
        for path in reversed(leaving):
            if path in needed:
                continue
            try:
                delete(path)
            except HoldfastError as error:
                if path not in self._said:
                    logger.warning("%s is not deleted: %s", path, error)
                self._said.add(path)

    @contextlib.contextmanager
    def _surviving(self, path: str) -> Iterator[None]:
        """Let training go on after an error that leaves older checkpoints whole; it is logged."""
        try:
            yield
        except SURVIVED as error:
            self._failure = path, error
            logger.error("%s is not saved, and training goes on: %s", path, error)


def _order_of(found: Mapping[str, Any]) -> int:
    order = found.get("order")
    return order if type(order) is int else 0


def heal(path: str) -> None:
    """Write the files that stand beside a commit, where they are missing or differ.

    A checkpoint may be a stranger's: nothing of ours is overwritten, and no link is followed.

    Raises:
        CorruptError: it names something else than a file of its own.
        HoldfastError, OSError: the checkpoint cannot be read, or a file not be written.
    """
    checkpoint = Checkpoint(path)
    if not any(name.startswith(f"{FILES}.") for name in checkpoint):
        return
    found = checkpoint.state(include=FILES)[FILES]
    for name, data in found.items() if isinstance(found, dict) else [("", None)]:
        is_plain = is_foreign(name) and name == os.path.basename(name) and name.strip(".")
        if not is_plain or getattr(data, "dtype", None) != UINT8:
            raise CorruptError(
                f"{path} names {shown(name)} as a file beside it; expected a plain name, and bytes"
            )
        _put(os.path.join(path, name), as_bytes(data))


def _put(place: str, wanted: bytes) -> None:
    """Write a file in one step, unless it is there as it should be."""
    if os.path.isfile(place) and not os.path.islink(place):
        with open(place, "rb") as file:
            if file.read(len(wanted) + 1) == wanted:
                return
    pending = f"{place}.{secrets.token_hex(8)}"
    with open(pending, "xb") as file:  # anew: what is there already may be a link
        file.write(wanted)
    os.replace(pending, place)


def as_tensor(data: bytes) -> Any:
    """Return bytes as a tensor, which a data file holds: they may be too many for MANIFEST."""
    if not data:
        return torch.zeros(0, dtype=UINT8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=UINT8)


def as_bytes(tensor: Any) -> bytes:
    """Return what `as_tensor` was given."""
    return bytes(tensor.numpy().tobytes())
