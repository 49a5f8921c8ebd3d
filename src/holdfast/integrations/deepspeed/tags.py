"""The directory of DeepSpeed's checkpoints: tags, the file ``latest``, and which tags are kept.

Knows no engines.
"""

import contextlib
import glob
import json
import logging
import os
import secrets
from collections.abc import Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ...errors import AlreadyCommittedError, HoldfastError, NotCommittedError, StoreError
from ...group.base import COORDINATOR
from ...group.phase import Phase
from ...loading.checkpoint import Checkpoint
from ...runs.retention import Keep
from ..adapter import delete, finish_deletion, is_committed, mark_of

if TYPE_CHECKING:
    from ...group.base import Group

logger = logging.getLogger("holdfast")

NAME, LATEST = "deepspeed", "latest"


def find(load_dir: str, tag: str | None, ranks: "Group") -> dict[str, Any]:
    """Return which checkpoint is meant, and whose it is, as the coordinator sees it."""
    with Phase(ranks) as told:
        if ranks.rank == COORDINATOR:
            tag = read_latest(load_dir) or _newest(load_dir) if tag is None else str(tag)
            path = os.path.join(load_dir, tag or "")
            found = {"kind": "none", "tag": tag, "path": path}
            if tag is not None:
                found["kind"] = _kind_of(load_dir, tag, path)
            told.answer = json.dumps(found).encode()
    result: dict[str, Any] = json.loads(told.answers[COORDINATOR])
    return result


def _kind_of(load_dir: str, tag: str, path: str) -> str:
    if is_committed(path):
        return "holdfast"
    if glob.glob(os.path.join(glob.escape(path), "*model_states.pt")):
        return NAME
    there = ", ".join(committed(load_dir)) or "none"
    raise NotCommittedError(
        f"{path} holds no committed checkpoint; committed tags in {load_dir}: {there:.500}. Give "
        f"one as tag=, or remove the file {LATEST} if it names {tag}"
    )


def committed(root: str) -> dict[str, int]:
    """Return the steps of the committed checkpoints of DeepSpeed in a directory, by their tags."""
    found = {}
    for name in sorted(os.listdir(root)) if os.path.isdir(root) else []:
        if is_committed(path := os.path.join(root, name)):
            with contextlib.suppress(HoldfastError):
                values = Checkpoint(path).objects()
                if mark_of(values).get("name") == NAME:
                    found[name] = int(values["engine.global_steps"])
    return found


def _newest(root: str) -> str | None:
    """Return the tag of the newest checkpoint that was to be the latest: for want of the file."""
    steps = committed(root)
    kept = {
        tag: step
        for tag, step in steps.items()
        if mark_of(Checkpoint(os.path.join(root, tag)).objects()).get("latest")
    }
    return max(kept, key=kept.__getitem__) if kept else None


def read_latest(root: str) -> str | None:
    try:
        with open(os.path.join(root, LATEST)) as file:
            return file.read().strip() or None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{root}/{LATEST} cannot be read: {error}") from error


def _write_latest(root: str, tag: str) -> None:
    """Replace the file that names the latest tag, at once: a crash leaves the old or the new."""
    place = os.path.join(root, LATEST)
    new = os.path.join(root, f".{LATEST}-{secrets.token_hex(4)}")
    try:
        with open(new, "w") as file:
            file.write(tag)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, place)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise StoreError(
            f"{tag} is saved, but {place} does not name it: {error}. Give tag={tag!r} to load it"
        ) from error


def conclude(place: str, keep: Keep, *, save_latest: bool) -> None:
    """Write ``latest``, and delete what a policy does not keep: on one rank, after the commit."""
    root, tag = os.path.split(place)
    if save_latest:
        _write_latest(root, tag)
    if keep.keeps_all:
        return
    with logging_of(root):
        for name in os.listdir(root):
            finish_deletion(os.path.join(root, name))
        steps = committed(root)
        kept = keep.kept(sorted({*steps.values()}), {})
        spared = {tag, read_latest(root)}
        for old, step in sorted(steps.items(), key=itemgetter(1), reverse=True):  # deltas first
            if step not in kept and old not in spared:
                with contextlib.suppress(AlreadyCommittedError):  # the base of a delta: kept
                    delete(os.path.join(root, old))


@contextlib.contextmanager
def logging_of(what: str) -> Iterator[None]:
    """Log an error, where nobody can be told of it."""
    try:
        yield
    except HoldfastError as error:
        logger.error("after the save of %s: %s", what, error)
