"""Faults planted in object stores, and in the protocol on them: the oracle has to notice each.

As in `plants.py`. The first ones are of the store: what it must keep to for the promises to hold.
"""

from typing import Any

from holdfast.engine import commit as commits
from holdfast.engine import discard, ledger, retire, swap
from holdfast.runs import directory as directory_module
from holdfast.runs import fence as fence_module
from holdfast.stores import objects
from holdfast.stores.objects import ObjectStore
from holdfast.stores.objects_bar import BAR_MAGIC

from .bucket import Bucket
from .plants import Plant, hold_without_a_look, keep_but_one, nothing

OLD_S = 60.0  # until a listing shows what another process has put

_put = Bucket._put


def _put_without_condition(kind: type) -> Any:
    def put(self: Any, key: str, data: bytes, mode: Any, began: float) -> Any:
        is_left_out = isinstance(mode, kind)
        return _put(self, key, data, "overwrite" if is_left_out else mode, began)

    return put


_below = Bucket._below


def _below_as_it_was(self: Any, below: str) -> list[str]:
    now, mine = self._scheduler.now, self._scheduler.current.process.name
    return [
        key
        for key in _below(self, below)
        if self.makers[key] == mine or self.objects[key].written < now - OLD_S
    ]


def _publish_where_nothing_is(store: Any, pending: str, name: str) -> bool:
    data, bar = store._prepared.pop(pending), objects._bars.pop(store._where(name), None)
    return bool(store._put(name, data, "create" if bar is None else bar))


def _prepare_without_a_bar(store: Any, pending: str, data: bytes, name: str = "") -> None:
    store._prepared[pending] = data


def _swap_without_condition(store: Any, pending: str, name: str, stamp: str) -> bool:
    return bool(store._put(name, store._prepared.pop(pending), "overwrite"))


_swap = swap.Swap.swap


def _remove_old_data_first(made: Any, stamp: str) -> None:
    store = made._store
    for save in retire._saves(store, store.list()):
        if save != made._save_id:
            discard.remove_files(store, save)
    _swap(made, stamp)


def _exit_without_the_lock(made: Any, *given: Any) -> None:
    commits.Commit.__exit__(made, *given)
    made._store.remove(made._mark)
    made._store.remove(made._lock)


def _lock_for_nobody(made: Any, stamp: str) -> None:
    made._store.claim(made._mark, made._store.get("MANIFEST", 1 << 30))


def _revoke_without_the_lock(store: Any, save: str) -> bool:
    store.revoke("", "MANIFEST")
    return True


def _not_published(made: Any, is_lost: bool) -> bool:
    return commits._certainly_not_published(made._store, made._data)


def _retire_data_first(store: Any) -> None:
    for save in retire._saves(store, store.list()):
        discard.remove_files(store, save)
    retire.retire(store)


PLANTS: dict[str, Plant] = {
    "If-None-Match is ignored": [(Bucket, "_put", _put_without_condition(str))],
    "If-Match is ignored": [(Bucket, "_put", _put_without_condition(dict))],
    "listings are old": [(Bucket, "_below", _below_as_it_was)],
    "bars are all alike": [(objects, "new_bar", lambda: BAR_MAGIC + b"0" * 32 + b"\n")],
    "a save puts no bar before its last look": [
        (ObjectStore, "prepare", _prepare_without_a_bar),
        (ObjectStore, "publish", _publish_where_nothing_is),
    ],
    "a new job bars nothing": [(fence_module.Fence, "_revoke", nothing)],
    "a failed save bars nothing": [(commits.Commit, "_will_never_be_there", _not_published)],
    "files removed though published": [
        (commits.Commit, "_will_never_be_there", lambda made, is_lost: True)
    ],
    "a replace puts without a condition": [(ObjectStore, "swap", _swap_without_condition)],
    "a replace takes no lock": [(swap.Swap, "lock", _lock_for_nobody)],
    "a sweep takes no lock": [(retire, "revoke_save", _revoke_without_the_lock)],
    "a lock goes while its request is on its way": [
        (swap.Swap, "__exit__", _exit_without_the_lock)
    ],
    "old data removed before the swap": [(swap.Swap, "swap", _remove_old_data_first)],
    "locks go before their data": [(retire, "_is_lock_of_data", lambda store, name: False)],
    "no look at the deadline": [(ledger.Ledger, "check_deadline", nothing)],
    "no look at the epoch": [(fence_module.Fence, "hold", hold_without_a_look)],
    "data retired before the manifest": [(directory_module, "retire", _retire_data_first)],
    "sweep ignores age": [(retire, "_is_older", lambda store, names, before_s: True)],
    "retention lets the newest go": [(directory_module.Run, "_with_bases", keep_but_one)],
}
