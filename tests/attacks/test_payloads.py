"""Payloads that no codec writes, and groups that cannot be, with every checksum right.

Both readers refuse what breaks a rule; damaged symbols are refused, or come out as other elements,
in bounded memory, and nothing crashes.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from format import reader
from format.forge import Forgery
from holdfast.errors import CorruptError, VersionError
from holdfast.options import Options

NewPath = Callable[[], Path]
ROWS, COLUMNS = 80, 30
OPTIONS = Options(chunk_elements=1300)
# Tensors in the order of the file: the moments, the master, the weight; two chunks each.
SQUARE, MOMENT, MASTER, WEIGHT, PLAIN = range(5)


def state() -> dict[str, Any]:
    torch.manual_seed(4)
    scale = torch.exp2(torch.randn(ROWS, 1) * 2 + torch.randn(COLUMNS) * 2 - 20)
    master = torch.randn(ROWS, COLUMNS) / 50
    square = scale * torch.exp2(2 * torch.randn(ROWS, COLUMNS))
    signs = torch.randint(0, 2, (ROWS, COLUMNS)) * 2 - 1
    first = square.sqrt() * signs * (1 + torch.rand(ROWS, COLUMNS))
    moments = {"exp_avg": first, "exp_avg_sq": square}
    return {
        "model": {"a": master.bfloat16()},
        "master": {"a": master},
        "optimizer": {"a": moments},
        "plain": torch.randn(500) / 50,
    }


@pytest.fixture
def truth(new_path: NewPath) -> Path:
    path = new_path()
    holdfast.save(state(), path, codec="lossless", options=OPTIONS)
    return path


def forged(truth: Path, path: Path, tell: Callable[[Forgery], None]) -> None:
    forgery = Forgery.read(truth)
    tell(forgery)
    forgery.write(path)


def both(forgery: Forgery) -> list[Any]:
    """MANIFEST and the footer of the one file; a lie has to be told in both."""
    return [forgery.manifest, forgery.files[0].footer]


def set_row(
    forgery: Forgery, row: int, *, size: int | None = None, mode: int | None = None
) -> None:
    for table in both(forgery):
        old = table.columns["chunk.size_mode"][row]
        new_size = old & 0xFFFFFF if size is None else size
        new_mode = old >> 24 if mode is None else mode
        table.columns["chunk.size_mode"][row] = new_size | new_mode << 24
        if not new_size:
            table.columns["chunk.offset"][row] = 0


def set_groups(forgery: Forgery, change: Callable[[list[Any]], Any]) -> None:
    for table in both(forgery):
        groups = table.header["codecs"][0]["groups"]
        table.header["codecs"][0]["groups"] = change(groups)


def modes(forgery: Forgery) -> list[int]:
    return [number >> 24 for number in forgery.columns["chunk.size_mode"]]


def row_of_mode(forgery: Forgery, mode: int) -> int:
    return modes(forgery).index(mode)


LIES: dict[str, tuple[Callable[[Forgery], None], str]] = {
    "no groups": (
        lambda f: [t.header["codecs"][0].pop("groups") for t in both(f)] and None,
        "a codec of its JSON header has the keys",
    ),
    "groups that are an object": (lambda f: set_groups(f, lambda _: {}), "'groups' of its JSON"),
    "a group of one": (lambda f: set_groups(f, lambda g: [*g, {"weight": PLAIN}]), "the roles"),
    "an unknown role": (
        lambda f: set_groups(f, lambda g: [{**g[0], "bias": PLAIN}]),
        "a group of a codec has the roles",
    ),
    "a member that is not there": (
        lambda f: set_groups(f, lambda g: [{**g[0], "weight": 5}]),
        "names tensor 5 of 5",
    ),
    "a member that is true": (
        lambda f: set_groups(f, lambda g: [{**g[0], "exp_avg": True}]),
        "exp_avg is True",
    ),
    "a tensor in two groups": (lambda f: set_groups(f, lambda g: [*g, *g]), "in two groups"),
    "a tensor twice in a group": (
        lambda f: set_groups(f, lambda g: [{**g[0], "master": g[0]["exp_avg"]}]),
        "in two groups",
    ),
    "a master of half precision": (
        lambda f: set_groups(f, lambda g: [{"master": g[0]["weight"], "weight": g[0]["master"]}]),
        "the master of a group is of the dtype bf16",
    ),
    "a group of two shapes": (
        lambda f: set_groups(f, lambda g: [{**g[0], "exp_avg_sq": 4}]),
        "of several shapes|of the dtype",
    ),
    "a group without what a chunk refers to": (
        lambda f: set_groups(f, lambda g: [{k: v for k, v in g[0].items() if k != "master"}]),
        "refers to a shard that is not in its file",
    ),
    "no group for a chunk that refers": (
        lambda f: set_groups(f, lambda _: []),
        "refers to a shard that is not in its file",
    ),
    "a mode that the codec has not": (
        lambda f: set_row(f, row_of_mode(f, 2), mode=8),
        "another size or mode",
    ),
    "a raw chunk of fewer bytes": (
        lambda f: set_row(f, row_of_mode(f, 2), mode=0),
        "another size or mode",
    ),
    "an empty payload of planes": (
        lambda f: set_row(f, row_of_mode(f, 2), size=0),
        "of no payload|another size or mode|a gap is too long",
    ),
    "an empty payload with a place": (
        lambda f: (
            [t.columns["chunk.offset"].__setitem__(row_of_mode(f, 5), 1) for t in both(f)] and None
        ),
        "an empty payload has an offset",
    ),
    "raw tensors of coded chunks": (
        lambda f: [t.header.__setitem__("codecs", [{"name": "raw"}]) for t in both(f)] and None,
        "another size or mode",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_told_from_the_truth_by_both_readers(
    truth: Path, new_path: NewPath, name: str
) -> None:
    tell, text = LIES[name]
    path = new_path()
    forged(truth, path, tell)
    with pytest.raises(CorruptError, match=text):
        holdfast.open(path).state()
    with pytest.raises(reader.Corrupt):
        reader.read(path)


def test_what_was_not_altered_is_read_by_both(truth: Path, new_path: NewPath) -> None:
    path = new_path()
    forged(truth, path, lambda forgery: None)
    assert sorted({*modes(Forgery.read(path))} - {0}) == [2, 3, 4, 5]
    found = reader.read(path)["tensors"]
    assert len(found) == 5
    assert torch.equal(holdfast.open(path).tensor("plain"), state()["plain"])


def test_an_unknown_codec_beside_a_known_one_is_newer(truth: Path, new_path: NewPath) -> None:
    path = new_path()

    def tell(forgery: Forgery) -> None:
        for table in both(forgery):
            table.header["codecs"].append({"name": "zip", "level": 3})

    forged(truth, path, tell)
    with pytest.raises(VersionError, match="the codec 'zip'"):
        holdfast.open(path)


def test_a_codec_that_no_tensor_has_is_read_by_both(truth: Path, new_path: NewPath) -> None:
    path = new_path()

    def tell(forgery: Forgery) -> None:
        for table in both(forgery):
            table.header["codecs"].append({"name": "raw"})

    forged(truth, path, tell)
    assert torch.equal(holdfast.open(path).tensor("plain"), state()["plain"])
    assert len(reader.read(path)["tensors"]) == 5


@pytest.mark.parametrize("seed", range(60))
def test_damaged_symbols_never_do_more_than_fail(truth: Path, new_path: NewPath, seed: int) -> None:
    """Bits of payloads flipped under right checksums: an error, or elements of the right shape."""
    chance, path = random.Random(seed), new_path()

    def tell(forgery: Forgery) -> None:
        columns = forgery.files[0].footer.columns
        places = zip(columns["chunk.size_mode"], columns["chunk.offset"], strict=True)
        spans = [(64 * units, number & 0xFFFFFF) for number, units in places if number & 0xFFFFFF]
        for _ in range(chance.choice([1, 1, 3, 20])):
            start, size = chance.choice(spans)
            at = start + chance.randrange(min(size, chance.choice([8, 60, 1 << 20])))
            byte = forgery.files[0].body[at - 64] ^ 1 << chance.randrange(8)
            forgery.set_body(0, at, bytes([byte]))

    forged(truth, path, tell)
    ours: dict[str, Any] = {}
    checkpoint = holdfast.open(path)
    for name in checkpoint.names():
        try:
            ours[name] = checkpoint.tensor(name)
        except CorruptError as error:
            assert "cannot be decoded" in str(error)
    assert all(ours[name].shape == checkpoint.info(name).shape for name in ours)
    try:
        reader.read(path)
    except reader.Corrupt:
        return
    assert len(ours) == len(checkpoint.names())
