"""Checkpoints of DeepSpeed as a `Source`: ZeRO stages 0 to 3, and universal ones.

Master weights, frozen weights and buffers are ``module.NAME``. An optimizer's state is
``optimizer.state.NAME.KEY``, as holdfast saves that of a torch optimizer.
"""

import os
import re
from collections.abc import Mapping
from math import prod
from typing import Any

from ..errors import CorruptError, OptionError, shown
from ..layout import Path, Shape, Tensor, whole
from ..state.tensors import DTYPE_NAMES
from .archive import region_of
from .contents import lay_flat
from .inert import sizes_of
from .pieces import Piece, PiecedSource
from .rebuild import StoredTensor
from .source import list_names
from .torch_archive import TorchArchive, read_torch_archive
from .torch_file import add_tensors
from .zero_parts import (
    RankState,
    flat_pieces,
    pieces_of,
    slices_in,
    stretches_of_groups,
    stretches_of_parameters,
)

KIND = "deepspeed"
MODULE, OPTIMIZER = "module", "optimizer"
UNIVERSAL = "zero"  # the folder of a universal checkpoint
_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_STATES = "optimizer_state_dict"
# What says how the rest is to be put together; all else comes along as values.
_STRUCTURE = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "ds_config"),
    *("shared_params", "frozen_param_fragments", "data_sampler", "random_ltd"),
    *("universal_checkpoint_info", "checkpoint_parallel_dimensions"),
}
NAME_BYTES_MAX = 4096


def open_deepspeed(path: str) -> PiecedSource:
    """Open the directory of a tag, or the one above it with the file ``latest``.

    Args:
        path: absolute.

    Raises:
        CorruptError: a file is missing or fails a check.
        OptionError: it was saved with tensor, pipeline or expert parallelism.
        StoreError: a file cannot be read.
    """
    source = PiecedSource(path, KIND)
    try:
        _Opened(source, _tag_of(source, path)).add_all()
    except BaseException:
        source.close()
        raise
    return source


def _tag_of(source: PiecedSource, path: str) -> str:
    """Return the directory of the newest tag, which ``latest`` names."""
    for name in ("latest_universal", "latest"):
        file = f"{path}/{name}"
        if os.path.isfile(file):
            size = min(source.files.size(file), NAME_BYTES_MAX)
            tag = region_of(source.files, file).read(0, size).decode(errors="replace").strip()
            if "/" in tag or "\0" in tag or tag in ("", ".", "..") or "�" in tag:
                raise CorruptError(f"{file} names {shown(tag)}; expected a directory beside it")
            if not os.path.isdir(f"{path}/{tag}"):
                raise CorruptError(f"{file} names {tag:.80}, which is no directory beside it")
            return f"{path}/{tag}"
    return path


def _get(root: Any, key: str, kind: Any, where: str) -> Any:
    value = root.get(key) if isinstance(root, dict) else None
    if not isinstance(value, kind):
        raise CorruptError(f"{where} has no {key} as DeepSpeed writes it")
    return value


