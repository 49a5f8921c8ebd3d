"""A run on a local disk and in the store behind it: `Checkpointer(…, local=…)`."""

import contextlib
import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Checkpointer, Event, Keep
from holdfast.engine import epochs
from holdfast.engine.check import read_manifest
from holdfast.errors import (
    AlreadyCommittedError,
    CorruptError,
    FencedError,
    HoldfastError,
    MismatchError,
    NoSpaceError,
    OptionError,
    StoreError,
)
from holdfast.format.local_mark import LocalMark
from holdfast.format.measured import decode_lines
from holdfast.format.names import step_name
from holdfast.runs import checkpointer as checkpointer_module
from holdfast.runs import host_uploads, local_mark, tier_steps, tier_waits, upload_thread, uploader
from holdfast.runs.directory import Run
from holdfast.runs.fence import Fence
from holdfast.runs.local_mark import read_mark, write_mark
from holdfast.runs.metrics_file import MetricsFile
from holdfast.runs.place import Lack
from holdfast.runs.schedule import Schedule
from holdfast.runs.tier_steps import TierSteps
from holdfast.stores.base import Store, list_if_there
from holdfast.stores.local import LocalStore
from holdfast.stores.url import open_store
from holdfast.testing import recording
from holdfast.tools.copy import copy_all
from namespaces import mounted
from stores.jobs import next_job
from stores.places import Place
from stores.test_copy import files

SMALL = holdfast.Options(chunk_elements=1 << 14)
SLOW = 1 << 20  # bytes a second


@pytest.fixture
def store(new_place: Place) -> str:
    return new_place()


@pytest.fixture
def local(tmp_path: Path) -> str:
    return str(tmp_path / "local")


def state(value: float, count: int = 1000) -> dict[str, Any]:
    return {"w": torch.full((count,), float(value)), "n": int(value)}


def opened(store: str, local: str, /, **more: Any) -> Checkpointer:
    given = {"local": local, "options": SMALL, "signals": (), **more}
    return Checkpointer(store, **given)


def restored(store: str, local: str | None, **more: Any) -> tuple[int | None, float, str]:
    """Restore in another job; return the step, its value, and where it came from."""
    next_job()
    into = state(-1.0)
    with Checkpointer(store, local=local, options=SMALL, signals=(), **more) as checkpointer:
        step = checkpointer.restore(into)
        report = checkpointer.report
    return step, float(into["w"][0]), "" if report is None else report.path


def backlog(checkpointer: Checkpointer) -> list[int]:
    tiers = checkpointer._tiers
    assert tiers is not None and tiers.uploader is not None
    return tiers.uploader.backlog()


def until(holds: Callable[[], object], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.01)


def test_a_step_is_the_same_in_both_places_byte_for_byte(store: str, local: str) -> None:
    with opened(store, local) as checkpointer:
        checkpointer.save(1, state(1))
        assert files(f"{store}/{step_name(1)}") == files(f"{local}/{step_name(1)}")
    assert restored(store, local) == (1, 1.0, f"{local}/{step_name(1)}")
    shutil.rmtree(local)
    assert restored(store, local) == (1, 1.0, f"{checkpointer.root}/{step_name(1)}")


def test_the_store_gets_what_a_save_has_measured(store: str, local: str) -> None:
    with opened(store, local) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.save(2, state(2))
    (here, there) = (
        [
            r
            for r in decode_lines(open_store(root).get("metrics.jsonl", 1 << 20))
            if r["verb"] == "save"
        ]
        for root in (local, store)
    )
    assert [record["step"] for record in there] == [1, 2]
    assert there == here


def test_step_does_not_wait_for_uploads_and_wait_does(store: str, local: str) -> None:
    large = state(1, 300_000)
    with opened(store, local, every=1, upload_bytes_s=SLOW / 4) as checkpointer:
        checkpointer.step(1, large)
        checkpointer.wait("local")
        assert not open_store(store).exists(step_name(1) + "/MANIFEST")
        checkpointer.wait()
        assert open_store(store).exists(step_name(1) + "/MANIFEST")


def test_an_upload_stands_back_behind_training(
    store: str, local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    priorities: list[int] = []
    priority = partial(os.getpriority, os.PRIO_PROCESS)
    transfer = uploader.transfer

    def transferred(*given: Any) -> Any:
        priorities.append(priority(threading.get_native_id()))
        return transfer(*given)

    monkeypatch.setattr(uploader, "transfer", transferred)
    with opened(store, local, durable="store") as checkpointer:
        checkpointer.save(1, state(1))
    assert priorities and priorities[0] > priority(threading.get_native_id())


@pytest.mark.parametrize("durable", ["store", "local"])
def test_on_commit_is_told_of_the_tier_that_was_asked_for(
    store: str, local: str, durable: str
) -> None:
    told: list[tuple[str, int, dict[str, float]]] = []
    kinds: list[tuple[str, int | None]] = []

    def observe(event: Event) -> None:
        kinds.append((event.kind, event.step))

    with opened(
        store, local, durable=durable, on_commit=lambda *a: told.append(a), observe=[observe]
    ) as checkpointer:
        checkpointer.save(1, state(1), metrics={"loss": 0.5})
        if durable == "store":
            until(lambda: told)
        place = checkpointer.root if durable == "store" else local
        assert told == [(f"{place}/{step_name(1)}", 1, {"loss": 0.5})]
    assert ("uploaded", 1) in kinds
    assert len(told) == 1
    assert open_store(store).exists(step_name(1) + "/MANIFEST")


class Clock:
    """Goes when it is told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of Checkpointers, by which every upload takes 300 s."""
    clock, real = Clock(), uploader.transfer

    def transfer(*given: Any) -> Any:
        clock.now_s += 300.0
        return real(*given)

    monkeypatch.setattr(uploader, "transfer", transfer)
    monkeypatch.setattr(checkpointer_module, "Schedule", partial(Schedule, clock=clock))
    return clock


def test_the_last_save_begins_early_enough_for_its_upload(
    store: str, local: str, clock: Clock
) -> None:
    with opened(store, local, ends_in_s=1150.0) as checkpointer:
        checkpointer.save(1, state(1))
        assert checkpointer.step(2, state(2))  # 850 s are left, for two uploads of up to 450 s
        assert checkpointer.stopping
        assert steps_in(store) == [1, 2]


def test_no_upload_hastens_the_last_save_where_nobody_waits_for_it(
    store: str, local: str, clock: Clock
) -> None:
    with opened(store, local, ends_in_s=1150.0, durable="local") as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.wait("store")
        assert not checkpointer.step(2, state(2))


def test_a_job_that_ends_late_waits_no_negative_time(store: str, local: str, clock: Clock) -> None:
    checkpointer = opened(store, local, ends_in_s=100.0, durable="local", upload_bytes_s=1000)
    checkpointer.save(1, state(1, 30_000))
    clock.now_s = 1000.0
    with pytest.raises(StoreError, match=r"lacks step 1 of .* after drain_s=0 s"):
        checkpointer.close()


def test_a_save_that_the_policy_does_not_keep_fails_at_once(store: str, local: str) -> None:
    keep = Keep.latest(1) | Keep.every(10)
    with opened(store, local, keep=keep) as checkpointer:
        for step in (10, 20):
            checkpointer.save(step, state(step))
        assert checkpointer.restore(state(0), step=10) == 10
        with pytest.raises(StoreError, match=r"step 15 .* does not go to .*call retire_after"):
            checkpointer.save(15, state(15))
    assert steps_in(store) == [10, 20]


def test_a_save_is_not_let_go_for_the_later_step_of_a_newer_job(
    store: str, local: str, tmp_path: Path
) -> None:
    old = opened(store, local, keep=Keep.latest(1), deadline_s=30)
    old.save(1, state(1))
    mine = epochs.held, epochs._names
    failures: list[BaseException] = []

    def save() -> None:
        try:
            old.save(2, state(2))
        except HoldfastError as error:
            failures.append(error)

    assert old._tiers is not None and old._tiers.uploader is not None
    with old._tiers.uploader.paused():
        saving = threading.Thread(target=save)
        saving.start()
        until(lambda: 2 in steps_in(local))
        epochs.held, epochs._names = {}, []
        try:
            with opened(store, str(tmp_path / "other host"), keep=Keep.latest(1)) as new:
                assert new.restore(state(0)) == 1
                new.save(3, state(3))
        finally:
            epochs.held, epochs._names = mine
    saving.join()
    assert [type(error) for error in failures] == [FencedError]
    assert steps_in(store) == [3]


def test_a_save_before_a_later_step_goes_up_if_the_policy_keeps_it(store: str, local: str) -> None:
    with opened(store, local, keep=Keep.latest(3)) as checkpointer:
        for step in (10, 20):
            checkpointer.save(step, state(step))
        assert checkpointer.restore(state(0), step=10) == 10
        checkpointer.save(15, state(15))
        assert steps_in(store) == [10, 15, 20]


def test_each_place_keeps_what_its_policy_says(store: str, local: str) -> None:
    with opened(store, local, keep=Keep.latest(3) | Keep.local(1)) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step, state(step))
        assert checkpointer.steps() == [5, 6, 7]
        until(lambda: steps_in(store) == [5, 6, 7])
        assert steps_in(local) == [7]
        assert open_store(store).get("LATEST", 100) == b"step-00000007\n"


