"""Lines of metrics.jsonl and slots of progress files that say what no writer of ours says."""

import json

import pytest

from holdfast.format.measured import FAILURE, newest_failure
from holdfast.format.progress import SLOT_BYTES, RankProgress, decode_slots, encode_slot


def test_other_lines_than_saves_say_nothing_of_failures() -> None:
    failed = {"verb": FAILURE, "step": 7, "error": "StoreError: gone"}
    assert newest_failure([failed, {"verb": "load", "step": 6}]) == (7, "StoreError: gone")
    assert newest_failure([failed, {"verb": "save", "step": 8}, {"verb": "upload"}]) is None
    assert newest_failure([{"verb": "upload"}]) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("rank", 2**70), ("rank", -5), ("time_s", 2**60), ("rank", True), ("host", 3)],
)
def test_a_slot_with_a_number_out_of_bounds_is_left_out(name: str, value: object) -> None:
    good = encode_slot(RankProgress(host="a", rank=1))
    record = json.loads(good.strip(b"\0 \n")) | {name: value}
    assert [*decode_slots(json.dumps(record).encode().ljust(SLOT_BYTES))] == []
    assert [one.rank for one in decode_slots(good)] == [1]
