"""What NFS does and a disk does not, as far as any machine can play it; `make nfs` has the rest."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from descriptors import open_descriptors
from holdfast._core import look_anew
from holdfast.engine import check
from holdfast.engine.read import DataFileReader
from holdfast.errors import NotCommittedError, ReplacedError, StoreError
from holdfast.stores.local import LocalStore
from holdfast.testing.faults import Fault, faulty

NewPath = Callable[[], Path]
OPTIONS = holdfast.Options(io="buffered")


def state(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1000,), value)}


def test_a_second_name_that_is_there_already_is_our_own(new_path: NewPath) -> None:
    """The reply was lost, and the client asked again."""
    store = LocalStore(new_path())
    store.prepare("one", b"1")
    store.prepare("other", b"2")
    store.link("one", "second")
    store.link("one", "second")
    with pytest.raises(StoreError) as caught:
        store.link("other", "second")
    assert caught.value.errno == errno.EEXIST
    assert store.get("second", 9) == b"1"


def test_what_is_open_on_its_client_goes_by_itself(new_path: NewPath) -> None:
    place = new_path()
    LocalStore(place).prepare(".nfs0001", b"")
    LocalStore(place).prepare("other", b"")
    with faulty(Fault("unlink", persistent=True, argument=errno.EBUSY)):
        LocalStore(place).remove(".nfs0001")
        with pytest.raises(StoreError, match="busy"):
            LocalStore(place).remove("other")
    LocalStore(place).remove(".nfs0001")
    assert os.listdir(place) == ["other"]


@pytest.mark.parametrize("operation", ["size", "read"])
def test_a_small_file_that_went_while_it_was_open_is_read_again(
    new_path: NewPath, operation: str
) -> None:
    place = new_path()
    LocalStore(place).prepare("name", b"text")
    with faulty(Fault(operation, argument=errno.ESTALE)):
        assert LocalStore(place).get("name", 9) == b"text"
    with (
        faulty(Fault(operation, persistent=True, argument=errno.ESTALE)),
        pytest.raises(StoreError, match="another machine removed it"),
    ):
        LocalStore(place).get("name", 9)


def lose_when_opened(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, lose: Callable[[], None]
) -> None:
    """Remove a checkpoint right after one of its data files was opened."""
    open_file = getattr(where, name)

    def open_and_lose(*arguments: Any, **options: Any) -> int:
        descriptor: int = open_file(*arguments, **options)
        monkeypatch.undo()
        lose()
        return descriptor

    monkeypatch.setattr(where, name, open_and_lose)


CHECKED, READ = (check, "open_data_file", 2), (DataFileReader, "_descriptor", 5)


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize(("where", "name", "nth"), [CHECKED, READ], ids=["checked", "read"])
def test_a_data_file_that_went_while_it_was_open_is_not_a_broken_disk(
    new_path: NewPath,
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    name: str,
    nth: int,
    is_replaced: bool,
) -> None:
    place, other = new_path(), new_path()

    def lose() -> None:
        if is_replaced:
            (data,) = (other / "data").iterdir()
            data.rename(place / "data" / data.name)
            (other / "MANIFEST").replace(place / "MANIFEST")
        else:
            (place / "MANIFEST").unlink()

    holdfast.save(state(1), place, options=OPTIONS)
    holdfast.save(state(2), other, options=OPTIONS)
    lose_when_opened(monkeypatch, where, name, lose)
    # MANIFEST, header, trailer and footer are read before.
    with (
        faulty(Fault("read", nth=nth, argument=errno.ESTALE)),
        pytest.raises(ReplacedError if is_replaced else NotCommittedError),
    ):
        holdfast.load(place, into=state(0), options=OPTIONS)


def test_a_data_file_that_is_stale_while_its_checkpoint_stands_is_an_error_of_the_store(
    new_path: NewPath,
) -> None:
    place = new_path()
    holdfast.save(state(1), place, options=OPTIONS)
    with (
        faulty(Fault("read", nth=2, argument=errno.ESTALE)),
        pytest.raises(StoreError, match="Stale file handle"),
    ):
        holdfast.load(place, into=state(0), options=OPTIONS)


@pytest.mark.parametrize("path", ["/", "/none/at/all", "name", "", "/dev/null/x"])
def test_a_look_at_any_path_changes_nothing(path: str) -> None:
    before = open_descriptors()
    look_anew(path)
    assert open_descriptors() == before
