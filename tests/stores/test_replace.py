"""A checkpoint in the place of another one, on an object store: every turn that it may take."""

import errno
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import holdfast
from holdfast.engine import retire, swap
from holdfast.engine.retire import sweep
from holdfast.errors import AlreadyCommittedError, ReplacedError, StoreError
from holdfast.stores.base import Store
from holdfast.stores.objects import ObjectStore
from holdfast.stores.objects_bar import new_bar
from holdfast.stores.objects_client import instead_of
from holdfast.stores.url import open_store
from stores.places import Place
from stores.test_copy import files


@pytest.fixture
def path(new_place: Place) -> str:
    made = new_place()
    if open_store(made).shows_pending:
        pytest.skip("it is of object stores; tests/unit and tests/crash have it for disks")
    holdfast.save(state(1), made)
    return made


def state(n: int) -> dict[str, Any]:
    return {"n": n, "w": torch.full((1000,), float(n))}


def replaced(path: str, n: int) -> None:
    holdfast.save(state(n), path, replace=True)


def check_holds(path: str, n: int, saves: int = 1) -> None:
    """Check that step n is there, whole, beside data of so many saves in all, and nothing else."""
    target = state(0)
    holdfast.load(path, into=target)
    assert target["n"] == n and bool((target["w"] == n).all())
    assert not holdfast.verify(path).damage
    assert len(left(path, "data")) == saves
    if saves == 1:
        assert left(path) == ["MANIFEST", "data"]


def left(path: str, below: str = "") -> list[str]:
    """Return what is there; some servers list a directory for a while when nothing is in it."""
    store, prefix = open_store(path), f"{below}/" if below else ""
    return [e.name for e in store.list(below) if store.exists(f"{prefix}{e.name}")]


