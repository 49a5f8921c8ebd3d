"""holdfast's verbs on each store: what works, what is refused, what a lost writer leaves."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import holdfast
from holdfast.engine import retire
from holdfast.errors import (
    AlreadyCommittedError,
    CorruptError,
    FencedError,
    NotCommittedError,
    OptionError,
)
from holdfast.runs import fence
from holdfast.stores import objects
from holdfast.stores.base import Store
from holdfast.stores.objects import ObjectStore
from holdfast.stores.url import open_store
from stores.places import Place


@pytest.fixture
def path(new_place: Place) -> str:
    return new_place()


def state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(64, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 64)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "half": torch.randn(7).bfloat16(), "n": seed}


def bits(of: dict[str, Any]) -> list[Any]:
    moments = [part["exp_avg"] for part in of["optimizer"].state.values()]
    return [*(p.detach().clone() for p in (*of["model"].parameters(), *moments, of["half"]))]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(map(torch.equal, bits(one), bits(other))) and one["n"] == other["n"]


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_what_is_saved_loads(path: str, codec: str) -> None:
    saved, target = state(1), state(2)
    holdfast.save(saved, path, codec=codec)
    holdfast.load(path, into=target)
    assert same(saved, target) and not holdfast.verify(path).damage
    assert holdfast.open(path)["half"].equal(saved["half"])


@pytest.mark.parametrize("stage", ["eager", "lazy"])
def test_a_save_in_the_background_holds_what_was_given(path: str, stage: str) -> None:
    saved, target = state(1), state(2)
    handle = holdfast.save_async(saved, path, stage=stage)
    assert handle.result() == path
    holdfast.load(path, into=target)
    assert same(saved, target)


def test_what_is_large_is_written_in_parts(path: str) -> None:
    saved = {"w": torch.randint(0, 255, (70 << 20,), dtype=torch.uint8)}
    holdfast.save(saved, path)
    target = {"w": torch.zeros(70 << 20, dtype=torch.uint8)}
    report = holdfast.load(path, into=target)
    assert torch.equal(saved["w"], target["w"])
    assert report.bytes_read <= 1.05 * report.bytes_needed
    part = holdfast.open(path).tensor("w")[5 << 20 : 6 << 20]
    assert torch.equal(part, saved["w"][5 << 20 : 6 << 20])


def test_nothing_is_saved_over_a_checkpoint(path: str) -> None:
    holdfast.save({"n": 1}, path)
    with pytest.raises(AlreadyCommittedError):
        holdfast.save({"n": 2}, path)
    assert holdfast.open(path)["n"] == 1
    with pytest.raises(OptionError, match="within a committed checkpoint"):
        holdfast.save({"n": 2}, f"{path}/inside/it")


def test_nothing_is_saved_above_a_run(path: str) -> None:
    holdfast.save({"n": 1}, f"{path}/a/step-00000001")
    with pytest.raises(OptionError, match="one directory too high: a in it is a run, with step-0"):
        holdfast.save({"n": 2}, path)
    holdfast.save({"n": 2}, f"{path}/a/step-00000002")


def test_what_a_store_without_links_cannot_do_is_refused(path: str) -> None:
    if open_store(path).can_link:
        pytest.skip("a disk can")
    with pytest.raises(OptionError, match="cannot hold chains of deltas"):
        holdfast.save({"n": 2}, f"{path}-b", codec="delta")
    assert not open_store(f"{path}-b").exists("")


def test_what_a_store_cannot_replace_is_refused_and_stays(path: str) -> None:
    if open_store(path).can_replace:
        pytest.skip("tests/stores/test_replace.py has it")
    holdfast.save({"n": 1}, path, replace=True)  # nothing is there
    with pytest.raises(OptionError, match="this store cannot replace one in its place"):
        holdfast.save({"n": 2}, path, replace=True)
    assert holdfast.open(path)["n"] == 1


def test_nothing_there_is_no_checkpoint(path: str) -> None:
    with pytest.raises(NotCommittedError):
        holdfast.load(path, into={"n": 0})
    with pytest.raises(NotCommittedError):
        holdfast.verify(path)


def test_a_changed_byte_is_found(path: str) -> None:
    holdfast.save({"w": torch.arange(1000.0)}, path)
    store = open_store(path)
    (save,) = store.list("data")
    (file,) = store.list(f"data/{save.name}")
    name = f"data/{save.name}/{file.name}"
    data = bytearray(store.get(name, 1 << 20))
    data[len(data) // 2] ^= 1
    store.remove(name)
    descriptor = store.create(name, direct=False)
    store.vfs.write(descriptor, data, 0)
    store.vfs.sync(descriptor)
    store.vfs.close(descriptor)
    with pytest.raises(CorruptError):
        holdfast.load(path, into={"w": torch.zeros(1000)})
    assert holdfast.verify(path).damage


def trained(root: str, steps: range, **options: Any) -> None:
    with holdfast.Checkpointer(root, every=1, **options) as checkpointer:
        for step in steps:
            checkpointer.step(step, {"n": step, "w": torch.full((1000,), float(step))})


def test_a_run_keeps_what_it_is_to_keep_and_is_restored(path: str) -> None:
    trained(path, range(1, 8), keep=holdfast.Keep.latest(2))
    target = {"n": 0, "w": torch.zeros(1000)}
    with holdfast.Checkpointer(path, keep=holdfast.Keep.latest(2)) as checkpointer:
        assert checkpointer.steps() == [6, 7] and checkpointer.latest() == 7
        assert checkpointer.restore(target) == 7 and target["n"] == 7
        assert target["w"].eq(7.0).all()
        checkpointer.save(8, target)
        assert checkpointer.steps() == [7, 8]
    assert holdfast.load(path, into=target).step == 8


def test_a_step_is_saved_again_after_it_is_let_go(path: str) -> None:
    trained(path, range(1, 5), keep=holdfast.Keep.latest(1))
    with holdfast.Checkpointer(path, every=1) as checkpointer:
        target = {"n": 0, "w": torch.zeros(1000)}
        assert checkpointer.restore(target) == 4
    holdfast.save({"n": 2}, f"{path}/step-00000002")
    assert holdfast.open(f"{path}/step-00000002")["n"] == 2


@pytest.fixture
def other_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let what is called within forget what this process holds, as another process would."""

    class Other:
        def __enter__(self) -> None:
            monkeypatch.setattr(objects, "_bars", {})
            monkeypatch.setattr(fence.epochs, "held", {})
            monkeypatch.setattr(fence.epochs, "_names", [])

        def __exit__(self, *_: object) -> None:
            monkeypatch.undo()

    yield Other()


