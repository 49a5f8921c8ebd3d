"""Checkpoints written again: the same bits under another codec, or without what they needed."""

import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from format import reader
from format.forge import Forgery
from format.simulated_ranks import run_ranks
from holdfast import codecs
from holdfast.errors import AlreadyCommittedError, CorruptError, NotCommittedError, StoreError
from holdfast.format.table import content_digest
from holdfast.options import Options
from holdfast.stores.local import LocalStore
from holdfast.testing import Fault, faulty

from .test_chains import at, grow, holds, links, manifest, stepped
from .test_lossless import same, trained

NewPath = Callable[[], Path]
OPTIONS = Options(chunk_elements=5000)


def test_a_link_that_is_rebased_needs_no_other(new_path: NewPath) -> None:
    root = new_path()
    states = grow(root, 5, codecs.Delta())
    before = content_digest(manifest(at(root, 3)).table)
    assert holdfast.rebase(at(root, 3), options=OPTIONS)
    assert content_digest(manifest(at(root, 3)).table) == before
    assert links(at(root, 3)) == 0 and links(at(root, 4)) == 4
    for step in range(3):
        shutil.rmtree(at(root, step))
    for step in (3, 4):  # what was made from it is as good as before
        assert holds(at(root, step), states[step])
    assert len(list(at(root, 3).glob("data/*"))) == 1
    assert not holdfast.rebase(at(root, 3))
    later = stepped(states[4], 9)
    holdfast.save(later, at(root, 5), codec=codecs.Delta(), options=OPTIONS)
    assert holds(at(root, 5), later)


def test_what_several_ranks_wrote_is_rebased(new_path: NewPath) -> None:
    root, state = new_path(), trained(3)
    for step in range(3):
        state = stepped(state, step)

        def save(group: Any, state: Any = state, step: int = step) -> None:
            holdfast.save(state, at(root, step), codec="delta", group=group, options=OPTIONS)

        run_ranks(3, save)
    assert holdfast.rebase(at(root, 1))
    shutil.rmtree(at(root, 0))
    assert links(at(root, 1)) == 0 and holds(at(root, 2), state)
    with holdfast.open(at(root, 1)) as checkpoint:
        assert checkpoint.world_size == 3 and checkpoint.objects()["step"] == 3


@pytest.mark.parametrize("operation", ["write", "sync", "rename", "sync_directory", "create"])
def test_a_rebase_that_fails_leaves_a_good_link(new_path: NewPath, operation: str) -> None:
    root = new_path()
    states = grow(root, 2, codecs.Delta())
    files = sorted(p.name for p in at(root, 1).rglob("*"))
    with (
        faulty(Fault(operation, persistent=True)),
        pytest.raises(StoreError),
    ):
        holdfast.rebase(at(root, 1), options=OPTIONS)
    assert holds(at(root, 1), states[1])
    if operation != "sync_directory":  # after which nobody can say which MANIFEST stays
        assert sorted(p.name for p in at(root, 1).rglob("*")) == files


