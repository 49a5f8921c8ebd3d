"""A local disk before a store, used otherwise than by one loop in one thread on disks that stay."""

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import holdfast
from holdfast import Checkpointer, Keep
from holdfast.engine import epochs
from holdfast.errors import FencedError, OptionError, StoreError
from holdfast.runs import uploader
from holdfast.runs.directory import Run
from namespaces import mounted, unmount

from .jobs import next_job
from .test_tiers import opened, restored, state, steps_in, until


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str]:
    """Give a store and a local disk."""
    return str(tmp_path / "store"), str(tmp_path / "local")


def test_each_step_that_a_thread_has_saved_is_in_the_store(places: tuple[str, str]) -> None:
    store, local = places
    with opened(store, local, keep=Keep.all() | Keep.local(1)) as checkpointer:
        checkpointer.save(1, state(1))

        def save(step: int) -> bool:
            checkpointer.save(step, state(step))
            return step in steps_in(store)

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(save, range(2, 10)))
    assert steps_in(store) == [*range(1, 10)]


def test_a_step_that_the_policy_lets_go_of_for_a_newer_one_is_no_error(
    places: tuple[str, str],
) -> None:
    store, local = places
    keep = Keep.latest(1) | Keep.local(1)
    with opened(store, local, keep=keep, upload_bytes_s=2e6) as checkpointer:
        checkpointer.save(1, state(1))
        with ThreadPoolExecutor(1) as pool:
            older = pool.submit(checkpointer.save, 2, state(2, 1_000_000))
            until((Path(local) / "step-00000002" / "MANIFEST").exists)
            checkpointer.save(3, state(3))
            older.result()
    assert steps_in(store) == [3]


def test_the_first_saves_of_several_threads_are_of_one_job(places: tuple[str, str]) -> None:
    for turn, local in enumerate([None, places[1]]):
        next_job()
        given = {} if local is None else {"local": local}
        start, failures = threading.Barrier(4), list[BaseException]()
        with Checkpointer(f"{places[0]}-{turn}", **given, signals=()) as checkpointer:

            def save(
                step: int,
                checkpointer: Checkpointer = checkpointer,
                start: threading.Barrier = start,
                failures: list[BaseException] = failures,
            ) -> None:
                start.wait()
                try:
                    checkpointer.save(step, state(step))
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=save, args=(step,)) for step in range(1, 5)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert failures == []


def test_two_places_that_are_swapped_are_refused(places: tuple[str, str]) -> None:
    store, local = places
    with opened(store, local) as checkpointer:
        checkpointer.save(1, state(1))
    before = sorted(Path(local).rglob("*")), sorted(Path(store).rglob("*"))
    next_job()
    with opened(local, store) as checkpointer:
        with pytest.raises(OptionError, match=f"is the local disk of {store}; expected the store"):
            checkpointer.restore(state(0))
        with pytest.raises(OptionError, match=f"Checkpointer\\('{store}', local='{local}'\\)"):
            checkpointer.save(2, state(2))
    assert before == (sorted(Path(local).rglob("*")), sorted(Path(store).rglob("*")))
    assert restored(store, local)[0] == 1


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_link_to_the_store_is_no_local_disk(places: tuple[str, str], below: str) -> None:
    store, local = places
    os.makedirs(store + below)
    os.symlink(store + below, local)
    checkpointer = opened(store, local)
    with pytest.raises(OptionError, match="one is within the other"):
        checkpointer.save(1, state(1))
    assert os.listdir(store + below) == []
    with pytest.raises(OptionError, match="one is within the other"):
        Checkpointer(store, local="/")


