"""Routes DCP's calls, and installs integrations, when the environment asks for it.

``import torch`` calls `autoload`, in the middle of whatever is being imported, so nothing is
imported here before it is needed.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from ..errors import OptionError

ENVIRONMENT = "HOLDFAST_DCP"  # "1": holdfast:// alone; else words of `install`: "every,cast"
OPTIONS = ("every", "cast", "pickled")
DCP = "torch.distributed.checkpoint"
INSTALL = "HOLDFAST_INSTALL"  # names of integrations: "accelerate,transformers"
# Integrations, and the module after whose import each is installed.
AFTER = {"accelerate": "accelerate", "transformers": "transformers.trainer"}


def autoload() -> None:
    """Install when the environment asks for it: the entry point that ``import torch`` calls.

    Raises:
        OptionError: it asks for what there is not.
    """
    asked = os.environ.get(ENVIRONMENT, "")
    words = [word.strip() for word in asked.split(",")] if asked not in ("", "0", "1") else []
    if unknown := [word for word in words if word not in OPTIONS]:
        expected = "'1', or of 'every', 'cast' and 'pickled', as in 'every,cast'"
        raise OptionError(f"{ENVIRONMENT} is {asked!r}, with {unknown[0]!r}; expected {expected}")
    if words or asked == "1":
        _when_imported(DCP, lambda: _install(words))
    names = [name.strip() for name in os.environ.get(INSTALL, "").split(",") if name.strip()]
    if unknown := [name for name in names if name not in AFTER]:
        raise OptionError(
            f"{INSTALL} has the name {unknown[0]!r}; expected some of {', '.join(AFTER)}"
        )
    for name in names:
        _when_imported(AFTER[name], partial(_install_for, name))


def _install_for(name: str) -> None:
    from .adapter import install

    install(name)


def _install(words: list[str]) -> None:
    from .dcp.routing import install

    install(every="every" in words, cast="cast" in words, pickled="pickled" in words)


def _when_imported(name: str, then: Callable[[], object]) -> None:
    """Call ``then`` when a module is there: now, or when it has been imported."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is None:
        sys.meta_path.insert(0, _Waiting(name, then))
    elif getattr(spec, "_initializing", False):  # its own import of torch has called `autoload`
        spec.__class__ = _Watched
        vars(spec)["then"] = then
    else:
        then()


class _Watched(ModuleSpec):
    """The spec of a module that is being imported; sees when that is over."""

    then: Callable[[], object]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value and self.name in sys.modules:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            vars(self).pop("then")()


class _Waiting(MetaPathFinder):
    """Finds nothing itself; sees the one import it waits for go by."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == self._name else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_then(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then()

        spec.loader.exec_module = execute_then  # type: ignore[method-assign]
        return spec
