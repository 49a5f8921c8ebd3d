"""What has to hold after a round, judged in a fresh process that the proxy does not harm.

What was acknowledged loads bit for bit, and what is there is whole. The next save works. When a day
has passed, nothing is left but the checkpoints and what a run has beside them.
"""

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from crash_content import WrongContentError, load_number, make_state
from forked_ranks import fork

import holdfast
from holdfast.engine.check import read_manifest
from holdfast.errors import HoldfastError, NotCommittedError
from holdfast.format.names import step_name, step_of
from holdfast.stores.base import Store
from holdfast.stores.url import open_store

from .jobs import die_with_parent
from .programs import BUCKET, OPTIONS, Work, let_a_day_pass, number_of, use_server

JUDGED_S = 60.0
NEXT_JOB = 900  # its number
OF_A_RUN = re.compile(r"LATEST|metrics\.jsonl|\.epoch-\d+")
PROBE = re.compile(r"(?:^|/)[^/]*\.probe-[0-9a-f]+$")


@dataclass(slots=True)
class Known:
    """What ranks have told of a place.

    Attributes:
        begun: numbers of states that may be there, by step.
        saved: numbers that were acknowledged, by step.
        times: of each number, when its first rank began, and its last one was told the end.
        local: numbers that the local disk before the store has acknowledged.
    """

    begun: dict[int, set[int]] = field(default_factory=dict)
    saved: dict[int, set[int]] = field(default_factory=dict)
    times: dict[int, tuple[float, float]] = field(default_factory=dict)
    local: set[int] = field(default_factory=set)

    def newer(self, number: int) -> int:
        """Return a number that was acknowledged, and begun when another had ended; 0: none."""
        ended = self.times[number][1] if number in self.times else -1.0
        acknowledged = self.local.union(*self.saved.values())
        return next((other for other in acknowledged if self.times[other][0] > ended), 0)


@dataclass(slots=True)
class Verdict:
    """What a judge found: broken promises, and what is there."""

    faults: list[str] = field(default_factory=list)
    lost: int = 0
    torn: int = 0
    probes: int = 0
    found: str = ""


def known_of(events: list[dict[str, Any]]) -> Known:
    """Collect what ranks told; a step that one rank says is saved, is acknowledged."""
    known = Known()
    for event in events:
        if event["what"] == "restored":
            continue
        number = number_of(event["job"], event["step"])
        if event["what"] == "begun":
            known.begun.setdefault(event["step"], set()).add(number)
        elif event["what"] == "saved":
            known.saved.setdefault(event["step"], set()).add(number)
        elif event["what"] == "local":
            known.local.add(number)
        began, ended = known.times.get(number, (event["at"], math.inf))
        if event["what"] in ("saved", "told"):
            ended = event["at"] if ended == math.inf else max(ended, event["at"])
        known.times[number] = (min(began, event["at"]), ended)
    return known


