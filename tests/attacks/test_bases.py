"""Links that tell lies of their base, with every checksum right: both readers refuse them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from format import reader
from format.forge import Forgery
from holdfast.errors import CorruptError, HoldfastError, VersionError
from holdfast.format.table import content_digest
from holdfast.options import Options

NewPath = Callable[[], Path]
Tell = Callable[[Forgery], None]
OPTIONS = Options(chunk_elements=700)
DIFFERENCE, UNCHANGED = 6, 7


@pytest.fixture
def run(new_path: NewPath) -> Path:
    """Three steps, each made from the one before."""
    root = new_path()
    torch.manual_seed(2)
    state = {"w": torch.randn(40, 50) / 50, "n": torch.arange(900)}
    for step in range(3):
        holdfast.save(state, at(root, step), codec="delta", options=OPTIONS)
        state["w"] = state["w"] + 1e-5 * torch.randn(40, 50)
    return root


def at(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def tell(path: Path, lie: Tell) -> None:
    forgery = Forgery.read(path)
    lie(forgery)
    moved = path.with_name("moved")
    forgery.write(moved)
    path.rename(path.with_name("true"))
    moved.rename(path)


def tables(forgery: Forgery) -> list[Any]:
    return [forgery.manifest, *(file.footer for file in forgery.files)]


def base(**changes: Any) -> Tell:
    def lie(forgery: Forgery) -> None:
        for table in tables(forgery):
            table.header["base"] = table.header["base"] | changes

    return lie


def header(change: Callable[[dict[str, Any]], None]) -> Tell:
    def lie(forgery: Forgery) -> None:
        for table in tables(forgery):
            change(table.header)

    return lie


def digest_of_unchanged(forgery: Forgery) -> None:
    columns = forgery.files[0].footer.columns
    rows = zip(columns["chunk.size_mode"], columns["chunk.offset"], strict=True)
    start = next(64 * units for number, units in rows if number >> 24 == UNCHANGED)
    forgery.set_body(0, start, bytes([forgery.files[0].body[start - 64] ^ 1]))


LIES: dict[str, tuple[Tell, str]] = {
    "a name that leads elsewhere": (base(name="../step-00000001"), "the name of the base is"),
    "a name of the directory above": (base(name=".."), "the name of the base is"),
    "a name of the run": (base(name="."), "the name of the base is"),
    "an absolute name": (base(name="/etc"), "the name of the base is"),
    "a name with a zero": (base(name="step\0"), "the name of the base is"),
    "a long name": (base(name="x" * 256), "the name of the base is"),
    "no name": (base(name=""), "the name of the base is"),
    "a name that is a number": (base(name=1), "the name of the base is 1"),
    "a base that is not there": (base(name="step-00000009"), "which is missing"),
    "itself as its base": (base(name="step-00000002"), "another checkpoint there"),
    "another digest": (base(digest="0" * 32), "another checkpoint there"),
    "a short digest": (base(digest="0" * 31), "digest is"),
    "no links": (base(links=0), "links is 0"),
    "65 links": (base(links=65), "links is 65"),
    "links that are true": (base(links=True), "links is True"),
    "as many links as the base has": (base(links=1), "fewer than 1 bases below that one, found 1"),
    "a further key": (base(step=3), "a base of its JSON header has the keys"),
    "a base that is a list": (
        header(lambda h: h.update(base=[])),
        "the base of its JSON header is not an object",
    ),
    "no base": (header(lambda h: h.pop("base")), "does not have the keys"),
    "a base without the feature": (
        header(lambda h: h.update(features=[])),
        "does not have the keys",
    ),
    "the feature twice": (
        header(lambda h: h["features"].append(h["features"][0])),
        "names the feature 'base' twice",
    ),
    "neither base nor feature": (
        header(lambda h: (h.pop("base"), h.update(features=[]))[1]),
        "refers to a base, and it has none",
    ),
    "another digest of what is unchanged": (digest_of_unchanged, "cannot be decoded"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_told_from_the_truth_by_both_readers(run: Path, name: str) -> None:
    lie, text = LIES[name]
    path = at(run, 2)
    tell(path, lie)
    with pytest.raises(CorruptError, match=text):
        holdfast.open(path).state()
    with pytest.raises(reader.Corrupt):
        reader.read(path)


def test_what_was_not_altered_is_read_by_both(run: Path) -> None:
    path = at(run, 2)
    found = [number >> 24 for number in Forgery.read(path).manifest.columns["chunk.size_mode"]]
    assert {DIFFERENCE, UNCHANGED} <= set(found)
    tell(path, lambda forgery: None)
    reader.read(path)
    holdfast.open(path).state()


def test_a_feature_beside_it_is_newer(run: Path) -> None:
    other = {"name": "dedup", "since": "9.0"}
    tell(at(run, 2), header(lambda h: h["features"].append(other)))
    with pytest.raises(VersionError, match="'dedup'"):
        holdfast.open(at(run, 2))
    with pytest.raises(reader.Newer):
        reader.read(at(run, 2))


def test_a_circle_is_refused(run: Path) -> None:
    """A checkpoint that names itself, by the digest that it has."""
    own = content_digest(holdfast.open(at(run, 2))._manifest.table)
    tell(at(run, 2), base(name="step-00000002", digest=own))
    with pytest.raises(CorruptError, match="fewer than 2 bases below that one, found 2"):
        holdfast.open(at(run, 2)).state()
    with pytest.raises(reader.Corrupt):
        reader.read(at(run, 2))


@pytest.mark.parametrize("change", ["dtype", "shape", "name"])
def test_a_base_without_the_tensor_is_refused(run: Path, change: str) -> None:
    """The base says, truly by its digest, that it holds something else."""
    state = {
        "dtype": {"w": torch.zeros(40, 50).double(), "n": torch.arange(900)},
        "shape": {"w": torch.zeros(50, 40), "n": torch.arange(900)},
        "name": {"v": torch.zeros(40, 50), "n": torch.arange(900)},
    }[change]
    holdfast.save(state, run / "other", options=OPTIONS)
    digest = content_digest(holdfast.open(run / "other")._manifest.table)
    tell(at(run, 2), base(name="other", digest=digest))
    with pytest.raises(CorruptError, match=r"has no w of the same dtype and shape"):
        holdfast.open(at(run, 2)).state()
    with pytest.raises(reader.Corrupt):
        reader.read(at(run, 2))


def test_a_long_chain_is_opened_in_bounded_time(run: Path) -> None:
    """Links may be 64; more cannot be told, since each has fewer below it."""
    state = {"w": torch.randn(40, 50)}
    for step in range(3, 70):
        state["w"] = state["w"] + 1e-5
        codec = holdfast.codecs.Delta(every=65)
        holdfast.save(state, at(run, step), codec=codec, options=OPTIONS)
    assert torch.equal(holdfast.open(at(run, 64)).tensor("w"), reader_tensor(at(run, 64)))
    with pytest.raises(HoldfastError, match="expected an integer from 1"):
        holdfast.codecs.Delta(every=66)


def reader_tensor(path: Path) -> torch.Tensor:
    dtype, shape, content = reader.read(path)["tensors"]['["w"]']
    assert dtype == "f32"
    return torch.frombuffer(bytearray(content), dtype=torch.float32).view(shape)
