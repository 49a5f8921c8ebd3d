"""ShardedTensors, and FSDP1's sharded state dicts: through DCP as DCP itself does, and directly."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.errors import StateError
from holdfast.integrations.dcp import HoldfastReader, HoldfastWriter

from .ranks import run_ranks

State = dict[str, Any]
ROWS, COLUMNS = 23, 6
WHOLE = torch.arange(ROWS * COLUMNS, dtype=torch.float64).reshape(ROWS, COLUMNS)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def in_rows(filled: bool) -> ShardedTensor:
    """Cut WHOLE into uneven blocks of rows; those of one rank are not neighbours."""
    size, rank = dist.get_world_size(), dist.get_rank()
    cuts = [0, *itertools.accumulate([1, 4, 2, 7, 3, 6])]
    shards = []
    for number, (first, end) in enumerate(itertools.pairwise(cuts)):
        if number % size == rank:
            data = (
                WHOLE[first:end].clone() if filled else torch.zeros(end - first, COLUMNS).double()
            )
            shards.append(Shard.from_tensor_and_offsets(data, [first, 0], rank))
    return init_from_local_shards(shards, ROWS, COLUMNS)


def in_columns(filled: bool) -> ShardedTensor:
    """Cut WHOLE into columns, as many ranks as have one; the others hold nothing."""
    size, rank = dist.get_world_size(), dist.get_rank()
    width = COLUMNS // min(size, 2)
    shards = []
    if rank < 2:
        data = WHOLE[:, rank * width : (rank + 1) * width].clone()
        data = data if filled else torch.zeros_like(data)
        shards.append(Shard.from_tensor_and_offsets(data, [0, rank * width], rank))
    return init_from_local_shards(shards, ROWS, COLUMNS)


def held(value: ShardedTensor) -> list[bool]:
    """Whether each local shard is the part of WHOLE that it should be."""
    return [
        torch.equal(
            shard.tensor,
            WHOLE[
                tuple(
                    slice(a, a + n)
                    for a, n in zip(
                        shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True
                    )
                )
            ],
        )
        for shard in value.local_shards()
    ]


def save_sharded(rank: int, root: str, verb: str) -> None:
    path = f"{root}/{verb}"
    value = in_rows(filled=True)
    if verb == "dcp.async_save":
        handle = dcp.async_save({"w": value}, storage_writer=HoldfastWriter(path))
        for shard in value.local_shards():
            shard.tensor.zero_()  # what is saved is as it was at the call
        handle.result()
    elif verb == "dcp.save":
        dcp.save({"w": value, "n": [{"v": value}]}, storage_writer=HoldfastWriter(path))
    elif verb == "save":
        holdfast.save({"w": value}, path)
    elif verb == "save_async":
        handle = holdfast.save_async({"w": value}, path)
        for shard in value.local_shards():
            shard.tensor.zero_()
        handle.result()
    else:
        dcp.save({"w": value}, storage_writer=dcp.FileSystemWriter(path))


def load_sharded(rank: int, root: str, verbs: tuple[str, ...]) -> list[list[bool]]:
    found = []
    for verb, cut in itertools.product(verbs, (in_rows, in_columns)):
        for reads in ("dcp", "holdfast"):
            value = cut(filled=False)
            if verb == "stock":
                dcp.load({"w": value}, checkpoint_id=f"{root}/{verb}")
            elif reads == "dcp":
                dcp.load({"w": value}, storage_reader=HoldfastReader(f"{root}/{verb}"))
            else:
                holdfast.load(f"{root}/{verb}", into={"w": value}, partial=True)
            found.append(held(value))
    return found


VERBS = ("dcp.save", "dcp.async_save", "save", "save_async")


def test_a_sharded_tensor_comes_back_on_other_ranks_and_boxes(tmp_path: Path) -> None:
    for verb in (*VERBS, "stock"):
        run_ranks(2, save_sharded, str(tmp_path), verb)
    for size in (1, 2, 3):
        for found in run_ranks(size, load_sharded, str(tmp_path), (*VERBS, "stock")):
            assert all(all(parts) for parts in found)
    for verb in VERBS:
        assert torch.equal(holdfast.open(tmp_path / verb).tensor("w"), WHOLE)


def too_many(rank: int, path: str) -> str:
    shards = [Shard.from_tensor_and_offsets(torch.zeros(1), [i], 0) for i in range(256)]
    with pytest.raises(StateError) as caught:
        holdfast.save({"a": {"w": init_from_local_shards(shards, 256)}}, path)
    return str(caught.value)


def test_more_shards_than_a_checkpoint_tells_apart_are_refused(tmp_path: Path) -> None:
    (text,) = run_ranks(1, too_many, str(tmp_path / "a"))
    assert "a.w is a ShardedTensor with 256 shards on this rank; expected at most 255" in text


class Holder:
    """Saves itself, as training scripts wrap a model: its state dict holds ShardedTensors."""

    def __init__(self, filled: bool) -> None:
        self.value = in_rows(filled)

    def state_dict(self) -> State:
        return {"w": self.value}

    def load_state_dict(self, state: State) -> None:
        self.value = state["w"]


def through_an_object(rank: int, path: str) -> list[bool]:
    holdfast.save({"app": Holder(filled=True)}, path)
    holder = Holder(filled=False)
    holdfast.load(path, into={"app": holder})
    return held(holder.value)


def test_an_object_whose_state_is_sharded_is_loaded_in_place(tmp_path: Path) -> None:
    assert all(map(all, run_ranks(2, through_an_object, str(tmp_path / "a"))))


def fsdp(seed: int, whose: str, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build FSDP1 of uneven layers; ``kind``: of which tensors its sharded state dict is."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    options: State = {"use_orig_params": whose == "own", "device_id": torch.device("cpu")}
    if kind == "DTensor":
        options["device_mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    model[2] = FullyShardedDataParallel(model[2], **options)
    model = FullyShardedDataParallel(model, **options)
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        batch = torch.randn(4, 7, generator=torch.Generator().manual_seed(seed + step))
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def sharded_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    ours, its = get_state_dict(model, optimizer)
    return {"model": ours, "optimizer": its}


def save_fsdp(rank: int, root: str, whose: str, kind: str) -> str:
    state = sharded_state(*fsdp(1, whose, kind))
    dcp.save(state, storage_writer=HoldfastWriter(f"{root}/dcp.save"))
    dcp.async_save(state, storage_writer=HoldfastWriter(f"{root}/dcp.async_save")).result()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{root}/stock"))
    holdfast.save({"model": state["model"]}, f"{root}/save")
    return type(state["model"]["0.weight"]).__name__


def numbers_of(state: State) -> dict[str, list[torch.Tensor]]:
    """Return what this rank holds of each tensor."""
    found: dict[str, list[torch.Tensor]] = {}
    flat, _ = dcp._nested_dict.flatten_state_dict(state)
    for name, value in flat.items():
        if isinstance(value, ShardedTensor):
            found[name] = [shard.tensor.clone() for shard in value.local_shards()]
        elif isinstance(value, DTensor):
            found[name] = [value.to_local().clone()]
        elif isinstance(value, torch.Tensor):
            found[name] = [value.clone()]
    return found


def load_fsdp(rank: int, root: str, whose: str, kind: str) -> None:
    found = {}
    for number, verb in enumerate(("stock", "dcp.save", "dcp.async_save")):
        model, optimizer = fsdp(2 + number, whose, kind)
        state = sharded_state(model, optimizer)
        reader = dcp.FileSystemReader if verb == "stock" else HoldfastReader
        dcp.load(state, storage_reader=reader(f"{root}/{verb}"))
        ours, its = state["model"], state["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=ours, optim_state_dict=its)
        found[verb] = numbers_of(sharded_state(model, optimizer))
    expected = found.pop("stock")
    assert len(expected) >= 4 * 3  # two layers' weights and biases, and both moments of each
    for verb, tensors in found.items():
        assert tensors.keys() == expected.keys()
        for name, parts in tensors.items():
            assert all(map(torch.equal, parts, expected[name])), (verb, name)
    ours = sharded_state(*fsdp(7, whose, kind))["model"]
    holdfast.load(f"{root}/save", into={"model": ours})
    for name, parts in numbers_of({"model": ours}).items():
        assert all(map(torch.equal, parts, expected[name])), name


@pytest.mark.parametrize("kind", ["ShardedTensor", "DTensor"])
@pytest.mark.parametrize("whose", ["own", "flat"])
def test_a_sharded_state_dict_comes_back_as_from_dcp(tmp_path: Path, whose: str, kind: str) -> None:
    assert run_ranks(2, save_fsdp, str(tmp_path), whose, kind) == [kind, kind]
    for size in (1, 2, 3):
        run_ranks(size, load_fsdp, str(tmp_path), whose, kind)
