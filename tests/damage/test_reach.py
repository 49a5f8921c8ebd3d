"""What verify says is lost is what cannot be read: no more, no less, through chains and groups."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import CorruptError
from holdfast.faults.reach import with_referring
from unit.test_chains import at, stepped

NewPath = Callable[[], Path]
OPTIONS = holdfast.Options(chunk_elements=400, pool_bytes=32 << 20)
STEPS, TRIALS = 3, 8


def grow(root: Path, codec: str) -> None:
    """Three steps of two parameters with their moments, a master of each, and one more tensor."""
    draw = torch.Generator().manual_seed(5)
    names = ("a", "b")
    master = {name: torch.randn(30, 40, generator=draw) / 50 for name in names}
    moments = {
        name: {
            "exp_avg": torch.randn(30, 40, generator=draw) * 1e-4,
            "exp_avg_sq": torch.rand(30, 40, generator=draw) * 1e-8,
        }
        for name in names
    }
    model = {name: master[name].bfloat16() for name in names}
    state = {"model": model, "master": master, "optimizer": {"state": moments}}
    for step in range(STEPS):
        state = stepped(state, step)
        state["still"] = torch.arange(900)
        holdfast.save(state, at(root, step), step=step, codec=codec, options=OPTIONS)


@pytest.mark.parametrize("codec", ["raw", "lossless", "delta", "delta:replay", "compact", "excp"])
def test_what_is_lost_is_what_cannot_be_read(new_path: NewPath, codec: str) -> None:
    root, seed = new_path(), random.randrange(2**32)
    print(f"seed {seed}")
    grow(root, codec)
    chance, costs = random.Random(seed), set[int]()
    for _ in range(TRIALS):
        hit = at(root, chance.randrange(STEPS))
        manifest = holdfast.open(hit)._manifest
        rows = [row for row, size in enumerate(manifest.chunk_bytes.tolist()) if size]
        row = chance.choice(rows)
        offset = int(manifest.chunk_start[row]) + chance.randrange(int(manifest.chunk_bytes[row]))
        file = hit / manifest.file_names[0]
        content = file.read_bytes()
        file.write_bytes(content[:offset] + bytes([content[offset] ^ 16]) + content[offset + 1 :])
        known: dict[str, holdfast.integrity.verify.Verified] = {}
        for step in range(STEPS):
            found = holdfast.verify(at(root, step), options=OPTIONS, known=known)
            lost = {part.tensor: part.boxes for d in found.damage for part in d.lost}
            check(at(root, step), lost)
            deep = holdfast.verify(at(root, step), deep=True, options=OPTIONS)
            assert len(deep.damage) == len(found.damage) <= 1
            costs.add(len(lost))
        file.write_bytes(content)
    assert len(costs) > 1, "no fault cost anything"


def test_the_first_chunk_of_a_file_is_lost_with_what_it_refers_to(new_path: NewPath) -> None:
    root = new_path()
    grow(root, "excp")
    manifest = holdfast.open(at(root, STEPS - 1))._manifest
    other = int(manifest.references[0])
    assert other > 0
    lost = np.zeros(len(manifest.chunk_start), np.bool_)
    lost[other] = True
    assert np.flatnonzero(with_referring(manifest, lost)).tolist() == [0, other]


Boxes = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def check(path: Path, lost: dict[str, Boxes]) -> None:
    """Read every tensor, and every element of what is lost of it, and one row of the rest."""
    with holdfast.open(path, options=OPTIONS) as checkpoint:
        for name in checkpoint.names():
            if name not in lost:
                checkpoint.tensor(name)
                continue
            shape = checkpoint.info(name).shape
            spoiled = torch.zeros(shape, dtype=torch.bool)
            for offset, extent in lost[name]:
                spoiled[tuple(slice(a, a + n) for a, n in zip(offset, extent, strict=True))] = True
            assert spoiled.any()
            for index in (
                (0,) * len(shape),
                tuple(n - 1 for n in shape),
                tuple(n // 2 for n in shape),
            ):
                box = (index, (1,) * len(shape))
                if spoiled[index]:
                    with pytest.raises(CorruptError):
                        checkpoint.tensor(name, box)
                else:
                    checkpoint.tensor(name, box)
            with pytest.raises(CorruptError):
                checkpoint.tensor(name)