def test_a_job_that_comes_back_late_publishes_nothing(path: str, other_job: Any) -> None:
    if open_store(path).can_link:
        pytest.skip("tests/crash has it for disks")
    trained(path, range(1, 3))
    late = holdfast.Checkpointer(path, every=1)
    late.__enter__()
    target = {"n": 0, "w": torch.zeros(1000)}
    assert late.restore(target) == 2
    late.step(3, target)
    late.wait()
    with other_job:
        with holdfast.Checkpointer(path, every=1) as ours:
            assert ours.restore(target) == 3
            ours.step(4, target)
        assert ours.steps() == [1, 2, 3, 4]
    with pytest.raises(FencedError):
        late.save(5, target)
    late.__exit__(None, None, None)
    with holdfast.Checkpointer(path, every=1) as last:
        assert last.steps() == [1, 2, 3, 4]


def delete(store: Store, name: str = "") -> None:
    """Remove all that is below a name, as `rm -r` does."""
    for entry in store.list(name):
        child = f"{name}/{entry.name}" if name else entry.name
        if entry.kind == "directory":
            delete(store, child)
        else:
            store.remove(child)
    if name:
        store.remove_directory(name)


def test_a_run_deleted_and_begun_again_by_another_job_is_that_jobs(
    path: str, other_job: Any
) -> None:
    """Though its epochs count from 1 again."""
    target = {"n": 0, "w": torch.zeros(1000)}
    late = holdfast.Checkpointer(path, every=1)
    late.save(1, target)
    delete(open_store(path))
    with other_job:
        holdfast.Checkpointer(path).save(1, target)
    for refused in (lambda: late.save(2, target), lambda: late.retire_after(0)):
        with pytest.raises(FencedError, match=r"belongs to a newer job: epoch 1, .* epoch 1, and"):
            refused()
    assert holdfast.Checkpointer(path).steps() == [1]


