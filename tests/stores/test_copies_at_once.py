"""Two copies of one checkpoint to one place, and removals beside them: one may be frozen for long.

What is frozen goes on when the other has ended: here it is stopped inside a call that it makes.
"""

import contextlib
import errno
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.engine import copied_files, removal, retire, transfer
from holdfast.engine.check import read_manifest
from holdfast.errors import CorruptError, NoSpaceError, NotCommittedError, StoreError
from holdfast.options import options_of
from holdfast.stores.base import Store
from holdfast.stores.local import LocalStore
from holdfast.stores.url import open_store
from stores.places import Place
from stores.test_copy import files, state

APART = holdfast.Options(pool_bytes=32 << 20)  # who is frozen holds the pool of all


@pytest.fixture
def target(new_place: Place) -> str:
    return new_place()


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = str(tmp_path / "run" / "step-00000001")
    options = holdfast.Options(chunk_elements=1 << 14, file_bytes=1 << 19)
    holdfast.save(state(1), path, step=1, options=options)
    assert len([*Path(path).glob("data/*/*")]) > 1
    return path


def copied(source: str, target: str, **more: Any) -> tuple[int, int]:
    """Copy as `holdfast.copy_checkpoint` does, but in this thread."""
    given: dict[str, Any] = {"report": lambda _: None, "options": options_of(None)} | more
    return transfer.transfer(open_store(source), open_store(target), **given)


class Once:
    """Does something at the first call; later ones do nothing."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.action: Callable[[], object] | None = action

    def __call__(self, *_: object) -> None:
        if (action := self.action) is not None:
            self.action = None
            action()


def other(source: str, target: str) -> Callable[[], object]:
    """Return another copy, from its beginning to its end."""
    return lambda: copied(source, target, options=APART)


def test_the_one_that_publishes_late_has_ended_well(source: str, target: str) -> None:
    copied(source, target, look=Once(other(source, target)))
    assert files(target) == files(source)


def test_what_is_torn_of_one_is_not_published_by_the_other(
    source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a kill between the making of its pending MANIFEST and the bytes."""
    whole = LocalStore.begin

    def torn(self: LocalStore, pending_name: str, data: bytes) -> None:
        whole(self, pending_name, b"")
        raise KeyboardInterrupt

    def dies() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(LocalStore, "begin", torn)
            patched.setattr(LocalStore, "remove", lambda *given: None)
            if open_store(target).shows_pending and target.startswith("/"):
                with pytest.raises(KeyboardInterrupt):
                    copied(source, target, options=APART)

    copied(source, target, look=Once(dies))
    assert files(target) == files(source)


def test_damage_that_comes_late_takes_no_place_of_what_is_whole(
    source: str, target: str, tmp_path: Path
) -> None:
    bad = str(tmp_path / "bad")
    shutil.copytree(source, bad)
    file = sorted(Path(bad).glob("data/*/*"))[0]
    data = bytearray(file.read_bytes())
    data[-3] ^= 255  # of its trailer
    file.write_bytes(data)
    with pytest.raises(CorruptError):
        copied(bad, target, report=Once(other(source, target)))
    assert files(target) == files(source)


def sweep_frozen_at(name: str, target: str, meanwhile: Callable[[], object]) -> None:
    """Sweep; as it comes to one call of the store, something else happens first."""
    store: Any = open_store(target)
    real, first = getattr(store, name), Once(meanwhile)

    def late(*given: Any, **more: Any) -> Any:
        first()
        return real(*given, **more)

    setattr(store, name, late)
    retire.sweep(store, math.inf)


def begin(source: str, target: str) -> Store:
    """Leave what a copy has that was killed before it published."""

    class Cut(BaseException):
        pass

    def cut() -> None:
        raise Cut

    store = open_store(target)
    with pytest.raises(Cut):
        copied(source, target, look=cut)
    return store


CALLS = ("list", "claim", "revoke", "exists", "sync_directory", "move")


