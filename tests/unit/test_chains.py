"""codec=Delta(): links of chains come back bit for bit, whatever wrote and reads them."""

import contextlib
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from format import reader
from format.simulated_ranks import cut, pieces, save_pieces
from holdfast import Keep, codecs
from holdfast.chains import base_choice
from holdfast.codecs.base import EVERY_MAX
from holdfast.engine import read_pipeline
from holdfast.engine.basis import forget_bases, last_link
from holdfast.errors import CorruptError, OptionError, StoreError
from holdfast.format.manifest import Manifest
from holdfast.format.spec import CHAIN_LINKS_MAX
from holdfast.options import Options
from holdfast.runs import directory as directory_module
from holdfast.stores.local import LocalStore
from holdfast.testing import Fault, faulty, recording

from .test_lossless import bits, same, stored, trained
from .test_sharing import load_together

NewPath = Callable[[], Path]
CHUNK = 5000
OPTIONS = Options(chunk_elements=CHUNK)
DIFFERENCE, UNCHANGED = 6, 7


def stepped(state: Any, seed: int) -> Any:
    """A state some steps later: masters move a little, moments a lot, the rest not at all."""
    draw = torch.Generator().manual_seed(seed)
    later = {key: dict(value) for key, value in state.items() if isinstance(value, dict)}
    for name, master in state["master"].items():
        moved = master + 1e-4 * torch.randn(master.shape, generator=draw)
        later["master"][name], later["model"][name] = moved, moved.bfloat16()
    moments = state["optimizer"]["state"]
    later["optimizer"] = {
        "state": {
            name: {
                key: value * torch.rand(value.shape, generator=draw).add(0.5)
                for key, value in moments[name].items()
            }
            for name in moments
        }
    }
    return state | later


