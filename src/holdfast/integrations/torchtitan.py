"""torchtitan: a checkpoint manager, and a data loader that goes on with any number of ranks.

docs/frameworks/torchtitan.md says how to use them. Checkpoints of DCP are read as before.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..data.data_state import DataState
from ..data.random_state import RandomState
from ..errors import MismatchError, OptionError
from ..loading.load import load
from ..loading.opening import open as open_checkpoint
from ..state.value import Value
from ..stores.url import SCHEME, absolute
from .adapter import MARK, Hook, check_mark, is_committed, known_version, mark
from .saves import Saves

NAME = "torchtitan"
VERSION = known_version(NAME, "0.3.0", "0.3.0")

from torchdata.stateful_dataloader import (  # type: ignore[import-untyped] # noqa: E402
    StatefulDataLoader,
)
from torchtitan.components.checkpointer import (  # type: ignore[import-not-found] # noqa: E402
    CheckpointManager,
)
from torchtitan.components.checkpointer.base import MODEL  # type: ignore # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # type: ignore # noqa: E402
from torchtitan.hf_datasets import text_datasets  # type: ignore # noqa: E402

RANDOM = "random"
_STEP = re.compile(r"step-(\d+)")
_STAGES = {"disabled": "sync", "async": "eager", "async_with_pinned_mem": "eager"}


class HoldfastManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's CheckpointManager, saving and loading through holdfast.

    Each step is one commit: model, optimizer, schedules, data loader, training state, and the
    random numbers of all ranks. ``async_mode`` "async" and "async_with_pinned_mem" both copy the
    state to memory that is kept, and write in the background. A save in the background that fails
    is logged, and training goes on. Checkpoints of DCP in the same folder are read by DCP.

    Example:
        ``config.checkpoint = HoldfastManager.Config(enable=True, interval=500, keep_latest_k=3)``
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's own settings, and those of holdfast."""

        codec: str = "raw"
        """As for `holdfast.save`."""

    def __init__(self, config: Config, **given: Any) -> None:
        """Prepare; nothing is written before the first save."""
        super().__init__(config, **given)
        if not self.enable:
            return
        # A URL of ours stands alone, or behind torchtitan's own folder.
        self.folder: str = absolute(self.folder.rpartition(SCHEME)[2])
        self._saves = Saves(stage=_STAGES[self.async_mode.value], codec=config.codec)
        Hook(NAME, VERSION, f"checkpoints in {self.folder} (HoldfastManager)")

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        if last_step and self.last_save_in_hf:
            self._saves.wait()
            self._save_last_step(curr_step)
            return True
        is_model_only = last_step and self.last_save_model_only
        state = mark(NAME, VERSION, **({"model_only": True} if is_model_only else {}))
        if is_model_only:
            state[MODEL] = {
                k: self._exported(v) for k, v in self.states[MODEL].state_dict().items()
            }
        else:
            state |= {name: held for name, held in self.states.items() if held is not None}
            state[RANDOM] = RandomState()
        path = self._create_checkpoint_id(curr_step)
        self._saves.save(state, path, step=curr_step, now=last_step)
        self._purge_stale_checkpoints()
        return True

    def _exported(self, value: Any) -> Any:
        """Return a tensor of the last checkpoint in the dtype that is asked for."""
        is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.export_dtype) if is_number else value

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Fill model, optimizers and the rest in place; checkpoints of others as torchtitan does.

        Args:
            state_dict: of what torchtitan wants: tensors of the model, and other states by name.
        """
        place = checkpoint_id.removeprefix(SCHEME)
        if from_hf or not is_committed(place):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        found = check_mark(place, NAME)
        others = {
            name: held
            for name, held in self.states.items()
            if name != MODEL and held is not None and state_dict.get(name) is held
        }
        is_whole = len(others) == sum(held is not None for held in self.states.values()) - 1
        into = {MARK: Value(), MODEL: self.states[MODEL], **others}
        if others and found.get("model_only"):
            raise MismatchError(
                f"{place} holds the weights alone, as last_save_model_only asks for; a run cannot "
                "be resumed from it. Give load_step= of an earlier step; or begin a run with these "
                f"weights: initial_load_path={place!r}, and another folder"
            )
        if is_whole:
            into[RANDOM] = Value()
        _check_shapes(place, self.states[MODEL].state_dict())
        load(place, into, partial=not is_whole)
        if is_whole:
            _begin_apart(self.states.get("dataloader"))
            RandomState().load_state_dict(into[RANDOM])

    def _find_load_step(self, folder: str = "") -> int:
        """Return the newest step that is committed, or that torchtitan finds by itself; or -1."""
        newest: int = super()._find_load_step(folder)
        return max([newest, *(step for step, name in self._steps() if is_committed(name))])

    def _purge_stale_checkpoints(self) -> None:
        """Delete older steps when this save is durable; what dead saves left goes with them."""
        if not self._should_purge():
            return
        *older, newest = sorted(self._steps()) or [(-1, "")]
        whole = [(step, name) for step, name in older if self._is_whole(name)]
        kept = {name for _, name in whole[1 - self.keep_latest_k :]}
        for _, name in older:
            if name not in kept and name != newest[1]:
                self._saves.delete(name)

    def _is_whole(self, name: str) -> bool:
        marks = (".metadata", "model.safetensors.index.json")
        return is_committed(name) or any(os.path.isfile(f"{name}/{mark}") for mark in marks)

    def _steps(self) -> list[tuple[int, str]]:
        """Return what is named as a step: (number, path)."""
        names = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        found = ((_STEP.fullmatch(name), name) for name in names)
        return [(int(match[1]), f"{self.folder}/{name}") for match, name in found if match]

    def _close(self) -> None:
        try:
            if saves := getattr(self, "_saves", None):
                saves.close()
        finally:
            super()._close()


def _check_shapes(place: str, model: Mapping[str, Any]) -> None:
    """Check that a model has the shapes of a checkpoint: torch would say so when it is half filled.

    Raises:
        MismatchError: it has others. Nothing was loaded.
    """
    saved = open_checkpoint(place)
    shapes = {saved.path_of(name): saved.info(name).shape for name in saved.names()}
    for name, value in model.items():
        found = shapes.get((MODEL, name))
        if found is not None and isinstance(value, torch.Tensor) and tuple(value.shape) != found:
            raise MismatchError(
                f"{place} has {name} with the shape {list(found)}, and the model has it with "
                f"{list(value.shape)}. Nothing was loaded. Resume with the model that was saved, "
                "or begin another run in another folder"
            )


def _begin_apart(loader: object) -> None:
    """Let a loader draw the seed of its workers elsewhere: it drew one when training began."""
    if isinstance(loader, DataLoader) and loader.generator is None:
        loader.generator = torch.Generator()


class HoldfastTextDataset(text_datasets.HuggingFaceTextDataset):  # type: ignore[misc]
    """torchtitan's text data set, whose documents are dealt to any number of ranks.

    Raises:
        OptionError: the data set has no number of samples.
    """

    def __init__(
        self, *args: Any, dp_rank: int, dp_world_size: int, seed: int, **more: Any
    ) -> None:
        super().__init__(*args, **more)  # all of it, whatever the rank
        if not hasattr(self._data, "__len__"):
            raise OptionError(
                f"the data set {self.dataset_name} is streamed, so its samples have no numbers; "
                "expected a map-style data set. Load it with streaming=False, or use torchtitan's "
                "own HuggingFaceTextDataLoader, on the same number of ranks"
            )
        self.data = DataState(
            len(self._data),
            seed=seed,
            shuffle=seed >= 0,
            epochs=None if self.infinite else 1,
            rank=dp_rank,
            world_size=dp_world_size,
        )

    def __iter__(self) -> Iterator[Any]:
        """Yield sequences; what is left of a document is held, and handed on with the state."""
        for index in self.data.indices():
            text = self._text_processor(self._data[index])
            tokens = self._tokenizer.encode(text, add_bos=True, add_eos=True)
            own = [tokens[:-1], tokens[1:], list(range(len(tokens) - 1))]
            held = [*self.data.held, own]
            parts = [[token for item in held for token in item[part]] for part in range(3)]
            while len(parts[0]) >= self.seq_len:
                inputs, labels, positions = (part[: self.seq_len] for part in parts)
                parts = [part[self.seq_len :] for part in parts]
                self.data.held = [parts] if parts[0] else []
                places = torch.LongTensor(self._normalize_positions(positions))
                yield (
                    {"input": torch.LongTensor(inputs), "positions": places},
                    torch.LongTensor(labels),
                )
            self.data.held = [parts] if parts[0] else []

    def state_dict(self) -> dict[str, Any]:
        """Return where all of this rank's readers are."""
        return self.data.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on there, on any number of ranks."""
        self.data.load_state_dict(state_dict)


class HoldfastTextDataLoader(BaseDataLoader):  # type: ignore[misc]
    """torchtitan's text data loader, resumed on any number of data-parallel ranks.

    Each document is read once in every epoch, whatever the ranks were. What is left of a document
    that a rank has begun is handed on.

    Example:
        ``config.dataloader = HoldfastTextDataLoader.Config(dataset="c4_test", seed=1)``
    """

    @dataclass(kw_only=True, slots=True)
    class Config(text_datasets.HuggingFaceTextDataLoader.Config):  # type: ignore[misc]
        """torchtitan's own settings, and the order of the documents."""

        seed: int = 0
        """Seed of the order; below 0: the order of the data set."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        """Open the data set."""
        dataset: IterableDataset[Any] = HoldfastTextDataset(
            dataset_name=config.dataset,
            dataset_path=config.dataset_path,
            tokenizer=tokenizer,
            seq_len=seq_len,
            infinite=config.infinite,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            seed=config.seed,
        )
        more = {"prefetch_factor": config.prefetch_factor} if config.num_workers else {}
        self._loader = StatefulDataLoader(
            dataset,
            local_batch_size,
            num_workers=config.num_workers,
            pin_memory=config.pin_memory,
            **more,
        )
        self._data: DataState = dataset.data  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        """Yield batches; each counts as read when it is yielded."""
        return self._data.read(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank's readers are."""
        return self._data.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on there, on any number of ranks."""
        self._data.load_state_dict(state_dict)
