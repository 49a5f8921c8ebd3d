"""Restore a run: a given step, or the newest good one, the same on all ranks."""

import errno
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from ..arguments import check_state
from ..brief import show_bytes
from ..engine.ledger import LOAD_PARTS, Ledger
from ..errors import (
    CorruptError,
    MismatchError,
    NotCommittedError,
    OptionError,
    PeerError,
    StoreError,
    TrustError,
    shown,
)
from ..group.base import COORDINATOR
from ..group.phase import Phase
from ..loading.load import load_from
from ..loading.report import LoadReport
from ..loading.request import LoadRequest
from ..options import Options
from .directory import Run
from .place import Place

if TYPE_CHECKING:
    from ..group.base import Group
    from .tiers import TieredRun

logger = logging.getLogger("holdfast")

TRIES = 10  # of a step that another process lets go of while it is read


def check_into(into: object) -> None:
    """Check what is to be filled.

    Raises:
        OptionError: it is the number of a step.
        StateError: it is no dict.
    """
    if type(into) is int:
        raise OptionError(
            f"into is {shown(into)}; restore() takes the state first: restore(state, step=…)"
        )
    check_state(into, "into")


def restore_step(
    run: "Run | TieredRun",
    step: int,
    into: Mapping[Any, Any],
    ranks: "Group",
    request: LoadRequest,
    options: Options,
) -> LoadReport:
    """Fill a state from one step; with ``partial`` nothing is noted in the run."""
    found = run.found(ranks)
    *others, last = found.get(step, [Place(run.path(step))])
    for place in others:
        if (lack := run.lacks(step, place)) is not None:
            logger.error("%s is left out: %s. Trying %s", place, lack.text, last)
            continue
        damage, gone, report = _try(run, step, place, into, ranks, request, options)
        if report is not None and not (damage or gone):
            break
        if damage:
            run.note(step, place, is_damaged=True)
        logger.error("%s cannot be restored: %s. Trying %s", place, damage or gone, last)
    else:
        if (lack := run.lacks(step, last)) is not None:
            failure = CorruptError if lack.is_damage else NotCommittedError
            raise failure(f"step {step} is not restored from {last}: {lack.text}")
        report, record = _load(run, last, step, into, ranks, request, options)
        if not request.partial:
            with Phase(ranks) as told:
                told.answer = json.dumps(record).encode()
            _note(run, step, last, [json.loads(answer) for answer in told.answers], ranks)
    if request.partial:
        return report
    later = [s for s in found if s > step]
    if later and ranks.rank == COORDINATOR:
        logger.warning(
            "step %d is restored, but %s has later steps, up to step %d. restore() and the "
            "retention policy take those as the newest. To train on from step %d, call "
            "retire_after(%d) first",
            *(step, run.root, later[-1], step, step),
        )
    return report


def restore_newest(
    run: "Run | TieredRun",
    into: Mapping[Any, Any],
    ranks: "Group",
    request: LoadRequest,
    options: Options,
) -> tuple[int, LoadReport] | None:
    """Fill a state from the newest step that is not damaged; None: there is no step.

    A step that is retired while it is read is no fault of its: there is a newer one by then. With
    ``partial`` nothing is noted in the run.

    Raises:
        MismatchError: the ranks see different copies of the run, or the state does not fit.
    """
    gone, gone_steps = "", set[int]()
    for _ in range(TRIES):
        faults = []
        for step, place, other in _in_turn(run.found(ranks)):
            instead = f". Trying {other}" if other else ""
            damage, gone, report = "", "", None
            if (lack := run.lacks(step, place)) is None:
                damage, gone, report = _try(run, step, place, into, ranks, request, options)
            elif lack.is_gone:
                gone = lack.text
            if gone:
                logger.info("step %d was deleted meanwhile; trying the newest again", step)
                gone_steps.add(step)
                break
            if lack is not None:
                run.note(step, place, is_damaged=True)
                logger.error("step %d in %s is left out: %s%s", step, place, lack.text, instead)
                faults += [f"step {step}: {lack.text}"] if lack.is_damage else []
                continue
            if not damage and report is not None:
                _say_lost(run, ranks)
                return step, report
            run.note(step, place, is_damaged=True)
            given = (step, place, damage, instead)
            logger.error("step %d in %s is damaged and is skipped: %s%s", *given)
            faults.append(f"step {step}: {damage}")
        else:
            if faults:
                raise CorruptError(f"every checkpoint of {run.root} is damaged. {' '.join(faults)}")
            _say_lost(run, ranks)
            return None
    if ranks.world_size > 1 and len(gone_steps) == 1:  # the coordinator goes on finding it
        raise MismatchError(
            f"nothing was restored: rank 0 finds step {gone_steps.pop()} in {run.root}, but "
            f"another rank does not: {gone}. Give all ranks the same directory, or the same copy"
        )
    raise NotCommittedError(
        f"nothing was restored: {TRIES} times, the newest step of {run.root} was deleted before it "
        f"was read. Keep more steps, such as Keep.latest(5). The last error: {gone}"
    )


