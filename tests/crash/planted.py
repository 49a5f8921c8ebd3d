"""Faults planted in the commit, retention and rebase; every oracle of a crash has to notice them.

Each is a function that breaks one rule of docs/commit.md in this process.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast.engine.retire
import holdfast.runs.directory
import holdfast.runs.saver
import holdfast.saving.save
from holdfast.chains import recompress as recompress_module
from holdfast.engine.commit import remove_files
from holdfast.engine.replace import Replacement
from holdfast.engine.retire import replacer_of
from holdfast.engine.write import DataFileWriter
from holdfast.stores.local import LocalStore

Plant = Callable[[pytest.MonkeyPatch], None]


def drop_a_file_fsync(patch: pytest.MonkeyPatch) -> None:
    original = DataFileWriter._sync

    def sync(self: DataFileWriter, call: Callable[[Any], None], target: Any) -> None:
        if self._descriptor < 0:  # the directories; the file is closed by then
            original(self, call, target)

    patch.setattr(DataFileWriter, "_sync", sync)


def drop_a_directory_fsync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LocalStore, "sync_made", lambda self, name: None)
    patch.setattr(LocalStore, "sync_path", lambda self, name: None)


def publish_before_durable(patch: pytest.MonkeyPatch) -> None:
    late: list[Callable[[], None]] = []
    publish = LocalStore.publish

    def sync(self: DataFileWriter, call: Callable[[Any], None], target: Any) -> None:
        store, name = self._store, self._names[-1]

        def sync_now() -> None:
            _sync_file(store, name)
            store.sync_made(name)

        late.append(sync_now)

    def publish_first(self: LocalStore, pending_name: str, name: str) -> bool:
        done = publish(self, pending_name, name)
        while late:
            late.pop()()
        return done

    patch.setattr(DataFileWriter, "_sync", sync)
    patch.setattr(LocalStore, "publish", publish_first)


def overwrite_in_place(patch: pytest.MonkeyPatch) -> None:
    create = LocalStore.create

    def create_again(self: LocalStore, name: str, *, direct: bool) -> int:
        self.remove(name)
        return create(self, name, direct=direct)

    def publish_again(self: LocalStore, pending_name: str, name: str) -> bool:
        self.replace(pending_name, name)
        return True

    absent = lambda store, *, with_dcp=False, reclaims=True: None  # noqa: E731
    patch.setattr(holdfast.saving.save, "check_absent", absent)
    patch.setattr(holdfast.saving.save.secrets, "token_hex", lambda size=8: "ab" * size)
    patch.setattr(LocalStore, "create", create_again)
    patch.setattr(LocalStore, "publish", publish_again)


def retire_data_first(patch: pytest.MonkeyPatch) -> None:
    retire = holdfast.runs.directory.retire

    def retire_backwards(store: LocalStore, *also: Any) -> None:
        for save in store.list("data"):
            for file in store.list(f"data/{save.name}"):
                store.remove(f"data/{save.name}/{file.name}")
                store.sync_directory(f"data/{save.name}")
        retire(store, *also)

    patch.setattr(holdfast.runs.directory, "retire", retire_backwards)


def retire_without_fsync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LocalStore, "sync_directory", lambda self, name="": None)


def retire_before_the_hint_is_durable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holdfast.runs.directory.Run, "_settle", lambda self: None)


def retire_before_saving(patch: pytest.MonkeyPatch) -> None:
    save = holdfast.runs.saver.save_now

    def make_room_and_save(state: Any, wanted: Any, *ranks: Any) -> Any:
        for older in Path(wanted.path).parent.glob("step-*"):
            holdfast.runs.directory.retire(LocalStore(older))
        return save(state, wanted, *ranks)

    patch.setattr(holdfast.runs.saver, "save_now", make_room_and_save)


def rename_without_fsync(patch: pytest.MonkeyPatch) -> None:
    """Sync what is linked alone: nothing that is renamed."""
    publish = LocalStore.publish

    def publish_synced(self: LocalStore, pending_name: str, name: str) -> bool:
        _sync_file(self, pending_name)
        return publish(self, pending_name, name)

    drop_the_manifest_fsync(patch)
    patch.setattr(LocalStore, "publish", publish_synced)


def drop_the_manifest_fsync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LocalStore, "prepare", _prepare_carelessly)


def sync_the_manifest_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    def write(self: LocalStore, pending_name: str, data: bytes) -> None:
        descriptor = self.vfs.create(self._path(pending_name))
        self.vfs.sync(descriptor)
        self.vfs.write(descriptor, data, 0)
        self._begun[pending_name] = descriptor

    patch.setattr(LocalStore, "begin", write)
    patch.setattr(LocalStore, "prepare", _prepare_carelessly)


def publish_by_rename_without_fsync(patch: pytest.MonkeyPatch) -> None:
    def publish(self: LocalStore, pending_name: str, name: str) -> bool:
        self.replace(pending_name, name)
        return True

    drop_the_manifest_fsync(patch)
    patch.setattr(LocalStore, "publish", publish)


def drop_every_directory_fsync(patch: pytest.MonkeyPatch) -> None:
    drop_a_directory_fsync(patch)
    retire_without_fsync(patch)
    patch.setattr(LocalStore, "sync_above", lambda self, name: None)
    patch.setattr(LocalStore, "publish", _publish_without_fsync)
    patch.setattr(LocalStore, "replace", LocalStore.rename)


def say_saved_when_staged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holdfast.Checkpointer, "wait", lambda self, tier=None: None)


def retire_what_links_need(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holdfast.runs.directory.Run, "_with_bases", lambda self, kept: kept)
    patch.setattr(holdfast.runs.directory.Run, "_check_unneeded", lambda self, step, unread: None)


def remove_the_old_files_before_rebasing(patch: pytest.MonkeyPatch) -> None:
    commit_again = recompress_module.commit_again

    def remove_first(store: LocalStore, *rest: Any) -> None:
        mine = rest[0].header.save_id
        for save in store.list("data"):
            if save.name != mine:
                remove_files(store, save.name)
        commit_again(store, *rest)

    patch.setattr(recompress_module, "commit_again", remove_first)


def remove_the_old_data_before_replacing(patch: pytest.MonkeyPatch) -> None:
    replace = Replacement.replace

    def remove_first(self: Replacement) -> None:
        for save in self._store.list("data"):
            if save.name != self._save_id:
                remove_files(self._store, save.name)
        replace(self)

    patch.setattr(Replacement, "replace", remove_first)


def remove_the_old_data_before_the_rename_is_durable(patch: pytest.MonkeyPatch) -> None:
    sync = LocalStore.sync_directory

    def sync_below(self: LocalStore, name: str = "") -> None:
        if name or not self.exists("MANIFEST"):
            sync(self, name)

    patch.setattr(LocalStore, "sync_directory", sync_below)


def take_the_new_data_for_the_old(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holdfast.engine.retire, "_save_of", lambda store, mark: replacer_of(mark))
    patch.setattr(holdfast.engine.retire, "_published", lambda store: "")


def _prepare_carelessly(self: LocalStore, pending_name: str, data: bytes, name: str = "") -> None:
    if pending_name not in self._begun:
        self.begin(pending_name, data)
    self.vfs.close(self._begun.pop(pending_name))


def _publish_without_fsync(self: LocalStore, pending_name: str, name: str) -> bool:
    made = self._link(self._path(pending_name), self._path(name))
    self.remove(pending_name)
    return made


def _sync_file(store: LocalStore, name: str) -> None:
    descriptor = store.open(name, direct=False)
    store.vfs.sync(descriptor)
    store.vfs.close(descriptor)
