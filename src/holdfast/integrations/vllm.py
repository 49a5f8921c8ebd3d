"""vLLM: ``--load-format holdfast`` reads the weights of a checkpoint or a run, without an export.

vLLM calls `register` when it starts, in each of its processes: the entry point is in its group
``vllm.general_plugins``. Weights have the names that an export gives them. Each is read when the
model copies it, and of each only what the rank takes (`on_demand`).
"""

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from .. import worker
from ..convert.as_transformers import as_saved
from ..convert.beside import CONFIG
from ..convert.export import as_written
from ..convert.kinds import OWN, open_source
from ..convert.names import Choice
from ..convert.own import OwnSource
from ..convert.to_safetensors import Written
from ..errors import HoldfastError, NotCommittedError, OptionError, ReplacedError, shown
from ..layout import ITEM_BYTES, Box
from ..options import Options
from ..state.tensors import TORCH_DTYPES
from .adapter import check_version, module
from .on_demand import OnDemand, Origin

logger = logging.getLogger("vllm.holdfast")  # vLLM shows what is below its own

NAME, PACKAGE = "vllm", "vllm"
OLDEST, NEWEST_TESTED = "0.32.0", "0.33.0"
FORMAT = "holdfast"  # of --load-format
LOADERS = "vllm.model_executor.model_loader"
MODEL = "model"  # the key of a state below which its weights are looked for

Weights = Iterator[tuple[str, torch.Tensor]]


def register() -> None:
    """Register the loader; what vLLM calls. Raises nothing: every program of vLLM calls it."""
    try:
        loaders = import_module(LOADERS)
        loader = loader_of(loaders.BaseModelLoader)
        loaders.register_model_loader(FORMAT)(loader)
    except (ImportError, AttributeError) as error:
        logger.warning("vLLM has no --load-format %s: its loaders are others: %s", FORMAT, error)


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for in ``--model-loader-extra-config``.

    Attributes:
        checkpoint: path or URL of a step, or of a run; None: vLLM's ``--model``.
        include, exclude, strip, rename: as for `holdfast.export_checkpoint`. Default: what is below
            the key ``model`` of the state, without that key; all tensors if there is no such key.
        trust: as for `holdfast.Options`.
    """

    checkpoint: str | None = None
    include: Any = ()
    exclude: Any = ()
    strip: str = ""
    rename: Any = None
    trust: Any = None

    @classmethod
    def of(cls, given: Any) -> "Request":
        """Check what was given.

        Raises:
            OptionError: no dict, or an unknown key.
        """
        known = cls.__slots__
        if not isinstance(given, Mapping) or any(key not in known for key in given):
            raise OptionError(
                f"--model-loader-extra-config is {shown(given)}; expected a dict of "
                f'{", ".join(known)}, such as {{"checkpoint": "/runs/a"}}'
            )
        return cls(**given)


def loader_of(base: type) -> type:
    """Return the loader of vLLM, made from its ``BaseModelLoader``."""

    class HoldfastLoader(base):  # type: ignore[misc]
        """Loads the weights of a checkpoint into a model of vLLM.

        Args:
            load_config: of vLLM; its ``model_loader_extra_config`` is a `Request`.

        Raises:
            OptionError: an invalid request, or an untested version of vLLM.
        """

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            found = str(module("vllm", NAME).__version__)
            self.version = check_version(PACKAGE, found, OLDEST, NEWEST_TESTED)
            self.request = Request.of(load_config.model_loader_extra_config)

        def download_model(self, model_config: Any) -> None:
            """Check that the checkpoint is there. Nothing is copied.

            Raises:
                HoldfastError: as `holdfast.open`.
            """
            _open(self.request, model_config).close()

        def get_all_weights(self, model_config: Any, model: Any) -> Weights:
            """Yield names and weights, which are read when they are used.

            Raises:
                HoldfastError: as `holdfast.export_checkpoint`.
            """
            if more := getattr(model, "secondary_weights", ()):
                raise OptionError(
                    f"this model takes further weights from {shown(more)}, which is no part of the "
                    "checkpoint. Export it, and serve the export: holdfast export --help"
                )
            source = _agreed(self.request, model_config)
            logger.info(
                "holdfast is active for vllm %s: weights of %s", self.version, source.location
            )
            weights = _Weights(source, self.request, model_config.model)
            yield from weights
            logger.info("%d bytes of weights taken of %s", weights.taken_bytes, source.location)

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Load the weights into a model.

            Raises:
                HoldfastError: as `holdfast.export_checkpoint`.
            """
            loaded = model.load_weights(self.get_all_weights(model_config, model))
            if loaded is not None and model_config.quantization is None:
                stock = module(f"{LOADERS}.default_loader", NAME).DefaultModelLoader
                stock.track_weights_loading(self, model, loaded)

    return HoldfastLoader


