"""What one rank has written of a save, for the coordinator: an object here, bytes between ranks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..chains.base_choice import Losses
from ..format.rows import Written, decode_written, encode_written
from ..group.replies import decode_replies, encode_reply


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has written.

    Attributes:
        record: what it has measured, as values of JSON.
        objects: JSON texts of the values that the coordinator has from this rank.
        losses: what its part of the tensors has lost.
        written: its data files.
    """

    record: dict[str, Any]
    objects: list[str]
    losses: Losses
    written: Written


def encode_share(share: Share) -> bytes:
    """Write a share as bytes for the coordinator."""
    return encode_reply(
        record=json.dumps(share.record).encode(),
        objects=json.dumps(share.objects).encode(),
        losses=json.dumps(share.losses).encode(),
        written=encode_written(share.written),
    )


def decode_shares(answers: Sequence[bytes]) -> list[Share]:
    """Read the shares of all ranks, in rank order.

    Raises:
        PeerError: a reply is damaged; the text names its rank.
    """
    replies = decode_replies(answers, "record", "objects", "losses", "written")
    return [
        Share(
            json.loads(reply["record"]),
            json.loads(reply["objects"]),
            [tuple(loss) for loss in json.loads(reply["losses"])],
            decode_written(reply["written"]),
        )
        for reply in replies
    ]
