"""`holdfast verify`: every byte of a checkpoint, or of all the steps of a run. Changes nothing."""

import os
from collections.abc import Sequence
from typing import Any

from .. import Options, signer
from .. import verify as verify_one
from ..errors import (
    CorruptError,
    HoldfastError,
    NotCommittedError,
    OptionError,
    TrustError,
    what_is_left,
    writable,
)
from ..format import spec
from ..format.header import REPAIRED
from ..format.names import names_of_dcp, some
from ..stores.url import open_store
from .progress import Progress
from .run_listing import RunListing, disk_bytes, find_run
from .text import printable, repaired_advice, show_bytes, show_count

Document = dict[str, Any]
BOXES_SHOWN_MAX = 3  # of a tensor; --json has all
NOT_CHECKED = {
    "no MANIFEST": "without MANIFEST, which a save or an upload is writing or has left",
    "dcp": "that PyTorch DCP wrote",
}
Signers = Sequence[str] | None


def verify(
    path: str | os.PathLike[str],
    *,
    deep: bool = False,
    strict: bool = False,
    keys: Signers = None,
) -> Document:
    """Check every byte of the checkpoint at ``path``, or of each committed step of a run.

    Of a link, everything that it was made from too. What one step of a run suffers from does not
    keep the others from being checked.

    Args:
        deep: also decode everything, and compare it with the digests of what was saved.
        strict: names that are not holdfast's are bad.
        keys: public keys, one of which has to have signed it; if none is named, the one that its
            SIGNATURE names, whoever's that is. Default: no SIGNATURE is asked for.

    Raises:
        NotCommittedError: there is nothing to check.
        VersionError, StoreError: a lone checkpoint cannot be read, which says nothing about it.
    """
    run = find_run(path)
    if run is None:
        store = open_store(path)
        with Progress("verify", disk_bytes(store, "")) as progress:
            one = _verify_one(store.location, progress, {}, deep=deep, keys=keys)
        return _document(store.location, [one], deep=deep, strict=strict)
    found = _verify_steps(run, deep=deep, keys=keys)
    if not (run.committed or found):
        raise NotCommittedError(
            f"{run.location} has {show_count(len(run.steps), 'step')}, none of them committed; "
            "give a run with checkpoints"
        )
    document = _document(run.location, found, deep=deep, strict=strict)
    return document | {"unchecked": _unchecked(run)}


def _unchecked(run: RunListing) -> list[Document]:
    """Name the steps that are not checked, and say why."""
    checked = {step.name for step in run.checked}
    return [
        {"name": step.name, "why": "dcp" if names_of_dcp(step.foreign) else "no MANIFEST"}
        for step in run.steps
        if step.name not in checked
    ]


def _verify_steps(run: RunListing, *, deep: bool, keys: Signers) -> list[Document]:
    """Verify every step that stays while others are verified."""
    found, known = [], dict[str, Any]()
    with Progress("verify", sum(step.disk_bytes for step in run.committed)) as progress:
        for step in run.checked:
            try:
                one = _verify_one(step.location, progress, known, deep=deep, keys=keys)
                found.append(one)
            except NotCommittedError:  # retired meanwhile, or never there
                continue
            except HoldfastError as error:
                is_named = writable(step.location) == step.location
                if isinstance(error, OptionError) and is_named:
                    raise  # it is wrong for every step
                found.append(_result(step.location) | {"error": str(error)})
    return found


def exit_code(document: Document) -> int:
    """Return 0 when all is whole, 1 when something is bad, 2 when a step cannot be read."""
    if any(found["error"] is None and not found["good"] for found in document["checkpoints"]):
        return 1
    return 0 if document["good"] else 2


def render(document: Document) -> list[str]:
    """Show what was found as lines for the terminal; all damage, however much."""
    lines = []
    for found in document["checkpoints"]:
        where = printable(found["path"])
        if found["error"] is not None:
            lines.append(f"?    {where}: {printable(found['error'])}")
        elif found["damage"]:
            lines.append(f"BAD  {where}: {show_count(len(found['damage']), 'fault')}")
            lines += [line for damage in found["damage"] for line in render_damage(damage)]
        elif not found["good"]:
            lines.append(f"BAD  {where}: {_foreign(found)}")
        else:
            count = found["below"]
            below = f", and of its {show_count(count, 'base')}" if count else ""
            decoded = "; all decoded" if document["deep"] else ""
            signer = f"; signed by {found['signer']}" if found["signer"] else ""
            lines.append(
                f"good {where}: {_size(found)}, every byte checked{below}{decoded}{signer}"
            )
            lines += [
                f"     damaged in a base, but not used here: {printable(damage['what'])}"
                for damage in found["spared"]
            ]
        if found["repaired"]:
            lines.append(f"     {repaired_advice(where)}")
        if found["foreign"] and (found["damage"] or found["good"]):
            unsigned = "not checked, and not signed" if found["signer"] else "not checked"
            lines.append(f"     {_foreign(found)}, {unsigned}")
    for why, text in NOT_CHECKED.items():
        steps = [printable(one["name"]) for one in document["unchecked"] if one["why"] == why]
        if steps:
            lines.append(f"not checked: {show_count(len(steps), 'step')} {text}: {some(steps)}")
    if any(found["damage"] for found in document["checkpoints"]):
        lines.append(what_is_left(printable(document["path"])))
    return lines


