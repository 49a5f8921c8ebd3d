"""The part of `holdfast inspect` that lists a run: its steps, and what is wrong with each."""

from collections.abc import Iterator, Mapping
from typing import Any

from .. import open as open_checkpoint
from .. import verify
from ..errors import CorruptError, HoldfastError
from ..format import spec
from ..format.header import REPAIRED
from ..format.names import misnamed, names_of_dcp, some, step_name, step_of
from ..format.values import decode_value, encode_value
from ..stores.base import Store
from ..stores.url import open_store
from .behind import behind, behind_text
from .run_listing import RunListing, Step, why_unfinished
from .text import (
    columns,
    cut,
    join_fitting,
    printable,
    repaired_advice,
    screen_size,
    show_bytes,
    show_count,
    width_of,
)

Document = dict[str, Any]

FIGURE_WIDTH = 60  # of the metrics and the mesh
STATES = ("committed", "uncommitted", "dcp", "foreign", "damaged", "unreadable")
_STATE_NAMES = {"dcp": "of PyTorch DCP", "foreign": "not of holdfast"}
_OPENED = ("committed", "damaged", "unreadable")


def describe_run(run: RunListing) -> Document:
    """Describe the steps of a run as a document."""
    store = open_store(run.location)
    return {
        "kind": "run",
        "path": run.location,
        "latest": run.latest,
        "steps": _with_bases(run, [describe_one(step, run.latest) for step in run.steps]),
        "behind": behind(store, [entry.name for entry in store.list()]),
    }


def _with_bases(run: RunListing, steps: list[Document]) -> list[Document]:
    """Say of each link what it lacks below it."""
    known = {step["name"]: step for step in steps if step["state"] in _OPENED}
    return [step | {"lacks": _lacking(step, known, open_store(run.location))} for step in steps]


def _lacking(step: Document, known: Mapping[str, Document], store: Store) -> Document | None:
    """Return the first of a chain that is missing or damaged, and which it is; None: none is."""
    seen = {step["name"]}
    while (base := step["base"]) is not None:
        if base in seen:
            return {"name": base, "fault": "is its own base"}
        seen.add(base)
        if base not in known:
            there = not base.startswith("step-") and store.exists(f"{base}/{spec.MANIFEST_NAME}")
            return None if there else {"name": base, "fault": "is missing"}
        step = known[base]
        if step["state"] == "damaged":
            return {"name": base, "fault": "is damaged"}
    return None


def describe_one(step: Step, latest: str | None) -> Document:
    """Describe a step as a document; its chain is not looked at."""
    found: Document = {"name": step.name, "state": "uncommitted", "disk_bytes": step.disk_bytes}
    empty: Document = {
        "step": None,
        "world_size": None,
        "metrics": {},
        "tensors": None,
        "codecs": [],
        "base": None,
        "repaired": False,
        "foreign": list(step.foreign),
        "error": None,
        "unfinished": None,
    }
    if step.foreign:
        return found | empty | {"state": "dcp" if names_of_dcp(step.foreign) else "foreign"}
    if not step.committed:
        lost = _lost_manifest(step) if step.name == latest else None
        if lost:
            return found | empty | {"state": "damaged", "error": lost}
        return found | empty | {"unfinished": why_unfinished(open_store(step.location))}
    try:
        checkpoint = open_checkpoint(step.location)
    except HoldfastError as error:
        state = "damaged" if isinstance(error, CorruptError) else "unreadable"
        return found | empty | {"state": state, "error": str(error)}
    wrong = misnamed(step.name, checkpoint.step)
    return found | {
        "state": "damaged" if wrong else "committed",
        "step": checkpoint.step,
        "world_size": checkpoint.world_size,
        "metrics": encode_value(checkpoint.metrics, ("metrics",)),
        "tensors": len(checkpoint.names()),
        "codecs": checkpoint.codecs,
        "base": checkpoint.base,
        "repaired": REPAIRED[0] in checkpoint.objects(),
        "error": wrong and f"it {wrong}",
        "unfinished": None,
    }


