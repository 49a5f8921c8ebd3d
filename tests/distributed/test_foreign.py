"""A checkpoint of another format, loaded by several ranks."""

from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.errors import HoldfastError

from .ranks import run_ranks


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5))


def load(rank: int, path: str) -> bool:
    module = net(1 + rank)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    report = holdfast.load(path, into=dict(module.named_parameters()))
    assert report.tensors == 4
    found = {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        found[name] = parameter.full_tensor()
    return all(torch.equal(found[name], value) for name, value in net(0).state_dict().items())


def failure(path: str, into: dict[str, torch.Tensor], **more: bool) -> str:
    try:
        holdfast.load(path, into=into, partial=True, **more)
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def load_other_names(rank: int, path: str) -> str:
    return failure(path, {"0.weight" if rank == 0 else "no.weight": torch.zeros(13, 7)})


def load_otherwise(rank: int, path: str) -> str:
    return failure(path, {"0.weight": torch.zeros(13, 7)}, cast=rank == 0)


def load_other_things(rank: int, paths: list[str]) -> str:
    return failure(paths[rank], {"0.weight": torch.zeros(13, 7)})


def test_ranks_load_their_shards_of_safetensors(tmp_path: Path) -> None:
    path = str(tmp_path / "a.safetensors")
    safetensors.torch.save_file(net(0).state_dict(), path)
    assert run_ranks(2, load, path) == [True, True]


def test_what_one_rank_lacks_no_rank_loads(tmp_path: Path) -> None:
    path = str(tmp_path / "a.safetensors")
    safetensors.torch.save_file(net(0).state_dict(), path)
    for said in run_ranks(2, load_other_names, path):
        assert said.startswith("MismatchError: ") and "no.weight" in said
    for said in run_ranks(2, load_otherwise, path):
        assert said.startswith("OptionError: ") and "cast" in said


def test_ranks_that_find_different_things_load_nothing(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.safetensors", "b", "c")]
    safetensors.torch.save_file(net(0).state_dict(), paths[0])
    holdfast.save(net(0).state_dict(), paths[1])
    for said in run_ranks(2, load_other_things, paths[:2]):
        assert said.startswith("MismatchError: ")
        assert "is another format on rank 0, and a checkpoint on rank 1" in said
    one, other = run_ranks(2, load_other_things, [paths[0], paths[2]])
    assert one.startswith("PeerError: rank 1 failed") and other.startswith("NotCommittedError: ")
