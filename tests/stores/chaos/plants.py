"""Faults planted in holdfast's protocol, in every rank and racer; the campaign has to notice each.

Beside each fault are the rounds that are to show it.
"""

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import planted
import pytest

import holdfast.engine.commit
import holdfast.engine.retire
import holdfast.engine.swap
from holdfast.engine.commit import Commit
from holdfast.engine.discard import remove_files
from holdfast.engine.swap import Swap
from holdfast.runs.fence import Fence
from holdfast.runs.tiers import TieredRun
from holdfast.stores.objects import ObjectStore

from .harms import FOREVER, Harm
from .jobs import Field, Plant
from .rounds import SCENARIOS, Tally, play

Show = Callable[[Field, Plant], Iterator[Tally]]


def put_without_condition() -> None:
    """MANIFEST is put whatever is there."""
    put = ObjectStore._put

    def put_over(self: Any, name: str, data: bytes, mode: Any, *, is_bar: bool = False) -> bool:
        is_manifest = name == "MANIFEST" and not is_bar
        return put(self, name, data, "overwrite" if is_manifest else mode, is_bar=is_bar)

    ObjectStore._put = put_over  # type: ignore[method-assign]


def acknowledge_before_the_answer() -> None:
    """A save is acknowledged when the request for MANIFEST has been sent."""
    publish = Commit.publish

    def publish_later(self: Any) -> None:
        threading.Thread(target=publish, args=(self,), daemon=True).start()

    Commit.publish = publish_later  # type: ignore[method-assign]


def take_a_refusal_for_a_lost_reply() -> None:
    """Whose MANIFEST is there is not looked at."""
    holdfast.engine.commit._settle_race = lambda store, data: None


def remove_data_after_an_unknown_end() -> None:
    """The data of a save that failed goes, though its MANIFEST may be there."""
    Commit._will_never_be_there = lambda self, is_lost: True  # type: ignore[method-assign]


def retire_data_first() -> None:
    """The data of a retired step goes before its MANIFEST."""
    planted.retire_data_first(pytest.MonkeyPatch())


def replace_data_first() -> None:
    """The data of a replaced checkpoint goes before the new MANIFEST is there."""
    swap = Swap.swap

    def remove_first(self: Any, stamp: str) -> None:
        for save in self._store.list("data"):
            if save.name != self._save_id:
                remove_files(self._store, save.name)
        swap(self, stamp)

    Swap.swap = remove_first  # type: ignore[method-assign]


def sweep_without_a_bar() -> None:
    """Data of a save that may be alive goes without a bar at its MANIFEST."""
    holdfast.engine.retire.revoke_save = lambda store, save: True
    ObjectStore.unbar = lambda self, name: None  # type: ignore[method-assign]


def no_look_at_the_epoch() -> None:
    """A job takes no notice of a newer one, nor bars what an older one has begun."""
    Fence.hold = lambda self: None  # type: ignore[method-assign]


def two_may_take_one_epoch() -> None:
    """An epoch is put whatever is there."""
    ObjectStore.claim = lambda self, name, note: self._put(name, note, "overwrite")  # type: ignore


def tell_before_the_store_has_it() -> None:
    """With a local disk before the store, nobody waits for the upload."""
    TieredRun.wait = lambda *given: None  # type: ignore[method-assign]


def _in_an_upload(field: Field, plant: Plant) -> Iterator[Tally]:
    """Kill a job that has a local disk before the store, while it uploads; the disk is gone."""
    for at in (4, 8, 16, 24):
        harm = Harm("kill-before", 0, at)
        yield play(field, SCENARIOS["tiers-store"], harm, "all", plant, vanishes=0)[0]


def _at(name: str, action: str, wanted: str, times: int = 1, *, is_commit: bool = True) -> Show:
    """Harm a request of the coordinator that looks so: the second, after its bar; or each."""

    def show(field: Field, plant: Plant) -> Iterator[Tally]:
        _, seen = play(field, SCENARIOS[name], None, plant=plant)
        found = [line for line in seen["seen"] if re.match(f"0:.* {wanted}$", line)]
        for line in found[1:2] if is_commit else found:
            harm = Harm(action, 0, _number(line), times)
            yield play(field, SCENARIOS[name], harm, "all", plant)[0]

    return show


def _number(line: str) -> int:
    return int(line.split(" ")[0].split(":")[1])


COMMIT, DELETE, EPOCH = "PUT .*/MANIFEST", r"POST .*\?delete", r"PUT .*/\.epoch-\d+"
A_WHILE = 24  # more often than one request is sent again, not so often as two are
PLANTS: dict[str, tuple[Plant, Show]] = {
    "MANIFEST put without a condition": (
        put_without_condition,
        _at("zombie", "hold-before", COMMIT),
    ),
    "acknowledged before the answer": (
        acknowledge_before_the_answer,
        _at("save", "cut", COMMIT, FOREVER),
    ),
    "a refusal taken for a lost reply": (
        take_a_refusal_for_a_lost_reply,
        _at("zombie", "hold-before", COMMIT),
    ),
    "data removed after an unknown end": (
        remove_data_after_an_unknown_end,
        _at("save", "lost", COMMIT, A_WHILE),
    ),
    "retired data goes before MANIFEST": (
        retire_data_first,
        _at("retire", "kill-after", DELETE, is_commit=False),
    ),
    "replaced data goes before MANIFEST": (
        replace_data_first,
        _at("replace", "kill-after", DELETE, is_commit=False),
    ),
    "data swept without a bar": (sweep_without_a_bar, _at("beside", "hold-before", COMMIT)),
    "no look at the epoch": (no_look_at_the_epoch, _at("zombie", "hold-before", COMMIT)),
    "two may take one epoch": (
        two_may_take_one_epoch,
        _at("zombie-first", "hold-before", EPOCH, is_commit=False),
    ),
    "told before the store has it": (tell_before_the_store_has_it, _in_an_upload),
}


def check(field: Field, names: list[str], seed: str) -> int:
    """Plant faults; print by what each was noticed. Return 0 when all were."""
    missed = []
    for name in names or list(PLANTS):
        plant, show = PLANTS[name]
        said, rounds = "NOT NOTICED", 0
        for tally in show(field, plant):
            rounds += tally.rounds
            if tally.faults:
                said = tally.faults[0]
                break
        else:
            missed.append(name)
        print(f"{name}, round {rounds}: {said[:160]}", flush=True)
    count = len(names or PLANTS)
    print(f"{count - len(missed)} of {count} planted faults noticed", flush=True)
    return 1 if missed else 0
