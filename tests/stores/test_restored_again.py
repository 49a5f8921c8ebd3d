"""A local disk before the store: what one restore found is not what the next one finds."""

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Event, Keep
from holdfast.codecs import Delta
from holdfast.engine.epochs import epochs_of
from holdfast.errors import AlreadyCommittedError, FencedError, NotCommittedError, StoreError
from holdfast.format.names import step_name
from holdfast.stores.url import open_store
from stores.jobs import next_job
from stores.test_tiers import (
    damage,
    left_local,
    opened,
    restored,
    state,
    steps_in,
    stop,
)


@pytest.fixture
def store(tmp_path: Path) -> str:
    (tmp_path / "store").mkdir()
    return str(tmp_path / "store")


@pytest.fixture
def local(tmp_path: Path) -> str:
    return str(tmp_path / "local")


def test_a_step_whose_files_are_back_is_not_deleted(
    store: str,
    local: str,
    tmp_path: Path,
) -> None:
    with opened(store, local) as first:
        first.save(1, state(1))
    left_local(store, local, 2)
    next_job()
    (data,) = Path(local, step_name(2), "data").iterdir()
    killed = opened(store, local, durable="local", upload_bytes_s=1000)
    os.rename(data, tmp_path / "away")  # as a disk that is not mounted yet
    with pytest.raises(NotCommittedError, match="step 2 is not restored"):
        killed.restore(state(0), step=2)
    assert killed.restore(state(0)) == 1
    os.rename(tmp_path / "away", data)
    into = state(0)
    assert killed.restore(into) == 2
    assert into["n"] == 2
    killed.step(3, into)  # begins, as the first step of training does
    stop(killed)
    assert steps_in(local)[-1] == 2
    assert restored(store, local)[:2] == (2, 2.0)


def test_a_step_that_was_damaged_and_is_good_again_goes_up(
    store: str,
    local: str,
) -> None:
    with opened(store, local) as first:
        first.save(1, state(1))
    left_local(store, local, 2)
    (data,) = Path(local, step_name(2)).rglob("*.hf")
    good = data.read_bytes()
    damage(f"{local}/{step_name(2)}")
    next_job()
    with opened(store, local, keep=Keep.latest(1) | Keep.local(1)) as checkpointer:
        assert checkpointer.restore(state(0)) == 1
        data.write_bytes(good)
        assert checkpointer.restore(state(0)) == 2
        checkpointer.wait("store")
        assert steps_in(store)[-1] == 2
        checkpointer.save(3, state(3))
    assert steps_in(local) == steps_in(store) == [3]


@pytest.mark.parametrize("is_away", [False, True])
def test_a_step_that_is_damaged_in_the_store_is_saved_again_and_its_job_dies(
    store: str,
    local: str,
    is_away: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with opened(store, f"{local}-of-another-host") as first:
        for step in (1, 2):
            first.save(step, state(step))
    damage(f"{store}/{step_name(2)}")
    next_job()
    killed = opened(store, local, durable="local", upload_bytes_s=1000)
    assert killed.restore(state(0)) == 1
    if is_away:
        assert killed._tiers is not None
        monkeypatch.setattr(killed._tiers.store, "retire", fails)
    killed.save(2, state(20))
    stop(killed)
    if is_away:  # the damaged one is still there, and the next job says so
        assert "step 2, which is damaged, stays for now" in caplog.text
        assert steps_in(store) == [1, 2]
        return
    assert steps_in(store) == [1]
    assert restored(store, local)[:2] == (2, 20.0)
    next_job()
    with opened(store, local) as last:
        assert last.restore(state(0)) == 2
        last.save(3, state(3))
    assert steps_in(store) == [1, 2, 3]
    assert not holdfast.verify(f"{store}/{step_name(2)}").damage


def fails(step: int) -> None:
    raise StoreError("the store is away")


def every_other(steps: Sequence[int], metrics: Mapping[int, object]) -> set[int]:
    return set(steps[::2])


@pytest.mark.parametrize("kind", ["deltas", "a policy of the user's own"])
def test_no_step_goes_up_twice(store: str, local: str, kind: str) -> None:
    ups = Counter[int]()

    def observe(event: Event) -> None:
        if event.kind == "uploaded" and event.step is not None:
            ups[event.step] += 1

    given: dict[str, Any] = {"observe": [observe], "durable": "local", "drain_s": 60}
    if kind == "deltas":
        given |= {"keep": Keep.latest(1) | Keep.every(20) | Keep.local(3)}
        given |= {"codec": Delta(every=3)}
    else:
        given |= {"keep": Keep((every_other,), "every other") | Keep.local(5)}
    with opened(store, local, **given) as checkpointer:
        assert checkpointer._tiers is not None and checkpointer._tiers.uploader is not None
        with checkpointer._tiers.uploader.paused():  # as a store that is away for a while
            for step in (10, 20, 30, 40):
                checkpointer.save(step, state(step))
    assert set(ups.values()) == {1}
    kept = {20, 40} if kind == "deltas" else {10, 30}
    assert kept <= set(steps_in(store))


def test_a_step_that_is_good_in_the_store_is_not_deleted_for_its_local_damage(
    store: str, local: str
) -> None:
    with opened(store, local) as first:
        for step in (1, 2):
            first.save(step, state(step))
    damage(f"{local}/{step_name(2)}")
    next_job()
    with opened(store, local) as checkpointer:
        assert checkpointer.restore(state(0)) == 2
        assert checkpointer.restore(state(0), step=1) == 1
        with pytest.raises(AlreadyCommittedError, match="call retire_after"):
            checkpointer.save(2, state(20))
        assert steps_in(store) == steps_in(local) == [1, 2]
        assert checkpointer.retire_after(1) == [2]
        checkpointer.save(2, state(20))
    assert restored(store, None)[:2] == (2, 20.0)


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_job_that_has_not_seen_the_store_deletes_nothing_in_it(
    store: str, local: str, tmp_path: Path, is_taken: bool
) -> None:
    with opened(store, local) as first:
        for step in (1, 2):
            first.save(step, state(step))
    if is_taken:
        next_job()
        with opened(store, str(tmp_path / "other host")) as other:
            assert other.restore(state(0)) == 2
            other.save(3, state(3))
    damage(f"{local}/{step_name(2)}")
    next_job()
    os.rename(store, tmp_path / "away")
    os.symlink(store, store)  # it cannot be read
    late = opened(store, local, durable="local", drain_s=20)
    assert late.restore(state(0)) == 1
    os.unlink(store)
    os.rename(tmp_path / "away", store)
    before = epochs_of(open_store(store))
    with contextlib.suppress(FencedError, AlreadyCommittedError):  # or not yet
        late.save(2, state(20))
    if is_taken:
        with pytest.raises(FencedError, match="has steps of another job"):
            late.wait("store")
        with contextlib.suppress(FencedError, StoreError):
            late.close()
        assert steps_in(store) == [1, 2, 3]
        assert epochs_of(open_store(store)) == before
        assert not holdfast.verify(f"{store}/{step_name(2)}").damage
        return
    # The store has step 2 as it was: this one is another checkpoint, and says so.
    with contextlib.suppress(StoreError):
        late.close()
    assert steps_in(store) == [1, 2]
    assert not holdfast.verify(f"{store}/{step_name(2)}").damage
