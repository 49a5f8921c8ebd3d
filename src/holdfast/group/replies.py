"""What a rank answers: named parts ⇄ the bytes of one answer. Knows no meaning of them."""

import struct
from collections.abc import Sequence

from ..errors import PeerError

Reply = dict[str, bytes]

_MAGIC = b"reply\n"  # then the number of parts, and each part
_COUNT = struct.Struct("<H")
_LENGTHS = struct.Struct("<HQ")  # bytes of a part's name and of the part, which follow


def encode_reply(**parts: bytes) -> bytes:
    """Write named parts as one answer.

    Example:
        ``encode_reply(record=b"{}", objects=b"[]")``
    """
    pieces = [_MAGIC, _COUNT.pack(len(parts))]
    for name, part in parts.items():
        pieces += [_LENGTHS.pack(len(name.encode()), len(part)), name.encode(), part]
    return b"".join(pieces)


def decode_replies(answers: Sequence[bytes], *needed: str) -> list[Reply]:
    """Read the answers of all ranks, in rank order.

    Args:
        needed: parts that each has to have; without any, an answer that is no reply has no parts:
            its rank may be in another call.

    Raises:
        PeerError: a reply is cut short, goes on behind its parts, or lacks one; the text names its
            rank.
    """
    return [_decode(answer, rank, needed) for rank, answer in enumerate(answers)]


def _decode(answer: bytes, rank: int, needed: Sequence[str]) -> Reply:
    begin, end = len(_MAGIC) + _COUNT.size, len(answer)
    if not answer.startswith(_MAGIC):
        if not needed:
            return {}
        raise _failure(answer, rank, "it does not begin as a reply")
    parts: Reply = {}
    at = begin
    (count,) = _COUNT.unpack_from(answer, len(_MAGIC)) if end >= begin else (0,)
    for _ in range(count):
        start = at + _LENGTHS.size
        sizes = _LENGTHS.unpack_from(answer, at) if start <= end else (0, 0)
        middle, at = start + sizes[0], start + sum(sizes)
        if at > end:
            break
        parts[answer[start:middle].decode(errors="replace")] = answer[middle:at]
    if at > end:
        raise _failure(answer, rank, f"it ends {at - end} bytes too early")
    if at < end:
        raise _failure(answer, rank, f"{end - at} bytes follow its parts")
    if lacking := [name for name in needed if name not in parts]:
        raise _failure(answer, rank, f"it lacks {', '.join(lacking)}")
    return parts


def _failure(answer: bytes, rank: int, fault: str) -> PeerError:
    """Make the error that says what is wrong."""
    cause = f"its reply of {len(answer)} bytes is damaged: {fault}"
    return PeerError(
        f"the reply of rank {rank} is invalid: {cause}. Check that all ranks run the same "
        "holdfast, and the network between them",
        rank=rank,
        cause=cause,
    )