def _say_lost(run: "Run | TieredRun", ranks: "Group") -> None:
    if ranks.rank == COORDINATOR and (lost := run.lost()) is not None:
        logger.error("a newer step was not restored: %s", lost)


def _in_turn(found: Mapping[int, Sequence[Place]]) -> Iterator[tuple[int, Place, Place | None]]:
    """Yield each step with each of its places and the one after that, the newest first."""
    for step in sorted(found, reverse=True):
        for place, other in zip_longest(found[step], found[step][1:]):
            yield step, place, other


def _load(
    run: "Run | TieredRun",
    place: Place,
    step: int,
    into: Mapping[Any, Any],
    ranks: "Group",
    request: LoadRequest,
    options: Options,
) -> tuple[LoadReport, dict[str, Any]]:
    """Load a step; return its report, and what this rank has measured."""
    started = time.perf_counter()
    # With its number, stray files are no reason to go back to an older one.
    ledger = Ledger(started)
    reach = run.reach(step, place)
    report = load_from(place.path, ranks, into, request, options, step, ledger, reach)
    seconds = round(time.perf_counter() - started, 6)
    record = ledger.record()
    return replace(report, seconds=seconds), {
        "rank": ranks.rank,
        "bytes": report.bytes_read,
        "bytes_needed": report.bytes_needed,
        "bytes_sent": report.bytes_sent,
        "seconds": {part: record["seconds"].get(part, 0.0) for part in LOAD_PARTS}
        | {"total": seconds},
        "waits": 0,
        "stall_s": seconds,
        **{key: record[key] for key in ("host", "clock", "spans")},
    }


def _try(
    run: "Run | TieredRun",
    step: int,
    place: Place,
    into: Mapping[Any, Any],
    ranks: "Group",
    request: LoadRequest,
    options: Options,
) -> tuple[str, str, LoadReport | None]:
    """Load a step.

    Returns:
        (what is damaged, why it is not there any more, the report): the texts are the same on every
        rank, and "" when it is good.
    """
    failure: BaseException | None = None
    report: LoadReport | None = None
    told: dict[str, Any] = {}
    try:
        report, told["record"] = _load(run, place, step, into, ranks, request, options)
    except BaseException as error:  # whatever it is: the other ranks are on their way to judge it
        failure = error
    with Phase(ranks) as judged:
        # What is neither is raised here, and so on every rank; a peer's error is the peer's.
        if failure is not None and not isinstance(failure, PeerError):
            if not (kind := _kind_of(failure)):
                raise failure
            told[kind] = str(failure)
        judged.answer = json.dumps(told).encode()
    found = [json.loads(answer) for answer in judged.answers]
    damage, gone = (
        " ".join(answer[kind] for answer in found if kind in answer) for kind in ("damage", "gone")
    )
    if failure is not None and not (damage or gone):
        raise failure
    if not (damage or gone or request.partial):
        _note(run, step, place, [answer["record"] for answer in found], ranks)
    return damage, gone, report


def _note(
    run: "Run | TieredRun",
    step: int,
    place: Place,
    records: list[dict[str, Any]],
    ranks: "Group",
) -> None:
    run.note(step, place, is_damaged=False)
    if ranks.rank != COORDINATOR:
        return
    size = show_bytes(sum(record["bytes"] for record in records))
    seconds = max(record["stall_s"] for record in records)
    logger.info("restored step %d from %s: %s in %.2f s", step, place.path, size, seconds)
    run.metrics.add("load", step, records)


def _kind_of(error: BaseException) -> str:
    """Whether an error says that this checkpoint cannot be read, and another perhaps can."""
    if isinstance(error, NotCommittedError):
        return "gone"
    if isinstance(error, TrustError):
        return ""  # an older step that is signed is no answer: say so, and let people decide
    damaged = (
        isinstance(error, CorruptError)
        or (isinstance(error, StoreError) and error.errno == errno.EIO)
        or (isinstance(error, MismatchError) and error.is_repaired)
    )
    return "damage" if damaged else ""
