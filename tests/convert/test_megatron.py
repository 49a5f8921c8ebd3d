"""Checkpoints of Megatron-Core as sources, from files that it has written (make_megatron.py)."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.cli import main
from holdfast.convert.kinds import open_source
from holdfast.errors import CorruptError, OptionError

from .make_megatron import tensors
from .test_torch_file import assert_same
from .unpacked import unpacked

NewPath = Callable[[], Path]


@pytest.fixture
def theirs(new_path: NewPath) -> Path:
    return unpacked("megatron", new_path())


def test_tensors_of_all_ranks_are_whole(theirs: Path) -> None:
    with open_source(theirs) as source:
        assert source.kind == "megatron"
        assert {str(tensor.path[0]) for tensor in source.tensors} == set(tensors())
        assert_same(source, tensors())


def test_values_come_along_and_classes_are_left_out_by_name(theirs: Path) -> None:
    with open_source(theirs) as source:
        values = dict(source.values)
        assert values.pop(("decoder.extra_state/shard_0_1",)).getvalue() == b"abc"
        rng = [{"random_rng_state": (3, (1, 2), None), "np": b"x"}]
        assert values == {
            ("rng_state/shard_0_2",): rng,
            ("rng_state/shard_1_2",): rng,
            ("args",): Namespace(lr=0.1, dtype=torch.bfloat16),
            ("iteration",): 100,
            ("optimizer", "param_groups"): [{"lr": 0.1, "params": [0, 1]}],
        }
        assert source.advice == ("left out args.backend, of __mp_main__.Backend",)


def test_it_becomes_a_checkpoint_of_holdfast(theirs: Path, new_path: NewPath) -> None:
    ours = new_path()
    holdfast.import_checkpoint(theirs, ours)
    with holdfast.open(ours) as checkpoint:
        assert checkpoint.verify(deep=True) == []
        assert torch.equal(checkpoint.tensor("decoder.w"), tensors()["decoder.w"])


def test_the_command_says_what_it_leaves_out(
    theirs: Path, new_path: NewPath, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(theirs), str(new_path())]) == 0
    out = capsys.readouterr().out
    assert "from megatron: 3 tensors" in out and "left out args.backend" in out


def test_another_format_is_refused(theirs: Path) -> None:
    config = theirs / "metadata.json"
    config.write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(OptionError, match="'zarr'; expected torch_dist"):
        open_source(theirs)
    config.write_text("{}")
    with pytest.raises(CorruptError, match="no sharded_backend"):
        open_source(theirs)


def test_a_file_of_a_rank_that_is_missing_is_named(theirs: Path) -> None:
    (theirs / "__1_0.distcp").unlink()
    with pytest.raises(CorruptError, match=r"__1_0\.distcp is missing"):
        open_source(theirs)