def judged(port: int, judge: Callable[[Verdict], None]) -> Verdict:
    """Judge in a fresh process, directly at a server."""
    reading, writing = os.pipe()

    def main(_: int) -> None:
        die_with_parent()
        use_server(port, JUDGED_S)
        verdict = Verdict()
        try:
            judge(verdict)
        except HoldfastError as error:
            verdict.faults.append(f"the judge met {type(error).__name__}: {error}")
        said = {name: getattr(verdict, name) for name in Verdict.__slots__}
        os.write(writing, json.dumps(said).encode()[: 1 << 16])

    child = fork(main, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        return Verdict(["the judge died"])
    return Verdict(**json.loads(text))


def look_at_run(known: Known, place: str, keep: int, verdict: Verdict) -> list[int]:
    """Load every step of a run; return the steps there are."""
    run = holdfast.Checkpointer(place, group="alone", options=OPTIONS)
    steps = run.steps()
    verdict.found = str(steps)
    for step in steps:
        number = _load(run.path(step), verdict)
        if number is None:
            continue
        if number not in known.begun.get(step, set()):
            verdict.torn += 1
            verdict.faults.append(f"step {step} holds state {number}, which nobody saved there")
        if any(number != saved for saved in known.saved.get(step, ())):
            verdict.lost += 1
            verdict.faults.append(f"step {step} holds state {number}, not the acknowledged one")
    for step, numbers in known.saved.items():
        if len(numbers) > 1:
            verdict.lost += 1
            verdict.faults.append(f"step {step} was acknowledged as {sorted(numbers)}")
        if step not in steps and len([s for s in steps if s > step]) < keep:
            verdict.lost += 1
            verdict.faults.append(f"step {step} was acknowledged; there are {steps}")
    return steps


def judge_run(known: Known, work: Work, verdict: Verdict) -> None:
    """Judge a run, and save on in it."""
    steps = look_at_run(known, work.place, work.keep, verdict)
    if verdict.faults:
        return
    for is_old in (False, True):
        if is_old:
            let_a_day_pass()
        run = holdfast.Checkpointer(
            work.place, every=1, keep=holdfast.Keep.latest(work.keep), stage="sync",
            signals=(), group="alone", options=OPTIONS,
        )  # fmt: skip
        restored = run.restore(make_state(-1)) or 0
        if restored != max(steps, default=0):
            verdict.faults.append(f"step {restored} was restored of {steps}")
        step = restored + 1  # what a dead job was about to save, among others
        run.save(step, make_state(number_of(NEXT_JOB, step)))
        known.begun[step] = known.saved[step] = {number_of(NEXT_JOB, step)}
        steps = look_at_run(known, work.place, work.keep, verdict)
    _check_metrics(work.place, verdict)
    _check_left(work.place, {step_name(step) for step in steps}, verdict)


def _check_metrics(place: str, verdict: Verdict) -> None:
    """Look whether each line of metrics.jsonl is there once."""
    lines = open_store(place).get("metrics.jsonl", 1 << 24).splitlines()
    verdict.faults += [f"metrics.jsonl has {line!r} twice" for line in _twice(lines)]
    for line in lines:
        try:
            json.loads(line)
        except ValueError:
            verdict.faults.append(f"metrics.jsonl has {line!r}")


def _twice(lines: list[bytes]) -> list[bytes]:
    return sorted({line for line in lines if lines.count(line) > 1})


def judge_place(known: Known, work: Work, verdict: Verdict) -> None:
    """Judge a checkpoint that is replaced in its place, and replace it twice more."""
    for is_old in (None, False, True):
        if is_old is not None:
            if is_old:
                let_a_day_pass()
            number = number_of(NEXT_JOB, 1 + is_old)
            holdfast.save(
                make_state(number), work.place, replace=True, group="alone", options=OPTIONS
            )
            known = Known({0: {number}}, {0: {number}}, {number: (0.0, 1.0)})
        found = _load(work.place, verdict) or 0
        verdict.found = f"{verdict.found} {found}"
        if newer := known.newer(found):
            verdict.lost += 1
            verdict.faults.append(f"state {newer} was acknowledged; {found} is there")
        if found and not any(found in numbers for numbers in known.begun.values()):
            verdict.torn += 1
            verdict.faults.append(f"it holds state {found}, which nobody saved there")
    _check_left(work.place, {""}, verdict)


def judge_copy(known: Known, work: Work, verdict: Verdict) -> None:
    """Judge a copy, and copy once more."""
    source = os.environ["HOLDFAST_CHAOS_SOURCE"]
    found = _load(work.place, verdict)
    if known.saved and found is None:
        verdict.lost += 1
        verdict.faults.append("the copy was acknowledged, and is not there")
    holdfast.copy_checkpoint(source, work.place, options=OPTIONS)
    if _load(work.place, verdict) is None:
        verdict.faults.append("a second copy is not there")
    _check_left(work.place, {""}, verdict)


def keys_below(prefix: str) -> list[str]:
    """List all objects below a prefix, bars too."""
    import obstore
    from obstore.store import from_url

    client = from_url(BUCKET, client_options={"allow_http": True})
    return [item["path"] for part in obstore.list(client, prefix) for item in part]


def published(store: Store) -> str:
    """Return the id of the save that a checkpoint is of."""
    return str(read_manifest(store).table.header.save_id)


def _load(path: str, verdict: Verdict) -> int | None:
    try:
        return load_number(path, OPTIONS)  # type: ignore[arg-type]
    except NotCommittedError:
        return None
    except (HoldfastError, WrongContentError) as error:
        verdict.torn += 1
        verdict.faults.append(f"{path} is visible, but: {error}"[:600])
        return None


def _check_left(place: str, checkpoints: set[str], verdict: Verdict) -> None:
    """Look for objects that no checkpoint has, below a place or beside it."""
    prefix = place.removeprefix(f"{BUCKET}/")
    keys = keys_below(prefix.rpartition("/")[0])
    allowed = {}
    for name in checkpoints:
        below = f"{prefix}/{name}".rstrip("/")
        # Not what is listed: some servers list a directory when nothing is in it any more.
        allowed[below] = published(open_store(f"{BUCKET}/{below}"))
    epochs = 0
    for key in keys:
        if PROBE.search(key):
            verdict.probes += 1
            continue
        if not key.startswith(f"{prefix}/"):
            verdict.faults.append(f"{key} is left beside {prefix}")
            continue
        rest = key.removeprefix(f"{prefix}/")
        epochs += rest.startswith(".epoch-")
        if (
            step_of(rest.split("/")[0]) is None
            and OF_A_RUN.fullmatch(rest)
            and "" not in checkpoints
        ):
            continue
        owner = next((below for below in allowed if key.startswith(f"{below}/")), "")
        of_it = key.removeprefix(f"{owner}/")
        parts = of_it.split("/")
        is_data = parts[0] == "data" and len(parts) == 3 and parts[1] == allowed.get(owner)
        if not owner or not (of_it == "MANIFEST" or is_data):
            verdict.faults.append(f"{key} is left over")
    if epochs > 1:
        verdict.faults.append(f"{epochs} epochs are left")
