"""What to do about a target that does not fit: the argument or the call that would help.

Knows names alone.
"""

import re
from collections.abc import Collection, Mapping, Sequence

_NUMBERED = re.compile(r"(?:(.+)\.)?param_groups\.\d+")


def advise(
    found: Mapping[str, Sequence[str]],
    missing: Sequence[str],
    extra: Sequence[str],
    unexpected: Sequence[str],
) -> str:
    """Return a sentence, or "" where no argument helps.

    Args:
        found: what differs, by kind.
        missing, extra: names that are in the way: of the target alone, of the checkpoint alone.
        unexpected: all names of the checkpoint alone.
    """
    if found["faults"]:
        return "Build the model with the sizes that it was saved with. " if found["shapes"] else ""
    if text := _of_optimizers(missing, unexpected) or _of_values(missing, unexpected):
        return text
    advice = []
    if found["dtypes"]:
        advice.append("cast=True, which converts dtypes")
    if missing and not found["shapes"] and (rename := _renaming(missing, extra, unexpected)):
        advice.append(f"rename={rename}, which makes them the same")
    elif missing or found["shapes"]:
        advice.append("strict=False, which loads what fits and reports the rest")
    elif extra:
        advice.append("partial=True, which reads only what the target has")
    names = "Make the names the same, or give" if missing or extra else "Give"
    return f"{names} {', and '.join(advice)}. " if advice else ""


def _of_optimizers(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    for name in missing:
        below = f"{name}."
        if name.endswith("param_groups") and any(n.startswith(below) for n in unexpected):
            of = name.rpartition(".")[0] or "optimizer"
            return (
                f"{of} was saved by its parameters' names, and the target has a state_dict(), by "
                f"numbers: pass the optimizer itself, such as {{{of!r}: optimizer}}. "
            )
        if match := _NUMBERED.fullmatch(name):
            below = name.rpartition(".")[0] + "."
            if any(n.startswith(below) for n in unexpected):
                return (
                    f"{match[1] or 'The optimizer'} was saved by its parameters' names, which they "
                    'do not have here: add their module to the target, such as "model": model. '
                )
    return ""


def _of_values(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    for name in missing:
        if any(other.startswith(f"{name}.") for other in unexpected):
            return f"{name} is a dict or list there: put holdfast.Value() in its place to take it. "
    return ""


def _renaming(missing: Sequence[str], extra: Sequence[str], unexpected: Sequence[str]) -> str:
    """Return what ``rename`` would make all names fit; "" if no single beginning does."""
    others, tried = set(unexpected), set[tuple[str, str]]()
    for other in unexpected:
        here, there = pair = _beginnings(missing[0], other)
        if here == there or pair in tried or (extra and len(extra) != len(missing)):
            continue
        tried.add(pair)
        if _fit(missing, here, there, others):
            if there:
                return f"{{{there!r}: {here!r}}}"
            firsts = {name.removeprefix(f"{here}.").partition(".")[0] for name in missing}
            if len(firsts) == 1:
                (first,) = firsts
                return f"{{{first!r}: {f'{here}.{first}'!r}}}"
            return f'("^", {f"{here}."!r})'
    return ""


def _beginnings(one: str, other: str) -> tuple[str, str]:
    """Return what stands before the end that two names have in common, up to a dot."""
    first, second = one.split("."), other.split(".")
    while first and second and first[-1] == second[-1]:
        first.pop()
        second.pop()
    return ".".join(first), ".".join(second)


def _fit(missing: Sequence[str], here: str, there: str, others: Collection[str]) -> bool:
    start, new = (f"{here}." if here else ""), (f"{there}." if there else "")
    return all(
        name.startswith(start) and f"{new}{name.removeprefix(start)}" in others for name in missing
    )
