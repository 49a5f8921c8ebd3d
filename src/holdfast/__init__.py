"""Checkpoints for training large models, never half-written and never silently wrong.

They are written at the speed of the disk, and load on any number of ranks.
"""

import os
import sys
from _thread import RLock  # `threading` is one more module to import
from importlib import import_module
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from . import _core as _core  # it refuses interpreters that it cannot run in
from .version import __version__ as __version__
from .version import needs, warn_of_other

if TYPE_CHECKING:
    from . import codecs, errors
    from .chains.recompress import rebase, recompress
    from .chains.trial import Trial, Trials, try_codecs
    from .codecs.base import Loss
    from .convert.export import Conversion, export_checkpoint
    from .convert.importing import import_checkpoint
    from .data.data_state import DataState
    from .data.random_state import RandomState
    from .engine.ledger import Progress
    from .faults.damage import Damage, Lost
    from .integrity.copying import Copied, copy_checkpoint
    from .integrity.repair import Repair, repair
    from .integrity.scrub import Pass, scrub
    from .integrity.sign import sign, signer
    from .integrity.verify import Verified, verify
    from .loading.checkpoint import Checkpoint
    from .loading.load import load
    from .loading.model import load_model
    from .loading.names import TensorInfo
    from .loading.opening import open as open
    from .loading.report import LoadReport
    from .options import Options
    from .runs.alerts import Alert, Alerts
    from .runs.check_run import check_run
    from .runs.checkpointer import Checkpointer
    from .runs.events import Event, redacted
    from .runs.prune import Pruned, prune
    from .runs.retention import Keep
    from .saving.handle import SaveHandle
    from .saving.save import save, save_async
    from .state.shard import Shard
    from .state.value import Value
    from .store_settings import StoreSettings

# Without `open`: `from holdfast import *` shadows no builtin.
__all__ = [
    "Alert",
    "Alerts",
    "Checkpoint",
    "Checkpointer",
    "Conversion",
    "Copied",
    "Damage",
    "DataState",
    "Event",
    "Keep",
    "LoadReport",
    "Loss",
    "Lost",
    "Options",
    "Pass",
    "Progress",
    "Pruned",
    "RandomState",
    "Repair",
    "SaveHandle",
    "Shard",
    "StoreSettings",
    "TensorInfo",
    "Trial",
    "Trials",
    "Value",
    "Verified",
    "__version__",
    "check_run",
    "codecs",
    "copy_checkpoint",
    "errors",
    "export_checkpoint",
    "import_checkpoint",
    "load",
    "load_model",
    "prune",
    "rebase",
    "recompress",
    "redacted",
    "repair",
    "save",
    "save_async",
    "scrub",
    "sign",
    "signer",
    "try_codecs",
    "verify",
]

_HOME = {
    "Alert": "runs.alerts",
    "Alerts": "runs.alerts",
    "Checkpoint": "loading.checkpoint",
    "Checkpointer": "runs.checkpointer",
    "Conversion": "convert.export",
    "Copied": "integrity.copying",
    "Damage": "faults.damage",
    "Event": "runs.events",
    "DataState": "data.data_state",
    "Keep": "runs.retention",
    "LoadReport": "loading.report",
    "Loss": "codecs.base",
    "Lost": "faults.damage",
    "Options": "options",
    "Pass": "integrity.scrub",
    "Pruned": "runs.prune",
    "Progress": "engine.ledger",
    "RandomState": "data.random_state",
    "Repair": "integrity.repair",
    "SaveHandle": "saving.handle",
    "Shard": "state.shard",
    "StoreSettings": "store_settings",
    "TensorInfo": "loading.names",
    "Trial": "chains.trial",
    "Trials": "chains.trial",
    "Value": "state.value",
    "Verified": "integrity.verify",
    "check_run": "runs.check_run",
    "codecs": "codecs",
    "copy_checkpoint": "integrity.copying",
    "errors": "errors",
    "export_checkpoint": "convert.export",
    "import_checkpoint": "convert.importing",
    "load": "loading.load",
    "load_model": "loading.model",
    "open": "loading.opening",
    "prune": "runs.prune",
    "redacted": "runs.events",
    "rebase": "chains.recompress",
    "recompress": "chains.recompress",
    "repair": "integrity.repair",
    "save": "saving.save",
    "save_async": "saving.save",
    "scrub": "integrity.scrub",
    "sign": "integrity.sign",
    "signer": "integrity.sign",
    "try_codecs": "chains.trial",
    "verify": "integrity.verify",
}


# A child would inherit the locks of modules that another thread is importing: a fork waits.
_importing = RLock()
os.register_at_fork(
    before=_importing.acquire,
    after_in_parent=_importing.release,
    after_in_child=_importing.release,
)


# PEP 562: a name loads on first use, so `holdfast inspect` starts without importing torch.
def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    if name == _HOME[name]:  # a module: those that are being imported ask for it too
        return _home_of(name)
    if begun := _begun_below():
        raise ImportError(
            f"holdfast.{name} cannot be imported here: this call (from a signal handler?) "
            f"interrupts the import of holdfast.{begun} in the same thread. Import it before: from "
            f"holdfast import {name}",
            name=__name__,
        )
    with _importing:
        module = _home_of(name)
        _name_as_public()
    value = globals()[name] = getattr(module, name)
    return value


def _home_of(name: str) -> ModuleType:
    """Import the module that a name stands in, or that it is the name of."""
    try:
        return import_module(f".{_HOME[name]}", __name__)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(needs("torch", "torch", f"holdfast.{name}"), name="torch") from error


def _begun_below() -> str:
    """What this thread was importing when something interrupted it, and called `__getattr__`; "".

    Python would hand out the modules that are half there. The frames say so, since an interrupt
    leaves nothing behind in them.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not __getattr__.__code__:
        frame = frame.f_back
    return str(frame.f_locals["name"]) if frame is not None else ""


def _name_as_public() -> None:
    """Let everything public say that it is of ``holdfast``, whichever module it stands in."""
    for name, home in _HOME.items():
        module = sys.modules.get(f"{__name__}.{home}")
        found = vars(module).get(name) if module is not None and name != home else None
        if found is not None:  # else another thread is at this import, and does this after it
            found.__module__ = __name__


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])


warn_of_other(os.path.dirname(os.path.dirname(__file__)))
