"""Pickles of torch.save, read by the machine that runs nothing: the same plain data."""

import argparse
import collections
import enum
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.convert.inert import Inert
from holdfast.convert.pickles import read_pickle
from holdfast.convert.plain_calls import Array
from holdfast.convert.rebuild import PLAIN, TENSORS, Storage, StoredTensor
from holdfast.state.tensors import TORCH_DTYPES

PROTOCOLS = (2, 3, 4, 5)


def pickle_of(value: Any, protocol: int = 2) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, pickle_protocol=protocol)
    with zipfile.ZipFile(file) as parts:
        return parts.read("archive/data.pkl")


PLAIN_VALUES: dict[str, Any] = {
    "none": None,
    "numbers": [0, 1, -1, 255, 256, 65536, -(1 << 31), 1 << 40, 1 << 300, -(1 << 300), 2.5, 1e300],
    "flags": (True, False),
    "texts": ["", "a", "é", "€", "\U0001f600", "x" * 1000, "\ud800"],
    "bytes": [b"", b"abc", bytes(range(256)), b"x" * 1000, bytearray(b"xyz")],
    "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    "sets": [{1, 2}, frozenset({"a"}), set(), frozenset()],
    "dicts": {1: {"a": {}}, (1, "b"): 2, None: 3, False: 4, 2.5: 5, b"k": 6},
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "counts": collections.Counter("aab"),
    "factory": collections.defaultdict(list, a=[1]),
    "complex": 1 + 2j,
    "namespace": argparse.Namespace(lr=0.1, name="x", betas=(0.9, 0.95)),
    "path": Path("/a/b"),
    "dtype": torch.bfloat16,
    "devices": [torch.device("cpu"), torch.device("cuda", 1)],
    "size": torch.Size([2, 3]),
    "numpy": [np.float64(2.5), np.int32(7), np.bool_(True)],
    "long list": list(range(5000)),
    "shared": [[1, 2]] * 3,
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", PLAIN_VALUES)
def test_plain_data_is_read_as_it_was(name: str, protocol: int) -> None:
    found = read_pickle(pickle.dumps(PLAIN_VALUES[name], protocol), PLAIN)
    assert found.root == PLAIN_VALUES[name]
    assert not found.unknown


ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.zeros((0, 4), np.float32),
    np.array([True, False]),
    np.array(3 + 1j),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_arrays_of_numpy_are_read(array: Any, protocol: int) -> None:
    found = read_pickle(pickle.dumps(array, protocol), PLAIN).root
    assert type(found) is Array
    np.testing.assert_array_equal(found.array(), array)
    assert found.array().dtype == array.dtype


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_a_tensor_of_each_dtype_is_described(name: str, protocol: int) -> None:
    tensor = torch.zeros(48, dtype=torch.uint8).view(TORCH_DTYPES[name])
    found = read_pickle(pickle_of({"w": tensor[1:]}, protocol), TENSORS).root["w"]
    assert type(found) is StoredTensor
    assert (found.dtype, found.shape) == (tensor.dtype, tuple(tensor[1:].shape))
    assert found.offset == 1 and found.storage.size_bytes == tensor.nbytes


def test_views_keep_their_places() -> None:
    base = torch.zeros(4, 6)
    state = {"base": base, "row": base[1], "turned": base.t(), "wide": base[:1].expand(5, 6)}
    found = read_pickle(pickle_of(state), TENSORS).root
    held = Storage("0", torch.float32, 96)
    assert found["base"] == StoredTensor(held, 0, (4, 6), (6, 1), torch.float32)
    assert found["row"] == StoredTensor(held, 6, (6,), (1,), torch.float32)
    assert found["turned"] == StoredTensor(held, 0, (6, 4), (1, 6), torch.float32)
    assert found["wide"] == StoredTensor(held, 0, (5, 6), (0, 1), torch.float32)
    contiguous = [name for name, tensor in found.items() if tensor.is_contiguous]
    assert contiguous == ["base", "row"]


def test_a_module_and_an_optimizer_are_read() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    state = {"m": model.state_dict(), "o": optimizer.state_dict(), "s": schedule.state_dict()}
    found = read_pickle(pickle_of(state), TENSORS)
    assert not found.unknown
    assert list(found.root["m"]) == list(state["m"])
    assert found.root["o"]["param_groups"] == state["o"]["param_groups"]
    assert found.root["s"]["milestones"] == {2: 1, 4: 1}
    assert found.root["o"]["state"][0]["exp_avg"].shape == (4, 3)


def test_a_parameter_with_attributes_is_its_tensor() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    found = read_pickle(pickle_of({"p": parameter}), TENSORS)
    assert found.root["p"].shape == (3,) and not found.unknown


class Colour(enum.Enum):
    RED = 1


class Custom:
    def __init__(self) -> None:
        self.size = torch.ones(2)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_unknown_class_keeps_its_name_arguments_and_state(protocol: int) -> None:
    found = read_pickle(pickle_of({"c": Custom(), "e": Colour.RED}, protocol), TENSORS)
    custom, colour = found.root["c"], found.root["e"]
    assert type(custom) is Inert and custom.name == f"{__name__}.Custom"
    assert custom.state["size"].shape == (2,)
    assert type(colour) is Inert and colour.args == (1,)
    assert found.unknown == {custom.name, colour.name}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.ones(3, device="meta"),
        torch.ones(2, dtype=torch.complex64).conj(),
        "quantized",
    ],
    ids=["sparse", "meta", "conjugated", "quantized"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_is_more_than_its_bytes_is_inert(tensor: Any) -> None:
    if isinstance(tensor, str):  # made here, since that warns
        tensor = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    found = read_pickle(pickle_of({"w": tensor}), TENSORS)
    assert type(found.root["w"]) is Inert and found.unknown
