"""What cannot be saved, loaded or opened is refused, with a text that says what, where and why."""

import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

import holdfast
from holdfast.errors import (
    AlreadyCommittedError,
    MismatchError,
    NotCommittedError,
    OptionError,
    StateError,
    StoreError,
)

from .training import net, same

NewPath = Callable[[], Path]


class Thing:
    """What no checkpoint holds."""

    def __repr__(self) -> str:  # of which names of tests are made, the same in each process
        return "Thing()"


@dataclass
class Made:
    """A leaf that is made when it is needed: making it warns."""

    make: Callable[[], Any]


def looped_dict() -> dict[str, Any]:
    # Two ways back: a walk that follows each to a fixed depth would take 2^depth steps.
    loop: dict[str, Any] = {}
    loop |= {"a": loop, "b": loop}
    return loop


def looped_list(*items: Any) -> list[Any]:
    loop: list[Any] = [*items]
    loop += [loop, loop]
    return loop


def nested(depth: int, leaf: Any, wrap: Callable[[Any], Any]) -> Any:
    for _ in range(depth):
        leaf = wrap(leaf)
    return leaf


WEIGHT = torch.ones(2)
LONG = "n" * 5000
REFUSED: dict[str, tuple[Any, str]] = {
    "a function": (lambda: 0, r"deep\.leaf is a function"),
    "a set of tensors": ({WEIGHT}, r"deep\.leaf"),
    "an object": (Thing(), r"deep\.leaf is a .*Thing; a state holds tensors"),
    "a class with the methods": (nn.Linear, r"deep\.leaf is a type"),
    "an array of objects": (np.array([Thing()]), r"deep\.leaf"),
    "a lock": (threading.Lock(), r"deep\.leaf is a .*lock"),
    "a generator": (torch.Generator(), r"deep\.leaf is a torch\._C\.Generator"),
    "an object within values": ([1, (2, Thing())], r"deep\.leaf is a .*Thing"),
    "an object beside a tensor": ([WEIGHT, Thing()], r"deep\.leaf\.1 is a .*Thing"),
    "a sparse tensor": (torch.eye(3).to_sparse(), r"deep\.leaf has layout torch\.sparse_coo"),
    "a CSR tensor": (
        Made(lambda: torch.eye(3).to_sparse_csr()),
        r"deep\.leaf has layout torch\.sparse_csr",
    ),
    "a quantized tensor": (
        Made(lambda: torch.quantize_per_tensor(WEIGHT, 0.1, 0, torch.qint8)),
        r"deep\.leaf has dtype torch\.qint8; expected one of bool, float64",
    ),
    "a nested tensor": (
        Made(lambda: torch.nested.nested_tensor([WEIGHT])),
        r"deep\.leaf has layout nested",
    ),
    "a jagged tensor": (
        Made(lambda: torch.nested.nested_tensor([WEIGHT], layout=torch.jagged)),
        r"deep\.leaf has layout nested",
    ),
    "a meta tensor": (torch.ones(2, device="meta"), r"deep\.leaf is on the meta device"),
    "a lazy module": (nn.LazyLinear(3), r"deep\.leaf\.weight belongs to a lazy module"),
    "65 dimensions": (torch.zeros([1] * 65), r"deep\.leaf has 65 dimensions; expected at most 64"),
    "a float key beside a tensor": ({1.5: WEIGHT}, r"deep\.leaf holds tensors and the key 1\.5"),
    "a tuple key beside a tensor": ({(1,): WEIGHT}, r"the key \(1,\); expected str or int keys"),
    "a bool key beside a tensor": ({True: WEIGHT}, r"the key True; expected str or int keys"),
    "a dict that holds itself": (looped_dict(), r"deep\.leaf\.a.* nested deeper than 100 levels"),
    "a list that holds itself": (looped_list(1), r"deep\.leaf is nested deeper than 64 levels"),
    "a list of itself and a tensor": (looped_list(WEIGHT), r"deeper than 100 levels"),
    "dicts too deep": (nested(3000, WEIGHT, lambda v: {"d": v}), r"deep\.leaf\.d.*deeper than 100"),
    "lists too deep": (nested(3000, 1, lambda v: [v]), r"deep\.leaf is nested deeper than 64"),
    "half a surrogate pair": ("\ud800", r"deep\.leaf: the text '\\ud800' is not valid Unicode"),
    "such a key": ({"\ud800": 1}, r"deep\.leaf\.\\ud800: the text"),
    "such a key in a value": ([{"\ud800": 1}], r"deep\.leaf: the text"),
    "a name too long": (
        {LONG: WEIGHT},
        r"the path deep\.leaf\.nnn.* takes 50\d\d bytes; expected at most",
    ),
    "an integer too long": (10**5000, r"deep\.leaf is an integer of 16610 bits"),
    "an integer key of 65 bits": ({2**63: 1}, r"deep\.leaf has an integer key of 64 bits, which"),
    "an integer key too long": ({10**5000: 1}, r"deep\.leaf has an integer key of 16610 bits"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_saved_is_refused_by_its_path(new_path: NewPath, what: str) -> None:
    leaf, text = REFUSED[what]
    leaf = leaf.make() if isinstance(leaf, Made) else leaf
    path = new_path()
    with pytest.raises(StateError, match=text) as caught:
        holdfast.save({"good": WEIGHT, "deep": {"leaf": leaf}}, path)
    str(caught.value).encode()  # a text that cannot be printed hides the error
    assert not path.exists()


@pytest.mark.parametrize("leaf", [Thing(), looped_dict(), torch.eye(3).to_sparse()], ids=str)
def test_a_target_that_no_checkpoint_could_fill_is_refused(new_path: NewPath, leaf: Any) -> None:
    path = new_path()
    holdfast.save({"t": WEIGHT, "leaf": WEIGHT}, path)
    with pytest.raises((StateError, MismatchError)):
        holdfast.load(path, into={"t": torch.zeros(2), "leaf": leaf})


@pytest.mark.parametrize(
    "state", [None, [WEIGHT], WEIGHT, nn.Linear(1, 1)], ids=lambda s: str(s)[:9]
)
def test_a_state_is_a_dict(new_path: NewPath, state: Any) -> None:
    with pytest.raises(StateError, match="expected a dict"):
        holdfast.save(state, new_path())
    with pytest.raises(StateError, match="expected a dict"):
        holdfast.load(new_path(), into=state)


def test_a_mismatch_lists_every_name_shape_and_dtype_at_once(new_path: NewPath) -> None:
    path = new_path()
    stored = {"same": WEIGHT, "shape": torch.ones(3, 4), "dtype": torch.ones(2), "gone": WEIGHT}
    holdfast.save({"a": stored, "epoch": 3, "lost": 4, "wide": torch.ones(2)}, path)
    target: dict[str, Any] = {
        "a": {
            "same": torch.zeros(2),
            "shape": torch.zeros(4, 3),
            "dtype": torch.zeros(2, dtype=torch.bfloat16),
            "new": torch.zeros(1),
        },
        "wide": torch.zeros(1).expand(2),
        "epoch": 0,
        "fresh": None,
    }
    with pytest.raises(MismatchError) as caught:
        holdfast.load(path, into=target)
    text = str(caught.value)
    assert "a.shape is f32 [3, 4] in the checkpoint and f32 [4, 3] in the target" in text
    assert "a.dtype is f32 [2] in the checkpoint and bf16 [2] in the target" in text
    assert "wide is an expanded tensor, and cannot be filled" in text
    assert "2 are missing in the checkpoint: a.new, fresh" in text
    assert "2 are missing in the target: a.gone, lost" in text
    assert "a.same" not in text
    assert "Nothing was loaded" in text
    assert target["epoch"] == 0
    tensors = [*target["a"].values(), target["wide"]]
    assert not any(bool(torch.any(tensor != 0)) for tensor in tensors)


def test_a_mismatch_leaves_modules_and_optimizers_alone(new_path: NewPath) -> None:
    path = new_path()
    model = net()
    holdfast.save({"model": model, "optimizer": optim.SGD(model.parameters(), 0.5)}, path)
    other = net(seed=1)
    optimizer = optim.SGD(other.parameters(), 0.25, momentum=0.9)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(MismatchError, match="missing in the checkpoint: step"):
        holdfast.load(path, into={"model": other, "optimizer": optimizer, "step": 1})
    assert same(dict(other.state_dict()), before)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert not optimizer.state


def test_without_strict_what_differs_is_reported_and_the_rest_is_loaded(new_path: NewPath) -> None:
    path = new_path()
    holdfast.save({"a": {"both": WEIGHT, "gone": WEIGHT}, "1": 2}, path, step=7)
    into: dict[Any, Any] = {"a": {"both": torch.zeros(2), "new": torch.zeros(3)}, 1: 5}
    report = holdfast.load(path, into=into, strict=False)
    assert report.missing == ("1", "a.new")
    assert report.unexpected == ("1", "a.gone")
    assert (report.step, report.tensors, report.path) == (7, 1, str(path))
    assert report.bytes_needed == WEIGHT.nbytes <= report.bytes_read
    assert report.seconds > 0
    assert same(into["a"], {"both": WEIGHT, "new": torch.zeros(3)})
    assert into[1] == 5
    assert report.skipped == {}


def test_cast_converts_what_can_be_converted(new_path: NewPath) -> None:
    path = new_path()
    source = torch.tensor([0.0, 1.0, 2.5, -3.0])
    complex_source = torch.tensor([1 + 2j])
    holdfast.save({"t": source, "c": complex_source}, path)
    for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.complex64, torch.float8_e5m2):
        into = {"t": torch.zeros(4, dtype=dtype), "c": torch.zeros(1, dtype=torch.complex128)}
        with pytest.raises(MismatchError, match="t is f32"):
            holdfast.load(path, into=into)
        holdfast.load(path, into=into, cast=True)
        assert same(
            into["t"].float() if dtype.itemsize == 1 else into["t"],
            (source.to(dtype).float() if dtype.itemsize == 1 else source.to(dtype)),
        )
        assert into["c"].tolist() == [1 + 2j]
    for dtype in (torch.float32, torch.int64):
        with pytest.raises(MismatchError, match="c is c64 "):
            holdfast.load(path, into={"c": torch.zeros(1, dtype=dtype)}, strict=False, cast=True)
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(MismatchError, match="t is f32"):
        holdfast.load(path, into={"t": packed}, strict=False, cast=True)


OPTIONS: list[tuple[str, Any]] = [
    *(("chunk_elements", value) for value in (0, -1, (1 << 20) + 1, 7.0, "7", True)),
    *(("file_bytes", value) for value in (0, (256 << 30) + 1)),
    *(("pool_bytes", value) for value in (0, (32 << 20) - 1)),
    *(("block_bytes", value) for value in (0, 4097, (16 << 20) + 4096)),
    *(("queue_depth", value) for value in (0, 5000)),
    ("io", "fast"),
    *(("writers", value) for value in ("ranks", 0, -1, True, 2.0, None)),
]


@pytest.mark.parametrize(("name", "value"), OPTIONS)
def test_an_option_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        holdfast.Options(**{name: value})


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"codec": "zip"}, "codec is 'zip'; expected one of raw"),
    ({"step": -1}, "step is -1; expected an integer from 0"),
    ({"step": 1.0}, "step is 1.0"),
    ({"step": True}, "step is True"),
    ({"metrics": {"loss": WEIGHT}}, r"metrics\['loss'\] is a Tensor; .*loss\.item\(\)"),
    ({"metrics": {"loss": True}}, r"metrics\['loss'\] is a bool"),
    ({"metrics": {1: 1.0}}, r"metrics\[1\]"),
    ({"group": "gloo"}, "group is a str"),
]


