"""What ranks tell each other comes apart as it was put together, or is refused."""

import pytest

from holdfast.errors import PeerError
from holdfast.group.replies import decode_replies, encode_reply

PARTS = {"record": b'{"rank": 1}', "objects": b"", "written": bytes(range(256)) + b"\n\n"}


def test_parts_come_back_by_name_whatever_is_in_them() -> None:
    assert decode_replies([encode_reply(**PARTS), encode_reply()]) == [PARTS, {}]


def test_an_answer_that_is_no_reply_has_no_parts() -> None:
    assert decode_replies([b"", b"7", b'{"what": "a load"}\n']) == [{}, {}, {}]


def test_a_reply_that_is_cut_short_anywhere_is_refused_with_its_rank() -> None:
    whole = encode_reply(**PARTS)
    begin = len(encode_reply()) - 2  # shorter, it is no reply
    for size in range(begin, len(whole)):
        with pytest.raises(PeerError, match=rf"rank 1 .* its reply of {size} bytes") as caught:
            decode_replies([whole, whole[:size]])
        assert caught.value.rank == 1
    with pytest.raises(PeerError, match="it ends 1 bytes too early"):
        decode_replies([whole[:-1]])


def test_a_reply_with_more_than_its_parts_is_refused() -> None:
    whole = encode_reply(**PARTS)
    with pytest.raises(PeerError, match="1 bytes follow its parts"):
        decode_replies([whole + b"\n"])


@pytest.mark.parametrize("answer", [b"", b"7", b"another answer", encode_reply(objects=b"[]")])
def test_a_part_that_has_to_be_there_is_missed(answer: bytes) -> None:
    whole = encode_reply(**PARTS)
    assert decode_replies([whole], "record", "written") == [PARTS]
    with pytest.raises(PeerError, match="the reply of rank 1 is invalid"):
        decode_replies([whole, answer], "record", "written")