def _open(request: Request, model_config: Any) -> OwnSource:
    place = request.checkpoint or model_config.model
    try:
        source = open_source(place, OWN, Options(trust=request.trust))
    except NotCommittedError as error:
        if request.checkpoint is not None or os.path.isdir(place):
            raise
        raise NotCommittedError(
            f"the model {place} is no checkpoint. Name the one whose weights are to be read: "
            '--model-loader-extra-config \'{"checkpoint": "/runs/a"}\''
        ) from error
    assert isinstance(source, OwnSource)
    return source


def _agreed(request: Request, model_config: Any) -> OwnSource:
    """Open the same save on all ranks of the engine: the newest step of a run may change."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return _open(request, model_config)
    ranks = import_module("vllm.distributed.parallel_state").get_world_group()
    failed: HoldfastError | None = None
    source, told = None, ("", "")
    if ranks.rank_in_group == 0:
        try:
            source = _open(request, model_config)
            told = (source.location, source.save_id)
        except HoldfastError as error:
            failed, told = error, ("", str(error))
    where, what = ranks.broadcast_object(told)
    if failed is not None:
        raise failed
    if not where:
        raise NotCommittedError(f"rank 0 of the engine cannot open the checkpoint: {what}")
    if source is None:
        source = _open(Request(where, trust=request.trust), model_config)
        if source.save_id != what:
            raise ReplacedError(
                f"{where} holds the save {source.save_id[:8]} now; expected {what[:8]}, as rank 0 "
                "has opened it. Start the engine again"
            )
    return source


class _Weights:
    """The weights of a checkpoint under the names of its export.

    Args:
        source: the checkpoint.
        model: path or name of a model of transformers, whose configuration tells its names.

    Attributes:
        taken_bytes: of elements that the model has taken, so far.
    """

    def __init__(self, source: OwnSource, request: Request, model: str) -> None:
        self._source, self.taken_bytes = source, 0
        include, strip = request.include, request.strip
        is_below = any(len(t.path) > 1 and t.path[0] == MODEL for t in source.tensors)
        if is_below and not include and not strip:
            include, strip = MODEL, f"{MODEL}."
        rename = request.rename
        if isinstance(rename, list):  # of JSON, which has no tuples
            rename = [tuple(pair) for pair in rename]
        choice = Choice(include, request.exclude, strip, rename)
        taken = choice.of(source)
        if not taken.tensors:
            raise OptionError(f"there is no tensor to load in {source.location}")
        self._written = as_saved(as_written(taken), (model, [CONFIG]))

    def __iter__(self) -> Weights:
        for written in self._written:
            yield written.piece.name, self._weight(written)

    def _weight(self, written: Written) -> torch.Tensor:
        def read(box: Box) -> torch.Tensor:
            return worker.run(lambda: self._read(written, box))

        origin = Origin(written.piece.box.shape, TORCH_DTYPES[written.piece.dtype], read)
        return OnDemand(origin, origin.view.view(written.shape))

    def _read(self, written: Written, box: Box) -> torch.Tensor:
        piece = written.piece
        offset = tuple(a + b for a, b in zip(box.offset, piece.box.offset, strict=True))
        size = box.elements * ITEM_BYTES[piece.dtype]
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._source.read(piece.tensor, Box(offset, box.shape), memory.numpy().data)
        self.taken_bytes += size
        return memory.view(TORCH_DTYPES[piece.dtype]).view(box.shape)
