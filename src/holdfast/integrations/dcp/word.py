"""The coordinator's word: what the ranks of one save have in common, in a file beside the data.

DCP gives a writer no way to speak to the other ranks but its plans, which planners with a plan
cache throw away, and it does not tell a writer that another rank has failed. So the coordinator
leaves its word in the checkpoint's directory before any rank writes; who fails takes it away, and
then all files of the save; and who has written looks whether it is there still. Whatever a rank
made before that is removed by the one that failed, whatever is found later by itself: nothing is
left. Readers do not look at the name (docs/format.md §1).
"""

import contextlib
import errno
import json
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from ... import __version__
from ...engine.discard import remove_files
from ...errors import PeerError, StoreError
from ...format import spec
from ...options import Options
from ...stores.base import Store

NAME = f"{spec.PENDING_MANIFEST_PREFIX}dcp"
BYTES_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Word:
    """What all ranks have to do alike; the coordinator's options count."""

    save_id: str
    world_size: int
    written_by: str
    chunk_elements: int
    file_bytes: int


def give(store: Store, world_size: int, options: Options) -> Word:
    """Begin a save: leave a new word where every rank finds it."""
    save_id = secrets.token_hex(16)
    word = Word(
        save_id,
        world_size,
        f"holdfast {__version__}",
        options.chunk_elements,
        options.file_bytes,
    )
    pending = f"{NAME}-{save_id}"
    store.prepare(pending, json.dumps(asdict(word)).encode())
    store.replace(pending, NAME)
    return word


def hear(store: Store, rank: int, given: Word | None = None) -> Word:
    """Return the coordinator's word.

    Args:
        given: on the coordinator, what it gave.

    Raises:
        PeerError: it is not there, or is that of another save, as far as that can be seen.
    """
    try:
        word = Word(**json.loads(store.get(NAME, BYTES_MAX)))
    except StoreError as error:
        if store.exists(NAME):
            raise
        cause = f"{store.location}/{NAME} is not there"
        raise PeerError(
            f"{cause}: another rank failed, or this one does not see the files of rank 0. Let all "
            "ranks save to one directory of a shared disk",
            rank=-1,
            cause=cause,
        ) from error
    if rank >= word.world_size or given not in (None, word):
        raise _another_save(store)
    return word


@contextlib.contextmanager
def standing(store: Store, word: Word, rank: int) -> Iterator[None]:
    """Check, when this rank has written its share, that no other has failed by then.

    Who fails removes the files of all. A rank that misses its own then tells why.

    Raises:
        PeerError: one has, or another save of the same path has begun.
    """
    try:
        yield
    except StoreError as error:
        if error.errno != errno.ENOENT or hear(store, rank) == word:
            raise
        raise _another_save(store) from error
    if hear(store, rank) != word:
        raise _another_save(store)


def take_back(store: Store, word: Word) -> None:
    """Remove all that a failed save has left, of every rank; let errors be."""
    end(store, word)
    remove_files(store, word.save_id)


def end(store: Store, word: Word) -> None:
    """Remove the word, unless it is another save's by now; let errors be."""
    with contextlib.suppress(StoreError, PeerError):
        if hear(store, 0) == word:
            store.remove(NAME)


def _another_save(store: Store) -> PeerError:
    cause = f"another save has begun at {store.location}"
    return PeerError(f"{cause}; run one save at a time for each path", rank=-1, cause=cause)
