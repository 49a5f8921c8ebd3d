"""Faults once found in the engine and the corridor, each with the test that keeps it away."""

import errno
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from descriptors import open_descriptors, opened_since
from holdfast import Options, worker
from holdfast.errors import (
    CorruptError,
    HoldfastError,
    MismatchError,
    NotCommittedError,
    OptionError,
    PeerError,
    StateError,
    StoreError,
)
from holdfast.format import spec
from holdfast.group.base import SingleGroup
from holdfast.group.phase import Phase
from holdfast.group.replies import decode_replies, encode_reply
from holdfast.saving import share
from holdfast.testing import Fault, faulty


def test_two_failed_writes_in_one_batch_end_the_save(tmp_path: Path) -> None:
    """It waited for ever for the second, which had been forgotten."""
    with faulty(Fault("write", persistent=True)), pytest.raises(StoreError):
        holdfast.save({"w": torch.zeros(30 << 20)}, tmp_path / "c")
    holdfast.save({"w": torch.zeros(8)}, tmp_path / "c")


class Loses(SingleGroup):
    """Rank 1 of two, interrupted when the coordinator may have committed already."""

    rank, world_size = 1, 2
    rounds = 1

    def all_gather(self, data: bytes) -> list[bytes]:
        if self.rounds == 0:
            raise KeyboardInterrupt
        self.rounds -= 1
        word = b'"word": {"save_id": "%s", "step": null, "metrics": {}, "base": null}' % (
            b"ab" * 16
        )
        (told,) = decode_replies([data[1:]])
        told["arguments"] = told["arguments"].replace(b'"word": {}', word)
        return [data[:1] + encode_reply(**told), data]


def test_a_rank_interrupted_after_its_promise_leaves_its_files(tmp_path: Path) -> None:
    """It removed them while the coordinator published a manifest that names them."""
    with pytest.raises(KeyboardInterrupt):
        state = {"v": torch.zeros(8), "w": torch.zeros(8)}  # one for each rank to write
        holdfast.save(state, tmp_path / "c", group=Loses())
    assert [file.name[:5] for file in tmp_path.rglob("*.hf")] == ["00001"]


@pytest.mark.parametrize(
    ("rank", "told_by", "left"),
    [(1, -1, ["00000", "00001"]), (1, 0, ["00000"]), (0, -1, []), (0, 1, [])],
)
def test_a_rank_discards_what_certainly_nobody_commits(
    tmp_path: Path, rank: int, told_by: int, left: list[str]
) -> None:
    store = holdfast.open(_saved(tmp_path))._store
    (file,) = tmp_path.rglob("*.hf")
    file.with_name("00001-0.hf").write_bytes(b"")
    written = Phase(SingleGroup())
    with written:
        written.answer = b""
    save_id = holdfast.open(tmp_path / "c").save_id
    error = PeerError("lost", rank=told_by, cause="")
    share.discard(store, save_id, rank, written, error)
    assert sorted(file.name[:5] for file in tmp_path.rglob("*.hf")) == left


def _saved(tmp_path: Path) -> Path:
    holdfast.save({"w": torch.arange(8)}, tmp_path / "c")
    return tmp_path / "c"


def test_a_stranger_in_a_step_is_no_reason_to_go_back(tmp_path: Path) -> None:
    """A file among those of the newest step made restore fall back, and then destroy that step."""
    state = {"w": torch.zeros(3)}
    with holdfast.Checkpointer(tmp_path, every=1) as checkpointer:
        for step in (1, 2):
            checkpointer.step(step, state)
        checkpointer.wait()
        (Path(checkpointer.path(2)) / "data" / "config.json").write_text("{}")
        assert checkpointer.restore(state) == 2
    with pytest.raises(CorruptError, match=r"config\.json"):
        holdfast.load(tmp_path / "step-00000002", into=state)
    assert holdfast.open(tmp_path / "step-00000002").verify() != []


