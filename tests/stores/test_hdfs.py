"""What HDFS does as no other store: its errors, its bars, its syncs. `make stores` runs these."""

import errno
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from typing import Any

import pytest
import torch

import holdfast
from holdfast.engine import retire
from holdfast.errors import NoSpaceError, OptionError, StoreError
from holdfast.stores import hdfs_client
from holdfast.stores.hdfs import BOX_END, HdfsStore
from holdfast.stores.url import open_store
from stores.hdfs_server import BLOCK_BYTES, Cluster, clusters
from stores.places import Place

PENDING, NAME = ".manifest-x", "MANIFEST"


@pytest.fixture
def path(new_place: Place) -> str:
    path = new_place()
    if not path.startswith("hdfs:"):
        pytest.skip("it is of HDFS")
    return path


@pytest.fixture
def store(path: str) -> HdfsStore:
    store = open_store(path)
    assert isinstance(store, HdfsStore)
    return store


@pytest.fixture
def cluster(path: str) -> Cluster:
    return clusters[0]


def failed(call: Any, *args: Any) -> StoreError:
    with pytest.raises(StoreError) as caught:
        call(*args)
    return caught.value


def test_what_is_barred_cannot_be_prepared_nor_published(store: HdfsStore) -> None:
    writer = open_store(store.location)
    writer.prepare(PENDING, b"early")
    store.revoke(PENDING, NAME)
    assert store.kind(PENDING) == "directory"
    assert failed(writer.publish, PENDING, NAME).errno == errno.ENOENT
    late = failed(writer.prepare, PENDING, b"late")
    assert late.errno == errno.EEXIST and "another job bars it" in str(late)
    assert failed(writer.replace, PENDING, NAME).errno == errno.ENOENT
    writer.remove(PENDING)
    assert [(e.name, e.kind) for e in store.list()] == [(PENDING, "directory")]
    store.revoke(PENDING, NAME)  # as two do at a time
    assert store.remove_directory(PENDING) and not store.list()


def test_who_takes_a_bar_for_a_box_does_not_remove_it(store: HdfsStore) -> None:
    """Another may have put it there since one looked."""
    store.revoke(PENDING, NAME)
    store._remove_box(PENDING)
    assert [(e.name, e.kind) for e in store.list()] == [(PENDING, "directory")]


def test_what_is_prepared_is_a_file_that_others_take_away(store: HdfsStore) -> None:
    writer = open_store(store.location)
    writer.prepare(PENDING, b"bytes")
    assert [(e.name, e.kind) for e in store.list()] == [(PENDING, "file")]
    assert store.kind(PENDING) == "file" and time.time() - store.modified_s(PENDING) < 60
    store.remove(PENDING)
    assert not store.list() and failed(writer.publish, PENDING, NAME).errno == errno.ENOENT
    assert not store.exists(NAME)


@pytest.mark.parametrize("order", [*itertools.permutations("PRB")][:6], ids="".join)
def test_no_order_of_calls_publishes_through_a_bar(store: HdfsStore, order: Any) -> None:
    """P: the writer prepares, and publishes. R: another removes it. B: another bars it."""
    writer, is_barred, is_there = open_store(store.location), False, False
    store.claim("other", b"")
    for call in order:
        if call == "P" and is_barred:
            failed(writer.prepare, PENDING, b"x")
        elif call == "P":
            writer.prepare(PENDING, b"x")
            is_there = True
        elif call == "R":
            store.remove(PENDING)
            is_there = False
        else:
            store.revoke(PENDING, NAME)
            is_barred, is_there = True, False
    assert not is_there and failed(writer.publish, PENDING, NAME).errno == errno.ENOENT
    assert not store.exists(NAME) and store.kind(PENDING) == ("directory" if is_barred else "")