class _Opened:
    """One directory: what its files say, and what is added of them to the source."""

    def __init__(self, source: PiecedSource, directory: str) -> None:
        self._source, self._directory = source, directory
        self._tensors: list[Tensor] = []
        self._values: dict[Path, Any] = {}
        names = list_names(directory)
        self._model = self._by_rank(names, _MODEL)
        self._optim = self._by_rank(names, _OPTIM)
        if any("expert" in name or name.startswith("layer_") for name in names):
            raise OptionError(
                f"{directory} was saved with experts or pipeline stages in files of their own; "
                "expected one file of the whole model. Convert it with DeepSpeed's ds_to_universal"
            )
        if not self._model:
            raise CorruptError(f"{directory} has no file *mp_rank_00_model_states.pt")
        self._archives = [self._open(file) for file in self._model]
        if not all(isinstance(archive.root, dict) for archive in self._archives):
            raise CorruptError(f"{self._model[0]} holds no dict as DeepSpeed writes it")
        self._first = self._archives[0]
        self._groups = self._shapes_of_groups()
        self._is_universal = UNIVERSAL in names

    def _by_rank(self, names: list[str], pattern: "re.Pattern[str]") -> list[str]:
        """Return the files of all ranks in their order, none missing."""
        found: dict[int, str] = {}
        for name in names:
            if match := pattern.fullmatch(name):
                rank, other = int(match[1] or 0), int(match[2])
                if other:
                    raise OptionError(
                        f"{self._directory} was saved with tensor parallelism ({name}); expected "
                        "mp_rank_00 alone. Convert it with DeepSpeed's ds_to_universal"
                    )
                if rank in found:
                    raise CorruptError(
                        f"{self._directory} has {min(name, found[rank])} and "
                        f"{max(name, found[rank])}, both of rank {rank}. Remove the files of other "
                        "saves"
                    )
                found[rank] = name
        for rank in range(len(found)):
            if rank not in found:
                expected = found[max(found)].replace(f"rank_{max(found)}_", f"rank_{rank}_", 1)
                raise CorruptError(
                    f"{self._directory}/{expected} is missing, and {found[max(found)]} is there. "
                    "Copy the files of all ranks"
                )
        return [f"{self._directory}/{found[rank]}" for rank in range(len(found))]

    def _open(self, path: str) -> TorchArchive:
        return read_torch_archive(region_of(self._source.files, path))

    def _shapes_of_groups(self) -> list[dict[str, Shape]]:
        root, where = self._first.root, self._first.where
        if root.get("param_shapes") is None:
            return []
        groups = _get(root, "param_shapes", list, where)
        return [self._shapes(group) for group in groups]

    def _shapes(self, named: Any) -> dict[str, Shape]:
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named):
            raise CorruptError(f"{self._first.where} gives shapes in an unknown way")
        try:
            return {name: sizes_of(shape, "shape") for name, shape in named.items()}
        except CorruptError as error:
            raise CorruptError(f"{self._first.where} gives shapes that are none: {error}") from None

    def add_all(self) -> None:
        """Add all tensors and values."""
        if not self._optim and not self._is_universal:
            self._add_stage_0()
            return
        world = len(self._optim) or len(self._archives)
        if len(self._archives) not in (1, world):
            raise CorruptError(
                f"{self._directory} has {len(self._archives)} files of models and {world} of "
                "optimizers; expected as many, or one. Copy the files of all ranks"
            )
        if self._is_universal:
            self._add_universal()
        else:
            self._add_partitions()
        self._add_frozen()
        self._add_module()
        self._source.tensors, self._source.values = tuple(self._tensors), self._values
        self._add_values()
        self._source.check_whole()

    def _add(self, path: Path, kind: Any, shape: Shape, pieces: list[Piece]) -> None:
        if path in self._source.pieces:
            raise CorruptError(f"{self._directory} has {'.'.join(map(str, path))} twice")
        self._tensors.append(Tensor(path, DTYPE_NAMES[kind], shape))
        self._source.pieces[path] = pieces

    # ZeRO's partitions.

    def _add_partitions(self) -> None:
        ranks, stages, groups = [], set(), []
        for file in self._optim:
            rank, stage, options = self._rank_state(self._open(file))
            ranks.append(rank)
            stages.add(stage)
            groups.append(options)
        if len(stages) != 1 or len({len(rank.flats) for rank in ranks}) != 1:
            raise CorruptError(f"the files of ranks in {self._directory} are of different saves")
        find = stretches_of_parameters if stages == {3} else stretches_of_groups
        if stages != {3} and len(ranks[0].flats) != len(self._groups):
            raise CorruptError(
                f"{ranks[0].archive.where} has {len(ranks[0].flats)} groups; expected "
                f"{len(self._groups)} by {self._first.where}"
            )
        stretches = find(ranks, self._groups)
        for group in self._groups:
            for name, shape in group.items():
                held = stretches[name]
                first, number = held[0][:2] if held else (0, 0)
                if not ranks[first].flats:
                    raise CorruptError(f"{ranks[first].archive.where} has no master weights")
                dtype = ranks[first].flats[number].dtype
                self._add((MODULE, name), dtype, shape, pieces_of(name, shape, held, ranks, "fp32"))
                self._add_state(name, shape, held, ranks)
        self._add_options(groups[0])

    def _rank_state(self, archive: TorchArchive) -> tuple[RankState, int, Any]:
        """Return what a rank has, the stage of ZeRO, and the options of its groups."""
        where = archive.where
        root = _get(archive.root, _STATES, dict, where)
        count = root.get("partition_count")
        for ranks in count if isinstance(count, list) else [count]:
            if ranks is not None and ranks != len(self._optim):
                raise CorruptError(
                    f"{where} was saved by {shown(ranks)} ranks; found {len(self._optim)} files. "
                    "Copy the files of all ranks"
                )
        if "fp32_flat_groups" in root:
            flats, inner, stage = _get(root, "fp32_flat_groups", list, where), _STATES, 3
        else:
            flats = _get(root, "single_partition_of_fp32_groups", list, where)
            inner, stage = "base_optimizer_state", 2
        if not isinstance(root.get(inner), dict):
            raise OptionError(
                f"{where} keeps the state of its optimizer in the elastic form; expected the usual "
                'one. Save it with "elastic_checkpoint": false'
            )
        states = _get(root[inner], "state", dict, where)
        if not all(type(flat) is StoredTensor for flat in flats):
            raise CorruptError(f"{where} has master weights that are no tensors")
        ordered = [states.get(number) or {} for number in range(len(flats))]
        if not all(isinstance(state, dict) for state in ordered):
            raise CorruptError(f"{where} has the state of its optimizer in an unknown way")
        slices = slices_in(root.get("param_slice_mappings"), where)
        if slices is not None and len(slices) != len(flats):
            raise CorruptError(f"{where} notes slices of {len(slices)} groups, not {len(flats)}")
        options = root[inner].get("param_groups")
        return RankState(archive, flats, ordered, slices), stage, options

    def _add_state(self, name: str, shape: Shape, held: list[Any], ranks: list[RankState]) -> None:
        if not held:
            return
        rank, number = held[0][:2]
        for key, value in ranks[rank].states[number].items():
            if not isinstance(key, str):
                raise CorruptError(f"{ranks[rank].archive.where} has a state without a name")
            path: Path = (OPTIMIZER, "state", name, key)
            if type(value) is StoredTensor and len(value.shape) == 1:
                self._add(path, value.dtype, shape, pieces_of(name, shape, held, ranks, key))
            elif type(value) is StoredTensor:
                piece = ranks[rank].archive.piece(value)
                self._add(path, value.dtype, value.shape, [piece])
            elif type(value) in (int, float, bool):
                self._values[path] = value
            else:
                raise CorruptError(
                    f"{ranks[rank].archive.where} has {key!r:.80} of an unknown kind"
                )

    def _add_options(self, options: Any) -> None:
        """Add the options of each group to all its parameters, as holdfast saves them."""
        owners: dict[int, dict[str, Any]] = {}
        for group in options if isinstance(options, list) else ():
            kept = dict(group) if type(group) is dict else {}
            numbers = kept.pop("params", ())
            if isinstance(numbers, list):
                owners |= {number: kept for number in numbers if type(number) is int}
        if sorted(owners) != list(range(len(self._groups))):
            self._source.advice += ("left out the options of the optimizer's groups",)
            return
        for number, names in enumerate(self._groups):
            contents = lay_flat(owners[number], self._directory, (OPTIMIZER,), leave_out=True)
            plain = {path[-1]: value for path, value in contents.values.items() if len(path) == 2}
            self._values |= {(OPTIMIZER, "param_groups", name): plain for name in names}

    # Universal checkpoints.

    def _add_universal(self) -> None:
        root = f"{self._directory}/{UNIVERSAL}"
        for group in self._groups:
            for name, shape in group.items():
                folder = f"{root}/{name}"
                if "/" in name or "\0" in name or name in ("", ".", ".."):
                    raise CorruptError(f"{self._first.where} names the parameter {name!r:.80}")
                if not os.path.isfile(f"{folder}/fp32.pt"):
                    raise CorruptError(f"{folder}/fp32.pt is missing. Copy all of the checkpoint")
                for file in sorted(list_names(folder)):
                    key, suffix = os.path.splitext(file)
                    path = (MODULE, name) if key == "fp32" else (OPTIMIZER, "state", name, key)
                    if suffix == ".pt":
                        self._add_parameter(path, self._open(f"{folder}/{file}"), shape)
        if os.path.isfile(f"{root}/optimizer_state.pt"):
            state = self._open(f"{root}/optimizer_state.pt").root
            self._add_options(state.get("param_groups") if isinstance(state, dict) else None)

    def _add_parameter(self, path: Path, archive: TorchArchive, shape: Shape) -> None:
        held = archive.root
        held = held.get("param") if isinstance(held, dict) else held
        if type(held) in (int, float):
            self._values[path] = held
            return
        if type(held) is not StoredTensor:
            raise CorruptError(f"{archive.where} holds no tensor as DeepSpeed writes it")
        if not held.shape or held.shape == shape:
            self._add(path, held.dtype, held.shape, [archive.piece(held)])
            return
        if held.shape != (prod(shape),) or not held.is_contiguous:
            raise CorruptError(
                f"{archive.where} holds a tensor of {list(held.shape)}; expected {list(shape)}"
            )
        pieces = [*flat_pieces(archive, held, 0, prod(shape), shape, 0)]
        self._add(path, held.dtype, shape, pieces)

    # The model's own file.

    def _add_frozen(self) -> None:
        root, where = self._first.root, self._first.where
        if not root.get("frozen_param_shapes"):
            return
        shapes = self._shapes(root["frozen_param_shapes"])
        for name, shape in shapes.items():
            pieces: list[Piece] = []
            kind: Any = None
            for archive in self._archives:
                held = _get(archive.root, "frozen_param_fragments", dict, where).get(name)
                if type(held) is not StoredTensor:
                    raise CorruptError(f"{archive.where} has no frozen weights of {name:.80}")
                kind = kind or held.dtype
                if held.shape == shape:
                    pieces = [archive.piece(held, whole(shape))]
                    break
                done = sum(piece.box.elements for piece in pieces)
                count = min(prod(held.shape), prod(shape) - done)
                is_flat = len(held.shape) == 1 and held.is_contiguous
                if not is_flat or held.dtype != kind:
                    raise CorruptError(f"{archive.where} has {name:.80} in an unknown form")
                pieces += flat_pieces(archive, held, 0, count, shape, done)
            self._add((MODULE, name), held.dtype, shape, pieces)

    def _add_module(self) -> None:
        """Add the buffers; and what has no master weights, where the model's file has it whole."""
        root, where = self._first.root, self._first.where
        module = _get(root, MODULE, dict, where)
        shared = root.get("shared_params")
        shared = shared if isinstance(shared, dict) else {}
        buffers = [*_get(root, "buffer_names", list, where)]
        tensors = [name for name, held in module.items() if type(held) is StoredTensor]
        self._source.advice += tuple(f"left out module.{n}" for n in module if n not in tensors)
        others = [name for name in tensors if name not in shared and len(self._archives) == 1]
        for name in [*buffers, *others]:
            held = module.get(name) if isinstance(name, str) else None
            if held is not None and (MODULE, name) in self._source.pieces:
                continue
            if type(held) is not StoredTensor:
                raise CorruptError(f"{where} has no tensor {name!r:.80}")
            self._add((MODULE, name), held.dtype, held.shape, [self._first.piece(held)])
        self._source.ties = {
            (MODULE, name): (MODULE, owner)
            for name, owner in shared.items()
            if isinstance(name, str)
            and isinstance(owner, str)
            and (MODULE, owner) in self._source.pieces
            and (MODULE, name) not in self._source.pieces
        }

    def _add_values(self) -> None:
        kept = {key: value for key, value in self._first.root.items() if key not in _STRUCTURE}
        self._add_contents(kept)

    def _add_contents(self, root: Mapping[Any, Any]) -> None:
        contents = lay_flat(root, self._first.where, leave_out=True)
        add_tensors(self._source, self._first, contents)
        self._source.values = {**self._source.values, **contents.values}
        self._source.advice += contents.left_out()

    def _add_stage_0(self) -> None:
        root = self._first.root
        if len(self._archives) > 1:
            raise CorruptError(
                f"{self._directory} has no files *_optim_states.pt. Copy the files of all ranks"
            )
        dropped = _STRUCTURE - {MODULE, OPTIMIZER}
        self._add_contents({key: value for key, value in root.items() if key not in dropped})
