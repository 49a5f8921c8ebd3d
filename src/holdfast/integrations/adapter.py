"""What the integrations of frameworks have in common. Imports no framework.

An integration imports its framework (`module`), checks its version (`known_version`), and says in
the log that it is active (`Hook`). It marks what it saves (`mark`), and loads only what it has
saved itself (`check_mark`). What it deletes goes through `delete`.
"""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from importlib import import_module, metadata
from types import ModuleType, TracebackType
from typing import Any

from ..engine.replace import needed_by
from ..engine.retire import (
    LEAVING_PREFIX,
    base_of,
    finish_retirement,
    leaving,
    replacer_of,
    retire,
)
from ..errors import (
    AlreadyCommittedError,
    HoldfastError,
    MismatchError,
    NotCommittedError,
    OptionError,
    shown,
)
from ..format.names import is_foreign
from ..format.spec import DATA_DIRECTORY, MANIFEST_NAME
from ..stores.base import Store
from ..stores.url import absolute, open_store
from ..version import needs

logger = logging.getLogger("holdfast")

# Modules here that have a function `hook`.
INSTALLABLE = ("accelerate", "deepspeed", "megatron", "transformers")
# What the others need instead: a line in the program, or nothing.
OTHERS = {
    "lightning": "give the Trainer a strategy of holdfast.integrations.lightning",
    "fabric": "give Fabric a strategy of holdfast.integrations.fabric",
    "torchtitan": "see docs/frameworks/torchtitan.md for its line",
    "ray": "see docs/frameworks/ray.md for its line",
    "vllm": "give vLLM --load-format holdfast",
}
MARK = "holdfast_framework"  # of a state: the value that says which framework saved it
_NUMBERS = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


def install(name: str, **options: Any) -> "Hook":
    """Let the unchanged programs of a framework save and load through holdfast.

    Args:
        name: of the framework, such as "transformers".
        options: of the integration; its page says which.

    Returns:
        The active hook. Its ``remove()`` restores the framework, as does the end of a ``with``
        block.

    Raises:
        ImportError: the framework is not installed; the text has the command that installs it.
        OptionError: an unknown name, an untested version of the framework, or another integration
            is active in its place.
    """
    if name in OTHERS:
        raise OptionError(f"{name} needs no install(): {OTHERS[name]}")
    if name not in INSTALLABLE:
        raise OptionError(
            f"there is no integration {shown(name)} to install; expected one of "
            f"{', '.join(INSTALLABLE)}"
        )
    hook: Hook = import_module(f"{__package__}.{name}").hook(**options)
    return hook


def module(name: str, extra: str) -> ModuleType:
    """Import a module of a framework.

    Raises:
        ImportError: the framework is missing; the text names the extra that installs it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        what = f"holdfast.integrations.{extra}"
        raise ImportError(needs(package, extra, what), name=error.name) from error


def known_version(package: str, oldest: str, newest_tested: str, extra: str = "") -> str:
    """Return the installed version of a package, which lies between two that are known.

    Args:
        package: name of the distribution.
        oldest, newest_tested, extra: as for `check_version`.

    Raises:
        ImportError: it is not installed.
        OptionError: it is older or newer. Nothing was hooked.
    """
    extra = extra or package
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError as error:
        what = f"holdfast.integrations.{extra}"
        raise ImportError(needs(package, extra, what), name=package) from error
    return check_version(package, found, oldest, newest_tested, extra)


def check_version(
    package: str, found: str, oldest: str, newest_tested: str, extra: str = ""
) -> str:
    """Check that the version of a package lies between two that are known; return it.

    Later patches of the newest one count as known: ``5.23.4`` where 5.23.0 was tested.

    Args:
        found: its version.
        extra: the extra that installs it; default: of the same name.

    Raises:
        OptionError: it is older or newer.
    """
    number = _number(found)
    if _number(oldest) <= number and number[:2] <= _number(newest_tested)[:2]:
        return found
    raise OptionError(
        f"{package} {found} is installed; holdfast.integrations.{extra or package} works with "
        f"{oldest} to {newest_tested}. Nothing was changed. Run: pip install "
        f"'{package}=={newest_tested}', or upgrade holdfast"
    )


def _number(version: str) -> tuple[int, ...]:
    found = _NUMBERS.match(version)
    return tuple(int(part or 0) for part in found.groups()) if found else (0, 0, 0)


class Hook:
    """An active integration: the names that it has replaced. It ends with a ``with`` block.

    Args:
        framework: name of the integration.
        version: of the framework.
        what: what holdfast does there, for the log.
        replacements: (owner, name of its attribute, what replaces it).
        places: other places that only one integration may have at a time.

    Raises:
        OptionError: another integration has one of the places. Nothing was replaced.
    """

    def __init__(
        self,
        framework: str,
        version: str,
        what: str,
        replacements: Iterable[tuple[Any, str, Any]] = (),
        places: Iterable[str] = (),
    ) -> None:
        self.framework = framework
        replaced = [(owner, name, ours) for owner, name, ours in replacements]
        self._places = [*places, *(_place(owner, name) for owner, name, _ in replaced)]
        for place in self._places:
            if (other := _active.get(place)) is not None:
                if other.framework == framework:
                    raise OptionError(
                        f"{framework} has holdfast installed already. To change its options, "
                        "call remove() of the first hook before"
                    )
                raise OptionError(
                    f"two integrations hook {place}: {other.framework}, which is active, and "
                    f"{framework}. Nothing was changed. Use one, or call remove() of the other"
                )
        _active.update(dict.fromkeys(self._places, self))
        # `vars`: what a class inherits is deleted again, not copied into it.
        self._stock = [(owner, name, vars(owner).get(name, _NONE)) for owner, name, _ in replaced]
        for owner, name, ours in replaced:
            setattr(owner, name, ours)
        logger.info("holdfast is active for %s %s: %s", framework, version, what)

    def __enter__(self) -> "Hook":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Restore the framework. A second call does nothing."""
        while self._stock:
            owner, name, stock = self._stock.pop()
            delattr(owner, name) if stock is _NONE else setattr(owner, name, stock)
        while self._places:
            _active.pop(self._places.pop(), None)


