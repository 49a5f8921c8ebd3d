"""Restore a run: a given step, or the newest good one, the same on all ranks."""

import errno
import json
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ._load import load_from
from ._run import Run
from .errors import CorruptError, PeerError, StoreError
from .group.base import COORDINATOR, Phase
from .options import Options

if TYPE_CHECKING:
    from .group.base import Group

logger = logging.getLogger("holdfast")


def restore_step(
    run: Run, step: int, into: Mapping[Any, Any], ranks: "Group", options: Options
) -> None:
    """Fill a state from one step."""
    record = _load(run, step, into, ranks, options)
    with Phase(ranks) as told:
        told.answer = json.dumps(record).encode()
    _note(run, step, [json.loads(answer) for answer in told.answers], ranks)
    later = [s for s in agree_steps(run, ranks) if s > step]
    if later and ranks.rank == COORDINATOR:
        logger.warning(
            "step %d is restored, but %s holds later ones, the last of them step %d: they stay the "
            "newest, for the policy and for restore(). To train on from step %d, call "
            "retire_after(%d) first",
            *(step, run.root, later[-1], step, step),
        )


def restore_newest(
    run: Run, into: Mapping[Any, Any], ranks: "Group", options: Options
) -> int | None:
    """Fill a state from the newest step that is not damaged; return the step, or None."""
    faults = []
    for step in reversed(agree_steps(run, ranks)):
        damage = _try(run, step, into, ranks, options)
        if not damage:
            return step
        run.damaged.add(step)
        logger.error("step %d is damaged and is skipped: %s", step, damage)
        faults.append(f"step {step}: {damage}")
    if faults:
        raise CorruptError(f"every checkpoint of {run.root} is damaged. {' '.join(faults)}")
    return None


def agree_steps(run: Run, ranks: "Group") -> list[int]:
    """Return the steps that the coordinator sees, on every rank."""
    with Phase(ranks) as listed:
        if ranks.rank == COORDINATOR:
            listed.answer = json.dumps(run.steps()).encode()
    result: list[int] = json.loads(listed.answers[COORDINATOR])
    return result


def _load(
    run: Run, step: int, into: Mapping[Any, Any], ranks: "Group", options: Options
) -> dict[str, Any]:
    """Load a step; return what this rank has measured."""
    started = time.perf_counter()
    report = load_from(
        run.path(step),
        ranks,
        into,
        strict=True,
        partial=False,
        cast=False,
        options=options,
        strangers=True,  # no reason to go back to an older step
    )
    seconds = round(time.perf_counter() - started, 6)
    return {
        "rank": ranks.rank,
        "bytes": report.bytes_read,
        "bytes_needed": report.bytes_needed,
        "bytes_sent": report.bytes_sent,
        "seconds": {"total": seconds},
        "waits": 0,
        "stall_s": seconds,
    }


def _try(run: Run, step: int, into: Mapping[Any, Any], ranks: "Group", options: Options) -> str:
    """Load a step; return what is damaged, the same on every rank, or "" when it is good."""
    failure: BaseException | None = None
    told: dict[str, Any] = {}
    try:
        told["record"] = _load(run, step, into, ranks, options)
    except BaseException as error:  # whatever it is: the other ranks are on their way to judge it
        failure = error
    with Phase(ranks) as judged:
        # What is no damage is raised here, and so on every rank; a peer's error is the peer's.
        if failure is not None and not isinstance(failure, PeerError):
            if not _is_damage(failure):
                raise failure
            told["damage"] = str(failure)
        judged.answer = json.dumps(told).encode()
    found = [json.loads(answer) for answer in judged.answers]
    damage = " ".join(answer["damage"] for answer in found if "damage" in answer)
    if failure is not None and not damage:
        raise failure
    if not damage:
        _note(run, step, [answer["record"] for answer in found], ranks)
    return damage


def _note(run: Run, step: int, records: list[dict[str, Any]], ranks: "Group") -> None:
    if ranks.rank != COORDINATOR:
        return
    gigabytes = sum(record["bytes"] for record in records) / 1e9
    seconds = max(record["stall_s"] for record in records)
    logger.info("restored step %d of %s: %.3f GB in %.2f s", step, run.root, gigabytes, seconds)
    run.note("load", step, records)


def _is_damage(error: BaseException) -> bool:
    """Whether an error says that this checkpoint cannot be read, and another perhaps can."""
    if isinstance(error, StoreError):
        return error.errno == errno.EIO
    return isinstance(error, CorruptError)