def test_a_rebase_whose_reply_is_lost_removes_nothing_that_is_named(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, rename = new_path(), LocalStore.rename
    states = grow(root, 2, codecs.Delta())
    before = (at(root, 1) / "MANIFEST").read_bytes()

    def rename_and_lose_contact(self: LocalStore, *job: Any) -> None:
        rename(self, *job)
        raise StoreError("rename: the reply was lost")

    monkeypatch.setattr(LocalStore, "rename", rename_and_lose_contact)
    holdfast.rebase(at(root, 1), options=OPTIONS)  # it finds its own MANIFEST there
    assert (at(root, 1) / "MANIFEST").read_bytes() != before
    shutil.rmtree(at(root, 0))
    assert holds(at(root, 1), states[1])


def test_a_damaged_base_is_not_written_into_a_link(new_path: NewPath) -> None:
    root = new_path()
    grow(root, 2, codecs.Delta())
    file = at(root, 0) / manifest(at(root, 0)).file_names[0]
    content = bytearray(file.read_bytes())
    content[4096 : len(content) - 4096] = bytes(len(content) - 8192)
    file.write_bytes(content)
    before = (at(root, 1) / "MANIFEST").read_bytes()
    with pytest.raises(CorruptError, match="step-00000000"):
        holdfast.rebase(at(root, 1))
    assert (at(root, 1) / "MANIFEST").read_bytes() == before


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_a_link_is_written_again_elsewhere(new_path: NewPath, codec: str) -> None:
    root, other = new_path(), new_path()
    states = grow(root, 3, codecs.Delta())
    holdfast.recompress(at(root, 2), other, codec=codec)
    assert holds(other, states[2]) and links(other) == 0
    with holdfast.open(other) as checkpoint:
        assert {checkpoint.info(name).codec for name in checkpoint.names()} == {codec}
    with pytest.raises(AlreadyCommittedError):
        holdfast.recompress(at(root, 2), other, codec=codec)
    with pytest.raises(NotCommittedError):
        holdfast.recompress(root / "none", new_path(), codec=codec)


def test_a_run_of_raw_steps_becomes_a_chain(new_path: NewPath) -> None:
    root, lossless, small = new_path(), new_path(), new_path()
    state, states = trained(3), []
    for step in range(4):
        state = stepped(state, step)
        holdfast.save(state, at(root, step), step=step, options=OPTIONS)
        states.append(state)
        holdfast.recompress(at(root, step), at(lossless, step), codec="delta")
        holdfast.recompress(at(root, step), at(small, step), codec="compact:small")
    assert [links(at(lossless, step)) for step in range(4)] == [0, 1, 2, 3]
    for step in range(4):
        assert holds(at(lossless, step), states[step])
    sizes = [sum(holdfast.open(at(small, step)).file_bytes) for step in range(4)]
    assert max(sizes[1:]) < sizes[0] / 10
    assert holdfast.open(at(small, 3)).step == 3


def test_a_deep_check_decodes_everything(new_path: NewPath) -> None:
    """A digest that is not of what was saved: every checksum is right, and only decoding tells."""
    root, other = new_path(), new_path()
    grow(root, 3, codecs.Delta())
    for step in range(3):
        with holdfast.open(at(root, step)) as checkpoint:
            assert checkpoint.verify(deep=True) == []
    forgery = Forgery.read(at(root, 0))
    for table in (forgery.manifest, forgery.files[0].footer):
        table.columns["shard.digest"][3] = bytes(16)
    forgery.write(other)
    with holdfast.open(other) as checkpoint:
        assert checkpoint.verify() == []
        (damage,) = checkpoint.verify(deep=True)
    assert "does not decode to the saved elements" in damage.what and damage.tensor is not None
    with pytest.raises(reader.Corrupt, match="shard digest"):
        reader.read(other)


@pytest.mark.timeout(60)
def test_a_checkpoint_of_four_thousand_million_ranks_is_written_again(new_path: NewPath) -> None:
    """The number is a word of the MANIFEST, and takes no memory."""
    path, told, other = new_path(), new_path(), new_path()
    holdfast.save({"w": torch.ones(3)}, path)
    forgery = Forgery.read(path)
    for table in (forgery.manifest, forgery.files[0].footer):
        table.header["world_size"] = 2**32 - 1
    forgery.write(told)
    tracemalloc.start()
    holdfast.recompress(told, other, codec="lossless")
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert holdfast.open(other).world_size == 2**32 - 1
    assert same(holdfast.open(other).state(), {"w": torch.ones(3)})


def test_a_checkpoint_without_elements_is_written_again(new_path: NewPath) -> None:
    path, other = new_path(), new_path()
    holdfast.save({"empty": torch.empty(0, 3), "n": 3}, path)
    holdfast.recompress(path, other, codec="lossless")
    assert same(holdfast.open(other).state(), holdfast.open(path).state())
