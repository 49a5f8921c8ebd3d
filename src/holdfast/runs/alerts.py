"""Rules over what happens in a run: what should wake somebody. Pure, but for `Alerts`.

`judge` takes facts, wherever they are from: `Alerts` has them from events, and `check_run.py` from
the files of a run.
"""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..arguments import is_positive
from ..brief import show_bytes
from ..errors import OptionError, StoreError, shown
from ..format.lag import Lag
from ..format.measured import phase_seconds
from ..format.stragglers import FACTOR, stragglers, typical
from ..stores.url import open_store
from .events import Event, Observer

logger = logging.getLogger("holdfast")

RULES = ("stall", "failed", "durable", "silent", "straggler", "disk", "behind")
STRAGGLER_SAVES = 5  # the newest: one slow save makes no straggler of a rank
STRAGGLERS_MAX = 8  # told of at once
AHEAD_S_MAX = 60.0  # of another machine's clock
GROWTH_SAVES = 4  # the disk's future is judged by so many of the newest saves


@dataclass(frozen=True, slots=True)
class Alert:
    """What a rule says.

    Attributes:
        rule: "stall", "failed", "durable", "silent", "straggler", "disk" or "behind".
        text: what was found, and what was expected.
        step: of which step; None: of none.

    Example:
        ``for alert in holdfast.check_run("runs/a"): print(alert.rule, alert.text)``
    """

    rule: str
    text: str
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When the rules speak; None: this one does not."""

    stall_s: float | None = None
    durable_min: float | None = None
    straggler: float | None = FACTOR
    disk_saves: float | None = 3
    behind_min: float | None = None

    def __post_init__(self) -> None:
        for name in ("stall_s", "durable_min", "straggler", "disk_saves", "behind_min"):
            value = getattr(self, name)
            if value is not None and not is_positive(value):
                raise OptionError(f"{name} is {shown(value)}; expected a number above 0, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a run; times are in seconds since 1970.

    Attributes:
        durable_s: when the newest step became durable, or the job began.
        failed: the newest save, if it failed: step and error.
        silent_s: how long ago a rank last wrote its progress, if it has not ended.
        saves: what each rank measured of the newest saves, as in metrics.jsonl; the newest last.
        free_bytes: of the disk.
        step_bytes: size of the newest step in its files.
        old_bytes: of a local disk: size of the steps that are deleted before a save fails.
        growth: how many steps each save adds, with what is deleted taken off.
        waits: the first step that the store behind a local disk lacks, and since when.
    """

    now_s: float
    durable_s: float | None = None
    failed: tuple[int, str] | None = None
    silent_s: float | None = None
    step: int | None = None
    saves: Sequence[Sequence[Mapping[str, Any]]] = ()
    free_bytes: int | None = None
    step_bytes: int = 0
    old_bytes: int = 0
    growth: float = 1.0
    waits: tuple[int, float] | None = None


def judge(facts: Facts, limits: Limits) -> list[Alert]:
    """Return what the rules say of the facts."""
    found = []
    step = facts.step
    newest = facts.saves[-1] if facts.saves else ()
    stall_s = max((_number(rank.get("stall_s")) for rank in newest), default=0.0)
    if limits.stall_s is not None and stall_s > limits.stall_s:
        text = f"the save held up training for {stall_s:.2f} s; the limit is {limits.stall_s:g} s"
        found.append(Alert("stall", text, step))
    if facts.failed is not None:
        found.append(Alert("failed", f"the newest save failed: {facts.failed[1]}", facts.failed[0]))
    if limits.durable_min is not None:
        found += _durable(facts, limits.durable_min)
    if facts.silent_s is not None:
        text = f"the job has said nothing for {facts.silent_s:.0f} s: it hangs, or was killed"
        found.append(Alert("silent", text))
    if limits.straggler is not None:
        found += _stragglers(facts, limits.straggler)
    if limits.disk_saves is not None and facts.free_bytes is not None and facts.step_bytes > 0:
        found += _disk(facts, facts.free_bytes, limits.disk_saves)
    if limits.behind_min is not None and facts.waits is not None:
        found += _behind(facts.now_s, *facts.waits, limits.behind_min)
    return found


def _durable(facts: Facts, limit_min: float) -> list[Alert]:
    limit = f"the limit is {limit_min:g} min"
    if facts.durable_s is None:
        return [Alert("durable", f"no step is durable yet; {limit}", facts.step)]
    age_min = (facts.now_s - facts.durable_s) / 60
    if age_min > limit_min:
        text = f"the newest step became durable {age_min:.1f} min ago; {limit}"
        return [Alert("durable", text, facts.step)]
    if age_min < -AHEAD_S_MAX / 60:
        text = f"the newest step is dated {-age_min:.1f} min in the future, so its age is unknown"
        return [Alert("durable", f"{text}; compare the clocks of the machines", facts.step)]
    return []


def _stragglers(facts: Facts, factor: float) -> list[Alert]:
    saves = [
        {_rank(record, at): phase_seconds(record) for at, record in enumerate(records)}
        for records in facts.saves[-STRAGGLER_SAVES:]
    ]
    slow = stragglers(typical(saves), factor)
    worst = {one.rank: one for one in reversed(slow)}  # of each rank, its phase that costs most
    return [
        Alert(
            "straggler",
            f"rank {one.rank} takes {one.seconds:.2f} s to {one.phase}; the median is "
            f"{one.median_s:.2f} s",
            facts.step,
        )
        for one in [*reversed(worst.values())][:STRAGGLERS_MAX]
    ]