@pytest.mark.parametrize("is_swept", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_a_removal_that_was_frozen_takes_nothing_that_is_there_again(
    source: str, target: str, call: str, is_swept: bool
) -> None:
    """A copy has brought it back since; perhaps another one has removed the same before."""
    movable(begin(source, target))

    def meanwhile() -> None:
        if is_swept:
            retire.sweep(open_store(target), math.inf)
        copied(source, target)

    sweep_frozen_at(call, target, meanwhile)
    assert files(target) == files(source)
    assert not holdfast.verify(target).damage


@pytest.mark.parametrize("call", CALLS)
def test_a_removal_beside_a_copy_lets_it_fail_or_fails(source: str, target: str, call: str) -> None:
    movable(begin(source, target))
    meanwhile = Once(lambda: sweep_frozen_at(call, target, lambda: None))
    try:
        copied(source, target, look=meanwhile)
    except (StoreError, NotCommittedError):
        copied(source, target)
    assert files(target) == files(source)


def movable(store: Store) -> None:
    if not store.shows_pending:
        pytest.skip("objects cannot be moved: docs/commit.md says what that leaves open")


class Frozen:
    """A removal in a thread of its own, which stops before its n-th call of the store."""

    def __init__(self, target: str, at: int) -> None:
        self.store: Any = open_store(target)
        self._left, self._stopped, self._go_on = at, threading.Event(), threading.Event()
        for name in (*CALLS, "remove", "remove_all", "remove_directory"):
            setattr(self.store, name, self._counted(getattr(self.store, name)))
        self._thread = threading.Thread(target=self._run)

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            if threading.current_thread() is self._thread:
                self._left -= 1
                if self._left == 0:
                    self._stopped.set()
                    assert self._go_on.wait(60)
            return real(*given, **more)

        return call

    def _run(self) -> None:
        try:
            retire.sweep(self.store, math.inf)
        except StoreError:
            pass  # it may find that another has taken over
        finally:
            self._stopped.set()

    def start(self) -> None:
        """Go as far as that call."""
        self._thread.start()
        assert self._stopped.wait(60)

    def end(self) -> bool:
        """Go on to the end; return whether it had stopped on its way."""
        self._go_on.set()
        self._thread.join()
        return self._left <= 0


@pytest.mark.parametrize("begins", ["report", "look"])
def test_a_removal_that_stops_anywhere_beside_a_copy_leaves_no_torn_one(
    source: str, tmp_path: Path, begins: str
) -> None:
    """It begins as the copy brings files, or as it is about to publish."""
    at = 0
    while True:
        at += 1
        target = str(tmp_path / f"there-{at}")
        begin(source, target)
        frozen = Frozen(target, at)
        if begins == "report":  # or there would be no file to bring
            next(Path(target).glob("data/*/*")).unlink()
        with contextlib.suppress(StoreError, NotCommittedError):
            copied(source, target, **{begins: Once(frozen.start)})
        has_stopped = frozen.end()
        with contextlib.suppress(NotCommittedError):
            assert not holdfast.verify(target).damage, f"at call {at}"
        copied(source, target)
        assert files(target) == files(source)
        if not has_stopped:
            break
    assert at > 12


def test_what_is_announced_as_others_are_taken_over_is_taken_over(source: str, target: str) -> None:
    store: Any = open_store(target)
    movable(store)
    save_id = read_manifest(open_store(source)).table.header.save_id
    real = store.remove_directory

    def announced() -> None:
        removal.announce(open_store(target), save_id)
        open_store(target).revoke(f".manifest-{save_id}", "MANIFEST")

    first = Once(announced)

    def late(name: str = "") -> bool:
        first()
        return bool(real(name))

    store.remove_directory = late
    removal.lift(store, save_id)
    assert not removal.announced(open_store(target), save_id)


def test_the_bar_of_a_removal_that_died_keeps_no_copy_out(source: str, target: str) -> None:
    store = begin(source, target)
    save_id = read_manifest(open_store(source)).table.header.save_id
    store.revoke(f".manifest-{save_id}", "MANIFEST")
    copied(source, target)
    assert files(target) == files(source)


def test_where_there_is_no_room_what_dead_copies_have_left_goes(
    source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(target)
    if not store.shows_pending:
        pytest.skip("nothing is left by a dead upload")
    name = f"data/{'0' * 32}/copy-00000-0.hf"
    descriptor = store.create(name, direct=False)
    store.vfs.write(descriptor, b"left", 0)
    store.vfs.sync(descriptor)
    store.vfs.close(descriptor)
    real = copied_files._NewFile.finish

    def full(self: Any) -> int:
        if self._there.exists(name):
            raise NoSpaceError("no space left on device")
        return real(self)

    monkeypatch.setattr(copied_files._NewFile, "finish", full)
    copied(source, target)
    assert files(target) == files(source)


def test_what_was_there_before_is_made_durable(source: str, tmp_path: Path) -> None:
    """Others may have put it there, or who did was told that its sync failed."""
    synced = set[str]()

    class Watched:
        def __init__(self, vfs: Any) -> None:
            self._vfs, self._open = vfs, dict[int, str]()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._vfs, name)

        def open_beneath(self, root: str, name: str, direct: bool = False) -> int:
            descriptor = int(self._vfs.open_beneath(root, name, direct))
            self._open[descriptor] = f"{root}/{name}"
            return descriptor

        def sync(self, descriptor: int) -> None:
            synced.add(self._open.get(descriptor, ""))
            self._vfs.sync(descriptor)

        def sync_directory(self, path: str) -> None:
            synced.add(path)
            self._vfs.sync_directory(path)

    place = tmp_path / "there"
    shutil.copytree(f"{source}/data", place / "data")
    there: Any = LocalStore(place)
    there.vfs = Watched(there.vfs)
    there.queue_kind = LocalStore(place).queue_kind
    given = options_of(holdfast.Options(io="buffered"))
    copied_bytes, _ = transfer.transfer(open_store(source), there, given, lambda _: None)
    assert copied_bytes == 0
    wanted = {str(path) for path in (place / "data").rglob("*")}
    assert wanted <= synced


def test_what_is_published_this_moment_is_no_other_checkpoint(source: str, target: str) -> None:
    there: Any = open_store(target)
    real, first = there.exists, Once(other(source, target))

    def exists(name: str) -> bool:
        found = bool(real(name))
        if name == "MANIFEST":
            first()
        return found

    there.exists = exists
    transfer.transfer(open_store(source), there, options_of(None), lambda _: None)
    assert files(target) == files(source)


def test_an_error_of_the_target_does_not_condemn_the_source(
    source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = copied_files.check_files

    def gone(store: Store, *given: Any) -> None:
        if store.location != source:
            raise NotCommittedError("it is gone")
        real(store, *given)

    monkeypatch.setattr(copied_files, "check_files", gone)
    with pytest.raises(StoreError, match="differs from the bytes written"):
        copied(source, target)


def bar_of_source(source: str) -> str:
    return removal.bar_of(read_manifest(open_store(source)).table.header.save_id)


@pytest.mark.parametrize("what", ["file", "link", "empty", "whole"])
def test_whatever_has_the_name_of_a_removal_goes(source: str, tmp_path: Path, what: str) -> None:
    target = tmp_path / "there"
    begin(source, str(target))
    left = target / f"{bar_of_source(source)}.gone-0123456789abcdef"
    if what == "file":
        left.write_bytes(b"x")
    elif what == "link":
        left.symlink_to(tmp_path)
    else:
        left.mkdir()
        if what == "whole":
            shutil.copytree(next((target / "data").iterdir()), left / "data")
    copied(source, str(target))
    assert files(str(target)) == files(source) and tmp_path.exists()


def test_what_cannot_go_is_named_before_a_byte_is_copied(source: str, tmp_path: Path) -> None:
    target = tmp_path / "there"
    left = target / f"{bar_of_source(source)}.gone-0123456789abcdef"
    left.mkdir(parents=True)
    (left / "of-a-user").write_bytes(b"x")
    with pytest.raises(StoreError, match=rf"left {left.name}\. .* remove it"):
        copied(source, str(target))
    assert (left / "of-a-user").exists() and not (target / "data").exists()


def test_an_old_bar_goes_after_what_is_removed_behind_it(source: str, tmp_path: Path) -> None:
    """Who announced that is frozen, and moves nothing that is published later."""
    target = str(tmp_path / "there")
    begin(source, target)

    def meanwhile() -> None:
        retire.sweep_pending(open_store(target), math.inf, ".manifest-")
        copied(source, target)

    sweep_frozen_at("move", target, meanwhile)
    assert files(target) == files(source)


def test_a_lead_that_was_frozen_takes_nothing_of_a_step_that_counts_again(
    source: str, tmp_path: Path
) -> None:
    target = str(tmp_path / "there")
    data = begin(source, target) and open_store(source).get("MANIFEST", 1 << 20)
    store: Any = open_store(target)
    move, first = store.move, Once(lambda: transfer.take_manifest(open_store(target), data))

    def late(*given: Any, **more: Any) -> None:
        first()
        move(*given, **more)

    store.move = late
    retire.let_go(store, None)
    if Path(target, "MANIFEST").exists():
        assert files(target) == files(source)


def test_a_lead_that_died_leaves_nothing_that_grows(source: str, tmp_path: Path) -> None:
    target = tmp_path / "there"
    begin(source, str(target))
    left = target / f"{bar_of_source(source)}.gone-0123456789abcdef"
    left.mkdir()
    next((target / "data").iterdir()).rename(left / "data")
    retire.let_go(open_store(target), "f" * 32)
    assert not left.exists()


def test_what_cannot_be_moved_is_removed_all_the_same(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a directory of a lower layer of overlayfs."""

    def elsewhere(*given: Any, **more: Any) -> None:
        error = StoreError("rename: invalid cross-device link")
        error.errno = errno.EXDEV
        raise error

    store = begin(source, str(tmp_path / "there"))
    monkeypatch.setattr(LocalStore, "move", elsewhere)
    retire.sweep(store, math.inf)
    assert not (tmp_path / "there").exists()


def test_a_removal_that_fails_leaves_no_directory_of_its_own(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any, **more: Any) -> None:
        raise StoreError("input/output error")

    store = begin(source, str(tmp_path / "there"))
    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "move", broken)
        for _ in range(3):
            with pytest.raises(StoreError, match="input/output"):
                retire.sweep(store, math.inf)
    assert not [*(tmp_path / "there").glob(".manifest-*.gone-*")]
    copied(source, str(tmp_path / "there"))


def test_a_file_that_cannot_be_synced_is_written_again(source: str, tmp_path: Path) -> None:
    """After a sync that failed, the next one succeeds, and what it says is not true."""
    target = str(tmp_path / "there")
    begin(source, target)
    there: Any = LocalStore(target)

    class Broken:
        def __init__(self, vfs: Any) -> None:
            self._vfs, self.failed = vfs, list[int]()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._vfs, name)

        def sync(self, descriptor: int) -> None:
            if not self.failed:
                self.failed.append(descriptor)
                raise StoreError("fsync: input/output error")
            self._vfs.sync(descriptor)

    there.vfs = Broken(there.vfs)
    there.queue_kind = LocalStore(target).queue_kind
    given = options_of(holdfast.Options(io="buffered"))
    done, kept = transfer.transfer(open_store(source), there, given, lambda _: None)
    assert there.vfs.failed and done > 0 and kept > 0
    assert files(target) == files(source)


def test_a_disk_that_is_full_from_the_beginning_says_so(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any, **more: Any) -> int:
        raise NoSpaceError("no space left on device")

    monkeypatch.setattr(LocalStore, "create", full)
    with pytest.raises(NoSpaceError):
        copied(source, str(tmp_path / "there"))
