"""What `holdfast.integrations.megatron` knows without Megatron-Core."""

import enum
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import CorruptError, MismatchError, OptionError, StateError
from holdfast.integrations import megatron, megatron_load
from holdfast.integrations.adapter import install
from holdfast.options import DEFAULTS
from holdfast.state.shard import Shard, Shards

NewPath = Callable[[], Path]


class Kind(enum.Enum):
    LEARNED = 1


@dataclass
class Tensor:
    """As Megatron's ShardedTensor."""

    key: str
    data: torch.Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    local_shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.local_shape = tuple(self.data.shape)

    def init_data(self, _: str) -> None:
        """Do nothing: the data is there."""


@dataclass
class Object:
    """As its ShardedObject."""

    key: str
    data: Any
    replica_id: int = 0

    @property
    def unique_key(self) -> str:
        return f"{self.key}/shard_0_1"


@dataclass
class Config:
    """As its CheckpointingConfig."""

    sharded_backend: str
    sharded_backend_version: int


def leaves(tree: Any) -> Iterator[Any]:
    for value in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(value, (dict, list)):
            yield from leaves(value)
        else:
            yield value


def put_leaves(put: Callable[[Any], Any], tree: Any) -> Any:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        nested = isinstance(value, (dict, list))
        tree[key] = put_leaves(put, value) if nested else put(value)
    return tree


@pytest.fixture(autouse=True)
def _megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    package = "megatron.core.dist_checkpointing"
    mapping: Any = ModuleType(f"{package}.mapping")
    mapping.ShardedTensor, mapping.ShardedObject = Tensor, Object
    mapping.is_main_replica = lambda number: number == 0
    utils: Any = ModuleType(f"{package}.dict_utils")
    utils.nested_values, utils.dict_list_map_inplace = leaves, put_leaves
    core: Any = ModuleType(f"{package}.core")
    core.CheckpointingConfig = Config
    for module in (mapping, utils, core):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def writer(common: Any = None, *, pickles: bool = False) -> Any:
    made = megatron._Writer("0.16.1", pickles=pickles, codec="raw", options=DEFAULTS)
    made.common = common or {"step": 3}
    return made


def test_without_megatron_the_extra_is_named() -> None:
    with pytest.raises(ImportError, match=r"holdfast-checkpoint\[megatron\]"):
        install("megatron")


def test_another_version_of_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.19.2")
    with pytest.raises(OptionError, match=r"megatron-core 0\.19\.2 is installed; .* 0\.16\.1"):
        install("megatron")


def test_one_rank_may_hold_several_boxes_of_a_tensor(new_path: NewPath) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    more = (Shard(whole[4:], (6, 4), offset=(4, 0)),)
    state = {"w": Shards(whole[:2], (6, 4), offset=(0, 0), more=more)}
    with pytest.raises(StateError, match=r"cover 16 of 24 elements, no rank holds \[2:4, 0:4\]"):
        holdfast.save(state, new_path())
    more += (Shard(whole[2:4], (6, 4), offset=(2, 0)),)
    holdfast.save({"w": Shards(whole[:2], (6, 4), offset=(0, 0), more=more)}, path := new_path())
    assert torch.equal(holdfast.open(path)["w"], whole)
    one, other = torch.zeros(1, 4), torch.zeros(3, 4)
    into = Shards(one, (6, 4), offset=(5, 0), more=(Shard(other, (6, 4), offset=(1, 0)),))
    holdfast.load(path, {"w": into})
    assert torch.equal(one, whole[5:]) and torch.equal(other, whole[1:4])


def test_a_state_comes_back_in_another_cut(new_path: NewPath) -> None:
    whole = torch.arange(24.0).reshape(2, 3, 4)
    layers = [Tensor("w", whole[i], (2, 3, 4), (i, 0, 0), prepend_axis_num=1) for i in (0, 1)]
    copy = Tensor("w", whole[0] * 9, (2, 3, 4), (0, 0, 0), replica_id=1, prepend_axis_num=1)
    # The copy is no main replica: Megatron does not write it, whatever comes first.
    sharded = {"copy": copy, "layers": layers, "rng": Object("rng", {"a": torch.ones(2)})}
    sharded |= {"scale": Object("scale", 3), "other": Object("scale", 9, replica_id=1)}
    writer({"args": Namespace(lr=0.1)}).save(sharded, str(path := new_path()))
    column = torch.zeros(3, 2)
    target = {
        "w": Tensor("w", column, (2, 3, 4), (1, 0, 2), prepend_axis_num=1),
        "rng": Object("rng", None),
        "scale": Object("scale", None),
    }
    found = megatron_load.load_state(target, str(path / "holdfast"))
    assert torch.equal(column, whole[1, :, 2:]) and found["w"] is column
    assert torch.equal(found["rng"]["a"], torch.ones(2)) and found["scale"] == 3
    assert holdfast.open(path / "holdfast").objects()["common.value.args"] == Namespace(lr=0.1)


