"""What another machine has made, replaced or removed is seen at once, and never called damaged."""

import contextlib
import os
import time
from pathlib import Path

from crash_content import make_state
from forked_ranks import OPTIONS

import holdfast
from holdfast.engine.read import DataFileReader
from holdfast.engine.retire import retire
from holdfast.errors import HoldfastError, NotCommittedError
from holdfast.stores.local import LocalStore

from .lab import Lab, Turn, is_there, latest, load, save
from .machine import wait_until

FRESH_S = 2.0  # seconds, on a busy machine; a client's caches would let it be 30 to 60
TICK_S = 0.05  # a server of NFS 3 tells two changes within a tick of its clock from none


def look_anywhere(lab: Lab) -> str:
    """Every verb of the store, on what its client has looked at right before."""
    rounds = lab.times(10)
    for number in range(rounds):
        root, asked = lab.root / str(number), (Turn(), Turn())

        def looker(root: Path = root, asked: tuple[Turn, Turn] = asked) -> list[str]:
            store, told = LocalStore(root), [""]
            for _ in range(4):
                told.append(_seen(store))
                asked[1].give()
                asked[0].take()
            return told[1:]

        looking = lab.b.begin(looker)
        for change in (_make, _replace, _remove, lambda root: None):
            asked[1].take()
            time.sleep(TICK_S)
            lab.a.do(lambda change=change, root=root: change(root))
            asked[0].give()
        told = looking.result()
        assert told[0] == told[3] == "absent", told
        assert told[1:3] == ["1", "22"], told
    return f"{rounds} names made, replaced and removed: each look is of the present"


def _seen(store: LocalStore) -> str:
    """Look in all ways, which have to agree."""
    name = "data/below/file"
    if not store.exists(name):
        assert store.kind(name) == "", "stat finds what is absent"
        with contextlib.suppress(HoldfastError):
            raise AssertionError(f"{store.get(name, 10)!r} of what is absent")
        return "absent"
    (entry,) = store.list("data/below")
    found = store.get(name, 10).decode()
    assert store.kind(name) == "file"
    assert entry.size_bytes == len(found), f"listed with {entry.size_bytes} bytes, of {found}"
    assert store.stamp(name).split()[1] == str(len(found)), store.stamp(name)
    return found


def _make(root: Path) -> None:
    (root / "data/below").mkdir(parents=True)
    (root / "data/below/file").write_text("1")


def _replace(root: Path) -> None:
    (root / "new").write_text("22")
    (root / "new").rename(root / "data/below/file")


def _remove(root: Path) -> None:
    (root / "data/below/file").unlink()


def a_new_step(lab: Lab) -> str:
    """The reader has looked right before the commit: its client knows that there is no MANIFEST."""
    steps, times = lab.times(8), list[float]()
    lab.a.do(lambda: save(lab.root / "step-00000001", 1))
    for step in range(2, 2 + steps):
        path, turns = lab.root / f"step-{step:08d}", (Turn(), Turn(), Turn())

        def saver(step: int = step, path: Path = path, turns: tuple[Turn, ...] = turns) -> None:
            publish = LocalStore.publish

            def publish_when_seen(store: LocalStore, pending: str, name: str) -> bool:
                turns[0].give()
                turns[1].take()
                return publish(store, pending, name)

            LocalStore.publish = publish_when_seen  # type: ignore[method-assign]
            save(path, step)

        def reader(step: int = step, path: Path = path, turns: tuple[Turn, ...] = turns) -> float:
            turns[0].take()
            assert latest(lab.root) == step - 1
            assert not is_there(path)
            turns[1].give()
            turns[2].take()
            late = wait_until(lambda: latest(lab.root) == step, 90)
            assert load(path) == step
            return late

        reading, saving = lab.b.begin(reader), lab.a.begin(saver)
        saving.result()
        turns[2].give()
        times.append(reading.result())
    assert max(times) < FRESH_S, f"seen after {', '.join(f'{late:.1f}' for late in times)} s"
    return f"{steps} steps, seen {max(times):.2f} s after the commit at most"


