"""Settings of torch that a program may have around a call of holdfast; calls made under them."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import holdfast

SOURCE = str(Path(holdfast.__file__).parent)
TORCH = str(Path(torch.__file__).parent)
USERS = ("make", "_own_state")  # of holdfast: they call what is the user's


class Refused(AssertionError):
    """A call of holdfast's own has reached a mode of the program."""


def _check_caller() -> None:
    """Refuse a call that holdfast makes for itself, not through a hook of a user's object."""
    frame = sys._getframe(2)
    while frame is not None:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name in ("load_state_dict", *USERS):
            return
        if file.startswith(SOURCE):
            raise Refused(f"{name} in {Path(file).name}:{frame.f_lineno} calls torch under a mode")
        if not file.startswith(TORCH) and file != __file__:
            return
        frame = frame.f_back


class RefusingDispatch(TorchDispatchMode):
    """A mode that sees every operation, and lets only those of others pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _check_caller()
        return func(*args, **(kwargs or {}))


class RefusingFunctions(TorchFunctionMode):
    """The same of calls of torch's Python functions, attributes of tensors among them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _check_caller()
        return func(*args, **(kwargs or {}))


_entered: list[object] = []  # by ranks that are threads: the default dtype is that of all


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    _entered.append(None)
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        _entered.pop()
        if not _entered:
            torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _all_refused() -> Iterator[None]:
    with RefusingDispatch(), RefusingFunctions():
        yield


SETTINGS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "meta": lambda: _default_device("meta"),
    "cuda": lambda: _default_device("cuda"),
    "float64": _default_dtype,
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": _deterministic,
    "dispatch": _all_refused,
    "fake": FakeTensorMode,
    "fake, with real ones": lambda: FakeTensorMode(allow_non_fake_inputs=True),
}
TRANSFORMS: Mapping[str, Callable[..., Any]] = {
    "func": torch.func.grad,
    "vmap": torch.func.vmap,
    "jvp": lambda call: lambda x: torch.func.jvp(call, (x,), (x,)),
    "functionalize": torch.func.functionalize,
}
AMBIENTS = (*SETTINGS, *TRANSFORMS)


def within(ambient: str, action: Callable[[], Any]) -> Any:
    """Call ``action`` under a setting, or in the middle of a function that torch transforms."""
    if ambient in SETTINGS:
        with SETTINGS[ambient]():
            return action()
    results = []

    def call(x: torch.Tensor) -> torch.Tensor:
        results.append(action())
        return x.sum()

    TRANSFORMS[ambient](call)(torch.ones(2, dtype=torch.float32, device="cpu"))
    return results[0]


# What the tests of `--ambient` call under the setting; all else in them runs without.
VERBS: Mapping[Any, tuple[str, ...]] = {
    holdfast: ("save", "save_async", "load"),
    holdfast.Checkpointer: ("step", "save", "restore", "close"),
}


def put_under(ambient: str, patch: Callable[[Any, str, Any], None]) -> None:
    """Let the public verbs run under a setting, through ``patch(owner, name, new)``."""
    for owner, names in VERBS.items():
        for name in names:
            patch(owner, name, _under(ambient, getattr(owner, name)))


def _under(ambient: str, verb: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: within(ambient, lambda: verb(*args, **options))
