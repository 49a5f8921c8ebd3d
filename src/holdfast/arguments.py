"""Arguments of a call: are they valid, and the same on all ranks? Errors name the ranks.

Compares what the ranks told each other. Knows no files, no tensors and no group.
"""

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from .errors import OptionError, StateError, shown
from .version import needs

CAMPS_MAX = 4  # in a text: of values, and of ranges of ranks
PATHS = (str, os.PathLike)
Arguments = dict[str, Any]  # JSON values by name


def plain_number(value: Any) -> Any:
    """Return a scalar of NumPy or a 0-d tensor as Python's integer or float; else the value.

    One that is a bool, or complex, stays what it is, and is then refused where a number is wanted.
    """
    if type(value) in (int, float, bool, type(None)) or getattr(value, "shape", None) != ():
        return value
    try:
        number = value.item()
    except Exception:  # a tensor without memory, or anything else with a shape
        return value
    return number if type(number) in (int, float) else value


def checked_step(step: object, least: int = 0) -> int:
    """Return the number of a step, which may be NumPy's or a 0-d tensor.

    Raises:
        OptionError: it is none.
    """
    step = plain_number(step)
    if type(step) is not int or step < least:
        is_state = not isinstance(step, (int, float, str))
        order = ". The step comes first, then the state" if is_state else ""
        raise OptionError(f"step is {shown(step)}; expected an integer from {least}{order}")
    return step


def check_alike(what: str, arguments: Sequence[Arguments]) -> None:
    """Check that all ranks gave the same arguments.

    Args:
        what: the call, as the error names it.
        arguments: by rank.

    Raises:
        OptionError: they did not; the same text on every rank.

    Example:
        ``[{"step": 1}, {"step": 2}]`` → "step: 1 on rank 0; 2 on rank 1"
    """
    if arguments.count(arguments[0]) == len(arguments):
        return
    differing = [
        f"{name}: {camps([repr(given.get(name)) for given in arguments])}"
        for name in dict.fromkeys(name for given in arguments for name in given)
        if any(given.get(name) != arguments[0].get(name) for given in arguments)
    ]
    if differing:
        raise OptionError(
            f"{what} was refused: the ranks gave different arguments. {'. '.join(differing)}. "
            "Give the same arguments on all ranks"
        )


def camps(texts: Sequence[str]) -> str:
    """Say which ranks say what, those of the coordinator's opinion first.

    Example:
        ``["a", "a", "b"]`` → "a on 2 ranks (0-1); b on rank 2"
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    shown = [f"{text} on {_named(held)}" for text, held in [*ranks.items()][:CAMPS_MAX]]
    more = len(ranks) - CAMPS_MAX
    return "; ".join(shown) + (f"; and {more} others" if more > 0 else "")


def encode_arguments(what: str, arguments: Arguments, **more: Any) -> bytes:
    """Write what a rank was called with, for the others.

    Args:
        what: the call, as an error names it.
    """
    # What is no JSON is refused where it is used, on the rank that gave it.
    given = {"what": what, "arguments": arguments, **more}
    return json.dumps(given, default=repr).encode()


def decode_arguments(told: bytes | None) -> dict[str, Any]:
    """Read what `encode_arguments` wrote; None: the rank is in another call."""
    if told is None:
        return {"what": "a call", "arguments": {"call": "another"}}
    given: dict[str, Any] = json.loads(told)
    return given


def is_positive(value: object) -> bool:
    """Return whether a value is a number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def check_order(path: object, state: object, usage: str) -> None:
    """Refuse a path and a state that stand in each other's place.

    Args:
        usage: how it is written.

    Raises:
        OptionError: they do.
    """
    if isinstance(state, PATHS) and not isinstance(path, PATHS):
        raise OptionError(f"{usage}; found {shown(path)} as the path, {shown(state)} as the state")


def check_saved(path: object, state: object) -> None:
    """Check what is to be saved.

    Raises:
        OptionError: path and state stand in each other's place.
        StateError: it is not a dict; the text says what to write.
    """
    usage = 'save() takes the state first and the path second: holdfast.save(state, "runs/a")'
    check_order(path, state, usage)
    check_state(state)


def check_into(path: object, into: object) -> NoReturn:
    """Say what is wrong with a target that is no dict.

    Raises:
        OptionError: path and state stand in each other's place.
        StateError: it is something else, or None.
    """
    if into is None:
        where = shown(os.fspath(path)) if isinstance(path, PATHS) else "path"
        raise StateError(
            "into is None: load() fills a state in place. For a new dict of all tensors and "
            f"values, use holdfast.open({where}).state(); else expected a dict, such as "
            'into={"model": model}'
        )
    usage = 'load() takes the path first, then the state: holdfast.load("runs/a", into=state)'
    check_order(path, into, usage)
    check_state(into, "into")
    raise StateError(f"into is {shown(into)}; expected a dict")


def check_state(state: object, named: str = "state") -> None:
    """Check that a state is a dict.

    Args:
        named: the argument that a user gave it as.

    Raises:
        StateError: it is not; the text says what to write.
    """
    if isinstance(state, Mapping):
        return
    example = '{"weight": tensor}' if hasattr(state, "shape") else '{"model": model}'
    if hasattr(state, "param_groups"):
        example = '{"optimizer": optimizer}'
    is_part = hasattr(state, "state_dict") or hasattr(state, "shape")
    how = ". Wrap it:" if is_part else ", such as"
    raise StateError(f"{named} is {shown(state)}; expected a dict{how} {named}={example}")


def check_torch(what: str, instead: str) -> None:
    """Check that torch is installed, before anything is read that needs it.

    Args:
        what: the work that needs torch, as the error names it.
        instead: a sentence: what works without.

    Raises:
        OptionError: it is not; the text says what to install.
    """
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise OptionError(f"{needs('torch', 'torch', what)}. {instead}") from error


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    begins = [0, *(n for n, (a, b) in enumerate(pairwise(ranks), 1) if b > a + 1), len(ranks)]
    ranges = [(ranks[a], ranks[b - 1]) for a, b in pairwise(begins)]
    shown = [f"{a}-{b}" if a < b else f"{a}" for a, b in ranges[:CAMPS_MAX]]
    return f"{len(ranks)} ranks ({', '.join(shown)}{', …' * (len(ranges) > CAMPS_MAX)})"