def test_a_store_whose_disk_goes_away_has_acknowledged_nothing_since(
    places: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, local = places
    monkeypatch.setattr(uploader, "PAUSES_S", (1.0, 2.0))
    options = holdfast.Options(deadline_s=6)
    with opened(store, local, options=options) as checkpointer:
        checkpointer.save(1, state(1))
        os.rename(store, away := f"{store}-away")
        with pytest.raises(StoreError, match=f"not yet in {store}.*the directory is gone"):
            checkpointer.save(2, state(2))
        assert not os.path.exists(store)
        os.rename(away, store)
        until(lambda: steps_in(store) == [1, 2])  # after a pause between the tries


@pytest.mark.parametrize("gone", ["store", "local"])
def test_nothing_is_written_beneath_a_disk_that_is_not_mounted(tmp_path: Path, gone: str) -> None:
    """The place of the run is the mount point itself, so a directory stays there."""
    with mounted(tmp_path / gone, "8m") as disk:
        places = str(tmp_path / "store"), str(tmp_path / "local")
        options = holdfast.Options(deadline_s=6)
        checkpointer = opened(*places, options=options, drain_s=1)
        checkpointer.save(1, state(1))
        unmount(disk)
        with pytest.raises(StoreError, match=f"{disk}: its disk is not mounted"):
            checkpointer.save(2, state(2))
        with pytest.raises(StoreError) if gone == "store" else contextlib.nullcontext():
            checkpointer.close()
        assert list(disk.rglob("*.hf")) == []


@pytest.mark.parametrize("lost", ["*", ".store", ".job-*", ".epoch-*"])
def test_a_local_disk_that_was_emptied_stays_the_one_of_its_job(
    places: tuple[str, str], lost: str
) -> None:
    """By people, or by what cleans scratch disks of old files."""
    store, local = places
    old = opened(store, local, durable="local", drain_s=0.1)
    old.save(1, state(1))
    old.wait("store")
    os.rename(store, f"{store}-away")
    Path(store).touch()  # it cannot be read
    if lost == "*":
        shutil.rmtree(local)
        os.mkdir(local)
    for path in Path(local).glob(lost):
        path.unlink()
    old.save(2, state(2))
    with pytest.raises(StoreError, match="lacks step 2"):
        old.close()
    os.unlink(store)
    os.rename(f"{store}-away", store)
    next_job()
    with opened(store, local) as checkpointer:
        assert checkpointer.restore(state(0)) == 2
        checkpointer.save(3, state(3))
    assert steps_in(store) == [1, 2, 3]


def test_a_restore_waits_for_saves_that_wait_for_their_upload(places: tuple[str, str]) -> None:
    options = holdfast.Options(deadline_s=20)
    given = {"options": options, "upload_bytes_s": float(1 << 20)}
    with opened(*places, **given) as checkpointer, ThreadPoolExecutor(1) as pool:
        checkpointer.save(1, state(1))
        saved = pool.submit(checkpointer.save, 2, state(2, 500_000))
        until((Path(places[1]) / "step-00000002" / "MANIFEST").exists)
        assert checkpointer.restore(state(0, 500_000), step=2) == 2
        saved.result()
        assert steps_in(places[0]) == [1, 2]


def test_a_step_that_another_host_has_saved_names_its_job(
    places: tuple[str, str], tmp_path: Path
) -> None:
    """Not the step alone: to go back with `retire_after` would delete what that job has."""
    store, local = places
    checkpointer = opened(store, local, durable="local")
    checkpointer.save(1, state(1))
    checkpointer.wait("store")
    mine = epochs.held, epochs._names
    epochs.held, epochs._names = {}, []
    with opened(store, str(tmp_path / "other")) as other:
        other.restore(state(0))
        other.save(2, state(2))
    epochs.held, epochs._names = mine
    assert checkpointer._tiers is not None and checkpointer._tiers.uploader is not None
    checkpointer._tiers.uploader.forget([1, 2])
    with pytest.raises(FencedError, match="belongs to a newer job"):
        checkpointer.save(2, state(2))
    checkpointer.close()


def test_a_checkpointer_that_is_dropped_says_what_the_store_lacks(
    places: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = opened(*places, durable="local", upload_bytes_s=100.0)
    checkpointer.save(1, state(1, 30_000))
    del checkpointer
    gc.collect()
    until(lambda: f"{places[0]} lacks step 1 of {places[1]}" in caplog.text)


def test_objects_have_no_disk_that_could_be_unmounted() -> None:
    """Some servers go on listing the names of directories in which no object is left."""
    run = Run("memory://gone/run", Keep.all())
    run._seen = True
    assert run.free_bytes() is None


def test_a_url_without_its_slashes_is_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("s3:bucket/run", "memory:x", "hdfs:x", "s3:/bucket"):
        with pytest.raises(OptionError, match="two slashes"):
            holdfast.save(state(1), url)
    assert list(tmp_path.iterdir()) == []


ENDED_IN_CLOSE = """
import os, signal, sys, threading, torch, holdfast
store, local = sys.argv[1:]
more = dict(durable="local", drain_s=3, upload_bytes_s=100.0, every=1)
checkpointer = holdfast.Checkpointer(store, local=local, **more)
checkpointer.step(1, {"w": torch.ones(30_000)})
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
checkpointer.close()
"""


def test_a_job_that_a_signal_ends_in_close_says_what_the_store_lacks(
    places: tuple[str, str],
) -> None:
    command = [sys.executable, "-c", ENDED_IN_CLOSE, *places]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGTERM
    assert f"{places[0]} lacks step 1 of {places[1]} after drain_s=3 s" in done.stderr


def test_a_file_in_the_place_of_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for given in ({"root": "file", "local": "local"}, {"root": "store", "local": "file"}):
        words = {name: str(tmp_path / place) for name, place in given.items()}
        (name,) = (name for name, place in given.items() if place == "file")
        with pytest.raises(OptionError, match=rf"^{name} is {tmp_path}/file, which is a file;"):
            Checkpointer(words["root"], local=words["local"])
    with pytest.raises(OptionError, match=rf"^root is {tmp_path}/file, which is a file;"):
        Checkpointer(tmp_path / "file")


def test_a_time_for_uploads_needs_a_local_disk(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"^drain_s is given without local"):
        Checkpointer(tmp_path, drain_s=5.0)