def _lost_manifest(step: Step) -> str | None:
    try:
        return "; ".join(fault.what for fault in verify(step.location).damage) or None
    except HoldfastError:
        return None


def render_run(document: Document, limit: int | None) -> list[str]:
    """Show a run as lines for the terminal: a heading, and a line for each step.

    Args:
        limit: of steps, the newest; None: all.
    """
    steps = document["steps"]
    states = [step["state"] for step in steps]
    counts = ", ".join(
        f"{states.count(state):,} {_STATE_NAMES.get(state, state)}"
        for state in STATES
        if state in states
    )
    size = show_bytes(sum(step["disk_bytes"] for step in steps))
    shown = steps if limit is None else steps[-limit:]  # the newest matter most
    hidden = len(steps) - len(shown)
    # A name that is cut names no step; a long line is the lesser evil.
    body = columns([_step_cells(step) for step in shown], right=(1,), width=None)
    return [
        printable(document["path"]),
        f"  steps: {counts}   {size}   {_latest_text(document)}",
        *(f"  {line}" for line in behind_text(document["behind"])),
        *([f"  … {hidden:,} earlier; --all shows them"] if hidden else []),
        *(f"  {line}" for line in body),
        *_notes(document),
    ]


def _notes(document: Document) -> Iterator[str]:
    """Say what restore() does not take, and how it is loaded."""
    steps, place = document["steps"], printable(document["path"])
    if repaired := [step["name"] for step in steps if step["repaired"]]:
        yield f"  {repaired_advice(f'{place}/{printable(repaired[-1])}')}"
    committed = [step["name"] for step in steps if step["state"] == "committed"]
    named = [printable(name) for name in committed if step_of(name) is None]
    if named:
        yield (
            f"  restore() finds only names such as {step_name(1000)}; load {some(named)} by path, "
            "with holdfast.load or HoldfastReader, or resume with the framework that saved them"
        )
    if dcp := [step["name"] for step in steps if step["state"] == "dcp"]:
        yield f"  'holdfast convert {place}/{printable(dcp[-1])} NEW' converts one of PyTorch DCP"


def _latest_text(document: Document) -> str:
    latest = document["latest"]
    if latest is None:
        return "no LATEST"
    committed = {step["name"] for step in document["steps"] if step["state"] == "committed"}
    doubt = "" if latest in committed else ", which is no committed step"
    return f"LATEST names {cut(printable(latest), FIGURE_WIDTH)}{doubt}"


def _step_cells(step: Document) -> tuple[str, str, str]:
    size = show_bytes(step["disk_bytes"])
    name = printable(step["name"])
    if step["state"] == "dcp":
        return (name, size, "a checkpoint of PyTorch DCP")
    if step["state"] == "foreign":
        names = some([printable(name) for name in step["foreign"]])
        return (name, size, f"has no files of holdfast, only {names}")
    if step["state"] == "uncommitted":
        return (name, size, f"uncommitted: {step['unfinished']}")
    if step["error"] is not None:
        return (name, size, f"{step['state']}: {printable(step['error'])}")
    parts = [show_count(step["tensors"], "tensor"), show_count(step["world_size"], "rank")]
    codecs = ", ".join(codec for codec in step["codecs"] if codec != "raw")
    if step["base"] is not None:
        base = printable(step["base"])
        parts.append(f"{codecs} on {base}")
        if (lacks := step["lacks"]) is not None:
            which = printable(lacks["name"])
            below = f" on {which}, which" if which == base else f"; its base {which}"
            parts = [f"{codecs}{below} {lacks['fault']}"]
    elif codecs:
        parts.append(codecs)
    if step["repaired"]:
        parts.append("repaired: restore() skips it")
    room = max(screen_size()[0] - 2 - width_of(name) - width_of(size) - 4, FIGURE_WIDTH // 2)
    return (name, size, join_fitting([*parts, *metrics_of(step["metrics"])], room, "   "))


def metrics_of(metrics: Document, digits: int = 6) -> Iterator[str]:
    """Show each metric of a step: its name and number."""
    for name, number in decode_value(metrics).items():
        yield f"{cut(printable(name), FIGURE_WIDTH // 2)} {number:.{digits}g}"
