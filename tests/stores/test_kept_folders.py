"""Stores that go on listing a directory when the last object in it is gone, as seaweedfs does."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch

from holdfast import Checkpointer, Keep
from holdfast.engine import epochs
from holdfast.engine.retire import GRACE_S, sweep
from holdfast.format.names import step_name
from holdfast.runs.directory import Run
from holdfast.stores.url import open_store
from stores.places import Place


class Folders:
    """All directories that the store had, and the keys that it was asked about."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._kept: set[str] = set()
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
        here = {path for path in self._kept if path.rpartition("/")[0] == prefix}
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
    epochs.held.clear()
    epochs._names.clear()
    return place


def state(value: int) -> dict[str, Any]:
    return {"n": value, "w": torch.full((1000,), float(value))}


def trained(
    store: str, steps: range, folders: Folders, local: Path | None = None
) -> list[list[str]]:
    """Train in another job; return what each save asked about the data of the first step."""
    epochs.held.clear()
    epochs._names.clear()
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
    descriptor = step.create(name, direct=False)
    step.vfs.write(descriptor, b"half", 0)
    step.vfs.sync(descriptor)
    step.vfs.close(descriptor)
    made_s = step.modified_s(name)
    assert sweep(step, made_s - 1) is None and step.exists(name)
    assert len(step.list("data")) == 2
    assert sweep(step, made_s + 1) is None and not step.exists(name)