def at(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def manifest(path: Path) -> Manifest:
    with holdfast.open(path) as checkpoint:
        return checkpoint._manifest


def links(path: Path) -> int:
    base = manifest(path).table.header.base
    return base.links if base else 0


def modes(path: Path) -> set[int]:
    return set(np.unique(manifest(path).table.chunk_size_mode >> 24).tolist())


def grow(root: Path, count: int, codec: codecs.Delta, **how: Any) -> list[Any]:
    """Save so many links; return what each holds."""
    state, states = trained(3), []
    for step in range(count):
        state = stepped(state, step)
        holdfast.save(state, at(root, step), step=step, codec=codec, options=OPTIONS, **how)
        states.append(state)
    return states


def holds(path: Path, state: Any) -> bool:
    """Whether both readers find a state at a path."""
    reader.read(path)
    with holdfast.open(path) as checkpoint:
        return same(checkpoint.state(), state) and not checkpoint.verify()


def test_every_link_holds_its_state(new_path: NewPath) -> None:
    root = new_path()
    states = grow(root, 6, codecs.Delta(every=4))
    assert [links(at(root, step)) for step in range(6)] == [0, 1, 2, 3, 0, 1]
    for step, state in enumerate(states):
        assert holds(at(root, step), state)
        target = trained(1)
        holdfast.load(at(root, step), into=target)
        assert same(target, state)
    assert modes(at(root, 3)) >= {DIFFERENCE, UNCHANGED}
    with holdfast.open(at(root, 0)) as key, holdfast.open(at(root, 3)) as link:
        assert stored(link, "master.up.weight") < 0.8 * stored(key, "master.up.weight")
        assert stored(link, "model.up.weight") == 0
        assert stored(link, "rng") < 0.01


@pytest.mark.parametrize("stage", ["eager", "lazy"])
def test_links_are_saved_in_the_background(new_path: NewPath, stage: Any) -> None:
    root, state = new_path(), trained(3)
    for step in range(4):
        state = stepped(state, step)
        codec = codecs.Delta(every=3)
        handle = holdfast.save_async(
            state, at(root, step), codec=codec, stage=stage, options=OPTIONS
        )
        handle.result()
        assert holds(at(root, step), state)
    assert [links(at(root, step)) for step in range(4)] == [0, 1, 2, 0]


def test_a_new_process_reads_its_base_and_goes_on(new_path: NewPath) -> None:
    root = new_path()
    states = grow(root, 2, codecs.Delta())
    forget_bases()  # as in a new process
    later = stepped(states[-1], 9)
    holdfast.save(later, at(root, 9), codec=codecs.Delta(), options=OPTIONS)
    assert links(at(root, 9)) == 2 and DIFFERENCE in modes(at(root, 9))
    assert holds(at(root, 9), later)


def test_chains_of_twenty_links_are_cut_anew_for_each(new_path: NewPath) -> None:
    """Other ranks, other boxes and other chunks at each link; any box of the last comes back."""
    root, chance, state = new_path(), random.Random(5), trained(3)
    for step in range(21):
        state = stepped(state, step)
        ranks = chance.randint(1, 4)
        states: list[dict[Any, Any]] = [{} for _ in range(ranks)]
        for place in ("model", "master"):
            for name, tensor in state[place].items():
                shape = tuple(tensor.shape)
                boxes = cut(chance, (0,) * len(shape), shape, chance.randint(1, ranks))
                for rank, piece in enumerate(pieces(tensor, boxes)):
                    states[rank][place, name] = piece
        if chance.random() < 0.5:
            forget_bases()
        sizes = Options(chunk_elements=chance.choice([700, CHUNK]))
        save_pieces(at(root, step), states, codec=codecs.Delta(every=40), options=sizes)
    assert links(at(root, 20)) == 20
    with holdfast.open(at(root, 20)) as checkpoint:
        found = checkpoint.state()
        assert same(found, {key: state[key] for key in ("model", "master")})
        part = checkpoint.tensor("master.up.weight", ((20, 9), (101, 33)))
        assert torch.equal(part, state["master"]["up.weight"][20:121, 9:42])


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_load_a_link_together(new_path: NewPath, world_size: int) -> None:
    root = new_path()
    states = grow(root, 3, codecs.Delta())
    found = load_together(at(root, 2), world_size, lambda _: trained(1))
    assert len(found) == world_size
    assert all(same(target, states[2]) for target, _ in found)


def test_bases_are_read_in_bounded_parts(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = new_path()
    states = grow(root, 5, codecs.Delta())
    parts: list[int] = []
    whole = read_pipeline._elements_below

    def note(chain: Any, lease: Any, reads: Any) -> Any:
        parts.append(sum(read.chunk.size_bytes for read in reads))
        return whole(chain, lease, reads)

    monkeypatch.setattr(read_pipeline, "_elements_below", note)
    monkeypatch.setattr(read_pipeline, "SCRATCH_BYTES", 0)
    monkeypatch.setattr(read_pipeline, "BATCH_BYTES_MIN", 50_000)
    with holdfast.open(at(root, 4)) as checkpoint:
        assert same(checkpoint.state(), states[4])
    most = max(t.nbytes for t in states[4]["master"].values()) + 4 * CHUNK
    assert len(parts) > 8 and max(parts) <= 2 * most


def test_what_is_needed_of_a_base_is_read_and_counted(new_path: NewPath) -> None:
    root = new_path()
    grow(root, 4, codecs.Delta())
    sizes = [sum(holdfast.open(at(root, step)).file_bytes) for step in range(4)]
    report = holdfast.load(at(root, 3), into=trained(1))
    # Weights of all four, moments of the last alone.
    assert sizes[3] < report.bytes_read < sizes[3] + 0.75 * sum(sizes[:3])


@pytest.mark.parametrize("call", ["sync", "write"])
@pytest.mark.parametrize("lasts", [False, True])
def test_a_fault_of_the_disk_spoils_no_link(new_path: NewPath, call: str, lasts: bool) -> None:
    """Neither this one, written a second time after a failed fsync, nor the next."""
    root = new_path()
    states = grow(root, 2, codecs.Delta())
    later = stepped(states[-1], 8)
    with faulty(Fault(call, nth=1, persistent=lasts)), contextlib.suppress(StoreError):
        holdfast.save(later, at(root, 2), codec=codecs.Delta(), options=OPTIONS)
    if at(root, 2).joinpath("MANIFEST").exists():
        assert not lasts and holds(at(root, 2), later)
    later = stepped(later, 9)
    holdfast.save(later, at(root, 3), codec=codecs.Delta(), options=OPTIONS)
    assert DIFFERENCE in modes(at(root, 3)) and holds(at(root, 3), later)


def test_a_base_that_is_gone_or_another_is_named(new_path: NewPath) -> None:
    root = new_path()
    grow(root, 3, codecs.Delta())
    shutil.copytree(root, root.parent / "other")
    shutil.rmtree(at(root, 1))
    with pytest.raises(CorruptError, match=r"a delta of step-00000001.*missing"):
        holdfast.load(at(root, 2), into=trained(1))
    holdfast.save(trained(2), at(root, 1), options=OPTIONS)
    with pytest.raises(CorruptError, match=r"step-00000001.*another checkpoint there \(step None"):
        holdfast.load(at(root, 2), into=trained(1))
    with pytest.raises(reader.Corrupt, match="something else"):
        reader.read(at(root, 2))
    holdfast.load(root.parent / "other" / "step-00000002", into=trained(1))


def test_a_base_that_was_saved_anew_is_read_again(new_path: NewPath) -> None:
    """What is kept in memory is of a checkpoint that another process has replaced."""
    root = new_path()
    states = grow(root, 2, codecs.Delta())
    shutil.rmtree(at(root, 1))
    other = stepped(states[0], 77)
    holdfast.save(other, root / "moved", options=OPTIONS)
    (root / "moved").rename(at(root, 1))
    later = stepped(states[1], 78)
    holdfast.save(later, at(root, 2), codec=codecs.Delta(), options=OPTIONS)
    assert links(at(root, 2)) == 1 and DIFFERENCE in modes(at(root, 2))
    assert holds(at(root, 2), later)


def test_a_damaged_base_is_found_by_who_needs_it(new_path: NewPath) -> None:
    root = new_path()
    grow(root, 3, codecs.Delta())
    key = manifest(at(root, 0))
    file = at(root, 0) / key.file_names[0]
    content = bytearray(file.read_bytes())
    master = next(i for i, t in enumerate(key.table.header.tensors) if t.path[0] == "master")
    row = int(key.shard_first_row[key.shards_of(master)[0]])
    content[int(key.chunk_start[row])] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptError, match="step-00000000"):
        holdfast.load(at(root, 2), into=trained(1))


@pytest.mark.parametrize("codec", ["delta", "compact"])
def test_a_damaged_base_keeps_no_run_from_saving(new_path: NewPath, codec: str) -> None:
    """A new process cannot read it: the next step is stored without it, and the run goes on."""
    root, state = new_path(), trained(3)
    for step in range(2):
        state = stepped(state, step)
        holdfast.save(state, at(root, step), codec=codec, options=OPTIONS)
    forget_bases()
    for file in at(root, 0).glob("data/*/*.hf"):
        content = bytearray(file.read_bytes())
        content[4096 : len(content) - 4096] = bytes(len(content) - 8192)
        file.write_bytes(content)
    later = stepped(state, 2)
    holdfast.save(later, at(root, 2), codec=codec, options=OPTIONS)
    with holdfast.open(at(root, 2)) as checkpoint:
        assert same(checkpoint.state()["master"], later["master"])
    last = stepped(later, 3)
    holdfast.save(last, at(root, 3), codec=codec, options=OPTIONS)
    shutil.rmtree(at(root, 0))
    with holdfast.open(at(root, 3)) as checkpoint:
        assert checkpoint.base == "step-00000002" and checkpoint.verify(deep=True) == []


def test_what_the_base_lacks_stands_by_itself(new_path: NewPath) -> None:
    """Tensors that are new, or of another dtype or shape."""
    root = new_path()
    first = {"a": torch.randn(90, 80), "b": torch.randn(50, 40), "c": torch.randn(70, 60)}
    second = {"a": first["a"] + 1e-5, "b": torch.randn(51, 40), "c": first["c"].double()}
    second["d"] = torch.randn(30, 30)
    codec = codecs.Delta()
    for forget in (False, True):
        holdfast.save(first, at(root, 0), codec=codec, options=OPTIONS)
        if forget:
            forget_bases()
        holdfast.save(second, at(root, 1), codec=codec, options=OPTIONS)
        found = manifest(at(root, 1))
        owner = np.repeat(found.table.shard_tensor, found.table.shard_chunks)
        names = [".".join(map(str, t.path)) for t in found.table.header.tensors]
        assert {names[n] for n in owner[found.based].tolist()} == {"a"}
        assert holds(at(root, 1), second)
        shutil.rmtree(root)
        forget_bases()


def test_a_step_that_could_not_be_let_go_keeps_what_it_needs(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, state, retire = new_path(), trained(3), directory_module.retire

    def retire_but_links(store: LocalStore) -> None:
        if store.location.endswith("2"):
            raise StoreError("the disk does not answer")
        retire(store)

    codec = codecs.Delta(every=2)
    with holdfast.Checkpointer(
        root, keep=Keep.latest(1), codec=codec, options=OPTIONS
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state := stepped(state, step))
        with monkeypatch.context() as patched:
            patched.setattr(directory_module, "retire", retire_but_links)
            checkpointer.save(3, stepped(state, 3))
        assert checkpointer.steps() == [1, 2, 3]
        assert holds(at(root, 2), state)
        checkpointer.save(4, stepped(state, 4))
        assert checkpointer.steps() == [3, 4]


def test_a_step_that_cannot_be_read_keeps_what_it_may_need(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, state, get = new_path(), trained(3), LocalStore.get

    def get_but_links(self: LocalStore, name: str, bytes_max: int) -> bytes:
        if name == "step-00000002/MANIFEST":
            raise StoreError("the disk does not answer")
        return get(self, name, bytes_max)

    def save(keep: Keep, *steps: int) -> list[int]:
        nonlocal state
        codec = codecs.Delta(every=2)
        with holdfast.Checkpointer(root, keep=keep, codec=codec, options=OPTIONS) as checkpointer:
            for step in steps:
                checkpointer.save(step, state := stepped(state, step))
            return checkpointer.steps()

    save(Keep.all(), 1, 2)
    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "get", get_but_links)
        assert save(Keep.latest(2), 3) == [1, 2, 3]
    assert save(Keep.latest(1), 5, 6) == [6]


@pytest.mark.parametrize("below", [(), (3,)])
def test_a_step_is_made_from_a_lower_one_alone(new_path: NewPath, below: tuple[int, ...]) -> None:
    """What a step that cannot be read may need is then below it, and kept."""
    root, state = new_path(), trained(3)
    for step in (*below, 9, 5):
        codec = codecs.Delta(every=3)
        holdfast.save(stepped(state, step), at(root, step), codec=codec, options=OPTIONS)
    found = holdfast.open(at(root, 5))
    assert found.base == ("step-00000003" if below else None)
    assert found.verify() == []


def test_a_base_of_a_higher_number_stays_until_its_delta_is_gone(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, state, remove = new_path(), trained(3), LocalStore.remove
    with monkeypatch.context() as patched:  # as in a run of an earlier version
        patched.setattr(base_choice, "_is_lower", lambda below, step: True)
        for step in (9, 5):
            codec = codecs.Delta(every=2)
            holdfast.save(stepped(state, step), at(root, step), codec=codec, options=OPTIONS)
    holdfast.save(state, at(root, 20), options=OPTIONS)

    def fail_at_5(store: LocalStore, name: str) -> None:
        if store.location == str(at(root, 5)) and name == "MANIFEST":
            raise StoreError("the disk does not work")
        remove(store, name)

    run = directory_module.Run(root, Keep.latest(1))
    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "remove", fail_at_5)
        assert run.make_room() == 0
    assert run.steps() == [5, 9, 20] and holdfast.open(at(root, 5)).verify() == []
    assert [run.make_room(), run.make_room(), run.steps()] == [1, 1, [20]]


@pytest.mark.parametrize("spare", [(), (2,)])  # a restored one is not known to be durable either
def test_nothing_is_let_go_before_what_is_newer_and_what_is_gone_are_durable(
    new_path: NewPath, spare: tuple[int, ...]
) -> None:
    root = new_path()
    for step in (1, 2):
        holdfast.save(trained(1), at(root, step), options=OPTIONS)
    at(root, 3).mkdir()  # what a removal that was cut off leaves
    with recording() as disk:
        assert directory_module.Run(root, Keep.latest(1)).make_room(spare) == 1
    calls = [call[:2] for call in disk.trace()]
    first = next(number for number, (operation, _) in enumerate(calls) if operation == "unlink")
    synced = {path for operation, path in calls[:first] if operation == "sync_directory"}
    assert {str(at(root, 2)), str(at(root, 3))} <= synced


def test_what_a_link_is_made_from_is_durable_whoever_published_it(new_path: NewPath) -> None:
    root, state, codec = new_path(), trained(3), codecs.Delta(every=3)
    holdfast.save(state, at(root, 1), codec=codec, options=OPTIONS)
    forget_bases()
    with recording() as disk:
        holdfast.save(stepped(state, 2), at(root, 2), codec=codec, options=OPTIONS)
    calls = [call[:2] for call in disk.trace()]
    linked = next(number for number, (operation, _) in enumerate(calls) if operation == "link")
    assert ("sync_directory", str(at(root, 1))) in calls[:linked]
    assert links(at(root, 2)) == 1


def test_retention_keeps_what_kept_steps_need(new_path: NewPath) -> None:
    root, state = new_path(), trained(3)
    codec = codecs.Delta(every=4)
    with holdfast.Checkpointer(
        root, every=1, keep=Keep.latest(2), codec=codec, options=OPTIONS
    ) as checkpointer:
        for step in range(1, 11):
            state = stepped(state, step)
            checkpointer.step(step, state)
        checkpointer.wait()
        assert [links(at(root, step)) for step in (9, 10)] == [0, 1]
        assert checkpointer.steps() == [9, 10]
        for step in (11, 12, 13):  # the fifth of a chain is the first of the next
            state = stepped(state, step)
            checkpointer.step(step, state)
            checkpointer.wait()
            assert checkpointer.steps() == [n for n in range(9, step + 1)]
        target = trained(1)
        assert checkpointer.restore(target) == 13
        assert same(target, state)
        state = stepped(state, 14)
        checkpointer.step(14, state)
        checkpointer.wait()
        assert checkpointer.steps() == [13, 14]
    assert holds(at(root, 14), state)


def test_what_is_no_step_is_made_from_no_step_and_no_step_from_it(new_path: NewPath) -> None:
    """Retention looks at steps alone: the base of ``best`` would be let go under it."""
    root, state = new_path(), trained(3)
    codec, kept = codecs.Delta(every=8), {}
    keep = Keep.latest(2)
    with holdfast.Checkpointer(
        root, every=1, keep=keep, codec=codec, options=OPTIONS
    ) as checkpointer:
        for step in range(1, 7):
            state = stepped(state, step)
            checkpointer.step(step, state)
            checkpointer.wait()
            if step in (2, 3):
                kept[f"best-{step}"] = state
                holdfast.save(state, root / f"best-{step}", codec=codec, options=OPTIONS)
        base = manifest(at(root, 3)).table.header.base
        assert base is not None and base.name == "step-00000002"
        assert links(at(root, 6)) == 5
        checkpointer.retire_after(3)
    assert [links(root / name) for name in kept] == [0, 0]
    assert all(holds(root / name, held) for name, held in kept.items())
    shutil.rmtree(root / "best-2")
    assert holdfast.open(at(root, 3)).verify() == []


def test_two_runs_in_one_process_keep_their_own_bases(new_path: NewPath) -> None:
    one, other = new_path(), new_path()
    state = trained(3)
    for step in range(3):
        state = stepped(state, step)
        for root in (one, other):
            holdfast.save(state, at(root, step), codec="delta", options=OPTIONS)
    for root in (one, other):
        assert links(at(root, 2)) == 2 and holds(at(root, 2), state)


def test_a_save_at_the_same_time_reads_its_base(new_path: NewPath) -> None:
    """Two saves to one run at once: one has what is kept, the other reads."""
    root = new_path()
    states = grow(root, 2, codecs.Delta())
    saved = [stepped(states[-1], seed) for seed in (5, 6)]

    def save(number: int) -> None:
        path = at(root, 5 + number)
        holdfast.save(saved[number], path, codec="delta", options=OPTIONS, group="alone")

    threads = [threading.Thread(target=save, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(holds(at(root, 5 + number), saved[number]) for number in range(2))


def test_special_values_survive_a_difference(new_path: NewPath) -> None:
    root = new_path()
    odd = [0x7FC12345, -1, 1, -(1 << 31), 0x7F800000, 0, -8388608, 0x7FFFFFFF, 8388607]
    every = torch.tensor([[a, b] for a in odd for b in odd] * 40, dtype=torch.int32)
    for dtype, integer in (
        (torch.float32, torch.int32),
        (torch.bfloat16, torch.int16),
        (torch.float16, torch.int16),
    ):
        old, new = (every[:, n].to(integer).view(dtype) for n in (0, 1))
        near = torch.randn(4000).to(dtype)
        state = {"x": torch.cat([old, near])}
        later = {"x": torch.cat([new, near])}
        holdfast.save(state, at(root, 0), codec="delta")
        holdfast.save(later, at(root, 1), codec="delta")
        assert DIFFERENCE in modes(at(root, 1))
        assert bits(holdfast.open(at(root, 1)).state()) == bits(later)
        reader.read(at(root, 1))
        shutil.rmtree(root)
        forget_bases()


@pytest.mark.parametrize("every", [0, -1, EVERY_MAX + 1, 2.0, True, "3"])
def test_lengths_of_chains_that_cannot_be(every: Any) -> None:
    with pytest.raises(OptionError, match=r"every is .*expected an integer from 1 to 65"):
        codecs.Delta(every=every)


def test_a_chain_has_as_many_links_as_the_format_allows() -> None:
    assert EVERY_MAX == CHAIN_LINKS_MAX + 1


def test_memory_for_the_next_delta_goes_with_the_checkpointer_and_is_kept_for_few_runs(
    tmp_path: Path,
) -> None:
    def kept() -> list[str]:
        runs = [f"{tmp_path}/{number}" for number in range(9)]
        return [Path(run).name for run in runs if last_link(run, 0)]

    state = {"w": torch.randn(1000)}
    for number in range(3):
        with holdfast.Checkpointer(tmp_path / f"{number}", every=1, codec="delta") as checkpointer:
            checkpointer.step(1, state)
            checkpointer.step(2, state)
            checkpointer.wait()
            assert kept() == [f"{number}"]
        assert kept() == []
    for number in (3, 4, 5, 6, 7, 8, 3):
        holdfast.save(state, tmp_path / f"{number}/{len(kept())}", codec="delta")
    assert kept() == ["3", "6", "7", "8"]