def test_reading_makes_no_file_in_the_checkpoint(tmp_path: Path) -> None:
    """The probe of the disk did, for a moment, in which another reader called it damaged."""
    path = _saved(tmp_path)
    before = path.stat().st_mtime_ns
    with faulty() as disk:
        holdfast.load(path, into={"w": torch.zeros(8, dtype=torch.int64)})
    assert disk.calls().get("create", 0) == 0
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize("mebibytes", [8, 9, 13])
def test_no_data_file_passes_its_limit(tmp_path: Path, mebibytes: int) -> None:
    """The footer was forgotten: a file of many chunks passed the limit, after all was written."""
    options = Options(chunk_elements=16, file_bytes=1 << 20)
    state = {f"w{i}": torch.zeros(60_000 + i, dtype=torch.int16) for i in range(mebibytes * 8)}
    holdfast.save(state, tmp_path / "c", options=options)
    checkpoint = holdfast.open(tmp_path / "c")
    assert max(checkpoint.file_bytes) <= 1 << 20
    assert len(checkpoint.file_bytes) > mebibytes
    assert checkpoint.verify() == []


@pytest.mark.parametrize(("nth", "step"), [(1, 2), (2, 1)], ids=["of the epoch", "of the step"])
def test_an_input_error_on_one_disk_makes_restore_fall_back(
    tmp_path: Path, nth: int, step: int
) -> None:
    state = {"w": torch.zeros(3)}
    with holdfast.Checkpointer(tmp_path, every=1) as checkpointer:
        for saved in (1, 2):
            checkpointer.step(saved, state)
    fault = Fault("read", nth=nth, argument=errno.EIO)
    with faulty(fault), holdfast.Checkpointer(tmp_path) as again:
        assert again.restore(state) == step


def test_a_queue_that_cannot_be_made_does_no_harm_to_the_next(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    with pytest.raises(OptionError):
        Options(queue_depth=2000)
    holdfast.load(path, into={"w": torch.zeros(8, dtype=torch.int64)})


def test_a_checkpoint_of_many_files_needs_few_descriptors(tmp_path: Path) -> None:
    """All its files stayed open until the end."""
    state = {f"w{i}": torch.full((40_000,), i, dtype=torch.int16) for i in range(60)}
    holdfast.save(state, tmp_path / "c", options=Options(file_bytes=1 << 17))
    assert len(holdfast.open(tmp_path / "c").file_names) >= 60
    most = 0
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    before = open_descriptors()
    from holdfast.engine import read

    original = read.open_data_file

    def counting(*arguments: Any, **options: Any) -> int:
        nonlocal most
        descriptor = original(*arguments, **options)
        most = max(most, len(opened_since(before)))
        return descriptor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "open_data_file", counting)
        holdfast.load(tmp_path / "c", into=target)
    assert 0 < most <= 16
    assert all(torch.equal(target[name], state[name]) for name in state)


def test_saving_from_a_signal_handler_says_that_it_cannot(tmp_path: Path) -> None:
    """It waited for ever for the save that it had interrupted."""
    found: list[str] = []

    def on_signal(*_: Any) -> None:
        try:
            holdfast.save({"w": torch.zeros(3)}, tmp_path / "b")
        except HoldfastError as error:
            found.append(str(error))

    from holdfast.engine import raw

    original = raw.stage_chunks

    def staging(*arguments: Any) -> Any:
        worker.call_in_caller(lambda: signal.raise_signal(signal.SIGUSR1))
        return original(*arguments)

    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(raw, "stage_chunks", staging)
            holdfast.save({"w": torch.zeros(3)}, tmp_path / "a")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ["another save or load of this thread" in text for text in found] == [True]


