"""What is left of retired steps in a store of objects, and who sees it.

Most stores here go on listing a directory when the last object in it is gone, as seaweedfs does.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch

from holdfast import Checkpointer, Keep
from holdfast.engine.retire import GRACE_S, sweep
from holdfast.format.names import step_name
from holdfast.report.read import read_run
from holdfast.runs.directory import Run
from holdfast.stores.url import open_store
from holdfast.tools import ls, watch
from holdfast.tools.inspect_run import describe_run
from holdfast.tools.run_listing import find_run
from holdfast.tools.verify import verify
from stores.jobs import next_job
from stores.places import Place


class Folders:
    """All directories that the store had, and the keys that it was asked about."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.are_kept, self._kept = True, set[str]()
        self.asked: list[str] = []
        for name in ("delete", "list_with_delimiter", "list", "head", "get", "put"):
            patch.setattr(obstore, name, self._around(name, getattr(obstore, name)))

    def _around(self, name: str, call: Any) -> Any:
        def asked(client: Any, keys: str | Sequence[str] | None, *more: Any, **named: Any) -> Any:
            self.asked += [keys] if isinstance(keys, str) else keys or [""]
            if name == "delete":
                for key in [keys] if isinstance(keys, str) else keys or ():
                    self._kept |= {key[:at] for at, letter in enumerate(key) if letter == "/"}
            found = call(client, keys, *more, **named)
            return self._with_kept(found, keys or "") if name == "list_with_delimiter" else found

        return asked

    def _with_kept(self, found: Any, prefix: Any) -> Any:
        here = {path for path in self._kept if self.are_kept and path.rpartition("/")[0] == prefix}
        prefixes = sorted({*found["common_prefixes"], *here})
        return {"common_prefixes": prefixes, "objects": found["objects"]}


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Folders:
    return Folders(monkeypatch)


@pytest.fixture
def store(new_place: Place, folders: Folders) -> str:
    place = new_place()
    if open_store(place).shows_pending:
        pytest.skip("its directories are made, and removed")
    return place


def state(value: int) -> dict[str, Any]:
    return {"n": value, "w": torch.full((1000,), float(value))}


def trained(
    store: str, steps: range, folders: Folders, local: Path | None = None
) -> list[list[str]]:
    """Train in another job; return what each save asked about the data of the first step."""
    next_job()
    found = list[list[str]]()
    more: Any = {"keep": Keep.latest(1), "local": local, "signals": ()}
    with Checkpointer(store, every=1, **more) as checkpointer:
        checkpointer.restore(state(0))
        for step in steps:
            folders.asked.clear()
            checkpointer.step(step, state(step))
            checkpointer.wait()
            found.append([key for key in folders.asked if f"{step_name(1)}/data" in key])
    return found


def write(place: str, name: str) -> None:
    """Leave a file of a save that has not committed."""
    store = open_store(place)
    descriptor = store.create(name, direct=False)
    store.vfs.write(descriptor, b"half", 0)
    store.vfs.sync(descriptor)
    store.vfs.close(descriptor)


def died(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "of a save that died" in text]


