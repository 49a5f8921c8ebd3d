"""Parts of the format that are refused one by one, where no lie about a whole checkpoint leads."""

import gc
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import CorruptError, StateError
from holdfast.format import references
from holdfast.format.data_file import decode_trailer
from holdfast.format.header import decode_header
from holdfast.format.links import decode_base, decode_losses
from holdfast.format.manifest import decode_manifest
from holdfast.format.values import PATH_KEYS_MAX, decode_value, encode_path

from .forge import Forgery, Table

GOLDEN = Path(__file__).parent / "golden" / "v1"
LOSS = {"tensor": 0, "squared_error": 0.5, "largest_error": 0.5, "energy": 1.0}


def manifest(name: str) -> Table:
    return Forgery.read(GOLDEN / name).manifest


def text_of(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8)


def test_a_trailer_of_other_bytes_is_refused() -> None:
    with pytest.raises(CorruptError, match="trailer: 5 bytes; expected 32"):
        decode_trailer(b"short", 200)


def test_a_flipped_bit_of_a_manifest_is_told_by_its_checksum() -> None:
    content = bytearray((GOLDEN / "boxes" / "MANIFEST").read_bytes())
    content[-20] ^= 1
    with pytest.raises(CorruptError, match=r"its checksum \(XXH3-128\) does not match"):
        decode_manifest(bytes(content), "it")


def test_a_header_is_read_with_the_collector_off_and_leaves_it_so() -> None:
    text = text_of(manifest("boxes").header)
    gc.disable()
    try:
        decode_header(text)
        assert not gc.isenabled()
    finally:
        gc.enable()
    decode_header(text)
    assert gc.isenabled()


def test_a_header_for_which_the_stack_is_too_small_is_refused() -> None:
    header = manifest("boxes").header
    value: Any = 1.5
    for _ in range(55):
        value = [value]
    header["objects"] = [{"path": ["a value"], "value": value}]
    text, limit = text_of(header), sys.getrecursionlimit()
    decode_header(text)
    sys.setrecursionlimit(len(inspect.stack(0)) + 90)  # enough for the JSON, not for values
    try:
        with pytest.raises(CorruptError, match="nested deeper"):
            decode_header(text)
    finally:
        sys.setrecursionlimit(limit)


def test_a_feature_that_stands_twice_is_refused() -> None:
    header = manifest("link").header
    header["features"] *= 2
    with pytest.raises(CorruptError, match="names the feature 'base' twice"):
        decode_header(text_of(header))


@pytest.mark.parametrize("entry", [[], {"name": "a/b", "digest": "0" * 32, "links": 1}])
def test_a_base_that_is_no_directory_beside_it_is_refused(entry: Any) -> None:
    with pytest.raises(CorruptError, match="base"):
        decode_base(entry)


@pytest.mark.parametrize("losses", [[], [LOSS | {"energy": -1.0}], [LOSS | {"energy": 1}]])
def test_losses_that_say_nothing_are_refused(losses: list[Any]) -> None:
    assert decode_losses({"losses": [LOSS]}, 1)[0].energy == 1.0
    with pytest.raises(CorruptError, match="loss"):
        decode_losses({"losses": losses}, 1)


def test_a_chunk_that_refers_to_no_base_is_refused() -> None:
    table = manifest("link")
    table.header["features"] = [f for f in table.header["features"] if f["name"] != "base"]
    del table.header["base"]
    with pytest.raises(CorruptError, match="a chunk refers to a base, and it has none"):
        decode_manifest(table.encode(), "it")


def test_shards_whose_hashes_meet_are_not_taken_for_one(
    new_path: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_path()
    masters = {name: torch.arange(n) / 7 for name, n in (("a", 500), ("b", 600))}
    weights = {name: master.bfloat16() for name, master in masters.items()}
    moments = {name: {"exp_avg": w, "exp_avg_sq": w} for name, w in masters.items()}
    state = {"model": weights, "master": masters, "optimizer": moments}
    holdfast.save(state, path, codec="lossless")
    content = (path / "MANIFEST").read_bytes()
    decode_manifest(content, "it")
    zeros = lambda rows: np.zeros(len(rows), np.uint64)  # noqa: E731
    monkeypatch.setattr(references, "row_hashes", zeros)
    with pytest.raises(CorruptError, match="two shards of a group cannot be told apart"):
        decode_manifest(content, "it")


def test_a_number_is_itself_and_a_path_has_an_end() -> None:
    assert decode_value(1.5) == 1.5
    with pytest.raises(StateError, match=f"at most {PATH_KEYS_MAX}"):
        encode_path(("a",) * (PATH_KEYS_MAX + 1))
