"""A wrong argument, of any public verb, is refused in a line that names it: no state is printed."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

import holdfast
from holdfast.errors import OptionError, StateError
from holdfast.integrations.dcp import HoldfastReader, HoldfastWriter
from holdfast.integrations.dcp.convert import plan_conversion

TEXT_MAX = 300  # characters of an error: its text must not hold the state it was given

MODEL = nn.Linear(30, 30)
# Its repr takes several thousand characters.
STATE: dict[str, Any] = {f"w{number}": torch.randn(50, 50) for number in range(20)}
WEIGHT = STATE["w0"]
ARRAY = np.zeros(5000)


class Place:
    """Where a wrong argument meets a good checkpoint, and a run with one step."""

    def __init__(self, root: Path) -> None:
        self.good, self.new, self.run = root / "good", root / "new", root / "run"
        holdfast.save(STATE, self.good)
        with self.checkpointer() as checkpointer:
            checkpointer.save(1, STATE)

    def checkpointer(self) -> holdfast.Checkpointer:
        return holdfast.Checkpointer(self.run, every=1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    yield Place(tmp_path_factory.mktemp("wrong"))


Use = Callable[[Place, Any], Any]

# What no path is; bytes are refused too: a checkpoint's paths are text.
NO_PATHS: list[Any] = [
    *(None, 5, 1.5, True, b"/tmp", "", "a\0b", "a/\udcff", ["a"], object(), 10**5000),
    *(STATE, MODEL, WEIGHT, ARRAY, "~nobody-has-this-name/a", "ftp://host/run"),
]
PATHS: dict[str, tuple[Use, str]] = {
    "save": (lambda p, v: holdfast.save(STATE, v), "path"),
    "save_async": (lambda p, v: holdfast.save_async(STATE, v), "path"),
    "load": (lambda p, v: holdfast.load(v, into=dict(STATE)), "path"),
    "open": (lambda p, v: holdfast.open(v), "path"),
    "verify": (lambda p, v: holdfast.verify(v), "path"),
    "scrub": (lambda p, v: holdfast.scrub(v), "path"),
    "repair": (lambda p, v: holdfast.repair(v), "path"),
    "repair to": (lambda p, v: holdfast.repair(p.good, to=v), "to"),
    "rebase": (lambda p, v: holdfast.rebase(v), "path"),
    "recompress": (lambda p, v: holdfast.recompress(v, p.new, codec="raw"), "source"),
    "recompress to": (lambda p, v: holdfast.recompress(p.good, v, codec="raw"), "target"),
    "sign with": (lambda p, v: holdfast.sign(p.good, key=v), "key"),
    "signer": (lambda p, v: holdfast.signer(v), "path"),
    "trust": (
        lambda p, v: holdfast.open(p.good, options=holdfast.Options(trust=(v,))),
        "trust",
    ),
    "try_codecs": (lambda p, v: holdfast.try_codecs(v), "path"),
    "try_codecs from": (lambda p, v: holdfast.try_codecs(p.good, v), "base"),
    "Checkpointer": (lambda p, v: holdfast.Checkpointer(v), "root"),
    "HoldfastWriter": (lambda p, v: HoldfastWriter(v), "path"),
    "HoldfastReader": (lambda p, v: HoldfastReader(v), "path"),
    "convert": (lambda p, v: plan_conversion(v, p.new), "source"),
    "convert to": (lambda p, v: plan_conversion(p.good, v), "target"),
}
MAY_BE_LEFT_OUT = {"repair to", "try_codecs from"}

# What no state is, with what should have been written.
NO_STATES: list[tuple[Any, str]] = [
    *((value, '{"model": model}') for value in (None, 1.5, b"x", [WEIGHT], object(), MODEL)),
    (WEIGHT, '{"weight": tensor}'),
    (optim.SGD(MODEL.parameters(), 0.1), '{"optimizer": optimizer}'),
]
STATES: dict[str, tuple[Use, str]] = {
    "save": (lambda p, v: holdfast.save(v, p.new), "state"),
    "save_async": (lambda p, v: holdfast.save_async(v, p.new), "state"),
    "step": (lambda p, v: p.checkpointer().step(2, v), "state"),
    "checkpointer.save": (lambda p, v: p.checkpointer().save(2, v), "state"),
    "load": (lambda p, v: holdfast.load(p.good, into=v), "into"),
    "restore": (lambda p, v: p.checkpointer().restore(v), "into"),
    "restore in a new run": (lambda p, v: holdfast.Checkpointer(p.new).restore(v), "into"),
    "restore a part": (lambda p, v: p.checkpointer().restore(v, partial=True), "into"),
}

SWAPPED: dict[str, tuple[Use, str]] = {
    "save": (lambda p, _: holdfast.save(str(p.new), STATE), "state first and the path second"),  # type: ignore[arg-type]
    "save_async": (lambda p, _: holdfast.save_async(p.new, STATE), "the state first"),  # type: ignore[arg-type]
    "save a module": (lambda p, _: holdfast.save("runs/a", MODEL), "the state first"),  # type: ignore[arg-type]
    "load": (lambda p, _: holdfast.load(STATE, into=str(p.good)), "the path first"),  # type: ignore[arg-type]
    "step": (lambda p, _: p.checkpointer().step(STATE, 5), "The step comes first"),  # type: ignore[arg-type]
    "checkpointer.save": (lambda p, _: p.checkpointer().save(MODEL, 3), "The step comes first"),  # type: ignore[arg-type]
    "restore": (lambda p, _: p.checkpointer().restore(5), "restore(state, step="),  # type: ignore[arg-type]
    "a step to restore": (lambda p, _: p.checkpointer().restore(STATE, step=STATE), "step is a"),  # type: ignore[arg-type]
}

# What is none of: a number, a name, a Keep, a codec, Options.
ODD: list[Any] = [STATE, WEIGHT, MODEL, object(), b"x", [STATE], 1e400 * 0, -1]
OTHERS: dict[str, Use] = {
    "step": lambda p, v: holdfast.save(STATE, p.new, step=v),
    "metrics": lambda p, v: holdfast.save(STATE, p.new, metrics=v),
    "metrics[": lambda p, v: holdfast.save(STATE, p.new, metrics={"loss": [v]}),  # type: ignore[dict-item]
    "codec": lambda p, v: holdfast.save(STATE, p.new, codec=v),
    "options": lambda p, v: holdfast.save(STATE, p.new, options=v),
    "group": lambda p, v: holdfast.save(STATE, p.new, group=v),
    "stage": lambda p, v: holdfast.save_async(STATE, p.new, stage=v),
    "busy": lambda p, v: holdfast.save_async(STATE, p.new, busy=v),
    "deadline_s": lambda p, v: holdfast.save_async(STATE, p.new, deadline_s=v),
    "every": lambda p, v: holdfast.Checkpointer(p.run, every=v),
    "keep": lambda p, v: holdfast.Checkpointer(p.run, keep=v),
    "overhead": lambda p, v: holdfast.Checkpointer(p.run, every="auto", overhead=v),
    "mtbf_s": lambda p, v: holdfast.Checkpointer(p.run, every="auto", mtbf_s=v),
    "ends_in_s": lambda p, v: holdfast.Checkpointer(p.run, ends_in_s=v),
    "signals": lambda p, v: holdfast.Checkpointer(p.run, signals=(v,)),
    "emergency": lambda p, v: holdfast.Checkpointer(p.run, emergency=v),
    "Keep.latest": lambda p, v: holdfast.Keep.latest(v),
    "Keep.every": lambda p, v: holdfast.Keep.every(v),
    "metric": lambda p, v: holdfast.Keep.best(v, 1),
    "mode": lambda p, v: holdfast.Keep.best("loss", 1, mode=v),
    "Keep": lambda p, v: holdfast.Keep.latest(1) | v,
    "bytes_per_s": lambda p, v: holdfast.scrub(p.run, bytes_per_s=v),
    "sample_bytes": lambda p, v: holdfast.try_codecs(p.good, sample_bytes=v),
    "name": lambda p, v: holdfast.open(p.good).tensor(v),
    "box": lambda p, v: holdfast.open(p.good).tensor("w0", v),
    "chunk_elements": lambda p, v: holdfast.Options(chunk_elements=v),
    "io": lambda p, v: holdfast.Options(io=v),
    "writers": lambda p, v: holdfast.Options(writers=v),
    "trust": lambda p, v: holdfast.Options(trust=v),
    "size": lambda p, v: holdfast.DataState(v),
    "quality": lambda p, v: holdfast.codecs.Compact(v),
}
GIVEN_OPTIONS: dict[str, Use] = {
    "load": lambda p, v: holdfast.load(p.good, into=dict(STATE), options=v),
    "open": lambda p, v: holdfast.open(p.good, options=v),
    "verify": lambda p, v: holdfast.verify(p.good, options=v),
    "repair": lambda p, v: holdfast.repair(p.good, options=v),
    "rebase": lambda p, v: holdfast.rebase(p.good, options=v),
    "recompress": lambda p, v: holdfast.recompress(p.good, p.new, codec="raw", options=v),
    "scrub": lambda p, v: holdfast.scrub(p.run, options=v),
    "try_codecs": lambda p, v: holdfast.try_codecs(p.good, options=v),
    "Checkpointer": lambda p, v: holdfast.Checkpointer(p.run, options=v),
    "HoldfastWriter": lambda p, v: HoldfastWriter(p.new, options=v),
    "HoldfastReader": lambda p, v: HoldfastReader(p.good, options=v),
}


def refusal(kind: type[Exception], use: Use, place: Place, value: Any) -> str:
    """Return the text of the error, which is one short line of text that can be written."""
    with pytest.raises(kind) as caught:
        use(place, value)
    text = str(caught.value)
    assert len(text) <= TEXT_MAX, text
    assert "\n" not in text
    text.encode()
    assert not place.new.exists()
    return text


@pytest.mark.parametrize("what", PATHS)
def test_what_is_no_path_is_refused_by_its_name(place: Place, what: str) -> None:
    use, named = PATHS[what]
    for value in NO_PATHS[1:] if what in MAY_BE_LEFT_OUT else NO_PATHS:
        text = refusal(OptionError, use, place, value)
        assert text.startswith(f"{named} "), text


@pytest.mark.parametrize("what", STATES)
def test_what_is_no_state_is_refused_with_what_to_write(place: Place, what: str) -> None:
    use, named = STATES[what]
    for value, example in NO_STATES:
        text = refusal(StateError, use, place, value)
        assert text.startswith(f"{named} is "), text
        assert text.endswith((f", such as {named}={example}", f". Wrap it: {named}={example}")), (
            text
        )


@pytest.mark.parametrize("what", SWAPPED)
def test_swapped_arguments_are_told_in_their_order(place: Place, what: str) -> None:
    use, order = SWAPPED[what]
    assert order in refusal(OptionError, use, place, None)


@pytest.mark.parametrize("named", OTHERS)
def test_an_odd_argument_is_refused_by_its_name(place: Place, named: str) -> None:
    for value in ODD:
        assert refusal(OptionError, OTHERS[named], place, value).find(named) in range(20)


@pytest.mark.parametrize("what", GIVEN_OPTIONS)
def test_options_are_refused_where_they_are_none(place: Place, what: str) -> None:
    for value in [*ODD, {}, 0, "", "io_uring"]:
        text = refusal(OptionError, GIVEN_OPTIONS[what], place, value)
        assert text.startswith("options is "), text


def test_nothing_was_written_where_the_process_is(place: Place) -> None:
    """A path that is refused must not have been taken for a relative one."""
    assert not [name for name in os.listdir() if name.startswith(("~", "s3:"))]
    assert sorted(path.name for path in place.good.parent.iterdir()) == ["good", "run"]


@pytest.mark.parametrize("value", [STATE, WEIGHT, "3", None, True])
def test_what_is_no_step_is_no_step_to_retire_after(place: Place, value: Any) -> None:
    for use in (
        lambda p, v: p.checkpointer().retire_after(v),
        lambda p, v: p.checkpointer().path(v),
        lambda p, v: p.checkpointer().step(v, STATE),
    ):
        assert refusal(OptionError, use, place, value).startswith("step is ")
    assert place.checkpointer().steps() == [1]


@pytest.mark.parametrize("names", ["w0", None, 5, [5], [STATE], WEIGHT])
def test_what_is_no_list_of_names_reads_nothing(place: Place, names: Any) -> None:
    text = refusal(OptionError, lambda p, v: holdfast.open(p.good).tensors(v), place, names)
    assert text.startswith("name")


@pytest.mark.parametrize("codecs", ["raw", None, 5, [5], [STATE], STATE])
def test_what_are_no_codecs_is_refused(place: Place, codecs: Any) -> None:
    text = refusal(OptionError, lambda p, v: holdfast.try_codecs(p.good, codecs=v), place, codecs)
    assert text.startswith("codec")