def _rank(record: Mapping[str, Any], at: int) -> int:
    rank = record.get("rank")
    return rank if type(rank) is int else at


def _disk(facts: Facts, free_bytes: int, limit: float) -> list[Alert]:
    # One step more than are kept: the new one is written before an old one is deleted.
    room = (free_bytes + facts.old_bytes) / facts.step_bytes
    saves = room if room < 1 or facts.growth <= 0 else room / facts.growth
    if room >= 1 and (facts.growth <= 0 or saves >= limit):
        return []
    sizes = f"{show_bytes(free_bytes)} are free, and a step takes {show_bytes(facts.step_bytes)}"
    full = "the next save does not fit" if room < 1 else f"it is full in {math.floor(saves)} saves"
    return [Alert("disk", f"{sizes}: {full}", facts.step)]


def _behind(now_s: float, step: int, since_s: float, limit_min: float) -> list[Alert]:
    waits_min = (now_s - since_s) / 60
    if waits_min <= limit_min:
        return []
    text = (
        f"the store lacks step {step}, saved {waits_min:.1f} min ago, and all newer steps; the "
        f"limit is {limit_min:g} min"
    )
    return [Alert("behind", text, step)]


def _number(value: object) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else 0.0  # type: ignore[arg-type]


class Alerts:
    """An observer that applies rules to events, and tells others of what they say.

    An alert is logged as a warning, and is an event of the kind "alert" for each of ``then``. It is
    told again only after its rule has been satisfied in between.

    Args:
        then: observers that get the alerts, such as a webhook; none: they are only logged.
        stall_s: longest stall of a save, in seconds.
        durable_min: longest time without a new durable step, in minutes.
        straggler: how many times the median of all ranks a rank may take for a part of its work.
        disk_saves: for how many more saves the disk must have room.
        behind_min: with a local disk before the store, how many minutes a step may be durable
            there while the store has neither it nor a newer one.

    Raises:
        OptionError: a limit is not a number above 0.

    Example::

        alerts = holdfast.Alerts(print, stall_s=2.0, durable_min=30)
        checkpointer = holdfast.Checkpointer("runs/a", every=100, observe=[alerts])
    """

    def __init__(
        self,
        *then: Observer,
        stall_s: float | None = None,
        durable_min: float | None = None,
        straggler: float | None = FACTOR,
        disk_saves: float | None = 3,
        behind_min: float | None = None,
    ) -> None:
        self._then = then
        self._limits = Limits(
            stall_s=stall_s,
            durable_min=durable_min,
            straggler=straggler,
            disk_saves=disk_saves,
            behind_min=behind_min,
        )
        self._began_s = time.time()
        self._facts = Facts(now_s=self._began_s, durable_s=self._began_s)
        self._last: Event | None = None
        self._retired = 0
        self._retired_before: deque[int] = deque(maxlen=GROWTH_SAVES)  # each save
        self._active: set[str] = set()
        self._lag = Lag()

    def __call__(self, event: Event) -> None:
        """Take note of an event, and tell what follows from it."""
        self._last = event
        if event.kind == "failed" and event.step is not None:
            self._facts = replace(self._facts, failed=(event.step, event.text))
        elif event.kind == "retired":
            self._retired += 1
        elif event.kind == "uploaded" and event.step is not None:
            self._lag.uploaded(event.step)
        elif event.kind == "committed":
            self._retired_before.append(self._retired)
            if event.step is not None:
                self._lag.saved(event.step, event.time_s)
            since = self._retired - self._retired_before[0]
            self._facts = replace(
                self._facts,
                durable_s=event.time_s,
                failed=None,
                step=event.step,
                saves=[*self._facts.saves, event.ranks][-STRAGGLER_SAVES:],
                free_bytes=_free_bytes(event.run) if event.rank == 0 else None,
                step_bytes=sum(int(_number(rank.get("stored_bytes"))) for rank in event.ranks),
                growth=max(0.0, 1 - since / max(1, len(self._retired_before) - 1)),
            )
        else:
            return
        self.tick()

    def tick(self) -> None:
        """Look at the clock; the thread of an observer calls it once a second."""
        if self._last is None:
            return
        facts = replace(self._facts, now_s=time.time(), waits=self._lag.oldest)
        now = judge(facts, self._limits)
        new = [alert for alert in now if alert.rule not in self._active]
        self._active = {alert.rule for alert in now}
        for alert in new:
            self._tell(alert, self._last)

    def _tell(self, alert: Alert, last: Event) -> None:
        where = last.run if alert.step is None else f"{last.run}, step {alert.step}"
        logger.warning("alert %s: %s: %s", alert.rule, where, alert.text)
        event = Event(
            kind="alert",
            run=last.run,
            step=alert.step,
            rank=last.rank,
            world_size=last.world_size,
            time_s=time.time(),
            rule=alert.rule,
            text=alert.text,
        )
        failures = []
        for observer in self._then:
            try:
                observer(event)
            except Exception as error:  # the others are told all the same
                failures.append(error)
        if failures:
            raise failures[0]


def _free_bytes(run: str) -> int | None:
    try:
        return open_store(os.fspath(run)).free_bytes()
    except StoreError:
        return None