def a_replaced_checkpoint(lab: Lab) -> str:
    """A reader gets the new one, each time."""
    rounds, path, turns = lab.times(8), lab.root / "best", (Turn(), Turn())
    lab.a.do(lambda: save(path, 1))

    def reader() -> None:
        for number in range(1, 2 + rounds):
            assert load(path) == number, "an old checkpoint was loaded"
            turns[0].give()
            turns[1].take()

    reading = lab.b.begin(reader)
    for number in range(2, 2 + rounds):
        turns[0].take()
        time.sleep(TICK_S)
        lab.a.do(lambda number=number: save(path, number, replace=True))
        turns[1].give()
    turns[0].take()
    turns[1].give()
    reading.result()
    return f"{rounds} replaced, the new one loaded each time"


def a_checkpoint_that_goes(lab: Lab) -> str:
    """It is deleted or replaced between the opening of a data file and the read."""
    seen: dict[str, int] = {}
    for number in range(2 * lab.times(8)):
        path, turns, is_replaced = lab.root / str(number), (Turn(), Turn()), number % 2 == 0
        lab.a.do(lambda path=path: save(path, 1))

        def reader(path: Path = path, turns: tuple[Turn, Turn] = turns) -> str:
            open_file, opened = DataFileReader._descriptor, list[int]()

            def open_and_wait(self: DataFileReader, file: int) -> int:
                descriptor = open_file(self, file)
                if not opened:
                    opened.append(file)
                    turns[0].give()
                    turns[1].take()
                return descriptor

            DataFileReader._descriptor = open_and_wait  # type: ignore[method-assign]
            try:
                return f"whole {load(path)}"
            except HoldfastError as error:
                return type(error).__name__

        reading = lab.b.begin(reader)
        turns[0].take()
        if is_replaced:
            lab.a.do(lambda path=path: save(path, 2, replace=True))
        else:
            lab.a.do(lambda path=path: retire(LocalStore(path)))
        turns[1].give()
        found = reading.result()
        allowed = ("whole 1", "ReplacedError" if is_replaced else "NotCommittedError")
        assert found in allowed, f"{found} of a checkpoint that was removed in order"
        seen[found] = seen.get(found, 0) + 1
    return ", ".join(f"{count} times {found}" for found, count in sorted(seen.items()))


def an_open_file(lab: Lab) -> str:
    """Removed on its own client, it gets a name in ``.nfs…`` until it is closed."""
    rounds = lab.times(4)
    for number in range(rounds):
        root = lab.root / str(number)
        assert lab.a.do(lambda root=root: _retire_what_is_open(root)) == ["step-00000002"]
    return f"{rounds} retired with a file open: read to its end, nothing left"


def _retire_what_is_open(root: Path) -> list[str]:
    for step in (1, 2):
        save(root / f"step-{step:08d}", step)
    old = root / "step-00000001"
    (data,) = old.glob("data/*/*.hf")
    expected = data.read_bytes()
    with open(data, "rb", buffering=0) as reader:
        retire(LocalStore(old))
        assert len(list(old.rglob(".nfs*"))) == 1
        retire(LocalStore(old))  # as a later save does
        assert not is_there(old)
        assert latest(root) == 2
        assert holdfast.Checkpointer(root, options=OPTIONS).restore(make_state(-1)) == 2
        save(old, 3)  # the same step again, beside it
        assert load(old) == 3
        with holdfast.open(old, options=OPTIONS) as checkpoint:
            assert not checkpoint.verify()
        assert reader.readall() == expected
    retire(LocalStore(old))
    with contextlib.suppress(NotCommittedError):
        raise AssertionError(f"{load(old)} is still there")
    return sorted(name for name in os.listdir(root) if name.startswith("step-"))