def test_a_job_whose_run_is_deleted_goes_on_and_says_so(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = {"n": 0, "w": torch.zeros(1000)}
    with holdfast.Checkpointer(path) as job:
        job.save(1, target)
        delete(open_store(path))
        job.save(2, target)
        assert job.steps() == [2]
    assert [r.levelname for r in caplog.records if "was deleted" in r.message] == ["WARNING"]


@pytest.mark.parametrize("steps", [(4,), (3, 4, 5)], ids=["another", "the same, let go again"])
def test_a_job_that_is_overtaken_before_its_last_request_publishes_nothing(
    path: str, other_job: Any, steps: tuple[int, ...]
) -> None:
    """Its data is there, and it has looked for its epoch: only the store keeps it out."""
    if open_store(path).can_link:
        pytest.skip("tests/crash has it for disks")
    trained(path, range(1, 3))
    kind: Any = type(open_store(path))
    publish, target = kind.publish, {"n": 0, "w": torch.zeros(1000)}

    def overtaken(store: Store, pending: str, name: str) -> Any:
        kind.publish = publish
        held, objects._bars = dict(objects._bars), {}
        keep = holdfast.Keep.latest(1)
        with other_job, holdfast.Checkpointer(path, every=1, keep=keep) as ours:
            assert ours.restore(target) == 2
            for step in steps:
                ours.step(step, target)
        objects._bars = held
        return publish(store, pending, name)

    with holdfast.Checkpointer(path, every=1) as late:
        assert late.restore(target) == 2
        kind.publish = overtaken
        with pytest.raises(FencedError, match="belongs to a newer job"):
            late.save(3, target)
    with holdfast.Checkpointer(path) as last:
        assert last.steps() == [steps[-1]]


def test_an_older_job_that_is_refused_stops_no_save_of_the_newer_one(
    path: str, other_job: Any
) -> None:
    """It begins the same step when the newer one has looked for the last time."""
    if open_store(path).can_link:
        pytest.skip("tests/crash has it for disks")
    trained(path, range(1, 3))
    kind: Any = type(open_store(path))
    publish, held = kind.publish, (dict(fence.epochs.held), list(fence.epochs._names))
    target = {"n": 0, "w": torch.zeros(1000)}
    late = holdfast.Checkpointer(path, every=1)
    assert late.restore(target) == 2

    def in_between(store: Store, pending: str, name: str) -> Any:
        kind.publish = publish
        ours = objects._bars, fence.epochs.held, fence.epochs._names
        objects._bars, (fence.epochs.held, fence.epochs._names) = {}, held
        with pytest.raises(FencedError, match="belongs to a newer job"):
            late.save(3, target)
        objects._bars, fence.epochs.held, fence.epochs._names = ours
        return publish(store, pending, name)

    with other_job, holdfast.Checkpointer(path, every=1) as newer:
        assert newer.restore(target) == 2
        kind.publish = in_between
        newer.save(3, {"n": 33, "w": torch.zeros(1000)})
    late.close()
    assert holdfast.open(f"{path}/step-00000003")["n"] == 33


def test_what_a_dead_save_left_is_revoked_by_the_next_job(path: str, other_job: Any) -> None:
    if open_store(path).can_link:
        pytest.skip("tests/crash has it for disks")
    trained(path, range(1, 3))
    store = open_store(path)
    dead = store.below("step-00000003")
    descriptor = dead.create(f"data/{'ab' * 16}/00000-0.hf", direct=False)
    dead.vfs.write(descriptor, b"half", 0)
    dead.vfs.sync(descriptor)
    dead.vfs.close(descriptor)
    dead.prepare(".manifest-x", b"late")
    with other_job:
        with holdfast.Checkpointer(path, every=1) as ours:
            assert ours.restore({"n": 0, "w": torch.zeros(1000)}) == 2
            ours.step(3, {"n": 33, "w": torch.zeros(1000)})
        assert ours.steps() == [1, 2, 3]
    assert not dead.publish(".manifest-x", "MANIFEST")
    assert holdfast.open(f"{path}/step-00000003")["n"] == 33


def test_a_publication_whose_reply_was_lost_is_a_commit(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client sends it again, and the store says that it is there."""
    if open_store(path).shows_pending:
        pytest.skip("tests/crash has it for disks, and test_hdfs.py for HDFS")
    put = ObjectStore._put

    def twice(self: ObjectStore, name: str, data: bytes, mode: Any, **more: Any) -> bool:
        put(self, name, data, mode, **more)
        return put(self, name, data, mode, **more)

    monkeypatch.setattr(ObjectStore, "_put", twice)
    trained(path, range(1, 4), keep=holdfast.Keep.latest(1))
    monkeypatch.undo()
    with holdfast.Checkpointer(path) as checkpointer:
        assert checkpointer.steps() == [3]


def test_no_secret_is_logged(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        holdfast.save({"n": 1}, path)
        with pytest.raises(NotCommittedError) as caught:
            holdfast.open(f"{path}-none")
    assert "test12345678" not in caplog.text + str(caught.value) + repr(open_store(path))


def test_who_takes_a_name_while_its_data_is_deleted_publishes_nothing(
    path: str, other_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if open_store(path).shows_pending:
        pytest.skip("tests/crash has it for disks, and test_hdfs.py for HDFS")
    holdfast.save({"w": torch.ones(3)}, path)
    remove_save, dead = retire._remove_save, open_store(path)

    def late(store: Store, save: str) -> bool:
        bars, objects._bars = objects._bars, {}
        dead.prepare(".manifest-x", b"late", "MANIFEST")
        theirs, objects._bars = objects._bars, bars
        is_dead = remove_save(store, save)
        bars, objects._bars = objects._bars, theirs
        assert not dead.publish(".manifest-x", "MANIFEST")
        objects._bars = bars
        return is_dead

    monkeypatch.setattr(retire, "_remove_save", late)
    retire.retire(open_store(path))
    assert not any(map(open_store(path).exists, open_store(path).scan()))


def test_a_checkpoint_without_tensors_is_let_go(path: str) -> None:
    holdfast.save({"n": 1}, path)
    retire.retire(open_store(path))
    assert not open_store(path).exists("MANIFEST")


FORKED = """
import os, torch, holdfast

holdfast.save({"w": torch.ones(10)}, "memory://x/a")
opened = holdfast.open("memory://x/a")
if (child := os.fork()) == 0:
    for use in (lambda: holdfast.save({"n": 2}, "memory://x/b"), opened.state):
        try:
            use()
        except holdfast.errors.OptionError as error:
            assert "'spawn'" in str(error)
        else:
            os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
holdfast.save({"n": 3}, "memory://x/c")
"""


def test_a_forked_child_is_told_instead_of_waiting_for_ever() -> None:
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=60)
