"""``types=``: enumerations and dataclasses come back as their class where the reader gives it."""

import dataclasses
import enum
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import MismatchError, OptionError
from holdfast.format.natives import Tagged
from holdfast.format.revive import revive_at, types_by_name

NewPath = Callable[[], Path]


class Colour(enum.Enum):
    """An enumeration of the user's."""

    RED = "r"
    BLUE = "b"


@dataclasses.dataclass
class Config:
    """A dataclass, which has no hash, and whose constructor may not be called."""

    lr: float
    colours: list[Colour]
    made = 0

    def __post_init__(self) -> None:
        Config.made += 1


class Schedule:
    """Something with a state of its own."""

    def __init__(self, colour: Any) -> None:
        self.colour = colour

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept."""
        return {"colour": self.colour, "last": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""
        self.colour = state["colour"]


NAME = f"{__name__}.Config"


def make_state() -> dict[str, Any]:
    config = Config(0.5, [Colour.BLUE, Colour.RED])
    return {"w": torch.ones(3), "config": config, "deep": [{"c": Colour.RED}, (Colour.BLUE,)]}


@pytest.fixture
def path(new_path: NewPath) -> Path:
    path = new_path()
    holdfast.save(make_state(), path)
    return path


def make_target() -> dict[str, Any]:
    return {"w": torch.zeros(3), "config": None, "deep": None}


def test_a_load_gives_members_and_instances_of_the_classes(path: Path) -> None:
    state, made = make_target(), Config.made
    holdfast.load(path, into=state, types=[Colour, Config])
    assert Config.made == made, "a constructor was called"
    assert type(state["config"]) is Config and state["config"].colours[0] is Colour.BLUE
    assert (state["config"].lr, state["deep"][1]) == (0.5, (Colour.BLUE,))
    assert state["deep"][0]["c"] is Colour.RED


def test_others_come_back_as_plain_data(path: Path) -> None:
    state = make_target()
    holdfast.load(path, into=state)
    assert state["config"].name == NAME
    red = Tagged("$enum", f"{__name__}.Colour", "r")
    assert state["deep"][0] == {"c": red}
    holdfast.load(path, into=state, types=(kind for kind in [Config]))
    assert type(state["config"]) is Config and state["config"].colours[1] == red


def test_an_open_checkpoint_gives_them_too(path: Path) -> None:
    opened = holdfast.open(path, types=[Colour, Config])
    assert opened.objects()["deep"] == [{"c": Colour.RED}, (Colour.BLUE,)]
    assert opened.state()["config"] == make_state()["config"]
    assert holdfast.open(path).objects()["deep"] != opened.objects()["deep"]
    assert not opened.verify()


def test_an_object_is_given_members_of_its_classes(new_path: NewPath) -> None:
    path, target = new_path(), Schedule(Colour.BLUE)
    holdfast.save({"schedule": Schedule(Colour.RED)}, path)
    holdfast.load(path, into={"schedule": target}, types=[Colour])
    assert target.colour is Colour.RED


def test_a_class_that_has_changed_is_an_error_that_names_the_value(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclasses.dataclass
    class Other:
        lr: float

    class Fewer(enum.Enum):
        RED = "r"

    for kind, name in ((Other, "Config"), (Fewer, "Colour")):
        kind.__module__, kind.__qualname__ = __name__, name
    for types, text in (
        ([Other], r"^config of .*has the fields \['lr'\], and was saved with \['colours', 'lr'\]"),
        ([Fewer], r"^config of .*'b' is not a valid .*Check types="),
    ):
        state = make_target()
        with pytest.raises(MismatchError, match=text):
            holdfast.load(path, into=state, types=types)
        assert not state["w"].any() and state["config"] is None
        with pytest.raises(MismatchError, match=text):
            holdfast.open(path, types=types)


@pytest.mark.parametrize(
    ("types", "text"),
    [
        (Colour, "types is the class Colour"),
        (5, "types is 5"),
        ("Colour", "types is 'Colour'"),
        ([Colour.RED], "types has a Colour"),
        ([Path], "types has the class Path"),
        ([Colour, enum.Enum("Colour", "RED", module=__name__)], "two classes of the name"),
    ],
)
def test_what_is_no_list_of_such_classes_is_refused(path: Path, types: Any, text: str) -> None:
    for call in (
        lambda: holdfast.load(path, into=make_target(), types=types),
        lambda: holdfast.open(path, types=types),
    ):
        with pytest.raises(OptionError, match=text):
            call()


def test_what_a_file_makes_of_a_class_is_an_error_of_ours() -> None:
    types = types_by_name([Colour, Config])
    config = Tagged("$dataclass", NAME, {"lr": 1.0, "colours": []})
    with pytest.raises(MismatchError, match=r"^x of here: unhashable type"):
        revive_at({config}, types, "x of here")

    class Vague(enum.Enum):
        ONE = 1

        @classmethod
        def _missing_(cls, value: object) -> "Vague":
            return cls.ONE

    name = f"{Vague.__module__}.{Vague.__qualname__}"
    both: Iterable[Any] = [Tagged("$enum", name, 5), Tagged("$enum", name, 6)]
    for value in (set(both), dict.fromkeys(both)):
        with pytest.raises(MismatchError, match="two elements or keys are the same"):
            revive_at(value, types_by_name([Vague]), "x of here")
