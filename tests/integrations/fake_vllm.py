"""A stand-in for vLLM: its registry of loaders and its base loader, with the signatures of 0.33.0.

Its one model takes weights as vLLM's layers do: each rank narrows what it is given, three weights
go into one parameter, and what another stage has is not touched. The engine itself is in
`make vllm`.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

VERSION = "0.33.0"
QKV = ("q_proj", "k_proj", "v_proj")


@dataclass
class LoadConfig:
    load_format: str = "auto"
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class ModelConfig:
    model: str
    quantization: str | None = None


class BaseModelLoader(ABC):
    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config: ModelConfig) -> None: ...

    @abstractmethod
    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None: ...


class DefaultModelLoader(BaseModelLoader):
    def track_weights_loading(
        self, model: torch.nn.Module, loaded_weights: set[str] | None, quantized: bool = False
    ) -> None:
        missing = {name for name, _ in model.named_parameters()} - (loaded_weights or set())
        if missing:
            raise ValueError(f"Following weights were not initialized from checkpoint: {missing}")


_loaders: dict[str, type] = {"auto": DefaultModelLoader}


def register_model_loader(load_format: str) -> Any:
    def wrapper(loader: type) -> type:
        if not issubclass(loader, BaseModelLoader):
            raise ValueError("The model loader must be a subclass of `BaseModelLoader`.")
        _loaders[load_format] = loader
        return loader

    return wrapper


def get_model_loader(load_config: LoadConfig) -> Any:
    return _loaders[load_config.load_format](load_config)


class Model(torch.nn.Module):
    """One attention layer and an output layer, as rank ``rank`` of ``ranks`` holds them."""

    def __init__(self, width: int = 8, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank, part = rank, width // ranks
        self.qkv_proj = torch.nn.Parameter(torch.empty(3 * part, width), requires_grad=False)
        self.o_proj = torch.nn.Parameter(torch.empty(width, part), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set[str]()
        for name, weight in weights:
            module = name.removesuffix(".weight")
            if module in QKV:
                part = self.qkv_proj.shape[0] // 3
                mine = weight.narrow(0, self.rank * part, part)
                self.qkv_proj.data.narrow(0, QKV.index(module) * part, part).copy_(mine)
                loaded.add("qkv_proj")
            elif module == "o_proj":
                part = self.o_proj.shape[1]
                self.o_proj.data.copy_(weight.narrow(1, self.rank * part, part))
                loaded.add("o_proj")
            elif not name.startswith("next_stage."):
                raise ValueError(f"There is no module or parameter named {name!r}")
        return loaded


class Group:
    """The ranks of an engine: what rank 0 tells reaches the others."""

    told: Any = None

    def __init__(self, rank: int) -> None:
        self.rank_in_group = rank

    def broadcast_object(self, obj: Any | None = None, src: int = 0) -> Any:
        if self.rank_in_group == src:
            Group.told = obj
        return Group.told


@contextmanager
def installed(version: str = VERSION, rank: int = 0) -> Iterator[None]:
    """Be there as ``vllm``."""
    root, loaders = ModuleType("vllm"), ModuleType("vllm.model_executor.model_loader")
    root.__version__ = version  # type: ignore[attr-defined]
    state = ModuleType("vllm.distributed.parallel_state")
    state.get_world_group = lambda: Group(rank)  # type: ignore[attr-defined]
    default = ModuleType(f"{loaders.__name__}.default_loader")
    default.DefaultModelLoader = DefaultModelLoader  # type: ignore[attr-defined]
    vars(loaders).update(
        BaseModelLoader=BaseModelLoader, register_model_loader=register_model_loader
    )
    made = [root, ModuleType("vllm.model_executor"), ModuleType("vllm.distributed")]
    made += [loaders, default, state]
    sys.modules.update({module.__name__: module for module in made})
    try:
        yield
    finally:
        _loaders.pop("holdfast", None)
        for module in made:
            sys.modules.pop(module.__name__, None)
