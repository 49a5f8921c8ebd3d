"""An open checkpoint: what it says of itself, and what it reads, from any thread and any size."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import MismatchError, OptionError

from .test_round_trip import bits_of
from .training import same

NewPath = Callable[[], Path]
POOL = 32 << 20  # two slots, the smallest there is


def test_a_checkpoint_describes_itself(new_path: NewPath) -> None:
    path = new_path()
    weight = torch.arange(12.0).reshape(3, 4)
    state = {"model": {"w": weight, "tied": weight, "empty": torch.zeros(0, 3)}, "epoch": 7}
    holdfast.save(state, path, step=12, metrics={"loss": 0.5, "best": float("inf")})
    with holdfast.open(str(path)) as checkpoint:
        assert checkpoint.location == str(path)
        assert (checkpoint.step, checkpoint.world_size, checkpoint.mesh) == (12, 1, None)
        assert checkpoint.metrics == {"loss": 0.5, "best": float("inf")}
        assert checkpoint.written_by == f"holdfast {holdfast.__version__}"
        assert checkpoint.file_names == (f"data/{checkpoint.save_id}/00000-0.hf",)
        assert checkpoint.file_bytes == ((path / checkpoint.file_names[0]).stat().st_size,)
        assert checkpoint.objects() == {"epoch": 7}
        assert repr(checkpoint) == f"<Checkpoint {path} step=12 tensors=3>"
        info = checkpoint.info("model.w")
        assert (info.name, info.dtype, info.shape) == ("model.w", "f32", (3, 4))
        assert (info.size_bytes, info.stored_bytes) == (48, 48)
        assert info.shards == (((0, 0), (3, 4)),)
        assert info.tied_to is None
        assert checkpoint.info("model.tied").tied_to == "model.w"
        assert checkpoint.info("model.empty").shards == ()
        assert same(checkpoint.state(), state)


def test_an_unknown_name_is_answered_with_similar_ones(new_path: NewPath) -> None:
    path = new_path()
    holdfast.save({"layers": {str(i): torch.zeros(1) for i in range(5)}, "step": 3}, path)
    checkpoint = holdfast.open(path)
    with pytest.raises(MismatchError, match=r"no tensor 'layer\.3'; expected one of layers\.3"):
        checkpoint.tensor("layer.3")
    with pytest.raises(MismatchError, match=r"no tensor 'zzz'; expected one of layers\.\S+, .* …"):
        checkpoint.info("zzz")
    with pytest.raises(MismatchError, match="no tensor 'step'"):
        checkpoint.tensor("step")


@pytest.mark.parametrize("box", [5, (1,), (1, 2, 3), ((0,), 1), ("a", "b"), ((0.5,), (1,))])
def test_a_box_that_is_none_is_refused(new_path: NewPath, box: Any) -> None:
    path = new_path()
    holdfast.save({"t": torch.zeros(4)}, path)
    with pytest.raises(OptionError, match=r"box is .*; expected \(offset, shape\)"):
        holdfast.open(path).tensor("t", box)


def test_many_threads_read_one_checkpoint(new_path: NewPath) -> None:
    path = new_path()
    whole = torch.arange(40_000).reshape(200, 200)
    options = holdfast.Options(chunk_elements=97, pool_bytes=POOL)
    holdfast.save({"t": whole, "u": -whole}, path, options=options)
    checkpoint = holdfast.open(path, options=options)

    def read(number: int) -> bool:
        row, column = number % 150, (7 * number) % 150
        found = checkpoint.tensor("t" if number % 2 else "u", ((row, column), (50, 50)))
        expected = whole[row : row + 50, column : column + 50]
        return torch.equal(found if number % 2 else -found, expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(60)))


def test_a_state_larger_than_the_pool_streams_through_it(new_path: NewPath) -> None:
    path = new_path()
    options = holdfast.Options(pool_bytes=POOL)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(-(2**62), 2**62, (3, 2_500_001), generator=generator)
    state = {"large": whole, "turned": whole.view(torch.int32)[:, :700_001].t()}
    assert whole.nbytes > POOL
    holdfast.save(state, path, options=options)
    target = {
        "large": torch.zeros_like(whole),
        "turned": torch.zeros(700_001, 3, dtype=torch.int32),
    }
    report = holdfast.load(path, into=target, options=options)
    assert same(target, state)
    assert report.bytes_needed == sum(tensor.nbytes for tensor in state.values())
    assert report.bytes_needed <= report.bytes_read < report.bytes_needed * 1.01
    part = holdfast.open(path, options=options).tensor("large", ((1, 2_000_000), (2, 5)))
    assert same(part, whole[1:, 2_000_000:2_000_005])
    checked: list[int] = []
    assert holdfast.open(path, options=options).verify(checked.append) == []
    assert sum(checked) >= report.bytes_needed


def test_a_tensor_larger_than_a_file_is_cut_into_several(new_path: NewPath) -> None:
    path = new_path()
    options = holdfast.Options(file_bytes=1 << 16, pool_bytes=POOL)
    whole = torch.arange(60_000, dtype=torch.int16).reshape(3, 20_000)
    holdfast.save({"t": whole, "small": torch.ones(3)}, path, options=options)
    checkpoint = holdfast.open(path, options=options)
    assert len(checkpoint.info("t").shards) == 6
    assert len(checkpoint.file_names) == 7
    assert max(checkpoint.file_bytes) <= 1 << 16
    target = {"t": torch.zeros_like(whole), "small": torch.zeros(3)}
    holdfast.load(path, into=target, options=options)
    assert bits_of(target["t"]) == bits_of(whole)
