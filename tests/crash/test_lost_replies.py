"""What was done is reported as failed, as NFS does when a reply is lost: the commit finds out."""

import dataclasses
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from crash_content import OPTIONS, load_number, make_state

import holdfast
from holdfast.errors import AlreadyCommittedError, NotCommittedError, StoreError
from holdfast.stores.local import LocalStore

link = LocalStore._link


def lost() -> StoreError:
    error = StoreError("link: the reply was lost")
    error.errno = errno.ETIMEDOUT
    return error


def names_below(place: Path) -> list[str]:
    return sorted(path.name for path in place.rglob("*") if path.is_file())


def test_a_link_that_was_made_twice_is_our_own(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link_again(self: LocalStore, source: str, target: str) -> bool:
        return link(self, source, target) and link(self, source, target)

    monkeypatch.setattr(LocalStore, "_link", link_again)
    holdfast.save(make_state(1), scratch / "place", options=OPTIONS)
    assert load_number(scratch / "place") == 1


def test_a_link_whose_reply_was_lost_leaves_a_whole_checkpoint(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link_silently(self: LocalStore, source: str, target: str) -> bool:
        link(self, source, target)
        raise lost()

    monkeypatch.setattr(LocalStore, "_link", link_silently)
    with pytest.raises(StoreError, match="the reply was lost") as caught:
        holdfast.save(make_state(1), scratch / "place", options=OPTIONS)
    assert "whole and loads" in caught.value.__notes__[0]
    assert load_number(scratch / "place") == 1


@pytest.mark.parametrize("is_in_contact", [True, False])
def test_where_a_call_may_come_late_its_pending_manifest_goes_before_the_data(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, is_in_contact: bool
) -> None:
    """As on HDFS, whose NameNode renames. Without contact, nothing can be taken back."""
    late, place = list[Callable[[], None]](), scratch / "place"

    def publish_later(self: LocalStore, pending: str, name: str) -> bool:
        late.append(lambda: os.rename(place / pending, place / name))
        if not is_in_contact:
            monkeypatch.setattr(LocalStore, "remove", lose_contact)
        raise lost()

    def lose_contact(*_: object) -> None:
        raise lost()

    remove = LocalStore.remove
    monkeypatch.setattr(LocalStore, "can_link", False)
    monkeypatch.setattr(LocalStore, "publish", publish_later)
    with pytest.raises(StoreError, match="the reply was lost") as caught:
        holdfast.save(make_state(1), place, options=OPTIONS)
    monkeypatch.setattr(LocalStore, "remove", remove)
    may_exist = any("may exist" in note for note in getattr(caught.value, "__notes__", []))
    assert may_exist is not is_in_contact
    if is_in_contact:
        assert names_below(scratch) == []
        with pytest.raises(FileNotFoundError):
            late.pop()()
    else:
        late.pop()()
        assert load_number(place) == 1


def test_a_save_whose_directory_is_gone_does_not_say_that_it_may_be_there(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_nothing(self: LocalStore, source: str, target: str) -> bool:
        shutil.rmtree(scratch / "place")
        return link(self, source, target)

    monkeypatch.setattr(LocalStore, "_link", find_nothing)
    with pytest.raises(StoreError, match="No such file") as caught:
        holdfast.save(make_state(1), scratch / "place", options=OPTIONS)
    assert not any("may exist" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("was_made", [True, False])
def test_files_stay_while_nobody_can_tell_whether_a_manifest_names_them(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, was_made: bool
) -> None:
    def link_and_lose_contact(self: LocalStore, source: str, target: str) -> bool:
        if was_made:
            link(self, source, target)
        monkeypatch.setattr(os, "lstat", lose_contact)
        raise lost()

    def lose_contact(path: str) -> os.stat_result:
        raise OSError(errno.EIO, "the server does not answer", path)

    look = os.lstat
    monkeypatch.setattr(LocalStore, "_link", link_and_lose_contact)
    with pytest.raises(StoreError, match="the reply was lost"):
        holdfast.save(make_state(1), scratch / "place", options=OPTIONS)
    monkeypatch.setattr(os, "lstat", look)
    monkeypatch.setattr(LocalStore, "_link", link)
    assert "00000-0.hf" in names_below(scratch / "place")
    if was_made:
        assert load_number(scratch / "place") == 1
        return
    with pytest.raises(NotCommittedError):
        load_number(scratch / "place")
    holdfast.save(make_state(2), scratch / "place", options=OPTIONS)
    assert load_number(scratch / "place") == 2


def test_the_manifest_of_another_save_is_not_taken_for_our_own(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = scratch / "place"

    def link_too_late(self: LocalStore, source: str, target: str) -> bool:
        monkeypatch.setattr(LocalStore, "_link", link)
        holdfast.save(make_state(1), place, options=OPTIONS)
        return link(self, source, target)

    other = dataclasses.replace(OPTIONS, pool_bytes=48 << 20)  # a pool of its own
    monkeypatch.setattr(LocalStore, "_link", link_too_late)
    with pytest.raises(AlreadyCommittedError, match="another save during"):
        holdfast.save(make_state(2), place, options=other)
    assert load_number(place) == 1
    assert names_below(place) == ["00000-0.hf", "MANIFEST"]


def test_a_save_that_cannot_read_whose_manifest_is_there_is_not_acknowledged(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, look = scratch / "place", os.lstat

    def lose_contact(path: str) -> os.stat_result:
        raise OSError(errno.EIO, "the server does not answer", path)

    def link_too_late(self: LocalStore, source: str, target: str) -> bool:
        monkeypatch.setattr(LocalStore, "_link", link)
        holdfast.save(make_state(1), place, options=OPTIONS)
        monkeypatch.setattr(os, "lstat", lose_contact)
        return link(self, source, target)

    other = dataclasses.replace(OPTIONS, pool_bytes=48 << 20)  # a pool of its own
    monkeypatch.setattr(LocalStore, "_link", link_too_late)
    with pytest.raises(StoreError, match=r"stat .*MANIFEST"):
        holdfast.save(make_state(2), place, options=other)
    monkeypatch.setattr(os, "lstat", look)
    assert load_number(place) == 1
