"""`holdfast recompress` and `holdfast rebase`: checkpoints under another codec, or without a base.

Changes nothing at the source but, for rebase, how it is stored.
"""

import os
from typing import Any

from .. import Checkpoint, open, rebase, recompress
from ..errors import AlreadyCommittedError, CorruptError, NotCommittedError, OptionError
from ..format import spec
from ..stores.url import open_store
from .progress import Progress
from .run_listing import elements_bytes, find_run
from .text import printable, show_bytes

Document = dict[str, Any]
Place = tuple[str, str]  # an old checkpoint, and where it is written again


def recompress_all(source: str, target: str, codec: str) -> Document:
    """Write a checkpoint, or every step of a run, again under a codec.

    Of a run, steps that are there already are left as they are, so that what was interrupted goes
    on; steps that are damaged are left out, and said.

    Args:
        codec: a name.

    Raises:
        NotCommittedError: there is nothing at ``source``.
        AlreadyCommittedError: something else is at ``target``; steps before it were written.
        CorruptError: the one checkpoint is damaged.
    """
    run = find_run(source)
    if run is None:
        with Progress("recompress", elements_bytes(source)) as progress:
            recompress(source, target, codec=codec, report=progress.advance)
        return _recompressed(codec, [(source, target)], [], [])
    if not run.committed:
        raise NotCommittedError(f"{run.location} has no committed step; give a run with steps")
    target = open_store(target, "target").location
    if os.path.realpath(run.location) == os.path.realpath(target):
        raise OptionError(f"{target} is the run itself; expected a new directory")
    places = [(step.location, os.path.join(target, step.name)) for step in run.committed]
    done, kept, damaged = list[Place](), list[Place](), list[Document]()
    with Progress("recompress", sum(step.disk_bytes for step in run.committed)) as progress:
        for here, there in places:
            try:
                if _is_there(here, there):
                    kept.append((here, there))
                    continue
                recompress(here, there, codec=codec, report=progress.advance)
                done.append((here, there))
            except CorruptError as error:
                damaged.append({"path": here, "error": str(error)})
    return _recompressed(codec, done, kept, damaged)


def _is_there(here: str, there: str) -> bool:
    """Whether a checkpoint is the one that was made from another before, as far as it says.

    Raises:
        AlreadyCommittedError: it is another.
    """
    if not open_store(there).exists(spec.MANIFEST_NAME):
        return False
    with open(here) as old, open(there) as new:
        same = old.step == new.step and old.names() == new.names()
        if not same or any(_form(old, name) != _form(new, name) for name in old.names()):
            raise AlreadyCommittedError(
                f"{new.location} holds a committed checkpoint with other contents than {here}; "
                "recompress to another directory, or delete it first"
            )
    return True


def _form(checkpoint: Checkpoint, name: str) -> tuple[object, ...]:
    info = checkpoint.info(name)
    return info.dtype, info.shape, info.tied_to


def _recompressed(
    codec: str, done: list[Place], kept: list[Place], damaged: list[Document]
) -> Document:
    every = sorted([*done, *kept], key=lambda place: place[1])
    steps: list[Document] = [
        {
            "path": open_store(there).location,
            "from_bytes": _files(here),
            "to_bytes": _files(there),
            "size_bytes": elements_bytes(there),
            "kept": (here, there) in kept,
            "codecs": list(open(there).codecs),
        }
        for here, there in every
    ]
    total = sum(step["size_bytes"] for step in steps)
    return {"codec": codec, "size_bytes": total, "checkpoints": steps, "damaged": damaged}


def rebase_one(path: str) -> Document:
    """Turn a delta checkpoint into a full one."""
    before, store = _files(path), open_store(path)
    signed = store.exists(spec.SIGNATURE_NAME)
    with Progress("rebase", elements_bytes(path)) as progress:
        changed = rebase(path, report=progress.advance)
    return {
        "path": store.location,
        "changed": changed,
        "from_bytes": before,
        "to_bytes": _files(path),
        "signature_removed": changed and signed,
    }


def render_recompress(document: Document) -> list[str]:
    """Say what was written, a line for each checkpoint and one for all."""
    found = document["checkpoints"]
    lines = [
        f"{printable(c['path'])}: {show_bytes(c['from_bytes'])} → {show_bytes(c['to_bytes'])}, "
        f"{_smaller(c['size_bytes'], c['to_bytes'])}"
        + (f", was there already ({', '.join(c['codecs'])})" if c["kept"] else "")
        for c in found
    ]
    lines += [
        f"left out, damaged: {printable(d['path'])}: {printable(d['error'])}"
        for d in document["damaged"]
    ]
    after = sum(c["to_bytes"] for c in found)
    total = _smaller(document["size_bytes"], after)
    return [*lines, f"{show_bytes(after)} in all, {total} than the elements"]


def _smaller(size_bytes: int, stored_bytes: int) -> str:
    """Show how many times smaller than its elements something is, as `bench --codecs` does."""
    ratio = size_bytes / stored_bytes if stored_bytes else 0.0
    return f"{ratio:.2f}x smaller" if ratio >= 1.005 else "no smaller"


def render_rebase(document: Document) -> list[str]:
    """Say what was done."""
    where = printable(document["path"])
    if not document["changed"]:
        return [f"{where} is a full checkpoint already; nothing was changed"]
    sizes = f"{show_bytes(document['from_bytes'])} → {show_bytes(document['to_bytes'])}"
    lines = [f"{where} is a full checkpoint now: {sizes}"]
    if document["signature_removed"]:
        lines.append(
            "its SIGNATURE no longer matched, and was deleted: sign this checkpoint again, and its "
            "deltas"
        )
    return lines


def _files(path: str) -> int:
    with open(path) as checkpoint:
        return sum(checkpoint.file_bytes)