def test_who_waits_for_an_upload_goes_on_when_all_is_told_of_it(
    store: str, local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MetricsFile.take_save

    def slow(*given: Any) -> None:
        time.sleep(0.3)
        real(*given)

    monkeypatch.setattr(MetricsFile, "take_save", slow)
    told: list[int | None] = []

    def observe(event: Event) -> None:
        if event.kind == "uploaded":
            told.append(event.step)

    with opened(store, local, keep=Keep.all() | Keep.local(1), observe=[observe]) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step))
            assert steps_in(local) == [step]
    assert told == [1, 2, 3]


def steps_in(place: str) -> list[int]:
    return Checkpointer(place, signals=(), group="alone").steps()


def test_newer_steps_overtake_those_that_wait(store: str, local: str) -> None:
    behind: list[int | None] = []

    def observe(event: Event) -> None:
        if event.kind == "behind":
            behind.append(event.step)

    keep = Keep.all() | Keep.local(1)
    with opened(
        store, local, every=1, keep=keep, upload_bytes_s=SLOW, observe=[observe]
    ) as checkpointer:
        for step in range(1, 8):
            checkpointer.step(step, state(step, 200_000))
            checkpointer.wait("local")
            assert len(steps_in(local)) <= 4
            time.sleep(0.05)
        checkpointer.wait()
    found = steps_in(store)
    assert 7 in found
    assert len(found) < 7, "nothing was overtaken"
    assert set(range(1, 8)) - set(found) <= set(behind)
    there = open_store(store)
    for entry in there.list():
        if entry.name.startswith("step-"):  # nothing is left of what was not finished
            assert there.exists(f"{entry.name}/MANIFEST"), entry.name


