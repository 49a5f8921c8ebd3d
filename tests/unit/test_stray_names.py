r"""Names of bytes that are no UTF-8, which Python shows as "\udcff": refused, or passed by."""

import io
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import holdfast
from holdfast import Checkpointer, Keep, cli
from holdfast.errors import CorruptError, HoldfastError, MismatchError, OptionError, StateError

NewPath = Callable[[], Path]

STRAY = "\udcff"
BYTES = b"\xff"
WEIGHT = torch.arange(4.0)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module(f"layer{STRAY}", nn.Linear(2, 2))


class Stateful:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


MODEL = Named()
STATES: dict[str, tuple[dict[Any, Any], str]] = {
    "a key of a tensor": ({"a": {f"b{STRAY}": WEIGHT}}, r"a.b\udcff"),
    "a key of a value": ({STRAY: 1}, r"\udcff"),
    "a key beside a float": ({STRAY: {1.5: WEIGHT}}, r"\udcff"),
    "a value": ({"a": {"b": f"x{STRAY}"}}, "a.b"),
    "within a value": ({"a": [1, ({"k": STRAY},)]}, "a"),
    "a key within a value": ({"a": [{STRAY: 1}]}, "a"),
    "a tuple that is a key": ({"a": {(STRAY,): 1}}, "a"),
    "a module": ({"m": MODEL}, r"m.layer\udcff.weight"),
    "an optimizer": (
        {"m": nn.Linear(2, 2), "o": optim.Adam([{"params": MODEL.parameters(), "name": STRAY}])},
        "o.param_groups.0",
    ),
    "what state_dict() gives": ({"s": Stateful({f"k{STRAY}": WEIGHT})}, r"s.k\udcff"),
    "a shard": ({f"s{STRAY}": holdfast.Shard(WEIGHT, (4,))}, r"s\udcff"),
    "what no checkpoint holds": ({f"f{STRAY}": {"g": print}}, r"f\udcff.g"),
}


@pytest.fixture(autouse=True)
def log() -> Iterator[io.BytesIO]:
    """A log file in UTF-8, as most are: a line that it does not take fails the test."""
    written = io.BytesIO()

    class Strict(logging.StreamHandler[io.TextIOWrapper]):
        def handleError(self, record: logging.LogRecord) -> None:
            raise

    handler = Strict(io.TextIOWrapper(written, encoding="utf-8", write_through=True))
    logger = logging.getLogger("holdfast")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield written
    logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.mark.parametrize("what", STATES)
def test_a_stray_name_in_a_state_is_refused_by_its_place(new_path: NewPath, what: str) -> None:
    state, place = STATES[what]
    path, run = new_path(), new_path()
    saves: list[Callable[[], object]] = [
        lambda: holdfast.save(state, path),
        lambda: holdfast.save_async(state, path).result(),
        lambda: holdfast.save_async(state, path, stage="lazy").result(),
        lambda: Checkpointer(run, every=1).step(1, state),
        lambda: Checkpointer(run).save(1, state),
    ]
    for save in saves:
        with pytest.raises(StateError) as caught:
            save()
        assert str(caught.value).startswith(place)
        str(caught.value).encode()
    assert not path.exists()


@pytest.mark.parametrize("what", STATES)
def test_a_target_with_a_stray_name_is_a_mismatch_that_can_be_written(
    new_path: NewPath, what: str
) -> None:
    path = new_path()
    holdfast.save({"a": WEIGHT, "b": 1}, path)
    for options in ({}, {"strict": False}, {"partial": True}):
        try:
            holdfast.load(path, into=dict(STATES[what][0]), **options)  # type: ignore[arg-type]
        except (MismatchError, StateError) as error:
            str(error).encode()
    with holdfast.open(path) as checkpoint, pytest.raises(MismatchError, match=r"'\\udcff'"):
        checkpoint.tensor(STRAY)


def test_a_stray_name_of_a_metric_is_refused(new_path: NewPath) -> None:
    with pytest.raises(StateError, match=r"metrics: the text '\\udcff' is not valid"):
        holdfast.save({"a": WEIGHT}, new_path(), metrics={STRAY: 1.0})
    checkpointer = Checkpointer(new_path(), keep=Keep.best(STRAY, 1))
    with pytest.raises(OptionError, match=r"needs the metric \\udcff; found loss") as caught:
        checkpointer.save(1, {"a": WEIGHT}, metrics={"loss": 1.0})
    str(caught.value).encode()
    with pytest.raises(StateError, match="metrics: the text"):
        checkpointer.save(1, {"a": WEIGHT}, metrics={STRAY: 1.0})


def test_an_emergency_is_logged_whatever_the_exception_says(
    new_path: NewPath, log: io.BytesIO
) -> None:
    run = new_path()
    with (
        pytest.raises(ValueError, match="lost"),
        Checkpointer(run, every=100, emergency=True) as checkpointer,
    ):
        checkpointer.step(7, {"a": WEIGHT})
        raise ValueError(f"lost {STRAY}")
    assert Checkpointer(run).steps() == [7]
    assert rb"saved step 7 in an emergency, after ValueError: lost \udcff" in log.getvalue()


