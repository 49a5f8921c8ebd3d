"""What one rank has written of a save, for the coordinator: an object here, bytes between ranks.

Of a save that fails, each rank removes what it knows that nobody commits.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..chains.base_choice import Losses
from ..engine.discard import pending_name, remove_files
from ..errors import PeerError, StoreError
from ..format.rows import Written, decode_written, encode_written
from ..group.base import COORDINATOR
from ..group.phase import Phase
from ..group.replies import decode_replies, encode_reply
from ..stores.base import Store


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


def discard(store: Store, save_id: str, rank: int, written: Phase, error: BaseException) -> None:
    """Remove the files of one rank after writing failed, on this rank or another.

    The coordinator, who alone commits, removes those of all ranks: some may be dead. A rank that
    has not told the others that it is done knows that nobody commits; so does one that was told of
    another's failure. Any other (out of contact, or interrupted while it told them) cannot know:
    then the files stay, and are swept when no manifest has named them for long.
    """
    told = isinstance(error, PeerError) and error.rank >= 0
    if rank == COORDINATOR:
        if store.shows_pending:
            with contextlib.suppress(StoreError):
                store.remove(pending_name(save_id))
        remove_files(store, save_id)
    elif told or not written.promised:
        remove_files(store, save_id, f"{rank:05d}-")
