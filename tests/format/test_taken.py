"""Files that say who has taken an epoch, and whose a local directory is: what lies in them."""

import json

import pytest

from holdfast.format.epoch import Taker, decode_taker
from holdfast.format.local_mark import LocalMark, decode_mark, encode_mark

STARTED = "2026-11-30T12:00:00+00:00"
TAKEN = {"host": "a", "pid": 7, "started": STARTED}
NOT_JSON = [b"", b"\xff", b"{", b"[" * 100_000, b"null", b"[]", b"7"]


def test_a_taker_is_read() -> None:
    assert decode_taker(json.dumps(TAKEN).encode()) == Taker("a", 7, 1796040000.0)


@pytest.mark.parametrize(
    "wrong", [{"pid": "x"}, {"pid": None}, {"pid": float("inf")}, {"started": "yesterday"}]
)
def test_a_taker_with_a_wrong_value_is_none(wrong: dict[str, object]) -> None:
    assert decode_taker(json.dumps(TAKEN | wrong).encode()) is None


@pytest.mark.parametrize("data", NOT_JSON)
def test_what_is_no_object_names_neither_a_taker_nor_a_store(data: bytes) -> None:
    assert decode_taker(data) is None
    assert decode_mark(data) is None


@pytest.mark.parametrize("ranks", [frozenset(), frozenset({1, 3})])
def test_a_mark_is_read_as_it_was_written(ranks: frozenset[int]) -> None:
    mark = LocalMark("s3://bucket/run", ranks, 4 if ranks else 0)
    assert decode_mark(encode_mark(mark)) == mark


@pytest.mark.parametrize(
    "wrong", [{"store": ""}, {"store": 7}, {"ranks": 7}, {"ranks": ["1"]}, {"of": 1.5}]
)
def test_a_mark_with_a_wrong_value_is_none(wrong: dict[str, object]) -> None:
    assert decode_mark(json.dumps({"store": "s3://bucket/run"} | wrong).encode()) is None
