"""Checkpoints of ByteCheckpoint as sources, from files that it wrote (make_bytecheckpoint.py)."""

import pickletools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.convert.kinds import open_source
from holdfast.errors import CorruptError, HoldfastError

from .make_bytecheckpoint import step, trained
from .test_torch_file import all_of
from .unpacked import unpacked

NewPath = Callable[[], Path]


@pytest.fixture
def theirs(new_path: NewPath) -> Path:
    return unpacked("bytecheckpoint", new_path()) / "global_step_2"


def test_shards_of_fsdp_are_whole_tensors(theirs: Path) -> None:
    net, optimizer = trained()
    step(net, optimizer)
    with open_source(theirs) as source:
        assert source.kind == "bytecheckpoint"
        found = all_of(source)
    names = dict(net.named_parameters())
    for name, tensor in names.items():
        torch.testing.assert_close(found["model", name], tensor.detach())
        for key in ("exp_avg", "exp_avg_sq", "step"):
            expected = optimizer.state[tensor][key]
            torch.testing.assert_close(found["optimizer", "state", name, key], expected)
    assert len(found) == 4 * len(names)


def test_values_of_the_optimizer_and_of_each_rank_come_along(
    theirs: Path, new_path: NewPath
) -> None:
    ours = new_path()
    holdfast.import_checkpoint(theirs, ours)
    values = holdfast.open(ours).objects()
    assert values["extra_state.extra_state_rank_0.note"] == 0
    assert values["extra_state.extra_state_rank_1.note"] == 1
    assert values["optimizer.param_groups"][0]["lr"] == 0.01


def test_a_file_that_is_cut_or_missing_is_named(theirs: Path) -> None:
    file = theirs / "model" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptError, match=r"__1_0\.distcp.*not within the file"):
        open_source(theirs)
    file.unlink()
    with pytest.raises(CorruptError, match=r"__1_0\.distcp is missing"):
        open_source(theirs)


def test_changed_metadata_is_read_or_a_typed_error(theirs: Path) -> None:
    file = theirs / "model" / ".metadata"
    data, refused = file.read_bytes(), 0
    places = [at for _, _, at in pickletools.genops(data) if at is not None]
    for at in places:
        for new in (0x4E, 0x5D, 0x29):  # None, an empty list, an empty tuple
            changed = bytearray(data)
            changed[at] = new
            file.write_bytes(changed)
            try:
                with open_source(theirs) as source:
                    all_of(source)
            except HoldfastError:
                refused += 1
    assert refused > len(places)