def before_swap(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something once, when a save has its lock and is about to put its MANIFEST."""
    real = ObjectStore.swap

    def late(self: ObjectStore, pending: str, name: str, stamp: str) -> bool:
        monkeypatch.setattr(ObjectStore, "swap", real)
        act()
        return real(self, pending, name, stamp)

    monkeypatch.setattr(ObjectStore, "swap", late)


def test_a_checkpoint_is_replaced_and_nothing_of_the_old_one_is_left(path: str) -> None:
    for n in (2, 3):
        replaced(path, n)
        check_holds(path, n)


def test_the_old_one_is_whole_until_then(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before_swap(monkeypatch, lambda: check_holds(path, 1, saves=2))
    replaced(path, 2)
    check_holds(path, 2)


def test_of_two_at_once_the_first_one_stays(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before_swap(monkeypatch, lambda: replaced(path, 2))
    with pytest.raises(ReplacedError, match="during this save"):
        replaced(path, 3)
    check_holds(path, 2)


def test_one_that_is_retired_meanwhile_is_not_replaced(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_swap(monkeypatch, lambda: retire.retire(open_store(path)))
    with pytest.raises(ReplacedError):
        replaced(path, 2)
    assert not left(path)


def test_data_of_a_save_that_is_about_to_replace_is_not_swept(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_swap(monkeypatch, lambda: sweep(open_store(path), math.inf))
    replaced(path, 2)
    check_holds(path, 2)


def test_a_save_that_was_swept_replaces_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = swap.Swap.lock

    def late(self: swap.Swap, stamp: str) -> None:
        sweep(open_store(path), math.inf)
        lock(self, stamp)

    monkeypatch.setattr(swap.Swap, "lock", late)
    with pytest.raises(StoreError, match=r"nothing is there|is not there on rank 0"):
        replaced(path, 2)
    check_holds(path, 1)


def test_a_save_whose_lock_another_one_holds_replaces_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who sweeps may be frozen before it deletes."""
    lock = swap.Swap.lock

    def late(self: swap.Swap, stamp: str) -> None:
        assert retire.revoke_save(open_store(path), self._save_id)
        lock(self, stamp)

    monkeypatch.setattr(swap.Swap, "lock", late)
    with pytest.raises(StoreError, match="has taken this save for dead"):
        replaced(path, 2)
    check_holds(path, 1)


@pytest.mark.parametrize(("lost", "number"), [("get", errno.EIO), ("claim", errno.EACCES)])
def test_a_lock_of_which_nothing_is_known_bars_nobody(
    path: str, monkeypatch: pytest.MonkeyPatch, lost: str, number: int
) -> None:
    def fail(*_: object) -> Any:
        error = StoreError("no answer")
        error.errno = number
        raise error

    store, save = open_store(path), "0" * 32
    assert store.claim(f".manifest-{save}.over", b"of the save itself")
    monkeypatch.setattr(ObjectStore, lost, fail)
    with pytest.raises(StoreError, match="no answer"):
        retire.revoke_save(store, save)


def test_a_save_that_ends_while_it_is_barred_is_no_error(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has removed its lock: its own MANIFEST may be there."""
    store, save = open_store(path), "0" * 32
    lock, get = f".manifest-{save}.over", ObjectStore.get
    assert store.claim(lock, b"of the save itself")

    def late(self: ObjectStore, name: str, bytes_max: int) -> bytes:
        self.remove(lock)
        return get(self, name, bytes_max)

    monkeypatch.setattr(ObjectStore, "get", late)
    assert not retire.revoke_save(store, save)
    assert retire.revoke_save(store, save)  # nobody has it now


@pytest.mark.parametrize("is_sent", [False, True])
def test_without_an_answer_the_data_stays_until_it_is_certain(
    path: str, monkeypatch: pytest.MonkeyPatch, is_sent: bool
) -> None:
    real, late = ObjectStore.swap, list[Callable[[], bool]]()

    def lost(self: ObjectStore, pending: str, name: str, stamp: str) -> bool:
        late.append(lambda: real(self, pending, name, stamp))
        if is_sent:
            late.pop()()
        raise StoreError("no answer")

    monkeypatch.setattr(ObjectStore, "swap", lost)
    with pytest.raises(StoreError, match="no answer"):
        replaced(path, 2)
    monkeypatch.undo()
    check_holds(path, 2 if is_sent else 1, saves=2)
    sweep(open_store(path), math.inf)
    if late:
        check_holds(path, 1, saves=2)
        assert late.pop()()  # it was on its way
    replaced(path, 3)
    sweep(open_store(path), math.inf)
    check_holds(path, 3)


def test_a_save_that_died_with_its_lock_is_swept_when_another_one_has_replaced(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ObjectStore.swap
    late = list[Callable[[], bool]]()

    def killed(self: ObjectStore, pending: str, name: str, stamp: str) -> bool:
        late.append(lambda: real(self, pending, name, stamp))
        raise StoreError("no answer")

    monkeypatch.setattr(ObjectStore, "swap", killed)
    with pytest.raises(StoreError):
        replaced(path, 2)
    monkeypatch.undo()
    replaced(path, 3)
    assert not late.pop()()
    sweep(open_store(path), math.inf)
    check_holds(path, 3)


def test_an_answer_that_was_lost_is_found_out(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put = ObjectStore._put

    def twice(self: ObjectStore, name: str, data: bytes, mode: Any, **more: Any) -> bool:
        put(self, name, data, mode, **more)
        return put(self, name, data, mode, **more)

    monkeypatch.setattr(ObjectStore, "_put", twice)
    replaced(path, 2)
    monkeypatch.undo()
    check_holds(path, 2)


def test_an_answer_that_was_lost_is_a_failed_save_of_an_empty_place(
    new_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent may come later: so its name is barred before its data goes."""
    path, late = new_place(), list[Callable[[], bool]]()
    if open_store(path).shows_pending:
        pytest.skip("a disk does nothing later; test_hdfs.py has it for HDFS")
    real = ObjectStore._put

    def lost(self: ObjectStore, name: str, data: bytes, mode: Any, *, is_bar: bool = False) -> bool:
        if is_bar:
            return real(self, name, data, mode, is_bar=True)
        late.append(lambda: real(self, name, data, mode))
        raise StoreError("no answer")

    monkeypatch.setattr(ObjectStore, "_put", lost)
    with pytest.raises(StoreError, match="no answer"):
        holdfast.save(state(1), path)
    monkeypatch.undo()
    store: Store = open_store(path)
    assert not left(path) and not late.pop()() and not store.exists("MANIFEST")
    store.unbar("MANIFEST")
    holdfast.save(state(2), path)
    check_holds(path, 2)


def test_a_name_that_another_save_takes_is_lost(
    new_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_place()
    if open_store(path).can_link:
        pytest.skip("tests/unit has it for disks")
    kind: Any = type(open_store(path))
    real = kind.publish

    def late(self: Store, pending: str, name: str) -> Any:
        monkeypatch.setattr(kind, "publish", real)
        holdfast.save(state(1), path)
        return real(self, pending, name)

    monkeypatch.setattr(kind, "publish", late)
    with pytest.raises(AlreadyCommittedError, match="was taken by another save"):
        holdfast.save(state(2), path, replace=True)
    check_holds(path, 1)


def test_who_is_refused_leaves_the_bar_to_the_other(
    new_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of jobs that save to one path, each that lost took the bar of the next: nobody won."""
    path = new_place()
    if open_store(path).shows_pending:
        pytest.skip("there are no bars")
    publish, theirs = ObjectStore.publish, list[str]()

    def overtaken(store: ObjectStore, pending_name: str, name: str) -> bool:
        found = store._head(name)
        assert store._put(name, new_bar(), instead_of(found), is_bar=False)  # another process
        theirs.append(str(store._head(name)["e_tag"]))
        return publish(store, pending_name, name)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "publish", overtaken)
        with pytest.raises(StoreError, match="another job kept this save from being published"):
            holdfast.save(state(1), path)
    store = ObjectStore(path)
    assert [str(store._head("MANIFEST")["e_tag"])] == theirs
    assert not files(path), "some stores keep an empty directory"