_NONE = object()
_active: dict[str, Hook] = {}  # by place


def _place(owner: Any, name: str) -> str:
    if isinstance(owner, ModuleType):
        return f"{owner.__name__}.{name}"
    kind = owner if isinstance(owner, type) else type(owner)
    of = "" if isinstance(owner, type) else f" of one at {id(owner):#x}"
    return f"{kind.__module__}.{kind.__qualname__}.{name}{of}"


def mark(framework: str, version: str, **more: Any) -> dict[str, Any]:
    """Return what a state says of the framework that saves it.

    ``mark("lightning", "2.6.6")`` → ``{"holdfast_framework": {"name": …, "version": …}}``

    Args:
        more: further plain values that the integration keeps there.
    """
    return {MARK: {"name": framework, "version": version, **more}}


def marked(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the mark of a committed checkpoint; empty: no integration has saved it.

    Raises:
        NotCommittedError, CorruptError, StoreError, VersionError: it cannot be opened.
    """
    from ..loading.checkpoint import Checkpoint  # it imports torch, and holdfast:// needs none

    return mark_of(Checkpoint(path).objects())


def mark_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mark among the values of a checkpoint, by dotted name."""
    start = f"{MARK}."
    return {name[len(start) :]: v for name, v in values.items() if name.startswith(start)}


def check_mark(path: str | os.PathLike[str], framework: str) -> dict[str, Any]:
    """Check that a framework resumes what it has saved itself; return the mark.

    Raises:
        MismatchError: another framework has saved it, or none.
        NotCommittedError, CorruptError, StoreError, VersionError: it cannot be opened.
    """
    found = marked(path)
    if found.get("name") == framework:
        return found
    saved = "a program without a framework"
    if found:
        saved = f"{found['name']} {found.get('version', '')}".strip()
    raise MismatchError(
        f"{path} was saved by {saved}; {framework} cannot resume from it. To load its weights "
        f'alone: holdfast.load({str(path)!r}, into={{"model": model}}, include="model")'
    )


def is_committed(path: str | os.PathLike[str]) -> bool:
    """Return whether a directory holds a committed checkpoint of holdfast."""
    return os.path.isfile(os.path.join(path, MANIFEST_NAME))


def delete(path: str | os.PathLike[str]) -> None:
    """Delete a committed checkpoint, and then whatever else is in its directory.

    MANIFEST goes first, durably: at no moment does it name data that is gone.

    Raises:
        AlreadyCommittedError: a delta checkpoint is made from it; it stays.
        NotCommittedError: it is no committed checkpoint; nothing was deleted.
        StoreError: something could not be deleted.
    """
    store = open_store(absolute(path))
    if not store.exists(MANIFEST_NAME):
        raise NotCommittedError(f"{path} holds no committed checkpoint, and is not deleted")
    with leaving(store):
        check_no_base(store)
        retire(store, lambda: _remove_foreign(store))
    shutil.rmtree(store.location, ignore_errors=True)


def is_half_deleted(path: str | os.PathLike[str]) -> bool:
    """Return whether a deletion began here and was not finished."""
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    is_begun = any(name.startswith(LEAVING_PREFIX) and not replacer_of(name) for name in names)
    return is_begun and MANIFEST_NAME not in names


def finish_deletion(path: str | os.PathLike[str]) -> None:
    """Finish a deletion whose process was killed, if there is one; what a delta needs stays.

    Raises:
        HoldfastError: something could not be deleted.
    """
    store = open_store(absolute(path))
    if not is_half_deleted(path) or needed_by(store, revoke=False):
        return
    finish_retirement(store)
    if not store.exists(DATA_DIRECTORY) and not store.exists(MANIFEST_NAME):
        logger.info("finished the deletion of %s, which a killed process began", path)
        shutil.rmtree(store.location, ignore_errors=True)


def _remove_foreign(store: Store) -> None:
    if not os.path.isdir(store.location):
        return
    for entry in os.scandir(store.location):
        if not is_foreign(entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)


def check_no_base(store: Store) -> None:
    """Check that no delta checkpoint is made from the one here, which is about to be deleted.

    Raises:
        AlreadyCommittedError: one is.
    """
    if delta := needed_by(store, revoke=True):
        raise AlreadyCommittedError(
            f"{store.location} is the base of the delta checkpoint {delta}, which would become "
            f"unreadable; nothing was deleted. Delete {delta} first, or run 'holdfast rebase' on it"
        )


def bases_of(paths: list[str]) -> set[str]:
    """Return the checkpoints that delta checkpoints need, their bases' bases too."""
    needed = set[str]()
    for path in paths:
        while base := _base_of(path):
            path = os.path.join(os.path.dirname(path), base)
            if path in needed:
                break
            needed.add(path)
    return needed


def _base_of(path: str) -> str:
    """Return the name of a checkpoint's base; empty: it has none, or cannot be read.

    What cannot be read keeps its base all the same: `delete` looks for itself.
    """
    try:
        return base_of(open_store(absolute(path)), MANIFEST_NAME)
    except HoldfastError:
        return ""