@pytest.mark.parametrize(("keywords", "text"), ARGUMENTS)
def test_an_argument_that_cannot_be_is_refused(
    new_path: NewPath, keywords: dict[str, Any], text: str
) -> None:
    path = new_path()
    with pytest.raises(OptionError, match=text):
        holdfast.save({"t": WEIGHT}, path, **keywords)
    assert not path.exists()


PATHS = ["ftp://host/run", "file:///tmp/x", "", None, 5, b"/tmp", "a\0b", "a/\udcff"]


@pytest.mark.parametrize("path", PATHS, ids=ascii)
def test_a_path_that_is_no_directory_is_refused(path: Any) -> None:
    for use in (
        lambda: holdfast.save({}, path),
        lambda: holdfast.load(path, into={}),
        lambda: holdfast.open(path),
        lambda: holdfast.Checkpointer(path),
    ):
        with pytest.raises(OptionError, match=r"expected the path|is a URL"):
            use()


def test_a_checkpoint_is_never_overwritten(new_path: NewPath) -> None:
    path = new_path()
    holdfast.save({"t": WEIGHT}, path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(AlreadyCommittedError, match="a committed checkpoint; save under another"):
        holdfast.save({"t": WEIGHT + 1}, path)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_of_two_saves_at_once_one_stands_and_the_other_says_so(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_path()
    tokens = iter(["aa" * 16, "bb" * 16])

    def race(size: int) -> str:
        # While the first save is between its check and its commit, the second runs whole.
        token = next(tokens)
        if token[0] == "a":
            holdfast.save({"t": WEIGHT + 1}, path)
        return token

    monkeypatch.setattr(secrets, "token_hex", race)
    with pytest.raises(AlreadyCommittedError, match="by another save during this one"):
        holdfast.save({"t": WEIGHT}, path)
    assert holdfast.open(path).save_id == "bb" * 16
    assert holdfast.open(path).verify() == []
    assert [entry.name for entry in (path / "data").iterdir()] == ["bb" * 16]


@contextmanager
def not_committed(text: str) -> Iterator[None]:
    with pytest.raises(NotCommittedError, match=text):
        yield


def test_what_is_no_checkpoint_is_named_for_what_it_is(new_path: NewPath) -> None:
    nowhere, file, empty, dying, run = (new_path() for _ in range(5))
    file.write_bytes(b"weights")
    empty.mkdir()
    holdfast.save({"t": WEIGHT}, dying)
    (dying / "MANIFEST").unlink()
    with holdfast.Checkpointer(run) as checkpointer:
        for step in (5, 10):
            checkpointer.save(step, {"t": WEIGHT})
    cases = [
        (nowhere, "does not exist; expected the directory of a checkpoint"),
        (run / "step-10", "does not exist; expected .+ run has step-00000005, step-00000010"),
        (file, "is not a directory; expected the directory of a checkpoint"),
        (empty, "has no MANIFEST: it is not a checkpoint"),
        (dying, "has data files but no MANIFEST: it is being written, or a save died"),
    ]
    assert holdfast.open(run).step == 10
    with not_committed(f"{run.name} is a run, not one checkpoint; give one of its steps, such as"):
        holdfast.Checkpoint(run)
    for path, text in cases:
        with not_committed(f"{path.name} {text}"):
            holdfast.open(path)
        with not_committed(f"{path.name} {text}"):
            holdfast.load(path, into={"t": WEIGHT})


def test_a_path_may_be_relative_text_or_a_path(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = new_path()
    place.mkdir()
    monkeypatch.chdir(place)
    with caplog.at_level(logging.INFO, "holdfast"):
        holdfast.save({"t": WEIGHT}, "a/b/step 1")
        holdfast.load(Path("a") / "b" / "step 1", into={"t": torch.zeros(2)})
    assert [record.message.split()[0] for record in caplog.records] == ["saved", "loaded"]
    assert os.listdir(place / "a" / "b") == ["step 1"]
    assert holdfast.open("a/../a/b/step 1").location == str(place / "a" / "b" / "step 1")


def test_a_pipe_named_as_a_manifest_above_holds_no_save(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "MANIFEST")
    holdfast.save({"w": torch.ones(3)}, tmp_path / "run" / "a")
    assert holdfast.verify(tmp_path / "run" / "a").damage == ()


def test_nothing_is_saved_within_a_checkpoint(new_path: NewPath) -> None:
    """It would not belong to the outer one, which would then be refused."""
    path, state = new_path(), {"w": torch.ones(3)}
    holdfast.save(state, path)
    with pytest.raises(OptionError, match=rf"{path}/a/b is within a committed checkpoint, {path},"):
        holdfast.save(state, path / "a" / "b")
    with pytest.raises(OptionError, match=rf"If {path} was saved by mistake, delete its MANIFEST"):
        holdfast.save(state, path / "a" / "b")
    with pytest.raises(OptionError, match="within a committed checkpoint"):
        holdfast.Checkpointer(path).save(1, state)
    with holdfast.open(path) as checkpoint:
        assert not checkpoint.verify()
    other = new_path()
    other.mkdir()
    (other / "MANIFEST").write_text("# file GENERATED by distutils, do NOT edit")
    holdfast.save(state, other / "a")
    file = new_path()
    file.write_text("")
    with pytest.raises(StoreError, match="is not a directory, or is within a file"):
        holdfast.save(state, file)


def test_a_tensor_is_no_value_and_a_value_no_tensor(new_path: NewPath) -> None:
    path = new_path()
    holdfast.save({"step": 3, "w": torch.ones(3)}, path)
    with pytest.raises(MismatchError, match=r"step is of type int .*, and a tensor in the") as one:
        holdfast.load(path, into={"step": torch.tensor(1), "w": torch.zeros(3)})
    with pytest.raises(
        MismatchError, match=r"w is a tensor in the checkpoint, f32 \[3\], and none in the target"
    ) as two:
        holdfast.load(path, into={"step": 1, "w": 0})
    assert "missing" not in str(one.value) + str(two.value)


def test_a_long_list_of_names_is_cut(new_path: NewPath) -> None:
    path = new_path()
    holdfast.save({"a": {str(n): torch.ones(1) for n in range(300)}}, path)
    with pytest.raises(
        MismatchError, match=r"300 are missing in the checkpoint: .*, … 250 more"
    ) as e:
        holdfast.load(path, into={"b": {str(n): torch.ones(1) for n in range(300)}})
    assert len(str(e.value)) < 3000


class ListOfItself(dict[str, int]):
    """A state that saves itself as a list."""

    def state_dict(self) -> list[int]:
        return [1, 2]

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError(state)


@pytest.mark.parametrize("state", [{(1, 2): 3}, {True: 1}, {1.5: {"a": 2}}, ListOfItself()])
def test_a_whole_state_without_names_is_refused_and_not_saved_empty(
    new_path: NewPath, state: Any
) -> None:
    with pytest.raises(StateError, match="expected a dict with str or int keys"):
        holdfast.save(state, new_path())


def test_a_model_of_another_size_is_refused_in_few_words(new_path: NewPath) -> None:
    def state(width: int) -> dict[str, Any]:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(40)))
        optimizer = optim.AdamW(model.parameters())
        model(torch.ones(width)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    path = new_path()
    holdfast.save(state(4), path)
    with pytest.raises(MismatchError) as raised:
        holdfast.load(path, state(5))
    text = str(raised.value)
    assert "240 differ: model.0.bias" in text and "; and 237 more. Build the model with" in text
    assert len(text) < 1000


@pytest.mark.parametrize(
    "key", ["\ud800", 10**5000, "x" * 1_000_000], ids=["half a pair", "large", "long"]
)
def test_a_path_is_refused_before_a_text_names_it(tmp_path: Path, key: Any) -> None:
    """Also where its tensor is refused too: the text would hold the whole path."""
    with pytest.raises(StateError, match=r"not valid Unicode|integer key|bytes") as told:
        holdfast.save({key: torch.ones(2, device="meta")}, tmp_path / "a")
    assert len(str(told.value)) < 500
