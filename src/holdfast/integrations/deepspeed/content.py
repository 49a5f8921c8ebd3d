"""What a checkpoint holds of a DeepSpeed engine, and how an engine is filled from one.

Knows engines and states; not what is called when, nor where a checkpoint lies. Which rank holds
what is known by `zero`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from ...data.random_state import RandomState
from ...errors import MismatchError
from ...group.phase import Phase, find_group
from ...loading.checkpoint import Checkpoint
from ...loading.load import load
from ...options import Options
from ...state.tensors import TORCH_DTYPES
from ...state.value import Value
from ..adapter import MARK
from . import zero

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_STATE = "optimizer.state."


def state_of(engine: Any, *, frozen: bool = True) -> dict[str, Any]:
    """Return what is saved of an engine.

    Args:
        frozen: whether parameters that the optimizer does not step are saved too.

    Raises:
        OptionError: an engine that cannot be described.
        StateError: an optimizer whose state cannot be.
    """
    zero.check_engine(engine)
    pieces, inner = zero.pieces_of(engine), zero.inner_of(engine)
    given = [piece for piece in pieces if not piece.is_copy]
    model: dict[str, Any] = {piece.name: piece.of(piece.flat) for piece in given}
    if frozen:
        model |= zero.others_of(engine, pieces)
    model |= {name: model[first] for name, first in zero.ties_of(engine) if first in model}
    state: dict[str, Any] = {"model": model | zero.buffers_of(engine)}
    if inner is not None:
        state["optimizer"] = {
            "state": {piece.name: zero.moments_of(piece, inner) for piece in given},
            "param_groups": {piece.name: zero.options_of(piece) for piece in given},
        }
    state["engine"] = {name: getattr(engine, name) for name in _COUNTERS} | _parts(engine)
    if (scaler := _scaler(engine)) is not None:
        state["engine"]["scaler"] = _numbers(scaler)
    return state | {"client_state": {}, "random": RandomState()}


def fill(
    engine: Any,
    path: str,
    *,
    strict: bool = True,
    frozen: bool = True,
    options: Options | None = None,
    more: dict[str, Any] | None = None,
    **chosen: Any,
) -> dict[str, Any]:
    """Fill an engine from a checkpoint; return what was loaded.

    Args:
        strict, options, chosen: as for `holdfast.load`; chosen are ``include`` or ``exclude``.
        frozen: as for `state_of`.
        more: what is loaded besides the engine.

    Raises:
        HoldfastError: as for `holdfast.load`, or an engine that cannot be described.
    """
    zero.check_engine(engine)
    with partitioned(engine):
        pieces, inner = zero.pieces_of(engine), zero.inner_of(engine)
        if inner is None and "exclude" in chosen:
            chosen["exclude"] = (*chosen["exclude"], "optimizer")
        saved = Checkpoint(path, options, **chosen)
        state = _target(engine, pieces, inner, saved, frozen=frozen) | (more or {})
        # Each engine has the dtypes of its configuration.
        load(path, state, strict=strict, cast=True, options=options, **chosen)
        with Phase(find_group(None)):
            if found := state.get("optimizer", {}).get("state"):
                zero.put_numbers(pieces, inner, found)
                zero.put_options(pieces, state["optimizer"]["param_groups"])
        zero.spread(engine)
        counted: dict[str, Any] = state.get("engine", {})
        for name in _COUNTERS:
            setattr(engine, name, counted.get(name, getattr(engine, name)))
        if (scaler := _scaler(engine)) is not None and (numbers := counted.get("scaler")):
            for name in _numbers(scaler).keys() & numbers.keys():
                setattr(scaler, name, numbers[name])
    return state


@contextlib.contextmanager
def partitioned(engine: Any) -> Iterator[None]:
    """Keep ZeRO-3's parameters partitioned meanwhile; wait for copies of ZeRO's offload."""
    optimizer = engine.optimizer
    getattr(optimizer, "_wait_for_offload_copies", lambda: None)()
    if engine._optimizer_has_ckpt_event_prologue():
        optimizer.checkpoint_event_prologue()
    try:
        yield
    finally:
        if engine._optimizer_has_ckpt_event_epilogue():
            optimizer.checkpoint_event_epilogue()


def _target(
    engine: Any, pieces: list[zero.Piece], inner: Any, saved: Checkpoint, *, frozen: bool
) -> dict[str, Any]:
    """Return the state that a checkpoint fills."""
    values, names = saved.objects(), saved.names()
    model: dict[str, Any] = {piece.name: piece.of(piece.flat) for piece in pieces}
    if frozen:
        model |= zero.others_of(engine, pieces)
    model |= {name: model[first] for name, first in zero.ties_of(engine) if first in model}
    state: dict[str, Any] = {"model": model | zero.buffers_of(engine)}
    if "engine.global_steps" not in values:  # the weights alone were asked for
        return state
    moments: dict[str, dict[str, Any]] = {}
    for name in names:
        if name.startswith(_STATE):
            parameter, _, key = name[len(_STATE) :].rpartition(".")
            moments.setdefault(parameter, {})[key] = saved.info(name)
    if any(name.startswith("optimizer.param_groups.") for name in values):
        state["optimizer"] = {"state": {}, "param_groups": {}}
        for piece in pieces:
            found = moments.get(piece.name, {})
            shapes = {key: info.shape for key, info in found.items()}
            dtypes = {key: TORCH_DTYPES[info.dtype] for key, info in found.items()}
            try:
                target = zero.targets_of(piece, inner, shapes, dtypes)
            except MismatchError as error:
                raise MismatchError(f"{saved.location}: {error}") from None
            state["optimizer"]["state"][piece.name] = target
            state["optimizer"]["param_groups"][piece.name] = Value()
    state["engine"] = dict.fromkeys(_COUNTERS, 0)
    parts = _parts(engine) | {"scaler": Value()}
    below = {name.split(".")[1] for name in [*values, *names] if name.startswith("engine.")}
    state["engine"] |= {name: parts.get(name, Value()) for name in below.difference(_COUNTERS)}
    state |= {"client_state": Value(), "random": RandomState(), MARK: Value()}
    return state


def _parts(engine: Any) -> dict[str, Any]:
    """Return what DeepSpeed saves beside the weights, as objects with ``state_dict()``."""
    found = {"lr_scheduler": engine.lr_scheduler}
    if engine.training_dataloader is not None and engine.curriculum_learning_enabled():
        found["data_sampler"] = engine.training_dataloader.data_sampler
    if engine.random_ltd_enabled():
        found["random_ltd"] = engine.random_ltd_scheduler
    found["grad_scaler"] = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    return {name: part for name, part in found.items() if part is not None}


def _scaler(engine: Any) -> Any:
    """Return what holds a loss scale that changes, as fp16 has it; or None."""
    optimizer = engine.optimizer
    found = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    changes = getattr(found, "dynamic", getattr(found, "dynamic_loss_scale", False))
    return found if changes else None


def _numbers(scaler: Any) -> dict[str, Any]:
    kept = (int, float, type(None))
    return {name: value for name, value in vars(scaler).items() if isinstance(value, kept)}
