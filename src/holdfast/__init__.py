"""Checkpoints that hold fast: saved at the speed of the disk, loaded on any layout, never torn."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _core as _core  # it refuses interpreters that it cannot run in

if TYPE_CHECKING:
    from . import codecs, errors
    from ._checkpoint import Checkpoint, open
    from ._checkpointer import Checkpointer
    from ._data import DataState
    from ._handle import SaveHandle
    from ._keep import Keep
    from ._load import LoadReport, load
    from ._random import RandomState
    from ._recode import rebase, recompress
    from ._repair import repair
    from ._save import save, save_async
    from ._scrub import scrub
    from ._sign import sign, signer
    from ._trial import Trial, Trials, try_codecs
    from ._verify import verify
    from .engine.pipeline import Progress
    from .options import Options
    from .state.shard import Shard

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "DataState",
    "Keep",
    "LoadReport",
    "Options",
    "Progress",
    "RandomState",
    "SaveHandle",
    "Shard",
    "Trial",
    "Trials",
    "__version__",
    "codecs",
    "errors",
    "load",
    "open",
    "rebase",
    "recompress",
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
    "Checkpoint": "_checkpoint",
    "Checkpointer": "_checkpointer",
    "DataState": "_data",
    "Keep": "_keep",
    "LoadReport": "_load",
    "Options": "options",
    "Progress": "engine.pipeline",
    "RandomState": "_random",
    "SaveHandle": "_handle",
    "Shard": "state.shard",
    "Trial": "_trial",
    "Trials": "_trial",
    "codecs": "codecs",
    "errors": "errors",
    "load": "_load",
    "open": "_checkpoint",
    "rebase": "_recode",
    "recompress": "_recode",
    "repair": "_repair",
    "save": "_save",
    "save_async": "_save",
    "scrub": "_scrub",
    "sign": "_sign",
    "signer": "_sign",
    "try_codecs": "_trial",
    "verify": "_verify",
}


# PEP 562: a name loads on first use, so `holdfast inspect` starts without importing torch.
def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    module = import_module(f".{_HOME[name]}", __name__)
    value = module if name == _HOME[name] else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
