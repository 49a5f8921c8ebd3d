"""Lightning Fabric: strategies whose ``fabric.save`` is one commit of all ranks' shards.

docs/frameworks/lightning.md says how to use them; `lightning` has those of the Trainer.
"""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..errors import OptionError
from ..loading.load import load
from ..loading.opening import open as open_checkpoint
from ..state.value import Value
from .adapter import MARK, check_mark, is_committed, mark
from .lightning import NAME, VERSION, Path, announce, asked, check_alone, refuse
from .saves import Saves

from lightning.fabric import strategies  # type: ignore[import-not-found] # isort: skip

_SingleDevice: Any = strategies.SingleDeviceStrategy
_DDP: Any = strategies.DDPStrategy
_FSDP: Any = strategies.FSDPStrategy
_ModelParallel: Any = strategies.ModelParallelStrategy


class _HoldfastStrategy:
    """Saves and fills the objects of a state where they are, on any number of ranks."""

    def __init__(
        self, *args: Any, stage: str = "eager", codec: Any = "raw", options: Any = None, **more: Any
    ) -> None:
        self._saves = Saves(stage=stage, codec=codec, options=options)
        super().__init__(*args, **more)
        check_alone(self, getattr(self, "_checkpoint_io", None))
        announce(f"checkpoints of all ranks (Fabric's {type(self).__name__})")

    @property
    def checkpoint_io(self: Any) -> Any:
        """Return Lightning's own, which loads what holdfast has not saved."""
        return super().checkpoint_io  # type: ignore[misc]

    @checkpoint_io.setter
    def checkpoint_io(self: Any, io: Any) -> None:
        check_alone(self, io)
        super(_HoldfastStrategy, type(self)).checkpoint_io.fset(self, io)  # type: ignore[misc]

    def save_checkpoint(
        self: Any,
        path: Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,
    ) -> None:
        """Save a state in one commit; what is at the path is replaced when that is durable."""
        refuse(storage_options)
        if filter:
            raise OptionError(
                f"filter is given; {type(self).__name__} saves modules as they are. Leave names "
                "out when you load: holdfast.load(path, state, exclude=…)"
            )
        told = (path, self._saves.place_for(path)) if self.global_rank == 0 else None
        path, place = self.broadcast(told)
        self._saves.save(mark(NAME, VERSION) | state, path, place=place)

    def load_checkpoint(
        self: Any,
        path: Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Fill a state in place; return the plain values that it has no place for."""
        self._saves.wait()
        told = (path, is_committed(path)) if self.global_rank == 0 else None
        path, is_ours = self.broadcast(told)
        if not is_ours:
            stock = super().load_checkpoint  # type: ignore[misc]
            found: dict[str, Any] = stock(path, state, strict=strict, **asked(weights_only))
            return found
        check_mark(path, NAME)
        if isinstance(state, (nn.Module, Optimizer)):
            raise OptionError(
                f"state is a {type(state).__name__}; expected a dict with the names that were "
                'saved, such as {"model": module}'
            )
        given = state or {}
        into = {MARK: Value(), **given}
        if given:
            load(path, into, strict=strict, partial=True)
            given.update({name: into[name] for name in given})
        checkpoint = open_checkpoint(path)
        heads = {name.partition(".")[0] for name in checkpoint.objects()} - {MARK, *given}
        if state:  # tensors without a place are not read
            heads -= {name.partition(".")[0] for name in checkpoint.names()}
            return checkpoint.state(include=[*heads]) if heads else {}
        return checkpoint.state(exclude=MARK)

    def wait(self) -> None:
        """Wait until the save in flight is durable.

        Raises:
            HoldfastError: the last save failed.
        """
        self._saves.close()


class HoldfastSingleDeviceStrategy(_HoldfastStrategy, _SingleDevice):  # type: ignore[misc]
    """Fabric's SingleDeviceStrategy, saving through holdfast.

    Args:
        stage, codec, options: as for `holdfast.save_async`; "sync" waits for each save.
        args, more: as for Fabric's strategy.

    Example:
        ``Fabric(strategy=HoldfastSingleDeviceStrategy(device="cuda:0"))``
    """


class HoldfastDDPStrategy(_HoldfastStrategy, _DDP):  # type: ignore[misc]
    """Fabric's DDPStrategy, saving through holdfast: all ranks write.

    Args:
        stage, codec, options: as for `holdfast.save_async`; "sync" waits for each save.
        args, more: as for Fabric's strategy.

    Example:
        ``Fabric(strategy=HoldfastDDPStrategy())``
    """


class HoldfastFSDPStrategy(_HoldfastStrategy, _FSDP):  # type: ignore[misc]
    """Fabric's FSDPStrategy (FSDP1), saving shards through holdfast.

    Args:
        stage, codec, options: as for `holdfast.save_async`; "sync" waits for each save.
        args, more: as for Fabric's strategy.

    Example:
        ``Fabric(strategy=HoldfastFSDPStrategy())``
    """


class HoldfastModelParallelStrategy(_HoldfastStrategy, _ModelParallel):  # type: ignore[misc]
    """Fabric's ModelParallelStrategy (FSDP2, tensor parallel), saving shards through holdfast.

    Args:
        stage, codec, options: as for `holdfast.save_async`; "sync" waits for each save.
        args, more: as for Fabric's strategy.

    Example:
        ``Fabric(strategy=HoldfastModelParallelStrategy(parallelize))``
    """
