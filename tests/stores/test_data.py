"""The bytes of a store: what is written in parts and read in ranges, through memory."""

import errno

import pytest

from holdfast._core import Pool
from holdfast.errors import StoreError
from holdfast.stores.base import Queue, Store, words_of
from holdfast.stores.url import open_store
from stores.places import Place

PAGE, SLOT = 4096, 1 << 20


@pytest.fixture
def store(new_place: Place) -> Store:
    return open_store(new_place())


@pytest.fixture
def pool() -> Pool:
    pool = Pool(SLOT, 40)
    memory = pool.memory().cast("B")
    for start in range(0, len(memory), PAGE):
        memory[start : start + 8] = start.to_bytes(8, "little")
    return pool


def queue_of(store: Store, pool: Pool) -> Queue:
    return store.queue_kind("auto", 16, 2 << 20).make(pool)


def landed(queue: Queue) -> dict[int, tuple[int, int]]:
    found = {}
    while queue.pending:
        found |= {tag: (done, code) for tag, done, code in queue.wait()}
    return found


def written(store: Store, pool: Pool, size: int, part: int) -> None:
    """Write what stands in the pool, a part after the other; the last is padded to a page."""
    queue = queue_of(store, pool)
    descriptor = store.create("data/a", direct=queue.direct)
    store.vfs.allocate(descriptor, size)
    for start in range(0, size, part):
        rest = min(part, -(-(size - start) // PAGE) * PAGE)
        queue.submit_write(descriptor, pool.address(0) + start, rest, start, start)
    assert not any(code for _, code in landed(queue).values())
    store.vfs.truncate(descriptor, size)
    store.vfs.sync(descriptor)
    store.vfs.close(descriptor)
    queue.close()


def test_memory_that_a_write_has_given_back_may_change(store: Store, pool: Pool) -> None:
    part, count, slots = 5 * SLOT, 16, 4
    queue, memory = queue_of(store, pool), pool.memory().cast("B")
    descriptor = store.create("data/a", direct=queue.direct)
    store.vfs.allocate(descriptor, part * count)
    busy = set[int]()
    for number in range(count):
        while number % slots in busy:
            for tag, done, code in queue.wait():
                assert (done, code) == (part, 0)
                memory[tag * part : (tag + 1) * part] = b"\xff" * part
                busy.remove(tag)
        slot = number % slots
        memory[slot * part : (slot + 1) * part] = bytes([number]) * part
        queue.submit_write(descriptor, pool.address(0) + slot * part, part, number * part, slot)
        busy.add(slot)
    assert not any(code for _, code in landed(queue).values())
    memory[: slots * part] = b"\xff" * (slots * part)
    store.vfs.truncate(descriptor, part * count)
    store.vfs.sync(descriptor)
    store.vfs.close(descriptor)
    queue.close()
    descriptor = store.open("data/a", direct=False)
    for number in range(count):
        assert store.vfs.read(descriptor, part, number * part) == bytes([number]) * part
    store.vfs.close(descriptor)


@pytest.mark.parametrize("size", [1, PAGE, 3 * PAGE + 5, (1 << 20) + 1, (36 << 20) + 7])
def test_what_is_written_is_read(store: Store, pool: Pool, size: int) -> None:
    written(store, pool, size, SLOT)
    assert [(e.name, e.size_bytes) for e in store.list("data")] == [("a", size)]
    source = bytes(pool.memory().cast("B")[:size])
    target, queue = Pool(SLOT, 40), queue_of(store, pool)
    descriptor = store.open("data/a", direct=False)
    assert store.vfs.size(descriptor) == size
    assert store.vfs.read(descriptor, 100, max(0, size - 50)) == source[max(0, size - 50) :][:100]
    for slot, start in enumerate(range(0, size, SLOT)):
        queue.submit_read(descriptor, target.address(slot), SLOT, start, slot)
    for slot, (done, code) in landed(queue).items():
        assert (done, code) == (min(SLOT, size - slot * SLOT), 0)
    assert bytes(target.memory().cast("B")[:size]) == source
    if queue.fetch is not None:
        parts = [queue.fetch(descriptor, SLOT, start, bytes) for start in range(0, size, SLOT)]
        assert b"".join(part.result() for part in parts) == source
    store.vfs.close(descriptor)
    queue.close()


def test_pages_are_written_one_by_one(store: Store, pool: Pool) -> None:
    written(store, pool, 20 * PAGE + 1, PAGE)
    assert store.get("data/a", SLOT) == bytes(pool.memory().cast("B")[: 20 * PAGE + 1])


@pytest.mark.parametrize("size", [PAGE, 36 << 20])
def test_what_is_closed_before_it_is_synced_is_not_there(
    store: Store, pool: Pool, size: int
) -> None:
    if store.shows_pending:
        pytest.skip("a file is there as soon as it is made")
    descriptor = store.create("data/a", direct=False)
    store.vfs.write(descriptor, pool.memory().cast("B")[:size], 0)
    store.vfs.close(descriptor)
    assert not store.exists("data/a") and not store.exists("")


def test_bytes_that_leave_a_gap_are_refused(store: Store, pool: Pool) -> None:
    if store.can_link:
        pytest.skip("a file on a disk may have gaps")
    queue, descriptor = queue_of(store, pool), store.create("data/a", direct=False)
    queue.submit_write(descriptor, pool.address(0), PAGE, PAGE, 1)
    ((_, code),) = landed(queue).values()
    assert code and "expected 0" in words_of(code)
    store.vfs.close(descriptor)


def test_what_goes_while_it_is_read_is_told(store: Store, pool: Pool) -> None:
    if store.shows_pending:
        pytest.skip("a file stays while it is open, and HDFS keeps its blocks for a while")
    written(store, pool, SLOT, SLOT)
    queue, descriptor = queue_of(store, pool), store.open("data/a", direct=False)
    store.remove("data/a")
    queue.submit_read(descriptor, pool.address(0), SLOT, 0, 1)
    ((done, code),) = landed(queue).values()
    assert (done, code) == (0, errno.ENOENT) and "data/a" in words_of(code)
    with pytest.raises(StoreError, match=r"read .*data/a"):
        store.vfs.read(descriptor, 10, 0)
    if queue.fetch is not None:
        with pytest.raises(StoreError, match=r"read .*data/a"):
            queue.fetch(descriptor, SLOT, 0, bytes).result()
    store.vfs.close(descriptor)


def test_memory_is_free_as_soon_as_a_write_is_handed_back(store: Store, pool: Pool) -> None:
    """A client may hold the memory that it is given until it has sent it."""
    queue, parts = queue_of(store, pool), 80
    memory = pool.memory().cast("B")[:SLOT]
    descriptor = store.create("data/a", direct=queue.direct)
    for part in range(parts):
        memory[:] = bytes([part]) * SLOT
        queue.submit_write(descriptor, pool.address(0), SLOT, part * SLOT, part)
        assert landed(queue) == {part: (SLOT, 0)}
    store.vfs.truncate(descriptor, parts * SLOT)
    store.vfs.sync(descriptor)
    store.vfs.close(descriptor)
    descriptor = store.open("data/a", direct=False)
    for part in range(parts):
        assert store.vfs.read(descriptor, SLOT, part * SLOT) == bytes([part]) * SLOT, part
    store.vfs.close(descriptor)
