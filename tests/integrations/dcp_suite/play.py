"""Plays every behaviour with DCP alone and routed to holdfast, and says how the two compare.

``python tests/integrations/dcp_suite/play.py`` prints the table; ``--write`` puts it into
docs/dcp-suite.md, where `make dcp-suite` compares it.
"""

import argparse
import contextlib
import logging
import shutil
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS)] if str(TESTS) not in sys.path else []

import torch.distributed as dist  # noqa: E402

from distributed.ranks import run_ranks  # noqa: E402
from holdfast.errors import HoldfastError  # noqa: E402
from holdfast.integrations.dcp import install, routed  # noqa: E402
from integrations.dcp_suite import behaviours, sharded, storage  # noqa: E402, F401
from integrations.dcp_suite.stage import (  # noqa: E402
    BEHAVIOURS,
    LEFT,
    NAMED,
    NONE,
    REFUSED,
    THROUGH,
    WAYS,
    Behaviour,
    Stage,
    plain,
)
from integrations.page import Page  # noqa: E402

PAGE = Page("dcp-suite.md", "<!-- the table of make dcp-suite -->")
SHOWN = {
    THROUGH: "through holdfast",
    LEFT: LEFT,
    REFUSED: "refused",
    NONE: "the same error",
    NAMED: NAMED,
}


@dataclass(frozen=True)
class Outcome:
    """What one rank saw.

    Attributes:
        value: what came of it, in a form that can be compared; an error by its class.
        refused: the text of an error of holdfast's.
        ours, stock: whether checkpoints of ours, or DCP's, were written.
        said: lines of the log.
    """

    value: Any
    refused: str
    ours: bool
    stock: bool
    said: tuple[str, ...]


def play_all(rank: int, root: str, ways: tuple[str, ...], only: str) -> list[tuple[str, str, Any]]:
    """Play on one rank; return (text, way, [DCP's outcome, ours])."""
    warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.CRITICAL)  # where DCP logs each of its errors
    logging.getLogger("holdfast").setLevel(logging.WARNING)
    found = []
    for number, each in enumerate(BEHAVIOURS):
        if dist.get_world_size() not in each.ranks or only not in each.text:
            continue
        for way in ways:
            if way not in each.ways:
                continue
            pair = []
            for mode in ("dcp", "holdfast"):
                place = Path(root, f"{number}-{way}-{mode}")
                place.mkdir(exist_ok=True)
                dist.barrier()
                pair.append(_play(each, Stage(place, way), mode))
                dist.barrier()
            found.append((each.text, way, pair))
    return found


def _play(each: Behaviour, stage: Stage, mode: str) -> Outcome:
    routed._say_once.cache_clear()
    refused = ""
    with _log() as lines, contextlib.ExitStack() as stack:
        if mode == "holdfast":
            stack.enter_context(install(every=True, **each.options))
        try:
            value = plain(each.play(stage))
        except BaseException as error:
            refused = _texts_of_ours(error)
            value = ("error", type(error).__name__)
    dist.barrier()
    names = [path.name for path in stage.root.rglob("*")]
    stock = any(name.endswith(".distcp") for name in names)
    return Outcome(value, refused, "MANIFEST" in names, stock, tuple(lines))


def _texts_of_ours(error: BaseException) -> str:
    """Return the text of an error of ours, also where DCP's holds it."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict):
        return "; ".join(filter(None, (_texts_of_ours(cause) for cause, _ in failures.values())))
    return str(error) if isinstance(error, HoldfastError) or "holdfast" in str(error) else ""


@contextlib.contextmanager
def _log() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("holdfast")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def verdict(expected: str, stock: Outcome, ours: Outcome) -> str:
    """Compare; what is neither the same nor said is a silent difference."""
    if stock.ours:
        return "DIFFERENT: holdfast wrote though it was not asked"
    if ours.refused and ours.value != stock.value:
        return REFUSED
    if ours.value != stock.value:
        if expected == NAMED:
            return NAMED
        return f"DIFFERENT: {ours.value!s:.300} instead of {stock.value!s:.300}"
    if ours.stock:
        return LEFT if ours.said else "DIFFERENT: left to DCP without a word"
    return THROUGH if ours.ours else NONE


def compare(ranks: int, ways: tuple[str, ...] = WAYS, only: str = "") -> dict[str, dict[str, str]]:
    """Play on so many ranks; return the verdicts: {text: {way: verdict}}."""
    root = tempfile.mkdtemp(prefix="holdfast-suite-", dir="/dev/shm")
    try:
        of_ranks = run_ranks(ranks, play_all, root, ways, only)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    expected = {each.text: each.expected for each in BEHAVIOURS}
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for played in zip(*of_ranks, strict=True):
        text, way, _ = played[0]
        seen = {verdict(expected[text], *pair) for _, _, pair in played}
        bad = sorted(one for one in seen if one.startswith("DIFFERENT"))
        found[text][way] = bad[0] if bad else " and ".join(sorted(seen))
    return dict(found)


def faults(found: dict[int, dict[str, dict[str, str]]]) -> list[str]:
    """Name what is not as the table says."""
    expected = {each.text: each.expected for each in BEHAVIOURS}
    return [
        f"{text} ({ranks} ranks, {way}): {seen}; expected {expected[text]}"
        for ranks, texts in found.items()
        for text, ways in texts.items()
        for way, seen in ways.items()
        if seen != expected[text]
    ]


def table() -> str:
    """Return the table of the page."""
    lines = ["| what DCP does | routed | ranks | saved |", "|---|---|---|---|"]
    for each in BEHAVIOURS:
        options = "".join(f" `{name}`" for name in each.options)
        why = f": {each.why}" if each.why else ""
        ranks = " and ".join(map(str, each.ranks))
        text = each.text + (f" ({options.strip()})" if options and "`" not in each.text else "")
        lines.append(f"| {text} | {SHOWN[each.expected]}{why} | {ranks} | {', '.join(each.ways)} |")
    return "\n".join(lines)


def main() -> None:
    """Play all, print what differs; fail when something does, or the page has another table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/dcp-suite.md")
    parser.add_argument("--only", default="", help="behaviours with this in their text")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    given = parser.parse_args()
    found = {ranks: compare(ranks, tuple(given.ways), given.only) for ranks in given.ranks}
    wrong = faults(found)
    count = sum(len(ways) for texts in found.values() for ways in texts.values())
    print("\n".join(wrong))
    print(f"{len(BEHAVIOURS)} behaviours, played {count} times with each: {len(wrong)} differ")
    PAGE.keep(table(), write=given.write)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
