"""`holdfast prune`: delete the steps of a run that a policy does not keep. Dry, unless told."""

from collections.abc import Sequence
from typing import Any

from .. import Keep
from .. import prune as prune_run
from ..errors import OptionError
from ..format.names import step_name
from .text import printable, show_bytes, show_count

Document = dict[str, Any]

STEPS_SHOWN_MAX = 8
_EXPECTED = "expected latest=3, every=1000, best=val_loss:3 or best=accuracy:3:max"


def prune(path: str, rules: Sequence[str], *, delete: bool) -> Document:
    """Delete steps, or say which would be deleted.

    Args:
        rules: such as ``latest=3``; a step that one of them keeps is kept.

    Raises:
        OptionError: there is no such rule.
        BusyError: a job runs there.
    """
    keep: Keep | None = None
    for rule in rules:
        keep = keep_of(rule) if keep is None else keep | keep_of(rule)
    if keep is None:
        raise OptionError(f"prune needs --keep; {_EXPECTED}")
    found = prune_run(path, keep, dry_run=not delete)
    return {
        "path": found.path,
        "keep": repr(keep),
        "dry_run": found.dry_run,
        "removed": list(found.removed),
        "kept": list(found.kept),
        "freed_bytes": found.freed_bytes,
        "spared": list(found.spared),
        "store": found.store,
    }


def keep_of(rule: str) -> Keep:
    """Return the policy that a rule names.

    Raises:
        OptionError: there is no such rule.
    """
    kind, _, value = rule.partition("=")
    if kind in ("latest", "every") and value.isdecimal() and len(value) < 16:
        return Keep.latest(int(value)) if kind == "latest" else Keep.every(int(value))
    if kind == "best":
        mode = "min"
        if value.endswith((":min", ":max")):
            value, _, mode = value.rpartition(":")
        metric, _, count = value.rpartition(":")
        if metric and count.isdecimal() and len(count) < 16:
            return Keep.best(metric, int(count), mode=mode)
    raise OptionError(f"--keep {rule} is no rule; {_EXPECTED}")


def render(document: Document) -> list[str]:
    """Say what goes and what stays, and how the steps are really deleted."""
    removed, kept = document["removed"], document["kept"]
    size = show_bytes(document["freed_bytes"])
    where, policy = printable(document["path"]), printable(document["keep"])
    lines = [where]
    if spared := document["spared"]:
        place = printable(document["store"])
        stay = "it stays" if len(spared) == 1 else "they stay"
        lines += [
            f"  only this disk has {_some(spared)}: the store behind it, {place}, does not. So "
            f"{stay}",
            "  the next job with both directories uploads what its policy keeps; 'holdfast copy "
            f"{where} {place}' uploads all. Then prune again",
        ]
    by_policy = [step for step in kept if step not in spared]
    if not removed:
        stay = show_count(len(by_policy), "step")
        return [*lines, f"  {policy} keeps {'' if spared else 'all '}{stay}: nothing to delete"]
    done = "would be deleted" if document["dry_run"] else "were deleted"
    lines += [
        f"  kept by {policy}: {_some(by_policy)}",
        f"  {show_count(len(removed), 'step')} of {size} {done}: {_some(removed)}",
    ]
    if document["dry_run"]:
        lines.append("  nothing was deleted; add --delete to delete them")
    return lines


def _some(steps: Sequence[int]) -> str:
    """Show the ends of many steps: ``1, 2, 3 … 99, 100``."""
    if len(steps) <= STEPS_SHOWN_MAX:
        shown = [str(step) for step in steps]
    else:
        shown = [*map(str, steps[:3]), "…", *map(str, steps[-2:])]
    return ", ".join(shown).replace(", …, ", " … ") or step_name(0)