def test_a_save_over_another_replaces_it_and_its_directory_is_whole(new_path: NewPath) -> None:
    path = new_path()
    for number in (1.0, 2.0):
        sharded = {"w": Tensor("w", torch.full((2,), number), (2,), (0,))}
        writer().save(sharded, str(path))
        assert json.loads((path / "metadata.json").read_text())["sharded_backend"] == "holdfast"
    assert torch.equal(holdfast.open(path / "holdfast")["tensors.w"], torch.full((2,), 2.0))


def test_padding_that_differs_is_left_alone(new_path: NewPath) -> None:
    writer().save({"e": Tensor("e", torch.ones(6, 2), (6, 2), (0, 0))}, str(path := new_path()))
    rows = torch.zeros(4, 2)
    target = {"e": Tensor("e", rows, (8, 2), (4, 0), allow_shape_mismatch=True)}
    megatron_load.load_state(target, str(path / "holdfast"))
    assert rows.sum(1).tolist() == [2, 2, 0, 0]
    with pytest.raises(MismatchError, match=r"tensors\.e"):
        megatron_load.load_state({"e": Tensor("e", rows, (8, 2), (4, 0))}, str(path / "holdfast"))


def test_what_is_no_plain_value_is_stored_only_on_request(new_path: NewPath) -> None:
    sharded = {"w": Tensor("w", torch.ones(2), (2,), (0,)), "o": Object("o", {"k": Kind.LEARNED})}
    with pytest.raises(StateError, match=r"o has a value that is not plain: k has an enum.*"):
        writer().save(sharded, str(new_path()))
    writer(pickles=True).save(sharded, str(path := new_path()))
    target = {"o": Object("o", None)}
    with pytest.raises(CorruptError, match=r"cannot be unpickled.*add_safe_globals"):
        megatron_load.load_state(target, str(path / "holdfast"))
    with torch.serialization.safe_globals([Kind, getattr]):
        assert megatron_load.load_state(target, str(path / "holdfast")) == {
            "o": {"k": Kind.LEARNED}
        }


def test_a_checkpoint_of_another_framework_is_refused(new_path: NewPath) -> None:
    holdfast.save({"w": torch.ones(2)}, path := new_path())
    with pytest.raises(MismatchError, match="was saved by a program without a framework"):
        megatron_load.load_state({}, str(path))


def test_a_background_save_is_waited_for_and_not_longer_than_its_process(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    megatron._wait_until_gone(str(flag), os.getpid())
    flag.touch()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    megatron._wait_until_gone(str(flag), ended.pid)
    assert not flag.exists()


def test_metadata_is_written_in_one_step_and_only_where_it_differs(tmp_path: Path) -> None:
    megatron.mark_whole(str(tmp_path))
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_bytes())["sharded_backend"] == "holdfast"
    first = file.stat().st_ino
    megatron.mark_whole(str(tmp_path))
    assert file.stat().st_ino == first
    file.write_bytes(b"")  # as a kill leaves what Megatron writes
    megatron.mark_whole(str(tmp_path))
    assert json.loads(file.read_bytes())["sharded_backend_version"] == 1
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("is_flexible", [False, True])
def test_leaves_that_share_memory_are_all_filled(new_path: NewPath, is_flexible: bool) -> None:
    whole = torch.arange(12.0).reshape(6, 2)
    flat = Tensor("master", whole.view(-1), (12,), (0,))
    weight = Tensor("w", whole, (6, 2), (0, 0))
    writer().save({"a": flat, "b": weight}, str(path := new_path()))
    given = torch.nn.Parameter(torch.zeros(6, 2))
    target = {
        "a": Tensor("master", given.detach().view(-1)[2:], (12,), (2,)),
        "b": Tensor("w", given, (6, 2), (0, 0), allow_shape_mismatch=is_flexible),
    }
    megatron_load.load_state(target, str(path / "holdfast"))
    assert torch.equal(given, whole)
