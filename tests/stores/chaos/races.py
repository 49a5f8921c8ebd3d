"""Sixteen processes that publish one step, or take one epoch, at the same moment, again and again.

Each race has one winner, the others are told so, and what the winner saved is there.
"""

import json
import multiprocessing
import os
import time
from typing import Any

from crash_content import make_state
from forked_ranks import fork, reap

import holdfast
from holdfast.errors import AlreadyCommittedError, FencedError, HoldfastError, StoreError
from holdfast.stores.url import open_store

from .jobs import Field, Plant, die_with_parent
from .oracle import Verdict, judged, keys_below, published
from .programs import BUCKET, OPTIONS, number_of, use_server
from .rounds import LIMIT_S, Tally

RACERS = 16
REQUEST_S = 30.0  # seaweedfs lets those who put the same object wait for each other
KINDS = ("publish", "replace", "epoch")
LOST = {  # what a loser may be told
    "publish": (AlreadyCommittedError, StoreError),
    "replace": (HoldfastError,),
    "epoch": (FencedError, AlreadyCommittedError),  # the latter by one that has published
}
CLEAR = ("another", "belongs to a newer job", "holds a committed", "taken by", "was replaced")


def race(field: Field, kind: str, times: int, plant: Plant | None = None) -> Tally:
    """Let all racers race so many times; return what was seen."""
    place = f"{BUCKET}/{field.new_name()}"
    barrier = multiprocessing.get_context("fork").Barrier(RACERS)
    reading, writing = os.pipe()

    def main(racer: int) -> None:
        die_with_parent()
        use_server(field.port, REQUEST_S)
        if plant is not None:
            plant()
        for number in range(times):
            at = f"{place}/{number}/run"
            run, state = _ready(kind, at, racer, barrier), make_state(number_of(1 + racer, number))
            barrier.wait(LIMIT_S)
            said: dict[str, Any] = {"race": number, "racer": racer, "error": "", "text": ""}
            started = time.monotonic()
            try:
                _save(kind, at, run, state)
            except HoldfastError as error:
                is_told = isinstance(error, LOST[kind])
                said |= {"error": type(error).__name__, "text": str(error)[:300], "typed": is_told}
            said["took"] = time.monotonic() - started
            os.write(writing, f"{json.dumps(said)}\n".encode())

    children = {racer: fork(main, racer) for racer in range(RACERS)}
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = [json.loads(line) for line in pipe]
    ended, late = reap(children, LIMIT_S)
    tally = Tally(rounds=times, hung=len(late))
    if late or any(ended.values()):
        tally.faults.append(f"racers ended so: {ended}, late {late}")
    tally.longest_s = max((one["took"] for one in said if one["error"]), default=0.0)
    for number in range(times):
        _count(kind, [one for one in said if one["race"] == number], number, tally)
    winners = {
        one["race"]: number_of(1 + one["racer"], one["race"]) for one in said if not one["error"]
    }
    verdict = judged(field.port, lambda found: _judge(kind, place, winners, times, found))
    tally.lost, tally.torn = verdict.lost, verdict.torn
    tally.faults += verdict.faults
    return tally


def _ready(kind: str, at: str, racer: int, barrier: Any) -> Any:
    if kind == "replace" and racer == 0:
        holdfast.save(make_state(0), at, group="alone", options=OPTIONS)
    if kind != "epoch":
        return None
    run = holdfast.Checkpointer(
        at, every=1, stage="sync", signals=(), group="alone", deadline_s=LIMIT_S, options=OPTIONS
    )
    run.restore(make_state(-1))
    return run


def _save(kind: str, at: str, run: Any, state: Any) -> None:
    if kind == "epoch":
        run.save(1, state)
    else:
        holdfast.save(state, at, replace=kind == "replace", group="alone", options=OPTIONS)


def _count(kind: str, said: list[dict[str, Any]], number: int, tally: Tally) -> None:
    winners = [one for one in said if not one["error"]]
    losers = [one for one in said if one["error"]]
    tally.saved += len(winners)
    tally.errors += len(losers)
    # Of those that replace, one may begin when another has ended.
    if not winners or (kind != "replace" and len(winners) > 1):
        tally.faults.append(f"race {number} ({kind}) has {len(winners)} winners")
    for one in losers:
        if not one["typed"] or not any(word in one["text"] for word in CLEAR):
            tally.faults.append(f"race {number}: a loser was told {one['error']}: {one['text']}")


def _judge(kind: str, place: str, winners: dict[int, int], times: int, verdict: Verdict) -> None:
    from crash_content import load_number

    for number in range(times):
        at = f"{place}/{number}/run" + ("/step-00000001" if kind == "epoch" else "")
        try:
            found = load_number(at, OPTIONS)  # type: ignore[arg-type]
        except Exception as error:
            if number in winners:
                verdict.lost += 1
                verdict.faults.append(f"race {number}: {type(error).__name__}: {error}")
            continue
        if kind != "replace" and found != winners.get(number):
            verdict.torn += 1
            verdict.faults.append(f"race {number}: {found} is there, {winners.get(number)} won")
        mine = published(open_store(at))
        keys = [key for key in keys_below(at.removeprefix(f"{BUCKET}/")) if "/data/" in key]
        if left := {key for key in keys if f"/data/{mine}/" not in key}:
            verdict.faults.append(f"race {number} ({kind}): {len(left)} data files of losers left")
