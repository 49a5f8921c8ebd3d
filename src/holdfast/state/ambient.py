"""Torch without the settings of the calling thread: its modes, transforms, grad and inference mode.

Users' hooks (``state_dict``, ``load_state_dict``) run in the thread of their user, with what is set
there. What holdfast itself does with a tensor runs without, in a worker: as a ``with`` ends in the
thread of the user, an exception from a signal handler may keep the settings from being put back.
Knows no state and no files.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch._subclasses.schema_check_mode  # torch imports it when modes are first turned off
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from .. import worker
from ..errors import StateError
from ..format.names import dotted
from ..layout import Path

_NOTHING = nullcontext()


@contextmanager
def ordinary_torch() -> Iterator[None]:
    """Turn off what a thread has set: modes, torch.func transforms, inference mode, autograd.

    A tensor made in here is an ordinary one. Torch's default dtype holds for all threads and stays
    as it is: name every dtype. Enter it once per walk (5 µs), not per tensor; as a decorator it
    is entered once per call. A worker has nothing set but autograd, which stays off there.
    """
    if worker.here.job is not None:
        with torch._C.DisableTorchFunction():  # subclasses of Tensor have functions of their own
            torch._C._set_grad_enabled(False)
            yield
        return
    # To turn these off takes twice as long as all the rest.
    is_set = (
        torch._C._len_torch_dispatch_stack()
        or _len_torch_dispatch_stack_pre_dispatch()  # type: ignore[no-untyped-call]
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
    # First, and left last: a function mode also sees the calls that set the others.
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes() if is_set else _NOTHING,
        temporarily_clear_interpreter_stack() if is_set else _NOTHING,
        torch._C._InferenceMode(False),
    ):
        has_grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            yield
        finally:
            torch._C._set_grad_enabled(has_grad)


def has_modes() -> bool:
    """Whether a mode or a transform of this thread sees the calls that are made in torch."""
    return bool(
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def computes_nothing() -> bool:
    """Whether the user has FakeTensorMode on, under which a copy may change nothing, unsaid."""
    modes = worker.call_in_caller(_get_current_dispatch_mode_stack)
    return any(isinstance(mode, FakeTensorMode) for mode in modes)


def fake_load(path: Path) -> StateError:
    """Return what is wrong where `computes_nothing` and a ``load_state_dict`` gets tensors."""
    return StateError(
        f"{dotted(path)} copies its tensors in its own load_state_dict(), and a copy under "
        "FakeTensorMode changes nothing; leave that mode before the load"
    )
