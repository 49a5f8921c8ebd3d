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
    if not needed and not answer.startswith(_MAGIC):
        return {}
    rest = _Rest(answer, rank)
    rest.expect(_MAGIC)
    (count,) = _COUNT.unpack(rest.take(_COUNT.size))
    parts = {}
    for _ in range(count):
        name_bytes, part_bytes = _LENGTHS.unpack(rest.take(_LENGTHS.size))
        name = rest.take(name_bytes).decode(errors="replace")
        parts[name] = rest.take(part_bytes)
    rest.end()
    if lacking := [name for name in needed if name not in parts]:
        raise rest.failure(f"it lacks {', '.join(lacking)}")
    return parts


class _Rest:
    """What has not been read yet of a rank's answer."""

    def __init__(self, answer: bytes, rank: int) -> None:
        self._answer, self._at, self._rank = answer, 0, rank

    def expect(self, magic: bytes) -> None:
        """Read bytes that are known."""
        if self.take(len(magic)) != magic:
            raise self.failure("it is none")

    def take(self, size_bytes: int) -> bytes:
        """Read so many bytes."""
        begin, self._at = self._at, self._at + size_bytes
        if self._at > len(self._answer):
            raise self.failure(f"it ends {self._at - len(self._answer)} bytes too early")
        return self._answer[begin : self._at]

    def end(self) -> None:
        """Check that nothing is left."""
        if self._at < len(self._answer):
            raise self.failure(f"{len(self._answer) - self._at} bytes follow its parts")

    def failure(self, fault: str) -> PeerError:
        """Make the error that says what is wrong."""
        cause = f"its reply of {len(self._answer)} bytes is damaged: {fault}"
        return PeerError(
            f"rank {self._rank} was not understood: {cause}. Check that all ranks run the same "
            "holdfast, and the network between them",
            rank=self._rank,
            cause=cause,
        )
