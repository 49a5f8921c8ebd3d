"""`holdfast bench --codecs`: what each codec would make of a checkpoint. Writes nothing."""

import math
from dataclasses import asdict
from typing import Any

from .. import try_codecs
from ..errors import OptionError
from ..layout import ROLES
from .progress import Progress
from .run_listing import elements_bytes
from .text import columns, printable, screen_size, show_bytes

Document = dict[str, Any]


def bench_codecs(path: str, base: str | None, *, gib: float) -> Document:
    """Try all codecs on a sample of a checkpoint.

    Args:
        base: the checkpoint that deltas are of; default: that of ``path``, or the step
            before it.
        gib: size of the sample.

    Raises:
        OptionError: no sample is so large.
        NotCommittedError: there is no checkpoint at one of the places.
        CorruptError: one of them, or something below it, fails a check.
    """
    if not (math.isfinite(gib) and gib > 0):
        raise OptionError(f"--gib is {gib}; expected a size above 0")
    most = math.ceil(gib * 2**30)
    with Progress("bench", min(most, elements_bytes(path))) as progress:
        found = try_codecs(path, base, sample_bytes=most, report=progress.advance)
    return {"path": path, **asdict(found)}


def render(document: Document) -> list[str]:
    """Show a line for each codec: how many times smaller it makes everything, and each role."""
    trials = document["trials"]
    tried = trials[0]["size_bytes"]
    base = document["base"]
    lines = [
        f"{printable(document['path'])}: {show_bytes(document['size_bytes'])}; "
        f"{show_bytes(tried)} were tried, by one thread"
    ]
    named = f"deltas are of {printable(base)}" if base else ""
    lines.append(named or "there is no step before it: codecs that make links were left out")
    roles = [role for role in (*ROLES, "") if any(role in trial["roles"] for trial in trials)]
    heads = [role or "other" for role in roles]
    rows = [("codec", "smaller", *heads, "lost", "GB/s in", "GB/s out")]
    for trial in trials:
        size, stored = trial["size_bytes"], trial["stored_bytes"]
        energy = trial["energy"]
        rows.append(
            (
                trial["codec"],
                f"{size / stored:.2f}x",
                *(_share(*trial["roles"].get(role, (0, 0))) for role in roles),
                f"{100 * trial['squared_error'] / energy:.3g} %" if energy else "",
                _speed(size, trial["encode_s"]),
                _speed(size, trial["decode_s"]),
            )
        )
    return [*lines, "", *columns(rows, range(1, len(rows[0])), screen_size()[0])]


def _share(size: int, stored: int) -> str:
    if not size:
        return ""
    return f"{size / stored:.2f}x" if stored >= 1e-4 * size else ">10,000x"


def _speed(size: int, seconds: float) -> str:
    return f"{size / seconds / 1e9:.2f}" if seconds else ""
