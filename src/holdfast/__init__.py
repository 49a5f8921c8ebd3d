"""Checkpoints for training large models, never half-written and never silently wrong.

They are written at the speed of the disk, and load on any number of ranks.
"""

import os
import sys
from importlib import import_module
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


# PEP 562: a name loads on first use, so `holdfast inspect` starts without importing torch.
def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    try:
        module = import_module(f".{_HOME[name]}", __name__)
        value = module if name == _HOME[name] else getattr(module, name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(needs("torch", "torch", f"holdfast.{name}"), name="torch") from error
    except (ImportError, AttributeError) as error:
        if "partially initialized" not in str(error):
            raise
        raise ImportError(
            f"holdfast.{name} cannot be imported here: this call (from a signal handler?) "
            "interrupts the import of modules that it needs, in the same thread. Import it at the "
            f"start of the program: from holdfast import {name}",
            name=__name__,
        ) from error
    _name_as_public()
    globals()[name] = value
    return value


def _name_as_public() -> None:
    """Let everything public say that it is of ``holdfast``, whichever module it stands in."""
    for name, home in _HOME.items():
        # A module that another thread is importing may lack it: that thread does this later.
        found = getattr(sys.modules.get(f"{__name__}.{home}"), name, None)
        if found is not None:
            found.__module__ = __name__


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])


warn_of_other(os.path.dirname(os.path.dirname(__file__)))
