"""The names of a store: who publishes, replaces, claims, revokes; what everybody then sees."""

import contextlib
import errno
import threading
from collections.abc import Callable

import pytest

from holdfast.errors import OptionError, StoreError
from holdfast.stores import objects, objects_client
from holdfast.stores.base import Store
from holdfast.stores.url import open_store
from stores.places import Place

RACERS = 16


@pytest.fixture
def store(new_place: Place) -> Store:
    return open_store(new_place())


def put(store: Store, name: str, data: bytes = b"x") -> bool:
    store.prepare(f".manifest-{name.replace('/', '-')}", data)
    return store.publish(f".manifest-{name.replace('/', '-')}", name)


def write(store: Store, name: str, data: bytes) -> None:
    """Write a data file."""
    descriptor = store.create(name, direct=False)
    store.vfs.write(descriptor, data, 0)
    store.vfs.sync(descriptor)
    store.vfs.close(descriptor)


def number_of(call: Callable[[], object]) -> int:
    with pytest.raises(StoreError) as caught:
        call()
    assert caught.value.errno is not None
    return caught.value.errno


def test_what_is_not_there_is_said_to_be_none(store: Store) -> None:
    assert not store.exists("") and store.kind("") == "" and not store.exists("a")
    assert store.kind("a/b") == ""
    assert number_of(store.list) == errno.ENOENT
    assert number_of(lambda: store.get("a", 10)) == errno.ENOENT
    assert number_of(lambda: store.open("a", direct=False)) == errno.ENOENT
    store.remove("a")


def test_a_name_is_published_once(store: Store) -> None:
    assert put(store, "a", b"first") and not put(store, "a", b"second")
    assert store.get("a", 10) == b"first" and store.kind("a") == "file"
    assert store.kind("") == "directory" and [*store.scan()] == ["a"]


def test_of_racers_one_publishes(store: Store) -> None:
    start, won = threading.Barrier(RACERS), list[int]()

    def race(number: int) -> None:
        mine = open_store(store.location)
        mine.prepare(f".manifest-{number}", b"%d" % number)
        start.wait()
        if mine.publish(f".manifest-{number}", "a"):
            won.append(number)

    threads = [threading.Thread(target=race, args=[number]) for number in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and store.get("a", 10) == b"%d" % won[0]


def test_a_name_is_replaced(store: Store) -> None:
    for data in (b"first", b"second"):
        store.prepare(".manifest-a", data)
        store.replace(".manifest-a", "a")
        assert store.get("a", 10) == data
    store.prepare(".manifest-a", b"third")
    store.rename(".manifest-a", "a")
    assert store.get("a", 10) == b"third" and [*store.scan()] == ["a"]


def test_a_file_is_moved_in_place_of_another(store: Store) -> None:
    put(store, "b")
    if not store.shows_pending:
        assert number_of(lambda: store.move("b", "c")) == errno.EOPNOTSUPP
        return
    put(store, "a", b"a")
    store.move("a", "b")
    assert store.get("b", 1) == b"a" and not store.exists("a")
    store.move("b", "made/for/it")
    assert store.get("made/for/it", 1) == b"a" and not store.exists("b")
    assert number_of(lambda: store.move("b", "made/for/it")) == errno.ENOENT
    assert store.get("made/for/it", 1) == b"a"


def test_a_stamp_changes_with_what_is_there(store: Store) -> None:
    put(store, "a", b"first")
    before = store.stamp("a")
    store.prepare(".manifest-a", b"second")
    store.replace(".manifest-a", "a")
    assert store.stamp("a") != before


def test_a_claim_is_made_once(store: Store) -> None:
    assert store.claim("a", b"mine") and not store.claim("a", b"theirs")
    assert store.get("a", 10) == b"mine"


def test_lines_are_appended(store: Store) -> None:
    put(store, "b")
    store.append("a", b"one\n")
    store.append("a", b"two\n")
    store.append("torn", b"half")
    store.append("torn", b"whole\n")
    assert store.get("a", 20) == b"one\ntwo\n" and store.get("torn", 20) == b"half\nwhole\n"


def test_what_is_below_a_name_is_a_directory(store: Store) -> None:
    write(store, "a/b/c", b"123")
    put(store, "d")
    assert [(entry.name, entry.kind) for entry in store.list()] == [
        ("a", "directory"),
        ("d", "file"),
    ]
    assert [(e.name, e.kind, e.size_bytes) for e in store.list("a/b")] == [("c", "file", 3)]
    assert sorted(store.some(5)) == [("a", "directory"), ("d", "file")]
    assert len(store.some(1)) == 1
    assert store.kind("a/b") == "directory" and store.exists("a") and not store.exists("a/x")
    assert not store.remove_directory("a/b")
    store.remove("a/b/c")
    store.remove_directory("a/b")
    store.remove_directory("a")
    assert not store.exists("a") and store.exists("d")


@pytest.mark.parametrize("page", [1, 2, 3, 1000])
def test_which_of_many_directories_have_a_file(
    store: Store, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects_client, "PAGE_OBJECTS", page)
    names = [f"step-{number}" for number in range(12)]
    assert store.having(names, "MANIFEST") == []
    for name in names:
        write(store, f"{name}/data/a", b"1")
    for name in names[::3]:
        put(store, f"{name}/MANIFEST", b"1")
    put(store, "MANIFEST")
    for name in names[::4]:
        store.revoke(f"{name}/.manifest-1", f"{name}/MANIFEST")  # a bar, where there is none
    store.remove("step-8/data/a")  # nothing but the bar is left
    for _ in range(2):
        assert store.having(names, "MANIFEST") == names[::3]
        assert store.having(names[5:], "MANIFEST") == ["step-6", "step-9"]
    store.remove("step-6/MANIFEST")
    store.reclaim("step-4/MANIFEST")
    assert put(store, "step-4/MANIFEST", b"2")
    assert store.having(names[::-1], "MANIFEST") == ["step-9", "step-4", "step-3", "step-0"]


@pytest.mark.parametrize("odd", ["a b", "x%20y", "100%", "a+b=c&d", "ü", "a~b", "日本", "a[1]{2}"])
def test_what_is_below_an_odd_name_is_found(store: Store, odd: str) -> None:
    """A server may spell a key another way in its listing than in a request."""
    run = store.below(odd)
    write(run, "step-1/data/a", b"1")
    put(run, "step-1/MANIFEST")
    assert run.having(["step-1", "step-2"], "MANIFEST") == ["step-1"]
    assert [entry.name for entry in run.list()] == ["step-1"]


def test_neighbours_are_found(store: Store) -> None:
    write(store, "a/b", b"x")
    below = store.below("a")
    assert below.get("b", 1) == b"x" and below.location == f"{store.location}/a"
    assert below.above().location == store.location
    assert below.sibling("c").location == f"{store.location}/c"
    put(store, "MANIFEST", b"magic and more")
    inner = store.below("a").below("x")
    assert inner.above_with("MANIFEST", b"magic") == store.location
    assert inner.above_with("MANIFEST", b"other") == "" == inner.above_with("NONE", b"magic")


def test_what_is_too_large_is_not_read(store: Store) -> None:
    put(store, "a", b"12345")
    assert store.get("a", 5) == b"12345"
    assert number_of(lambda: store.get("a", 4)) == errno.EFBIG


def test_who_is_revoked_does_not_publish_and_who_came_first_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "first")
    dead, bars = open_store(store.location), dict[str, str]()
    with monkeypatch.context() as other:
        other.setattr(objects, "_bars", bars)  # as in another process
        dead.prepare(".manifest-1", b"late", "MANIFEST")
    store.revoke(".manifest-1", "MANIFEST")
    monkeypatch.setattr(objects, "_bars", bars)
    with pytest.raises(StoreError) if store.shows_pending else contextlib.nullcontext():
        assert not dead.publish(".manifest-1", "MANIFEST")
    assert not store.exists("MANIFEST") and "MANIFEST" not in [*store.scan()]
    assert number_of(lambda: store.get("MANIFEST", 100)) == errno.ENOENT
    store.revoke(".manifest-1", "first")
    assert store.get("first", 1) == b"x"


