"""The footer of a checkpoint's only file, which a load compares with MANIFEST byte by byte."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from format.forge import COLUMNS, Forgery
from holdfast import Options
from holdfast.errors import CorruptError


def state(fill: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((3, 4), fill), "b": torch.full((3,), fill)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    holdfast.save(state(1.0), tmp_path / "a", options=Options(chunk_elements=4))
    return tmp_path / "a"


def forged(saved: Path, change: Callable[[Forgery], None]) -> Path:
    forgery = Forgery.read(saved)
    assert len(forgery.files) == 1
    assert forgery.header["objects"] == []
    change(forgery)
    path = saved.with_name("forged")
    forgery.write(path)
    return path


def load(path: Path) -> None:
    target = state()
    holdfast.load(path, into=target)
    assert all(torch.equal(target[name], value) for name, value in state(1.0).items())


def test_a_checkpoint_put_together_again_loads(saved: Path) -> None:
    load(forged(saved, lambda forgery: None))


@pytest.mark.parametrize("name", [name for name, *_ in COLUMNS])
@pytest.mark.parametrize("row", [0, -1])
def test_a_footer_that_differs_in_one_number_is_refused(saved: Path, name: str, row: int) -> None:
    def change(forgery: Forgery) -> None:
        column = forgery.files[0].footer.columns[name]
        was = column[row]
        column[row] = was + 1 if isinstance(was, int) else bytes(16)
        forgery.footer_kept.add(name)

    with pytest.raises(CorruptError, match=f"differ in .*{name.replace('.', '_')}"):
        load(forged(saved, change))


@pytest.mark.parametrize("key", ["save_id", "step", "written_by", "tensors"])
def test_a_footer_that_differs_in_its_header_is_refused(saved: Path, key: str) -> None:
    def change(forgery: Forgery) -> None:
        other = {"save_id": "ab" * 16, "step": 8, "written_by": "another"}
        header = forgery.files[0].footer.header
        header[key] = other.get(key, header["tensors"][::-1])

    with pytest.raises(CorruptError, match=f"differ in .*{key}"):
        load(forged(saved, change))


def test_a_header_in_another_form_loads_where_the_footer_says_the_same(saved: Path) -> None:
    def change(forgery: Forgery) -> None:
        for table in (forgery.manifest, forgery.files[0].footer):
            table.header = dict(reversed(table.header.items()))

    load(forged(saved, change))