def _size(found: Document) -> str:
    """Say what was checked."""
    files = show_count(found["files"], "file")
    if found["elsewhere"]:
        here = found["files"] - len(found["elsewhere"])
        return f"{here:,} of {files} (the others are on other hosts)"
    return f"{show_bytes(found['file_bytes'])} in {files}"


def _foreign(found: Document) -> str:
    """Say which names are none of holdfast's."""
    names = some([printable(name) for name in found["foreign"]], found["foreign_count"])
    return f"not written by holdfast: {names}"


def _verify_one(
    location: str, progress: Progress, known: Any, *, deep: bool, keys: Signers
) -> Document:
    options, named = None, None
    if keys is not None:
        try:
            named = signer(location)
            if named is None:
                raise TrustError(f"{location} is not signed: it has no {spec.SIGNATURE_NAME}")
        except CorruptError as error:
            where = f"{location}/{spec.SIGNATURE_NAME}"
            unsigned: Document = {"where": where, "tensor": None, "what": str(error), "lost": []}
            return _result(location) | {"damage": [unsigned]}
        options = Options(trust=tuple(keys) or named)
    one = verify_one(location, deep=deep, options=options, report=progress.advance, known=known)
    return describe(one) | {"signer": named}


def render_damage(damage: Document) -> list[str]:
    """Say what is damaged, and what is lost by it."""
    lines = [f"     {printable(damage['what'])}"]
    return lines + [f"       {render_lost(lost)}" for lost in damage["lost"]]


def render_lost(lost: Document) -> str:
    """Say what of a tensor is lost; nothing is said of boxes where all of it is."""
    boxes = [_show_box(box) for box in lost["boxes"]]
    more = f" … {len(boxes) - BOXES_SHOWN_MAX:,} more" if len(boxes) > BOXES_SHOWN_MAX else ""
    where = f"{' '.join(boxes[:BOXES_SHOWN_MAX])}{more}"
    return f"lost: {printable(lost['tensor'])} {where}".rstrip()


def _show_box(box: Document) -> str:
    """Show a box as an index: ``[2:5, 0:12]``."""
    ends = (f"{a}:{a + n}" for a, n in zip(box["offset"], box["shape"], strict=True))
    return f"[{', '.join(ends)}]"


def describe(verified: Any) -> Document:
    """Return what was found of a checkpoint, as a document."""
    checkpoint = verified.checkpoint
    found = _result(verified.location) | {
        "good": not verified.damage,
        "below": verified.below,
        "damage": [describe_damage(damage) for damage in verified.damage],
        "spared": [describe_damage(damage) for damage in verified.spared],
        "foreign": list(verified.foreign),
        "foreign_count": verified.foreign_count,
        "elsewhere": sorted({damage.where for damage in verified.elsewhere}),
    }
    if checkpoint is None:
        return found
    return found | {
        "step": checkpoint.step,
        "files": len(checkpoint.file_names),
        "file_bytes": sum(checkpoint.file_bytes),
        "repaired": REPAIRED[0] in checkpoint.objects(),
    }


def describe_damage(damage: Any) -> Document:
    """Return one fault as a document; what can be done is said once, after all faults."""
    lost = [describe_lost(part.tensor, part.boxes) for part in damage.lost]
    return {"where": damage.where, "tensor": damage.tensor, "what": damage.what, "lost": lost}


def describe_lost(tensor: str, boxes: Any) -> Document:
    """Return what of a tensor is lost as a document."""
    described = [{"offset": list(offset), "shape": list(shape)} for offset, shape in boxes]
    return {"tensor": tensor, "boxes": described}


def _result(location: str) -> Document:
    return {
        "path": location,
        "good": False,
        "step": None,
        "files": None,
        "file_bytes": None,
        "below": 0,
        "signer": None,
        "repaired": False,
        "damage": [],
        "spared": [],
        "foreign": [],
        "foreign_count": 0,
        "elsewhere": [],
        "error": None,
    }


def _document(location: str, found: list[Document], *, deep: bool, strict: bool) -> Document:
    for one in found if strict else ():
        one["good"] = one["good"] and not one["foreign"]
    good = all(f["good"] for f in found)
    return {
        "path": location,
        "good": good,
        "deep": deep,
        "strict": strict,
        "checkpoints": found,
        "unchecked": [],
    }
