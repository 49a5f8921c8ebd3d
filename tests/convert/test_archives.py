"""Export to files of torch.save and npz: read by torch and NumPy, and by any program for zip."""

import math
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast import Options
from holdfast.convert.emit import BATCH_BYTES, Piece
from holdfast.convert.names import Chosen
from holdfast.convert.to_npz import DTYPES as NUMPY_DTYPES
from holdfast.convert.to_npz import plan_file as plan_npz
from holdfast.convert.to_safetensors import Written
from holdfast.convert.to_torch import NEWER, STORAGES
from holdfast.convert.to_torch import plan_file as plan_torch
from holdfast.errors import OptionError
from holdfast.layout import Tensor, whole
from holdfast.state.tensors import DTYPE_NAMES, TORCH_DTYPES

from .test_export import some_tensor
from .test_source import same

NewPath = Callable[[], Path]
VALUES: dict[str, Any] = {
    "none": None,
    "yes": True,
    "no": False,
    "int": -5,
    "large": 1 << 70,
    "larger": -(1 << 2038),
    "float": math.pi,
    "inf": -math.inf,
    "text": "é\u20ac\U0001f600",
    "bytes": bytes(range(256)),
    "list": [1, [2.5, None], ("a", b"b")],
    "tuple": (),
    "dict": [{"a": {1: [True]}, "b": {}}],
}


def test_every_dtype_has_a_form() -> None:
    assert STORAGES.keys() | NEWER.keys() == TORCH_DTYPES.keys()
    assert not STORAGES.keys() & NEWER.keys()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_torch_loads_every_dtype_and_value(new_path: NewPath) -> None:
    chance = random.Random(8)
    torch.manual_seed(8)
    tensors = {
        f"{name}.{n}": some_tensor(chance, dtype)
        for dtype, name in DTYPE_NAMES.items()
        for n in range(3)
    }
    source, target = new_path(), new_path().with_suffix(".pt")
    holdfast.save(tensors | VALUES | {"set": {1, 2}, "huge": 1 << 2039}, source)
    report = holdfast.export_checkpoint(source, target)
    assert report.left_out == ("set", "huge") and report.to == "torch"
    for mmap in (False, True):
        found = torch.load(target, weights_only=True, mmap=mmap)
        assert found.keys() == tensors.keys() | VALUES.keys()
        assert all(same(found[name], tensors[name]) for name in tensors)
        assert all(found[name] == value for name, value in VALUES.items())
        assert all(type(found[name]) is type(value) for name, value in VALUES.items())
    with zipfile.ZipFile(target) as file:
        assert file.testzip() is None, "a checksum is wrong"


def test_tied_tensors_are_tied_again(new_path: NewPath) -> None:
    weight = torch.randn(30, 3)
    source, target = new_path(), new_path().with_suffix(".pth")
    holdfast.save({"a": weight, "b": weight, "c": torch.ones(2)}, source)
    holdfast.export_checkpoint(source, target, rename={"a": "first"})
    found = torch.load(target, weights_only=True)
    assert found["first"].data_ptr() == found["b"].data_ptr()
    assert target.stat().st_size < 2 * weight.nbytes + 3000


@pytest.mark.parametrize("suffix", [".pt", ".npz"])
def test_large_tensors_come_whole_with_their_checksums(suffix: str, new_path: NewPath) -> None:
    torch.manual_seed(9)
    state = {
        "large": torch.randint(0, 256, (BATCH_BYTES + 4099,), dtype=torch.uint8),
        "double": torch.randn(1001, 2003).double(),
        "small": torch.ones(3),
    }
    source, target = new_path(), new_path().with_suffix(suffix)
    holdfast.save(state, source)
    holdfast.export_checkpoint(source, target, options=Options(pool_bytes=48 << 20), dtype="f32")
    with zipfile.ZipFile(target) as file:
        assert file.testzip() is None
    found = np.load(target) if suffix == ".npz" else torch.load(target, weights_only=True)
    assert np.array_equal(found["large"], state["large"].numpy())
    assert np.array_equal(found["double"], state["double"].float().numpy())


def test_numpy_loads_every_dtype(new_path: NewPath) -> None:
    chance = random.Random(10)
    torch.manual_seed(10)
    state = {
        f"{name}/{n}": some_tensor(chance, TORCH_DTYPES[name])
        for name in NUMPY_DTYPES
        for n in range(4)
    }
    state["scalar"] = torch.tensor(4.5)
    source, target = new_path(), new_path().with_suffix(".npz")
    holdfast.save(state | {"value": 1}, source)
    assert holdfast.export_checkpoint(source, target).left_out == ("value",)
    with np.load(target) as found:
        assert set(found.files) == set(state)
        for name in state:
            assert found[name].dtype == state[name].numpy().dtype, name
            assert found[name].tobytes() == state[name].numpy().tobytes(), name
            assert found[name].shape == tuple(state[name].shape), name


def test_what_numpy_lacks_is_refused(new_path: NewPath) -> None:
    source, target = new_path(), new_path().with_suffix(".npz")
    holdfast.save({"w": torch.ones(2).bfloat16()}, source)
    with pytest.raises(OptionError, match="w is bf16, which NumPy does not have"):
        holdfast.export_checkpoint(source, target)
    holdfast.export_checkpoint(source, target, dtype="f32")
    assert np.load(target)["w"].tolist() == [1, 1]
    holdfast.save({"w": torch.ones(2).to(torch.float8_e5m2)}, source, replace=True)
    with pytest.raises(OptionError, match=r"does not have; leave it out, or export to a \.pt"):
        holdfast.export_checkpoint(source, target.with_name("other.npz"))


@pytest.mark.parametrize("plan", [plan_torch, plan_npz])
@pytest.mark.parametrize("count", [1, 70_000])
def test_archives_of_more_than_32_bits(plan: Any, count: int, new_path: NewPath) -> None:
    """The elements are holes in the file: zeros, that take no room and are not read."""
    large = Tensor(("large",), "u8", ((1 << 32) + 5,))
    tensors = [large, *(Tensor((f"t{n}",), "f32", (1,)) for n in range(count))]
    written = [Written(Piece(str(t.path[0]), t, whole(t.shape), t.dtype), t.shape) for t in tensors]
    planned, _ = plan("a", written, Chosen({}, {}, {}))
    path = new_path()
    with path.open("wb") as file:
        for content in planned.contents:
            if isinstance(content, Piece) and content.size_bytes > 1 << 20:
                file.seek(content.size_bytes, os.SEEK_CUR)
            elif isinstance(content, Piece):
                zeros = bytes(content.size_bytes)
                assert content.see is not None
                content.see(memoryview(zeros))
                file.write(zeros)
            else:
                file.write(content if isinstance(content, bytes) else content.make())
    assert path.stat().st_size == planned.size_bytes
    with zipfile.ZipFile(path) as archive:
        sizes = [info.file_size for info in archive.infolist()]
        assert max(sizes) >= (1 << 32) + 5 and len(sizes) > count
        assert archive.open(archive.infolist()[-1]).read(1)
    if plan is plan_torch:
        found = torch.load(path, weights_only=True, mmap=True)
        assert found["large"].shape == large.shape and not found["large"][-9:].any()
        assert len(found) == count + 1