def test_a_job_that_ends_too_early_says_what_stays_behind_and_the_next_one_uploads_it(
    store: str, local: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = opened(store, local, durable="local", drain_s=0.2, upload_bytes_s=SLOW)
    checkpointer.save(1, state(1, 600_000))
    with pytest.raises(StoreError, match=r"lacks step 1 of .*local after drain_s=0.2 s"):
        checkpointer.close()
    assert steps_in(store) == []
    next_job()
    with opened(store, local) as checkpointer:
        assert checkpointer.restore(state(0, 600_000), partial=True) == 1
    assert not caplog.records
    with opened(store, local) as checkpointer:
        assert checkpointer.restore(state(0, 600_000)) == 1
    assert "lacks step 1 of" in caplog.text
    assert "this job has saved nothing. The next job" in caplog.text
    assert steps_in(store) == []
    with opened(store, local) as checkpointer:
        assert checkpointer.restore(state(0, 600_000)) == 1
        checkpointer.wait("store")
    assert steps_in(store) == [1]
    with opened(store, local) as checkpointer:
        assert checkpointer.restore(state(0, 600_000)) == 1
        checkpointer.save(2, state(2, 600_000))
    assert steps_in(store) == [1, 2]


def test_what_a_newer_job_asks_of_other_hosts_is_not_taken_back_by_an_older_one(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_uploads, "LOOK_S", 0.01)
    holdfast.save(state(1), tmp_path / "step-00000001", options=SMALL)
    manifest = read_manifest(open_store(tmp_path / "step-00000001"))
    data, run = (tmp_path / "step-00000001" / "MANIFEST").read_bytes(), open_store(store)
    looks = itertools.count()

    def asked() -> str:
        return str(json.loads(run.get(host_uploads.ASKED_NAME, 4096))["name"])

    def look() -> None:
        if next(looks) == 0:
            run.remove(host_uploads.ASKED_NAME)  # an earlier holdfast takes back what is there
        elif run.exists(host_uploads.ASKED_NAME):
            raise StoreError("it is asked again")

    old = host_uploads.OtherHosts(run, 1, frozenset({1}), lambda: None)
    new = host_uploads.OtherHosts(run, 1, frozenset({1}), look)
    old.ask(manifest, data)
    new.ask(manifest, data)
    old.take_back()
    assert asked() == new._name
    with pytest.raises(StoreError, match="it is asked again"):
        new.wait(manifest, [0])
    assert asked() == new._name
    new.take_back()
    assert [e.name for e in list_if_there(run) or () if e.kind == "file"] == []


def test_a_job_that_only_waits_uploads_all_that_was_left(store: str, local: str) -> None:
    keep = Keep.latest(5) | Keep.local(3)
    checkpointer = opened(
        store, local, durable="local", drain_s=0.1, upload_bytes_s=SLOW, keep=keep
    )
    for step in (1, 2, 3):
        checkpointer.save(step, state(step, 600_000))
    with pytest.raises(StoreError, match="lacks step"):
        checkpointer.close()
    next_job()
    with opened(store, local, keep=keep) as checkpointer:
        assert checkpointer.restore(state(0, 600_000)) == 3
        checkpointer.wait("store")
    assert steps_in(store) == [1, 2, 3]


def test_a_job_that_ends_says_what_it_waits_for(
    store: str, local: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tier_waits, "FIRST_WORD_S", 0.5)
    with opened(store, local, durable="local", upload_bytes_s=SLOW, drain_s=500) as checkpointer:
        checkpointer.save(1, state(1, 600_000))
        assert "this job waits" not in caplog.text
    words = [r.getMessage() for r in caplog.records if "this job waits" in r.getMessage()]
    assert len(words) == 1, "once a minute"
    assert f"the upload of step 1 to {store}, at most 49" in words[0]
    assert re.search(r"step 1: [\d.]+ [kM]?B are up$", words[0])
    assert steps_in(store) == [1]


def test_files_that_are_up_are_not_sent_again(
    store: str, local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = holdfast.Options(chunk_elements=1 << 14, file_bytes=1 << 20)
    sent: list[int] = []
    kept: list[int] = []
    monkeypatch.setattr(uploader, "transfer", counted(uploader.transfer, sent, kept))
    big = {f"w{n}": torch.full((200_000,), float(n)) for n in range(6)}
    more = {"durable": "local", "options": options}
    checkpointer = opened(store, local, drain_s=0.1, upload_bytes_s=SLOW, **more)
    checkpointer.save(1, big)
    until(lambda: sum(sent) > options.file_bytes)  # a file is up; the others need seconds
    with pytest.raises(StoreError, match="drain_s"):
        checkpointer.close()
    next_job()
    with opened(store, local, **more) as checkpointer:
        checkpointer.restore(big)
        checkpointer.wait("store")  # or step 2 is up first, and what was begun of step 1 goes
        checkpointer.save(2, big)
    assert steps_in(store) == [1, 2]
    assert any(size > 0 for size in kept), "everything was sent again"


def counted(
    real: Callable[..., tuple[int, int]], sent: list[int], kept: list[int]
) -> Callable[..., Any]:
    def transfer(
        here: object, there: object, options: object, report: Callable[[int], None], *more: Any
    ) -> tuple[int, int]:
        def told(size: int) -> None:
            report(size)
            sent.append(size)

        sizes = real(here, there, options, told, *more)
        kept.append(sizes[1])
        return sizes

    return transfer


def test_an_older_job_neither_uploads_nor_saves(store: str, local: str, tmp_path: Path) -> None:
    old = opened(store, local)
    old.save(1, state(1))
    mine = dict(epochs.held), list(epochs._names)
    next_job()
    with opened(store, str(tmp_path / "other host")) as new:
        assert new.restore(state(0)) == 1
        new.save(2, state(2))
    epochs.held.clear()
    epochs.held.update(mine[0])
    epochs._names[:] = mine[1]
    with pytest.raises(FencedError, match="belongs to a newer job"):
        old.save(3, state(3))
    with pytest.raises(FencedError, match="belongs to a newer job"):
        old.save(4, state(4))
    with pytest.raises(
        StoreError, match=r"lacks step 3 .*, and the next job leaves it out: "
    ) as left:
        old.close()
    assert "holdfast copy" not in str(left.value)
    assert steps_in(store) == [1, 2]


def test_an_older_job_does_not_take_the_step_of_a_newer_one_for_its_own(
    store: str, local: str, tmp_path: Path
) -> None:
    old = opened(store, local)
    old.save(1, state(1))
    assert old._tiers is not None
    assert old._tiers.uploader is not None
    mine = epochs.held, epochs._names
    failures: list[BaseException] = []

    def save() -> None:
        try:
            old.save(2, state(2))
        except HoldfastError as error:
            failures.append(error)

    with old._tiers.uploader.paused():
        saving = threading.Thread(target=save)
        saving.start()
        until(lambda: 2 in steps_in(local))
        epochs.held, epochs._names = {}, []
        try:
            with opened(store, str(tmp_path / "other host")) as new:
                assert new.restore(state(0)) == 1
                new.save(2, state(22))
        finally:
            epochs.held, epochs._names = mine
    saving.join()
    assert [type(error) for error in failures] == [FencedError]
    with pytest.raises(StoreError, match="lacks step 2"):
        old.close()
    assert restored(store, None)[:2] == (2, 22.0)


def test_a_job_that_restored_without_the_store_does_not_go_on_in_it_as_another_has(
    store: str, local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(store, local, durable="local", drain_s=0.1, upload_bytes_s=SLOW / 100)
    first.save(1, state(1))
    first.save(2, state(2, 100_000))
    with pytest.raises(StoreError):
        first.close()
    next_job()
    with opened(store, str(tmp_path / "other host")) as other:
        other.restore(state(0))
        other.save(5, state(5))
    next_job()
    away = [True]
    real = Run.look

    def look(run: Run) -> None:
        if run.root != local and away[0]:
            raise StoreError("it is away")
        real(run)

    monkeypatch.setattr(Run, "look", look)
    late = opened(store, local, durable="local")
    into = state(0, 100_000)
    assert late.restore(into) == 2
    away[0] = False
    late._tiers._away_until = 0.0  # type: ignore[union-attr]
    with pytest.raises(StoreError, match="could not be read, so its steps are not known"):
        late.retire_after(1)
    with pytest.raises((FencedError, StoreError), match="another job"):
        late.save(7, into)  # or later, when the uploader has looked
        late.close()
    assert 7 not in steps_in(store)
    assert 2 in steps_in(local)


def test_a_step_that_was_restored_goes_up_when_it_is_waited_for(store: str, local: str) -> None:
    first = opened(store, local, durable="local", drain_s=0.1, upload_bytes_s=SLOW / 100)
    first.save(1, state(1, 100_000))
    with pytest.raises(StoreError):
        first.close()
    next_job()
    with opened(store, local) as checkpointer:
        assert checkpointer.restore(state(0, 100_000)) == 1
        checkpointer.wait("store")
        assert steps_in(store) == [1]


def test_an_upload_that_is_cleared_may_have_been_finished_meanwhile(
    store: str, local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(store, local, keep=Keep.all() | Keep.local(1)) as checkpointer:
        checkpointer.save(1, state(1))
        # Listed before it was committed, by a job that was frozen then.
        monkeypatch.setattr(Run, "uncommitted", lambda run: [step_name(1)])
        checkpointer.save(2, state(2))
    assert steps_in(store) == [1, 2]
    holdfast.verify(f"{store}/{step_name(1)}")


def test_local_steps_that_another_host_has_trained_on_without_do_not_count(
    store: str, local: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(store, local) as checkpointer:
        checkpointer.save(1, state(1))
    next_job()
    lost = opened(store, local, durable="local", drain_s=0.1, upload_bytes_s=1000)
    assert lost.restore(state(0)) == 1
    lost.save(2, state(20))
    with pytest.raises(StoreError, match="step 2"):
        lost.close()
    assert restored(store, local, durable="local", drain_s=0.1, upload_bytes_s=1000)[:2] == (2, 20)
    train_on_another_host(store, tmp_path, 3, 3)
    assert steps_in(store) == [1, 3]
    assert restored(store, local)[:2] == (3, 3.0)
    assert f"step 2 of {local}: left out" in caplog.text
    next_job()
    with opened(store, local) as checkpointer:
        assert checkpointer.restore(state(0), step=1) == 1
        assert checkpointer.retire_after(1) == [3]
        checkpointer.save(2, state(2))
    assert restored(store, local)[:2] == (2, 2.0)
    assert restored(store, None)[:2] == (2, 2.0)


def test_a_step_of_another_past_does_not_count_because_it_could_not_be_read_for_a_moment(
    store: str, local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(store, local) as checkpointer:
        checkpointer.save(1, state(1))
    left_local(store, local, 2)
    train_on_another_host(store, tmp_path, 2, 20)
    get, failed = LocalStore.get, list[str]()

    def fail_once(self: LocalStore, name: str, limit: int) -> bytes:
        if self.location == f"{local}/{step_name(2)}" and name == "MANIFEST" and not failed:
            failed.append(name)
            raise StoreError(f"read {self.location}/{name}: Input/output error")
        return get(self, name, limit)

    monkeypatch.setattr(LocalStore, "get", fail_once)
    assert restored(store, local)[:2] == (2, 20.0)
    assert failed
    into = state(0)
    with opened(store, local) as checkpointer:
        assert checkpointer.restore(into) == 2
        checkpointer.save(3, into)
    assert restored(store, local)[:2] == (3, 20.0)


def test_a_step_of_another_past_that_comes_while_the_disk_is_taken_does_not_count(
    store: str, local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(store, local) as checkpointer:
        checkpointer.save(1, state(1))
    left_local(store, local, 4)
    train_on_another_host(store, tmp_path, 2, 2)
    late = f"{local}/{step_name(4)}"
    os.rename(late, tmp_path / "late")  # its job is about to publish it
    hold = Fence.hold

    def hold_late(self: Fence) -> None:
        if self._store.location == local and not os.path.exists(late):
            os.rename(tmp_path / "late", late)
            monkeypatch.setattr(Fence, "hold", hold)
        hold(self)

    monkeypatch.setattr(Fence, "hold", hold_late)
    next_job()
    with opened(store, local) as checkpointer:
        assert checkpointer.restore(state(0)) == 2
        checkpointer.save(3, state(3))
    assert Fence.hold is hold
    assert steps_in(store) == [1, 2, 3]
    assert restored(store, local)[:2] == (3, 3.0)


def test_a_step_that_is_saved_while_a_disk_is_looked_at_is_no_run_without_a_store(
    store: str, local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_local(store, local, 1)
    os.rename(local, tmp_path / "late")  # another job is about to begin on this disk

    def read_early(place: Store) -> LocalMark:
        mark = read_mark(place)
        if place.location == local and not os.path.exists(local):
            os.rename(tmp_path / "late", local)
        return mark

    monkeypatch.setattr(tier_steps, "read_mark", read_early)
    assert restored(store, local)[0] is None
    assert restored(store, local)[0] == 1


def train_on_another_host(store: str, tmp_path: Path, step: int, value: int) -> None:
    """Go on from step 1 without the local disk."""
    next_job()
    with opened(store, str(tmp_path / "other host")) as other:
        assert other.restore(state(0)) == 1
        other.save(step, state(value))


def left_local(store: str, local: str, *steps: int) -> None:
    """Save steps that only the local disk has in the end, in another job."""
    next_job()
    lost = opened(store, local, durable="local", drain_s=0.1, upload_bytes_s=1000)
    lost.restore(state(0))
    for step in steps:
        lost.save(step, state(step))
    with pytest.raises(StoreError, match="lacks step"):
        lost.close()


def test_retire_after_keeps_the_local_steps_that_it_goes_on_from(store: str, local: str) -> None:
    with opened(store, local) as checkpointer:
        checkpointer.save(1, state(1))
    left_local(store, local, 2, 3)
    next_job()
    killed = opened(store, local, durable="local", upload_bytes_s=1000)
    assert killed.restore(state(0), step=2) == 2
    assert killed.retire_after(2) == [3]
    stop(killed)
    assert restored(store, local, durable="local", drain_s=0.1)[:2] == (2, 2.0)
    with opened(store, local) as checkpointer:
        assert checkpointer.restore(state(0)) == 2
        checkpointer.save(3, state(30))
    assert restored(store, None)[:2] == (3, 30.0)


def test_local_steps_count_though_the_store_went_away_with_the_first_one(
    tmp_path: Path, local: str
) -> None:
    store, away = tmp_path / "store", tmp_path / "away"
    with opened(str(store), str(tmp_path / "other host")) as checkpointer:
        checkpointer.save(1, state(1))
    next_job()
    killed = opened(str(store), local, durable="local", drain_s=0.1)
    tiers = killed._tiers
    assert killed.restore(state(0)) == 1 and tiers is not None and tiers.uploader is not None

    def goes_away() -> None:
        if not away.exists():
            store.rename(away)
            store.symlink_to(tmp_path / "nowhere")
        raise StoreError("the store is away")

    tiers.uploader.enter = goes_away  # type: ignore[method-assign]
    killed.save(2, state(2))
    stop(killed)
    store.unlink()
    away.rename(store)
    assert restored(str(store), local)[:2] == (2, 2.0)


def stop(checkpointer: Checkpointer) -> None:
    """End its uploads as a kill would."""
    tiers = checkpointer._tiers
    assert tiers is not None and tiers.uploader is not None
    tiers.uploader.close()


def fenced(checkpointer: Checkpointer) -> bool:
    tiers = checkpointer._tiers
    assert tiers is not None and tiers.uploader is not None
    return tiers.uploader.failure is not None


@pytest.mark.parametrize("has_steps", [False, True])
def test_a_job_that_began_without_the_store_does_not_take_it_from_another(
    tmp_path: Path, local: str, has_steps: bool
) -> None:
    store, away = tmp_path / "store", tmp_path / "away"
    with opened(str(store), local if has_steps else str(tmp_path / "other")) as checkpointer:
        checkpointer.save(1, state(1))
    if has_steps:
        left_local(str(store), local, 2)
    next_job()
    with opened(str(store), str(tmp_path / "other host")) as newer:
        assert newer.restore(state(0)) == 1
        newer.save(5, state(5))
    store.rename(away)
    store.symlink_to(tmp_path / "nowhere")
    next_job()
    stale = opened(str(store), local, durable="local", drain_s=5.0)
    assert stale.restore(state(0)) == (2 if has_steps else None)
    stale.save(7, state(7))
    (tmp_path / "link").symlink_to(away)  # it comes back in one step
    (tmp_path / "link").rename(store)
    until(lambda: fenced(stale))
    with pytest.raises(FencedError, match="has steps of another job"):
        stale.save(8, state(8))
    with pytest.raises(StoreError, match="has steps of another job"):
        stale.close()
    assert steps_in(str(store)) == [1, 5]
    assert restored(str(store), local)[:2] == (5, 5.0)


@pytest.mark.parametrize("note", [b"", b'{"job": ', b"[]"])
def test_an_epoch_that_does_not_say_whose_it_is_deletes_nothing(
    tmp_path: Path, local: str, note: bytes
) -> None:
    store = tmp_path / "store"
    with opened(str(store), local) as checkpointer:
        checkpointer.save(1, state(1))
    left_local(str(store), local, 2)
    (epoch,) = store.glob(".epoch-*")
    epoch.write_bytes(note)
    next_job()
    with opened(str(store), local) as checkpointer:
        with pytest.raises(OptionError, match=r"\.epoch-\d+ is empty or torn"):
            checkpointer.restore(state(0))
        with pytest.raises(OptionError, match="delete that file"):
            checkpointer.save(3, state(3))
    epoch.unlink()  # as the error says
    assert restored(str(store), local)[:2] == (2, 2.0)


def test_a_step_that_could_not_be_restored_does_not_go_up_beside_its_successors(
    store: str, local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(store, local) as checkpointer:
        checkpointer.save(1, state(1))
    left_local(store, local, 9)
    next_job()
    checkpointer = opened(store, local)
    tiers = checkpointer._tiers
    assert tiers is not None
    monkeypatch.setattr(
        tiers,
        "lacks",
        lambda step, _: Lack("it cannot be read now", is_damage=step == 9) if step == 9 else None,
    )
    with checkpointer:
        assert checkpointer.restore(state(0)) == 1
        checkpointer.save(2, state(2))
    assert steps_in(store) == [1, 2]


PROGRAM = """
import sys, torch, holdfast, holdfast.errors
store, local = sys.argv[1:]
options = {"local": local, "durable": "local", "drain_s": 0.1, "upload_bytes_s": 1000}
with holdfast.Checkpointer(store, local=local) as checkpointer:
    checkpointer.save(1, {"w": torch.full((1000,), 1.0), "n": 1})
checkpointer = holdfast.Checkpointer(store, **options)
checkpointer.save(2, {"w": torch.full((1000,), 2.0), "n": 2})
try:
    checkpointer.close()
except holdfast.errors.StoreError as error:
    assert "step 2" in str(error), error
else:
    raise SystemExit("step 2 went up")
"""


def test_prune_leaves_no_local_step_behind(tmp_path: Path, local: str) -> None:
    store = str(tmp_path / "store")
    subprocess.run([sys.executable, "-c", PROGRAM, store, local], check=True, timeout=100)
    holdfast.prune(store, Keep.latest(1), dry_run=False)
    assert restored(store, local, durable="local")[:2] == (2, 2.0)


def test_a_step_that_is_another_checkpoint_in_each_place_is_refused(
    store: str, local: str, tmp_path: Path
) -> None:
    with opened(store, local) as checkpointer:
        checkpointer.save(1, state(1))
    shutil.rmtree(f"{local}/{step_name(1)}")
    holdfast.save(state(7), f"{local}/{step_name(1)}", step=1, options=SMALL)
    next_job()
    with (
        opened(store, local) as checkpointer,
        pytest.raises(MismatchError, match=r"step 1 is not the same checkpoint in .* as in"),
    ):
        checkpointer.restore(state(0))


def test_damage_on_the_local_disk_is_made_up_for_by_the_store(store: str, local: str) -> None:
    with opened(store, local) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.save(2, state(2))
    damage(f"{local}/{step_name(2)}")
    assert restored(store, local) == (2, 2.0, f"{checkpointer.root}/{step_name(2)}")
    next_job()
    into = state(0)
    with opened(store, local) as checkpointer:
        assert checkpointer.restore(into, step=2) == 2
        assert into["n"] == 2


def test_a_damaged_local_manifest_is_made_up_for_by_the_store(
    store: str, local: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(store, local) as checkpointer:
        checkpointer.save(1, state(1))
    Path(local, step_name(1), "MANIFEST").write_bytes(b"x" * 1000)
    assert restored(store, local) == (1, 1.0, f"{checkpointer.root}/{step_name(1)}")
    assert f"Trying {checkpointer.root}/{step_name(1)}" in caplog.text
    next_job()
    into = state(0)
    alone = opened(store + "-2", local + "-2", durable="local", drain_s=0.1, upload_bytes_s=1000)
    alone.save(1, state(1))
    with pytest.raises(StoreError, match="step 1"):
        alone.close()
    Path(local + "-2", step_name(1), "MANIFEST").write_bytes(b"x" * 1000)
    next_job()
    with (
        opened(store + "-2", local + "-2", durable="local") as checkpointer,
        pytest.raises(CorruptError, match="every checkpoint of"),
    ):
        checkpointer.restore(into)


@pytest.mark.parametrize(
    ("place", "before"), [(TierSteps, "lacks"), (tier_steps, "present")], ids=["MANIFEST", "data"]
)
def test_a_local_step_that_a_live_job_deletes_during_a_restore_is_not_damaged(
    *,
    store: str,
    local: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    before: str,
) -> None:
    left_local(store, local, 1, 2)
    first, second = (Path(local, step_name(step)) for step in (1, 2))
    second.rename(tmp_path / "2")
    real, calls = getattr(place, before), itertools.count()

    def after_the_live_job(*given: Any) -> Any:
        if not next(calls):
            (tmp_path / "2").rename(second)
            (first / "MANIFEST").unlink()
            shutil.rmtree(first)
        return real(*given)

    monkeypatch.setattr(place, before, after_the_live_job)
    assert restored(store, local, durable="local", drain_s=0.1)[:2] == (2, 2.0)
    assert next(calls) > 1


def test_a_local_manifest_that_names_another_version_is_made_up_for_by_the_store(
    store: str, local: str
) -> None:
    with opened(store, local) as checkpointer:
        checkpointer.save(1, state(1))
    manifest = Path(local, step_name(1), "MANIFEST")
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:10] + b"\x01" + whole[11:])  # a bit of it may have changed
    assert restored(store, local) == (1, 1.0, f"{checkpointer.root}/{step_name(1)}")


def test_a_forked_child_uploads_nothing(store: str, local: str) -> None:
    with opened(store, local, every=1, upload_bytes_s=SLOW / 4) as checkpointer:
        checkpointer.step(1, state(1, 300_000))
        checkpointer.wait("local")
        child = os.fork()
        if not child:
            os._exit(0 if not upload_thread.running else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert steps_in(store) == [1]


@pytest.mark.parametrize("error", [None, SystemExit, KeyboardInterrupt])
def test_a_forked_child_does_not_wait_for_a_thread_that_it_does_not_have(
    store: str, local: str, error: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_thread, "STOP_S", 1000.0)
    with opened(store, local, every=1, upload_bytes_s=SLOW / 4, drain_s=1000.0) as checkpointer:
        checkpointer.step(1, state(1, 300_000))
        checkpointer.wait("local")
        child = os.fork()
        if not child:
            try:
                with contextlib.suppress(SystemExit, KeyboardInterrupt), checkpointer:
                    if error is not None:
                        raise error
                os._exit(0)
            finally:
                os._exit(1)
        assert exit_of(child) == 0
    assert steps_in(store) == [1]


def exit_of(child: int, limit_s: float = 60.0) -> int:
    """Return how a child ends; kill one that lives longer."""
    end, found = time.monotonic() + limit_s, (0, 0)
    while not found[0] and time.monotonic() < end:
        time.sleep(0.01)
        found = os.waitpid(child, os.WNOHANG)
    if not found[0]:
        os.kill(child, signal.SIGKILL)
        found = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(found[1])


def test_a_job_whose_last_step_was_damaged_does_not_end_well(store: str, local: str) -> None:
    checkpointer = opened(store, local, every=1, upload_bytes_s=20_000)
    checkpointer.step(1, state(1, 30_000))
    checkpointer.wait("local")
    tiers = checkpointer._tiers
    assert tiers is not None and tiers.uploader is not None
    with tiers.uploader.paused():
        damage(f"{local}/{step_name(1)}")
    with pytest.raises(StoreError, match=r"lacks step 1 of .*the bytes were damaged"):
        checkpointer.close()
    assert steps_in(store) == []


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_files_that_the_local_disk_lacks_come_from_the_store(
    store: str, local: str, kept: int, strict: bool
) -> None:
    big = {f"w{n}": torch.full((200_000,), float(n)) for n in range(6)}
    options = holdfast.Options(chunk_elements=1 << 14, file_bytes=1 << 20)
    with opened(store, local, options=options) as checkpointer:
        checkpointer.save(1, big)
    data = sorted(Path(local).rglob("*.hf"))
    assert len(data) > 3
    for number, path in enumerate(data):
        if kept == 0 or number % 2 == kept - 1:
            path.unlink()
    next_job()
    into = {name: torch.full_like(value, -1.0) for name, value in big.items()}
    with opened(store, local, options=options) as checkpointer:
        assert checkpointer.restore(into, strict=strict) == 1
        report = checkpointer.report
    assert all(torch.equal(into[name], value) for name, value in big.items())
    assert report is not None and report.path == f"{local}/{step_name(1)}"


def test_a_damaged_step_of_another_job_does_not_hide_what_is_left_to_upload(
    store: str, local: str
) -> None:
    with opened(store, local) as checkpointer:
        checkpointer.save(1, state(1))
    left_local(store, local, 5)
    damage(f"{local}/{step_name(5)}")
    next_job()
    keep = Keep.latest(1) | Keep.local(2)
    with opened(store, local, keep=keep, durable="local", upload_bytes_s=SLOW) as checkpointer:
        assert checkpointer.restore(state(0), step=1) == 1
        checkpointer.save(2, state(2, 500_000))
        until(lambda: 5 in checkpointer._tiers.uploader._bad)  # type: ignore[union-attr]
        assert backlog(checkpointer) == [2]
    assert 2 in steps_in(store)


def damage(path: str) -> None:
    (data,) = Path(path).rglob("*.hf")
    content = bytearray(data.read_bytes())
    content[len(content) // 3] ^= 1
    data.write_bytes(content)


def test_a_damaged_step_never_goes_up(store: str, local: str) -> None:
    first = opened(store, local, durable="local", drain_s=0.1, upload_bytes_s=1000)
    first.save(1, state(1))
    with pytest.raises(StoreError, match="step 1"):
        first.close()
    damage(f"{local}/{step_name(1)}")
    next_job()
    with opened(store, local) as checkpointer:
        checkpointer.save(2, state(2))
        until(lambda: not backlog(checkpointer))
    assert steps_in(store) == [2]
    assert steps_in(local) == [1, 2]


def test_retire_after_deletes_in_both_places(store: str, local: str) -> None:
    with opened(store, local) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step))
        assert checkpointer.retire_after(1) == [2, 3]
        assert checkpointer.steps() == steps_in(store) == [1]
        checkpointer.save(2, state(22))
    assert restored(store, None)[:2] == (2, 22.0)


def test_retire_after_deletes_nothing_while_the_store_cannot_be_read(
    store: str, local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(store, local) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
    next_job()
    with opened(store, local, durable="local") as checkpointer:
        assert checkpointer.restore(state(0)) == 2
        checkpointer.save(3, state(3))
        checkpointer.wait("store")
        real = Run.steps

        def steps(run: Run) -> list[int]:
            if run.root != local and is_away:
                raise StoreError("it is away")
            return real(run)

        monkeypatch.setattr(Run, "steps", steps)
        is_away = True
        with pytest.raises(StoreError, match="could not be read, so its steps are not known"):
            checkpointer.retire_after(1)
        is_away = False
        checkpointer._tiers._away_until = 0.0  # type: ignore[union-attr]
        assert checkpointer.restore(state(0), step=1) == 1
        assert checkpointer.steps() == [1, 2, 3]
        assert checkpointer.retire_after(1) == [2, 3]
        checkpointer.save(2, state(22))
    assert restored(store, None)[:2] == (2, 22.0)


def test_a_step_that_the_store_has_is_not_saved_again(store: str, local: str) -> None:
    with opened(store, local, keep=Keep.all() | Keep.local(1)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step))
        assert steps_in(local) == [3]
        with pytest.raises(AlreadyCommittedError, match=r"call retire_after\(step\) first"):
            checkpointer.save(1, state(9))


def test_a_local_directory_of_another_store_is_refused(
    store: str, local: str, new_place: Place
) -> None:
    with opened(store, local) as checkpointer:
        checkpointer.save(1, state(1))
    next_job()
    moved = new_place()
    other = opened(moved, local)
    refused = pytest.raises(OptionError, match=f"of {store}; .*: holdfast copy {local} {moved}$")
    with refused:
        other.restore(state(0))
    with refused:
        other.save(1, state(1))
    copy_all(local, moved)
    with opened(moved, f"{local}-2") as checkpointer:
        assert checkpointer.restore(state(0)) == 1


def test_a_local_run_of_no_store_is_refused_until_the_store_has_its_steps(
    store: str, local: str, new_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all but its newest steps would be deleted before they are uploaded."""
    with Checkpointer(local, options=SMALL, signals=()) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step, state(step))
    next_job()
    refused = pytest.raises(OptionError, match=f"holdfast copy {local} {store}$")
    for call in ("restore", "save"):
        with opened(store, local, durable="local") as checkpointer, refused:
            checkpointer.restore(state(0)) if call == "restore" else checkpointer.save(6, state(6))
    real = Run.look

    def look(run: Run) -> None:
        if run.root != local:
            raise StoreError("it is away")
        real(run)

    with monkeypatch.context() as away:
        away.setattr(Run, "look", look)
        with opened(store, local, durable="local", drain_s=0.1) as checkpointer, refused:
            checkpointer.restore(state(0))
    assert steps_in(local) == [1, 2, 3, 4, 5]
    copy_all(local, store)
    with opened(store, local, keep=Keep.all() | Keep.local(1)) as checkpointer:
        assert checkpointer.restore(state(0)) == 5
        checkpointer.save(6, state(6))
    assert (steps_in(local), steps_in(store)) == ([6], [1, 2, 3, 4, 5, 6])
    plain, full = f"{local}-2", new_place()
    for place in (plain, full):
        next_job()
        with Checkpointer(place, options=SMALL, signals=()) as checkpointer:
            checkpointer.save(5 if place == plain else 4, state(5))
    next_job()
    with (
        opened(full, plain) as checkpointer,
        pytest.raises(OptionError, match="does not say which store they belong to"),
    ):
        checkpointer.restore(state(0))


def test_the_best_step_of_the_store_leaves_the_place_of_one_that_lasts(
    store: str, local: str
) -> None:
    keep = Keep.latest(1) | Keep.every(10) | Keep.best("loss", 1) | Keep.local(1)
    with opened(store, local, durable="local", keep=keep) as checkpointer:
        checkpointer.save(1, state(1), metrics={"loss": 0.0})
        checkpointer.wait("store")
        assert checkpointer._tiers is not None
        assert checkpointer._tiers.uploader is not None
        with checkpointer._tiers.uploader.paused():
            for step in range(10, 15):  # each better than the one before, none the best
                checkpointer.save(step, state(step), metrics={"loss": 100.0 - step})
            assert 10 in steps_in(local)
    assert steps_in(store) == [1, 10, 14]


def test_a_step_that_the_policy_keeps_does_not_go_without_a_word(store: str, local: str) -> None:
    texts: list[str] = []
    keep = Keep.latest(1) | Keep.every(10) | Keep.local(1)
    given: dict[str, Any] = {"observe": [lambda event: texts.append(event.text)]}
    with opened(store, local, durable="local", keep=keep, **given) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.wait("store")
        assert checkpointer._tiers is not None
        assert checkpointer._tiers.uploader is not None
        with checkpointer._tiers.uploader.paused():
            for step in (10, 15, 20, 21):
                checkpointer.save(step, state(step))
    though = "step 10 is not uploaded, though the policy keeps it: newer ones have taken its place"
    assert though in texts
    assert not any(text.startswith("step 15 is not uploaded, though") for text in texts)
    assert steps_in(store) == [20, 21]


def test_a_job_is_named_durably_before_it_takes_the_store(tmp_path: Path) -> None:
    root = tmp_path
    with recording() as disk:
        write_mark(open_store(root / "new" / "run"), LocalMark("s3://bucket/run"), ["1" * 16])
    calls = [(operation, path) for operation, path, *_ in disk.trace()]
    named = calls.index(("create", f"{root}/new/run/.job-{'1' * 16}"))
    for above in ("new/run", "new", ""):
        assert ("sync_directory", str(root / above)) in calls[named:], above


def test_jobs_that_begin_at_once_are_all_named(local: str) -> None:
    one, third = "1" * 16, "3" * 16
    place = open_store(local)
    write_mark(place, LocalMark("s3://bucket/run"), [one])
    start = threading.Barrier(8)

    def begin(number: int) -> None:
        start.wait()
        write_mark(place, LocalMark("s3://bucket/run"), [one, f"{number:x}" * 16, "../escapes"])

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_mark(place).jobs == {f"{number:x}" * 16 for number in range(8)}
    for number in range(200):
        write_mark(place, LocalMark("s3://bucket/run"), [third, f"{number:016x}"])
    assert len(read_mark(place).jobs) == 8 + 199  # one was there before
    write_mark(place, LocalMark("s3://bucket/run"), [third, f"{199:016x}"], forgets=True)
    jobs = read_mark(place).jobs
    assert len(jobs) == local_mark.JOBS_MAX + 2
    assert {third, f"{199:016x}"} <= jobs


def test_a_store_that_is_away_is_asked_once_in_a_restore(
    lost: Path, local: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    real = Run.look

    def look(run: Run) -> None:
        asked.append(run.root)
        if run.root != local:
            raise StoreError("it is away")
        real(run)

    monkeypatch.setattr(Run, "look", look)
    with opened(str(lost), local, durable="local", drain_s=0.1) as checkpointer:
        assert checkpointer.restore(state(0)) is None
    assert asked.count(str(lost)) == 1
    assert caplog.text.count("cannot be read, so only the steps of") == 1


def test_older_steps_that_go_up_later_leave_no_more_than_the_policy_keeps(
    store: str, local: str
) -> None:
    keep = Keep.latest(2) | Keep.local(3)
    first = opened(store, local, durable="local", keep=Keep.latest(9) | Keep.local(9))
    assert first._tiers is not None
    assert first._tiers.uploader is not None
    first.save(1, state(1))
    first.wait("store")
    with first._tiers.uploader.paused():
        for step in (2, 3, 4):
            first.save(step, state(step))
        first._tiers.uploader.end()
    with pytest.raises(StoreError, match="lacks step 2, 3, 4"):
        first._tiers.drain(0.1)
    next_job()
    with opened(store, local, keep=keep, durable="local") as checkpointer:
        checkpointer.restore(state(0))
        assert checkpointer._tiers is not None
        assert checkpointer._tiers.uploader is not None
        with checkpointer._tiers.uploader.paused():  # so that the newest goes up first
            checkpointer.save(5, state(5))
    assert steps_in(store) == [4, 5]


@pytest.mark.parametrize("inner", ["", "nvme"])
def test_the_local_disk_is_not_within_the_run_nor_around_it(tmp_path: Path, inner: str) -> None:
    with pytest.raises(OptionError, match="one is within the other"):
        opened(str(tmp_path), str(tmp_path / inner))
    with pytest.raises(OptionError, match="one is within the other"):
        opened(str(tmp_path / "x" / inner), str(tmp_path / "x"))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"store": 3, "jobs": []}', b"[1]"])
def test_a_mark_that_is_none_is_refused(store: str, local: str, content: bytes) -> None:
    os.makedirs(local)
    Path(local, ".store").write_bytes(content)
    with pytest.raises(OptionError, match="does not say which store"):
        opened(store, local).restore(state(0))


def test_an_exception_in_training_does_not_leave_the_last_step_behind(
    store: str, local: str
) -> None:
    with pytest.raises(ZeroDivisionError), opened(store, local, every=1) as checkpointer:
        checkpointer.step(1, state(1, 300_000))
        raise ZeroDivisionError
    assert steps_in(store) == [1]


def test_an_exception_after_a_second_restore_does_not_leave_the_last_step_behind(
    store: str, local: str
) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        opened(store, local, durable="local", upload_bytes_s=SLOW / 4) as checkpointer,
    ):
        checkpointer.save(1, state(1, 300_000))
        checkpointer.restore(state(0, 300_000))
        raise ZeroDivisionError
    assert steps_in(store) == [1]


def test_an_interrupt_after_a_second_restore_says_what_is_left(
    store: str, local: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        opened(store, local, durable="local", upload_bytes_s=1000) as checkpointer,
    ):
        checkpointer.save(1, state(1, 100_000))
        checkpointer.restore(state(0, 100_000))
        raise KeyboardInterrupt
    assert f"lacks step 1 of {local}" in caplog.text
    assert steps_in(store) == []


def test_an_exception_after_a_restore_alone_uploads_nothing(store: str, local: str) -> None:
    left_local(store, local, 1)
    next_job()
    with pytest.raises(ZeroDivisionError), opened(store, local) as checkpointer:
        assert checkpointer.restore(state(0)) == 1
        raise ZeroDivisionError
    assert steps_in(store) == []


def test_deltas_are_refused_where_the_store_holds_none(store: str, local: str) -> None:
    codec = holdfast.codecs.Delta()
    if open_store(store).can_link:
        with opened(store, local, codec=codec) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(step, state(step))
        assert steps_in(store) == [1, 2, 3]
        shutil.rmtree(local)
        assert restored(store, None)[:2] == (3, 3.0)
        return
    with pytest.raises(OptionError, match="cannot hold chains of deltas"):
        opened(store, local, codec=codec)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"durable": "both"}, "durable is 'both'; expected one of store, local"),
        ({"drain_s": 0}, "drain_s is 0; expected a number of seconds above 0"),
        ({"upload_bytes_s": -1}, "upload_bytes_s is -1; expected a number of bytes above 0"),
        ({"local": "s3://bucket/run"}, "expected a directory of a local disk"),
        ({"local": 7}, "local is 7; expected the path of a directory"),
        ({"local": None, "durable": "local"}, 'durable="local" is given without local'),
        ({"local": None, "keep": Keep.local(2)}, "Keep.local is given without local"),
    ],
)
def test_what_cannot_be_is_refused(
    store: str, local: str, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(OptionError) as caught:
        opened(store, local, **arguments)
    assert text in str(caught.value)


def test_the_store_itself_is_no_local_disk(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="or both are the same; expected"):
        opened(str(tmp_path), f"{tmp_path}/.")


@pytest.fixture
def lost(tmp_path: Path) -> Path:
    """A store whose disk is not mounted."""
    path = tmp_path / "mount" / "run"
    path.parent.mkdir()
    path.symlink_to(tmp_path / "nowhere")
    return path


def test_training_begins_without_the_store_where_the_local_disk_is_enough(
    lost: Path, local: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StoreError), opened(str(lost), local) as checkpointer:
        checkpointer.restore(state(0))
    with pytest.raises(StoreError), opened(str(lost), local) as checkpointer:
        checkpointer.save(1, state(0))
    caplog.set_level(logging.WARNING)
    with opened(str(lost), local, durable="local") as checkpointer:
        assert checkpointer.restore(state(0)) is None
        assert "cannot be read, so only the steps of" in caplog.text
        checkpointer.save(1, state(1))
        checkpointer.save(2, state(2))
        lost.unlink()  # and it comes back
    assert steps_in(str(lost)) == [1, 2]


def test_a_store_that_is_gone_is_no_reason_not_to_restore_from_the_local_disk(
    tmp_path: Path, local: str
) -> None:
    store, away = tmp_path / "store", tmp_path / "away"
    with opened(str(store), local) as checkpointer:
        checkpointer.save(1, state(1))
    store.rename(away)
    store.symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError):
        restored(str(store), local)
    next_job()
    into = state(0)
    checkpointer = opened(str(store), local, durable="local", drain_s=0.3)
    assert checkpointer.restore(into) == 1
    assert into["n"] == 1
    checkpointer.save(2, state(2))
    with pytest.raises(StoreError, match=r"step 1, 2|step 2"):
        checkpointer.close()
    store.unlink()
    away.rename(store)
    assert restored(str(store), local)[:2] == (2, 2.0)
    next_job()
    with opened(str(store), local) as checkpointer:
        checkpointer.restore(into)
        checkpointer.save(3, state(3))
    assert steps_in(str(store)) == [1, 2, 3]


def test_local_steps_count_however_often_jobs_began_without_the_store(
    tmp_path: Path, local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_mark, "JOBS_MAX", 2)
    store, away = tmp_path / "store", tmp_path / "away"
    with opened(str(store), local) as checkpointer:
        checkpointer.save(1, state(1))
    store.rename(away)
    store.symlink_to(tmp_path / "nowhere")
    for step in range(2, 7):
        next_job()
        killed = opened(str(store), local, durable="local")
        assert killed.restore(state(0)) == step - 1
        killed.save(step, state(step))
        stop(killed)
    store.unlink()
    away.rename(store)
    next_job()
    with opened(str(store), local) as checkpointer:
        assert checkpointer.restore(state(0)) == 6
        checkpointer.save(7, state(7))
    assert {6, 7} <= set(steps_in(str(store)))
    assert len(read_mark(open_store(local)).jobs) == 4  # of two it is known that they are over


def test_a_publish_that_was_said_to_fail_is_synced_before_it_counts(
    tmp_path: Path, local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its MANIFEST is there, but a power cut could take it."""
    store, seen = str(tmp_path / "store"), list[str]()
    publish, sync = LocalStore.publish, LocalStore.sync_directory

    def published(self: LocalStore, pending_name: str, name: str) -> bool:
        if seen or name != "MANIFEST" or not self.location.startswith(store):
            return publish(self, pending_name, name)
        seen.append("linked")
        self.vfs.link(f"{self.location}/{pending_name}", f"{self.location}/{name}")
        raise StoreError("the answer is lost")

    def synced(self: LocalStore, name: str = "") -> None:
        if seen:
            seen.append(f"{self.location}/{name}".rstrip("/"))
        sync(self, name)

    monkeypatch.setattr(LocalStore, "publish", published)
    monkeypatch.setattr(LocalStore, "sync_directory", synced)
    with opened(store, local) as checkpointer:
        checkpointer.save(1, state(1))
    assert f"{store}/step-00000001" in seen


LEAVES_WITHOUT_CLOSE = """
import sys, torch, holdfast
store, local = sys.argv[1:]
c = holdfast.Checkpointer(store, local=local, durable="local", upload_bytes_s=1000.0, signals=())
c.save(1, {"w": torch.ones(30_000)})
"""


def test_a_job_that_closes_nothing_says_what_it_leaves(tmp_path: Path) -> None:
    words = [str(tmp_path / "store"), str(tmp_path / "local")]
    command = [sys.executable, "-c", LEAVES_WITHOUT_CLOSE, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert f"{words[0]} lacks step 1 of {words[1]}" in done.stderr


ENDS_TOO_EARLY = """
import sys, torch, holdfast
store, local = sys.argv[1:]
more = dict(durable="local", drain_s=0.1, upload_bytes_s=1000.0)
with holdfast.Checkpointer(store, local=local, **more) as checkpointer:
    checkpointer.save(1, {"w": torch.ones(30_000)})
"""


def test_a_job_that_ends_too_early_does_not_exit_with_0(tmp_path: Path) -> None:
    words = [str(tmp_path / "store"), str(tmp_path / "local")]
    command = [sys.executable, "-c", ENDS_TOO_EARLY, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert f"{words[0]} lacks step 1 of {words[1]} after drain_s=0.1 s" in done.stderr


def test_a_local_disk_that_is_smaller_than_a_step_is_named_and_takes_smaller_ones(
    store: str, tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk", "500k") as disk:
        with opened(store, str(disk / "local"), every=1) as checkpointer:
            with pytest.raises(NoSpaceError, match=f"{disk}/local/.*it needs .* are free there"):
                checkpointer.save(1, state(1, 300_000))
            assert not list(disk.rglob("*.hf")) and steps_in(store) == []
            for step in range(2, 8):
                checkpointer.save(step, state(step))
        assert restored(store, str(disk / "local"))[0] == 7
        assert steps_in(store)[-1] == 7
