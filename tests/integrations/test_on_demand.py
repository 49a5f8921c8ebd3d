"""Tensors that are read when they are used: which boxes are read, and that values are right."""

import copy
import ctypes

import numpy
import pytest
import torch

from holdfast.integrations.on_demand import OnDemand, Origin
from holdfast.layout import Box


class Read:
    """A tensor on demand, the tensor that it stands for, and the boxes that were read."""

    def __init__(self, *shape: int) -> None:
        size = torch.Size(shape).numel()
        self.plain = torch.arange(size, dtype=torch.float32).reshape(shape)
        self.boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.tensor = OnDemand(Origin(shape, torch.float32, self._read))

    def _read(self, box: Box) -> torch.Tensor:
        self.boxes.append((box.offset, box.shape))
        return self.plain[box.slices()].clone()


def test_a_view_reads_nothing() -> None:
    read = Read(8, 6)
    tensor = read.tensor
    views = [tensor.narrow(0, 2, 3), tensor.t(), tensor[1], *tensor.chunk(2), tensor.view(2, 4, 6)]
    views += [tensor.detach(), tensor.unsqueeze(0), tensor.flatten(), tensor.permute(1, 0)]
    assert read.boxes == [] and all(isinstance(view, OnDemand) for view in views)
    assert tensor.shape == (8, 6) and tensor.dtype == torch.float32 and tensor.numel() == 48
    assert tensor.dim() == 2 and tensor.device == torch.device("cpu") and tensor.is_contiguous()
    assert repr(tensor) == "<OnDemand [8, 6] torch.float32>" and read.boxes == []


def test_a_copy_of_a_part_reads_that_part() -> None:
    read, target = Read(8, 6), torch.zeros(3, 6)
    target.copy_(read.tensor.narrow(0, 2, 3))
    assert torch.equal(target, read.plain[2:5])
    assert read.boxes == [((2, 0), (3, 6))]


def test_a_copy_to_what_has_no_memory_reads_nothing() -> None:
    read = Read(8, 6)
    target = torch.empty(8, 6, device="meta")
    assert target.copy_(read.tensor) is target and read.boxes == []


@pytest.mark.parametrize(
    ("cut", "boxes"),
    [
        (lambda t: t.t().narrow(0, 2, 2), [((0, 2), (8, 2))]),
        (lambda t: t[:, 3], [((0, 3), (8, 1))]),
        (lambda t: t[5, 4], [((5, 4), (1, 1))]),
        (lambda t: t.chunk(2, dim=1)[1], [((0, 3), (8, 3))]),
        (lambda t: t.view(2, 4, 6)[1], [((4, 0), (4, 6))]),
        (lambda t: t.unbind(0)[7], [((7, 0), (1, 6))]),
        (lambda t: t[::2], [((0, 0), (8, 6))]),
        (lambda t: t.view(torch.int32), [((0, 0), (8, 6))]),
        (lambda t: t.reshape(-1)[9:14], [((0, 0), (8, 6))]),
        (lambda t: t[:0], [((0, 0), (8, 6))]),
        (lambda t: t.unsqueeze(0).expand(3, 8, 6), [((0, 0), (8, 6))]),
    ],
)
def test_each_cut_has_the_right_elements(cut: object, boxes: object) -> None:
    read = Read(8, 6)
    assert callable(cut)
    found = cut(read.tensor)
    real = found.fetch() if isinstance(found, OnDemand) else found
    wanted = cut(read.plain)
    assert torch.equal(real, wanted) and real.dtype == wanted.dtype
    assert read.boxes == boxes


def test_what_computes_gets_numbers() -> None:
    read = Read(2, 3)
    tensor, plain = read.tensor, read.plain
    assert torch.equal(torch.cat([tensor, tensor]), torch.cat([plain, plain]))
    assert torch.equal(tensor.to(torch.bfloat16), plain.to(torch.bfloat16))
    assert torch.equal(tensor + 1, plain + 1) and torch.equal(1 - tensor, 1 - plain)
    assert tensor[1, 2].item() == 5.0 and tensor.tolist() == plain.tolist()
    assert (tensor.numpy() == plain.numpy()).all()
    assert torch.equal(tensor.t().contiguous(), plain.t()) and torch.equal(tensor, plain)
    assert torch.equal(tensor.data.clone(), plain)


def test_its_memory_is_read_when_someone_asks_where_it_is() -> None:
    read = Read(2, 3)
    part = read.tensor[1]
    assert ctypes.cast(part.data_ptr(), ctypes.POINTER(ctypes.c_float))[2] == 5.0
    assert read.tensor.untyped_storage().data_ptr() == part.data_ptr() - 12
    assert torch.equal(torch.from_dlpack(read.tensor), read.plain)
    assert torch.equal(copy.deepcopy(read.tensor), read.plain)
    assert (numpy.asarray(read.tensor) == read.plain.numpy()).all()


def test_what_is_written_to_it_stays() -> None:
    read = Read(4, 3)
    tensor, part = read.tensor, read.tensor[1:3]
    tensor += 1
    part[0].mul_(10)
    assert isinstance(tensor, OnDemand)
    wanted = read.plain + 1
    wanted[1] *= 10
    assert torch.equal(tensor.fetch(), wanted) and torch.equal(part.fetch(), wanted[1:3])
    assert read.boxes == [((0, 0), (4, 3))]


def test_elements_from_all_over_are_read_once() -> None:
    read = Read(8, 6)
    for start in range(2):
        assert torch.equal(read.tensor[start::2].clone(), read.plain[start::2])
    assert read.boxes == [((0, 0), (8, 6))]