def test_a_directory_that_is_not_utf_8_is_refused_wherever_it_is_named(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = new_path()
    stray = os.fsencode(here) + b"/here" + BYTES
    os.makedirs(stray)
    monkeypatch.setenv("HOME", os.fsdecode(stray))
    monkeypatch.chdir(os.fsdecode(stray))
    for path in (os.fsdecode(stray), Path(os.fsdecode(stray)) / "a", "a", "~/a"):
        for use in (
            lambda path=path: holdfast.save({"a": WEIGHT}, path),
            lambda path=path: holdfast.save_async({"a": WEIGHT}, path),
            lambda path=path: holdfast.load(path, into={"a": WEIGHT}),
            lambda path=path: holdfast.verify(path),
            lambda path=path: Checkpointer(path),
        ):
            with pytest.raises(OptionError, match=r"here\\udcff.*is not UTF-8"):
                use()
    assert os.listdir() == []
    holdfast.save({"a": WEIGHT}, here / "b")
    holdfast.load(here / "b", into={"a": torch.zeros(4)})


def stray_run(run: Path) -> None:
    """Make a run of two steps, and beside and within them what others have named."""
    with Checkpointer(run) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"a": WEIGHT, "step": step})
    base = os.fsencode(run)
    shutil.copytree(base + b"/step-00000001", base + b"/step-7" + BYTES)
    for name in (b"step-" + BYTES, b"step-00000009" + BYTES, b".epoch-" + BYTES, BYTES):
        os.mkdir(base + b"/" + name)
    for name in (b"file", b".latest-", b"step-00000002/.manifest-"):
        (Path(run) / os.fsdecode(name + BYTES)).write_bytes(b"")


def test_a_run_goes_on_among_stray_names(new_path: NewPath) -> None:
    run = new_path()
    stray_run(run)
    into = {"a": torch.zeros(4), "step": 0}
    with Checkpointer(run, every=1, keep=Keep.latest(2)) as checkpointer:
        assert checkpointer.steps() == [1, 2]
        assert checkpointer.restore(into) == 2 == into["step"]
        for step in (3, 4):
            checkpointer.step(step, {"a": WEIGHT, "step": step})
            checkpointer.wait()
        assert 4 in checkpointer.steps()
        assert checkpointer.retire_after(3) == [4]
    holdfast.save({"a": WEIGHT, "step": 5}, run / "step-00000005", step=5, codec="delta")
    assert Checkpointer(run).restore(into) == 5
    done = holdfast.scrub(run)
    assert not done.damage
    assert [name for name, _ in done.unread if STRAY not in name] == []
    assert len(done.unread) == 3


@pytest.mark.parametrize("verb", ["inspect", "verify", "repair", "scrub"])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_the_commands_show_stray_names_and_go_on(
    new_path: NewPath, capsysbinary: pytest.CaptureFixture[bytes], verb: str, form: list[str]
) -> None:
    run = new_path()
    stray_run(run)
    (run / os.fsdecode(b"step-00000002/.manifest-" + BYTES)).unlink()
    assert cli.main([verb, str(run), *form]) == 2  # some of what is there cannot be read
    out = capsysbinary.readouterr().out
    assert rb"step-7\udcff" in out
    if form:
        json.loads(out)
    else:
        assert b"not UTF-8" in out or b"not named in UTF-8" in out


def test_the_commands_refuse_a_stray_path(
    new_path: NewPath, capsys: pytest.CaptureFixture[str]
) -> None:
    good, stray = str(new_path()), f"{new_path()}{STRAY}"
    holdfast.save({"a": WEIGHT}, good)
    for arguments in (
        *([verb, stray] for verb in ("inspect", "verify", "repair", "scrub", "rebase", "bench")),
        *([verb, good, stray] for verb in ("diff", "recompress", "convert")),
        ["repair", good, "--to", stray],
        ["sign", good, "--key", stray],
        ["demo", "--out", stray],
        [STRAY],
    ):
        assert cli.main(arguments) == 2
        text = capsys.readouterr().err
        assert r"\udcff" in text
        text.encode()


def test_a_stray_file_in_a_checkpoint_is_named(new_path: NewPath) -> None:
    path, below = new_path(), "data/"
    holdfast.save({"a": WEIGHT}, path)
    (path / f"{below}{STRAY}").write_bytes(b"")
    with pytest.raises(CorruptError, match=r"\\udcff is a file that does not belong") as caught:
        holdfast.load(path, into={"a": torch.zeros(4)})
    str(caught.value).encode()
    (fault,) = holdfast.verify(path).damage
    assert rf"{below}\udcff is a file" in fault.what
    repaired = new_path()
    assert holdfast.repair(path, to=repaired).written == str(repaired)
    holdfast.load(repaired, into={"a": torch.zeros(4)})


def test_the_text_of_every_error_can_be_written() -> None:
    for kind in HoldfastError.__subclasses__():
        if kind.__init__ is HoldfastError.__init__:
            assert str(kind(f"é {STRAY}")) == r"é \udcff"