def test_a_manifest_too_large_to_read_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec, "MANIFEST_BYTES_MAX", 500)
    with pytest.raises(StateError, match="cannot be read back"):
        holdfast.save({"w": torch.zeros(3), "text": "x" * 500}, tmp_path / "c")
    assert not (tmp_path / "c" / "MANIFEST").exists()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"metrics": [1]}, "metrics is a list"),
        ({"step": 1 << 53}, "step is"),
        ({"path": "a\0b"}, "path is"),
        ({"path": "a\udcff"}, "path is"),
    ],
)
def test_arguments_that_cannot_be(tmp_path: Path, arguments: dict[str, Any], what: str) -> None:
    path = arguments.pop("path", str(tmp_path / "c"))
    with pytest.raises(OptionError, match=what):
        holdfast.save({"w": torch.zeros(3)}, path, **arguments)


def test_a_checkpoint_retired_while_it_is_read_says_so(tmp_path: Path) -> None:
    """It was called damaged."""
    path = _saved(tmp_path)
    checkpoint = holdfast.open(path)
    (path / "MANIFEST").unlink()
    next(path.rglob("*.hf")).unlink()
    with pytest.raises(NotCommittedError, match="while it was read"):
        checkpoint.tensor("w")


def test_a_footer_larger_than_the_manifest_is_not_read(tmp_path: Path) -> None:
    """A sparse file of terabytes would have been."""
    path = _saved(tmp_path)
    file = next(path.rglob("*.hf"))
    checkpoint = holdfast.open(path)
    size = 1 << 30
    data = file.read_bytes()
    trailer = bytearray(data[-32:])
    offset = int.from_bytes(trailer[:8], "little")
    trailer[8:16] = (size - 32 - offset).to_bytes(8, "little")
    with open(file, "r+b") as handle:
        handle.truncate(size - 32)
        handle.seek(size - 32)
        handle.write(trailer)
    table = replace(
        checkpoint._manifest.table, file_bytes=checkpoint._manifest.table.file_bytes * 0 + size
    )
    from holdfast.engine.check import check_files

    with pytest.raises(CorruptError, match="more than the whole MANIFEST"):
        check_files(checkpoint._store, replace(checkpoint._manifest, table=table), [0])


def test_a_policy_that_looks_at_a_metric_needs_it(tmp_path: Path) -> None:
    """A misspelt name let go of every checkpoint but the newest."""
    keep = holdfast.Keep.best("val_loss", 2)
    with holdfast.Checkpointer(tmp_path, every=1, keep=keep) as checkpointer:
        with pytest.raises(OptionError, match=r"needs the metric val_loss; found loss"):
            checkpointer.step(1, {"w": torch.zeros(3)}, metrics={"loss": 1.0})
        assert checkpointer.steps() == []


def test_a_directory_of_other_things_takes_a_checkpoint_that_loads(tmp_path: Path) -> None:
    """It was acknowledged there, and refused by the load."""
    (tmp_path / "train.py").write_text("")
    holdfast.save({"w": torch.ones(3)}, tmp_path)
    holdfast.load(tmp_path, into=(found := {"w": torch.zeros(3)}))
    assert torch.equal(found["w"], torch.ones(3))


def test_a_partial_load_takes_all_of_the_target_and_no_more(tmp_path: Path) -> None:
    saved = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(saved.parameters())
    holdfast.save({"model": saved, "optimizer": optimizer}, tmp_path / "c")
    found = torch.nn.Linear(3, 2)
    report = holdfast.load(tmp_path / "c", into={"model": found}, partial=True)
    assert torch.equal(found.weight, saved.weight) and report.unexpected
    with pytest.raises(MismatchError, match="missing in the checkpoint: net"):
        holdfast.load(tmp_path / "c", into={"net": found}, partial=True)


def test_another_kind_of_optimizer_is_a_mismatch(tmp_path: Path) -> None:
    """It loaded, and failed at the next step."""
    model = torch.nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9)
    holdfast.save({"model": model, "optimizer": sgd}, tmp_path / "c")
    adam = torch.optim.AdamW(model.parameters())
    with pytest.raises(MismatchError, match="another kind of optimizer"):
        holdfast.load(tmp_path / "c", into={"model": model, "optimizer": adam})