def test_a_retired_step_is_not_deleted_again_by_each_save_of_the_next_job(
    store: str, folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    trained(store, range(1, 4), folders)
    asked = trained(store, range(4, 8), folders)
    assert died(caplog) == []
    assert asked[0] and asked[1:] == [[], [], []]


def test_a_retired_step_is_not_deleted_again_by_each_upload(
    store: str, folders: Folders, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    asked = trained(store, range(1, 8), folders, tmp_path / "local")
    assert died(caplog) == []
    assert asked[1] and asked[3:] == [[], [], [], []]


def test_what_is_begun_of_a_step_after_it_was_retired_is_removed_before_another_goes_up(
    store: str, tmp_path: Path
) -> None:
    more: Any = {"keep": Keep.latest(1), "local": tmp_path / "local", "signals": ()}
    with Checkpointer(store, every=1, **more) as checkpointer:
        for step in range(1, 4):
            checkpointer.step(step, state(step))
            checkpointer.wait()
        assert checkpointer._tiers is not None and checkpointer._tiers.uploader is not None
        clear = checkpointer._tiers.uploader._clear_others
        clear(1)  # as its upload begins
        name = f"{step_name(1)}/data/{'ab' * 16}/00000-0.hf"
        write(store, name)
        clear(2)
        assert not open_store(store).exists(name)


def test_a_bar_is_left_as_it_is_and_goes_after_a_day_though_the_save_is_still_listed(
    store: str, folders: Folders
) -> None:
    trained(store, range(1, 4), folders)
    step = open_store(f"{store}/{step_name(1)}")
    barred_s = step.modified_s("")
    assert [entry.name for entry in step.list("data")]
    assert sweep(step, barred_s - 1) == barred_s == step.modified_s("")
    assert sweep(step, barred_s + 1) == barred_s + 1 + GRACE_S
    assert not step.exists("") and step.list() != []
    assert sweep(step, barred_s + 1) == barred_s + 1 + GRACE_S  # of nothing at all


def test_a_run_looks_again_at_a_retired_step_when_its_bar_is_a_day_old(
    store: str, folders: Folders
) -> None:
    trained(store, range(1, 4), folders)
    run, step = Run(store, Keep.all()), open_store(f"{store}/{step_name(1)}")
    barred_s = step.modified_s("")
    run._sweep(barred_s - 1, "")
    folders.asked.clear()
    run._sweep(barred_s - 0.5, "")
    assert not [key for key in folders.asked if step_name(1) in key]
    run._sweep(barred_s + 1, "")
    assert not step.exists("")


def test_what_is_left_of_a_save_is_found_beside_one_that_is_listed_and_holds_nothing(
    store: str, folders: Folders
) -> None:
    trained(store, range(1, 4), folders)
    step = open_store(f"{store}/{step_name(1)}")
    name = f"data/{'ab' * 16}/00000-0.hf"
    write(step.location, name)
    made_s = step.modified_s(name)
    assert sweep(step, made_s - 1) is None and step.exists(name)
    assert len(step.list("data")) == 2
    assert sweep(step, made_s + 1) is None and not step.exists(name)


@pytest.mark.parametrize("are_kept", [True, False])
def test_a_retired_step_is_no_step_to_who_looks_at_the_run(
    store: str, folders: Folders, are_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders.are_kept = are_kept
    trained(store, range(1, 8), folders)
    assert len([e for e in open_store(store).list() if e.name.startswith("step-")]) == 7
    monkeypatch.setattr(ls, "screen_size", lambda: (80, 6))  # room for 4 steps
    listed, run, verified = ls.ls(store), find_run(store), verify(store)
    assert listed is not None and run is not None
    assert listed["steps"] == 1 and [one["name"] for one in listed["shown"]] == [step_name(7)]
    assert [one["name"] for one in describe_run(run)["steps"]] == [step_name(7)]
    assert verified["good"] and verified["unchecked"] == []
    report = read_run(store)
    assert [step.name for step in report.steps] == [step_name(7)] and not report.earlier_steps
    seen = watch.look(store)
    assert (seen["steps"], seen["newest"]) == (1, 7)


def test_a_step_that_is_being_saved_is_shown_beside_retired_ones(
    store: str, folders: Folders
) -> None:
    trained(store, range(1, 4), folders)
    write(store, f"{step_name(4)}/data/{'ab' * 16}/00000-0.hf")
    listed = ls.ls(store)
    assert listed is not None
    assert [one["state"] for one in listed["shown"]] == ["committed", "uncommitted"]


def test_who_looks_at_a_run_of_which_all_steps_are_retired_finds_none(
    store: str, folders: Folders
) -> None:
    trained(store, range(1, 4), folders)
    Run(store, Keep.all()).retire(3)
    assert find_run(store) is None
    assert read_run(store).steps == () and watch.look(store)["steps"] == 0
