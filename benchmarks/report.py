"""Results of `save_load.py` as Markdown: one alone, or several sizes beside each other."""

from collections.abc import Iterable, Sequence
from typing import Any

import ratios

VERBS = ("save", "load")
Result = dict[str, Any]  # the JSON of save_load.py


def report(results: Sequence[Result]) -> str:
    """Return results as Markdown: machine, tables for each direction, settings, who was skipped.

    Args:
        results: of the same machine, smallest state first; a line where they differ tells all.
    """
    parts = [*_facts(results)]
    if len(results) == 1:
        parts += _tables(results[0])
    else:
        for verb in VERBS:
            by_size = {_size(result): rows_of(result, verb) for result in results}
            parts += [f"\n**{verb}**\n", ratios.table_of_sizes(by_size, results[-1]["limits"])]
    parts += ["", *_notes(results[-1])]
    if len(results) > 1:
        parts.append("\n<details><summary>Seconds, and the best fio of each round</summary>")
        for result in results:
            parts += [f"\n{_size(result)}, `{result['command']}`", *_tables(result)]
        parts.append("\n</details>")
    return "\n".join(parts)


def rows_of(result: Result, verb: str) -> list[ratios.Row]:
    """Return the rows of one direction of a result."""
    contenders = result["contenders"]
    return ratios.rows(
        {name: contender[verb] for name, contender in contenders.items()},
        {name: contender["moved_bytes"] for name, contender in contenders.items()},
        result["limits"],
    )


def _facts(results: Sequence[Result]) -> list[str]:
    machines = [result["machine"] for result in results]
    facts = {key: _each(machine[key] for machine in machines) for key in machines[0]}
    facts["state"] = (
        f"{_each(_size(result) for result in results)} in "
        f"{_each(result['tensors'] for result in results)} tensors, "
        f"{_each(result['rounds'] for result in results)} rounds"
    )
    facts["caches"] = _each(result["caches"] for result in results)
    return ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items())]


def _tables(result: Result) -> list[str]:
    parts = []
    for verb in VERBS:
        parts += [f"\n**{verb}**\n", ratios.table(rows_of(result, verb), result["limits"])]
    return parts


def _notes(result: Result) -> list[str]:
    """Tell each contender's settings and size, and who was skipped."""
    notes = ["| | settings of save; load | more on disk |", "|---|---|---|"]
    for name, contender in result["contenders"].items():
        if name not in result["limits"]:
            more = contender["stored_bytes"] / result["state_bytes"] - 1
            notes.append(f"| {name} | {contender['settings']} | {more:+.3%} |")
    return notes + [f"| {name} | skipped: {why} | |" for name, why in result["skipped"].items()]


def _size(result: Result) -> str:
    return f"{result['state_bytes'] / 1e9:.3f} GB"


def _each(values: Iterable[object]) -> str:
    """Return equal values once, others all."""
    return "; ".join(dict.fromkeys(str(value) for value in values))