def test_who_found_an_object_bars_nothing_when_that_has_gone(store: Store) -> None:
    put(store, "MANIFEST", b"old")
    store.prepare(".manifest-1", b"late", "MANIFEST")
    open_store(store.location).remove("MANIFEST")  # by a newer job, after the last look
    # On a disk a newer job removes what is pending; an object store knows nothing of that.
    assert store.publish(".manifest-1", "MANIFEST") == store.shows_pending
    assert store.exists("MANIFEST") == store.shows_pending


def test_who_revoked_publishes_in_the_end(store: Store) -> None:
    put(store, "first")
    store.revoke(".manifest-1", "MANIFEST")
    store.prepare(".manifest-2", b"mine")
    assert store.publish(".manifest-2", "MANIFEST") and store.get("MANIFEST", 9) == b"mine"


def test_a_name_is_free_again_when_its_file_is_removed(store: Store) -> None:
    put(store, "MANIFEST", b"old")
    store.remove("MANIFEST")
    assert not store.exists("MANIFEST")
    store.reclaim("MANIFEST")
    assert put(store, "MANIFEST", b"new") and store.get("MANIFEST", 9) == b"new"


@pytest.mark.parametrize(
    "url",
    ["s3://", "s3:///a", "memory://b//a", "memory://b/../a", "memory://b/a?x=1", "memory://b c/a"],
)
def test_a_url_that_names_no_place_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="expected SCHEME://BUCKET/NAME"):
        open_store(url)


@pytest.mark.parametrize(
    "url", ["hdfs://", "hdfs:///a", "hdfs://h:x/a", "hdfs://h//a", "hdfs://h/../a", "hdfs://h/a?b"]
)
def test_a_url_that_names_no_place_in_hdfs_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="expected hdfs://NAMENODE:PORT/NAME"):
        open_store(url)


@pytest.mark.parametrize("url", ["ftp://b/a", "http://b/a", "S3://b/a"])
def test_a_scheme_without_a_store_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="There is no store for"):
        open_store(url)