def test_who_bars_while_another_prepares_again_and_again_wins(store: HdfsStore) -> None:
    """Of each round either the file is published, or the bar stands; never a part of both."""
    writer = open_store(store.location)
    for number in range(12):
        pending, name = f".manifest-{number}", f"MANIFEST-{number}"
        start, told = threading.Barrier(2), list[str]()

        def write(pending: str = pending, name: str = name) -> None:
            start.wait()  # noqa: B023 - the thread ends with the round
            try:
                writer.prepare(pending, b"x")
                writer.publish(pending, name)
                told.append("published")  # noqa: B023
            except StoreError:
                told.append("refused")  # noqa: B023

        thread = threading.Thread(target=write)
        thread.start()
        start.wait()
        time.sleep(0.05 * number)  # prepare takes half a second
        store.revoke(pending, name)
        thread.join()
        assert (told == ["published"]) == (store.kind(name) == "file")
        assert store.kind(name) in ("", "file")
        store.remove_directory(pending)
        assert not store.exists(pending)


def test_a_rename_whose_reply_was_lost_is_a_commit(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client asks again, and finds no source."""
    move = HdfsStore._move

    def twice(self: HdfsStore, pending: str, name: str, *, overwrite: bool) -> None:
        move(self, pending, name, overwrite=overwrite)
        if name == NAME:
            move(self, pending, name, overwrite=overwrite)

    monkeypatch.setattr(HdfsStore, "_move", twice)
    holdfast.save({"n": 1}, path)
    assert holdfast.open(path)["n"] == 1


def test_a_rename_that_comes_late_publishes_no_save_that_has_failed(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had no answer within the limit may still be done: so it is taken back first."""
    move, late = HdfsStore._move, list[Any]()

    def lost(self: HdfsStore, pending: str, name: str, *, overwrite: bool) -> None:
        late.append(lambda: move(self, pending, name, overwrite=overwrite))
        raise StoreError("no answer")

    monkeypatch.setattr(HdfsStore, "_move", lost)
    with pytest.raises(StoreError, match="no answer"):
        holdfast.save({"w": torch.ones(10)}, path)
    monkeypatch.undo()
    failed(late.pop())
    assert not open_store(path).exists("")


def test_who_lets_a_checkpoint_go_bars_its_writer(
    path: str, store: HdfsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast.save({"w": torch.ones(10)}, path)
    (save,) = store.list("data")
    pending, dead = f".manifest-{save.name}", open_store(path)
    dead.prepare(pending, b"late")
    remove = HdfsStore.remove

    def late(self: HdfsStore, name: str) -> None:
        if name.startswith("data/"):
            failed(dead.publish, pending, NAME)
            failed(dead.prepare, pending, b"again")
        remove(self, name)

    monkeypatch.setattr(HdfsStore, "remove", late)
    retire.retire(open_store(path))
    assert not open_store(path).exists("")


def test_a_box_that_a_killed_writer_left_is_removed_with_its_step(store: HdfsStore) -> None:
    store.prepare(PENDING, b"x")
    store._client.delete(store._in_box(PENDING))  # as between its rename and what follows
    assert [e.name for e in store.list()] == [PENDING]
    retire.retire(store)
    assert not store.exists("")


def test_each_block_is_synced_when_it_is_full_and_the_last_before_the_file_is_closed(
    store: HdfsStore, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, create, before = list[int | str](), HdfsStore._create, syncs_of(cluster)

    class Writer:
        """The client's, which also notes what it is asked."""

        def __init__(self, real: Any) -> None:
            self._real = real

        def write(self, data: bytes) -> None:
            calls.append(len(data))
            self._real.write(data)

        def hsync(self) -> None:
            calls.append("sync")
            self._real.hsync()

        def close(self) -> None:
            calls.append("close")
            self._real.close()

    monkeypatch.setattr(HdfsStore, "_create", lambda *args: Writer(create(*args)))
    store.prepare(PENDING, bytes(2 * BLOCK_BYTES + 5000))
    assert sum(call for call in calls if isinstance(call, int)) == 2 * BLOCK_BYTES + 5000
    written, synced = 0, []
    for call in calls:
        if call == "sync":
            synced.append(written)
        written += call if isinstance(call, int) else 0
    assert synced == [BLOCK_BYTES, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 5000]
    assert calls[-2:] == ["sync", "close"]
    deadline = time.monotonic() + 30  # the DataNode counts anew every ten seconds
    while syncs_of(cluster) == before:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert store.publish(PENDING, NAME)
    assert store.get(NAME, 3 * BLOCK_BYTES) == bytes(2 * BLOCK_BYTES + 5000)


def syncs_of(cluster: Cluster) -> int:
    query = "jmx?qry=Hadoop:service=DataNode,name=DataNodeActivity*"
    with urllib.request.urlopen(f"{cluster.datanode_url}/{query}", timeout=10) as reply:
        (found,) = json.load(reply)["beans"]
    return int(found["FsyncCount"])


def test_nothing_in_a_file_is_a_file(store: HdfsStore) -> None:
    store.prepare(PENDING, b"")
    assert store.publish(PENDING, "empty") and store.get("empty", 1) == b""
    store.append("empty", b"line\n")
    assert store.get("empty", 5) == b"line\n"


def test_a_file_is_no_directory(store: HdfsStore) -> None:
    store.claim("file", b"x")
    assert failed(store.list, "file").errno == errno.ENOTDIR
    made = failed(lambda: store.create("file/in", direct=False))
    assert made.errno == errno.ENOTDIR and f"{store.location}/file/in" in str(made)
    store.claim("in/a", b"x")
    assert failed(lambda: store.open("in", direct=False)).errno == errno.EISDIR
    store.prepare(PENDING, b"x")
    assert failed(store.replace, PENDING, "in").errno == errno.EISDIR
    assert store.kind(PENDING) == ""
    with pytest.raises(StoreError):
        holdfast.save({"n": 1}, f"{store.location}/file/checkpoint")


def test_a_quota_that_is_used_up_says_so(path: str, cluster: Cluster) -> None:
    open_store(path).below("b").claim("x", b"")
    directory = path.removeprefix(cluster.url)
    cluster.admin("-setSpaceQuota", str(2 * BLOCK_BYTES), directory)
    with pytest.raises(NoSpaceError, match="quota") as caught:
        holdfast.save({"w": torch.ones(8 << 20)}, f"{path}/a")
    assert caught.value.errno == errno.EDQUOT
    assert not open_store(f"{path}/a").exists(NAME)
    cluster.admin("-clrSpaceQuota", directory)
    holdfast.save({"w": torch.ones(8 << 20)}, f"{path}/a")


def test_a_name_node_in_safe_mode_says_so(path: str, cluster: Cluster) -> None:
    cluster.admin("-safemode", "enter")
    try:
        with pytest.raises(StoreError, match=r"SafeModeException: .*safe mode") as caught:
            holdfast.save({"n": 1}, path)
        assert caught.value.errno == errno.EAGAIN
    finally:
        cluster.admin("-safemode", "leave")


def test_a_user_without_rights_is_told(
    path: str, store: HdfsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast.save({"n": 1}, path)
    with monkeypatch.context() as other:
        other.setenv("HADOOP_USER_NAME", "nobody-of-ours")
        other.setattr(hdfs_client, "_clients", {})
        refused = failed(open_store(path).claim, "a", b"")
        assert refused.errno == errno.EACCES
        assert "Permission denied: user=nobody-of-ours" in str(refused)
        assert holdfast.open(path)["n"] == 1
    store.remove("a")


def test_a_name_node_that_hangs_is_an_error_within_the_limit(
    path: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast.save({"n": 1}, path)
    monkeypatch.setattr(hdfs_client, "CALL_S", 2.0)
    started = time.monotonic()
    with cluster.frozen():
        hung = failed(open_store(path).kind, NAME)
        assert hung.errno == errno.ETIMEDOUT and "no answer in 2 s" in str(hung)
        with pytest.raises(StoreError, match="no answer"):
            holdfast.save({"n": 2}, f"{path}-b")
    assert time.monotonic() - started < 60
    holdfast.save({"n": 2}, f"{path}-b")


def test_a_name_node_that_is_not_there_is_an_error(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(hdfs_client.SETTINGS, "dfs.client.failover.max.attempts", "1")
    gone = failed(open_store("hdfs://127.0.0.1:1/a").exists, "")
    assert gone.errno == errno.ECONNREFUSED and "Connection refused" in str(gone)
    assert "hdfs://127.0.0.1:1/a" in str(gone)


def test_a_name_without_a_port_is_one_of_the_settings_or_has_the_usual_port(
    path: str, cluster: Cluster, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {
        "dfs.ha.namenodes.ours": "one",
        "dfs.namenode.rpc-address.ours.one": cluster.url.removeprefix("hdfs://"),
    }
    lines = [f"<property><name>{n}</name><value>{v}</value></property>" for n, v in names.items()]
    text = f"<configuration>{''.join(lines)}</configuration>"
    (tmp_path / "hdfs-site.xml").write_text(text)
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    monkeypatch.setattr(hdfs_client, "_clients", {})
    ours = path.replace(cluster.url, "hdfs://ours")
    holdfast.save({"n": 1}, ours)
    assert holdfast.open(path)["n"] == 1
    monkeypatch.setitem(hdfs_client.SETTINGS, "dfs.client.failover.max.attempts", "0")
    with pytest.raises(StoreError, match="refused"):  # by port 8020
        open_store("hdfs://127.0.0.1/a").exists("")


def test_lines_of_several_jobs_and_of_one_that_died_stay_whole(store: HdfsStore) -> None:
    store.append("log", b"one\n")
    open_store(store.location).append("log", b"two\n")
    assert store.get("log", 20) == b"one\ntwo\n"


EXCEPTIONS = [
    ("org.apache.hadoop.security.AccessControlException", "Permission denied", errno.EACCES),
    ("org.apache.hadoop.fs.ParentNotDirectoryException", "/a (is not a directory)", errno.ENOTDIR),
    (
        "java.io.IOException",
        "File /a could only be replicated to 0 nodes instead of minReplication (=1).  There are 1 "
        "datanode(s) running and no node(s) are excluded in this operation.",
        errno.ENOSPC,
    ),
    (
        "java.io.IOException",
        "File /a could only be written to 0 of the 1 minReplication nodes. There are 1 "
        "datanode(s) running and 1 node(s) are excluded in this operation.",
        errno.EREMOTEIO,
    ),
    (
        "java.io.IOException",
        "File /a could only be replicated to 0 nodes instead of minReplication (=1).  There are 0 "
        "datanode(s) running and no node(s) are excluded in this operation.",
        errno.EREMOTEIO,
    ),
]


@pytest.mark.parametrize(("kind", "said", "number"), EXCEPTIONS)
def test_the_words_of_the_name_node_are_told_and_not_its_stack(
    kind: str, said: str, number: int
) -> None:
    cause = RuntimeError(f'RPCError("{kind}", "{said}\\n\\tat org.apache.Hadoop.main(H.java:1)")')
    error = hdfs_client.failure("write", "hdfs://h:1/a", cause)
    assert error.args[0] == f"write hdfs://h:1/a: {kind.rpartition('.')[2]}: {said}"
    assert error.errno == number
    assert isinstance(error, NoSpaceError) == (number == errno.ENOSPC)


FORKED = """
import os, sys, holdfast, torch

holdfast.save({"w": torch.ones(10)}, sys.argv[1])
opened = holdfast.open(sys.argv[1])
if (child := os.fork()) == 0:
    for use in (lambda: holdfast.save({"n": 2}, sys.argv[1] + "-b"), opened.state):
        try:
            use()
        except holdfast.errors.OptionError as error:
            assert "'spawn'" in str(error)
        else:
            os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
holdfast.save({"n": 3}, sys.argv[1] + "-c")
"""


def test_a_forked_child_is_told_instead_of_waiting_for_ever(path: str) -> None:
    subprocess.run([sys.executable, "-c", FORKED, path], check=True, timeout=100)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdfs_native", None)
    monkeypatch.setattr(hdfs_client, "_clients", {})
    with pytest.raises(OptionError, match=r"hdfs-native.*\[hdfs\]"):
        open_store("hdfs://h:1/a")


def test_the_box_has_a_name_of_its_own(store: HdfsStore) -> None:
    store.prepare(PENDING, b"x")
    found = [os.path.basename(s.path) for s in store._client.list_status(store._path(""))]
    assert found == [f"{PENDING}{BOX_END}"]
