"""What codecs would make of a checkpoint: sizes, losses, speeds. Writes nothing.

A sample of its parameters is encoded and decoded in memory, chunk by chunk as a save does.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from .._core import hash_chunk
from ..arguments import is_positive
from ..brief import brief
from ..codecs.base import Block, Codec, Loss, Piece
from ..codecs.groups import Unit, find_groups, units_of
from ..engine.chain import Chain, open_chain
from ..engine.decode import decode
from ..engine.encode import Coded, bases_of, encode
from ..engine.pool import lease
from ..engine.read_pipeline import read_parts
from ..engine.registry import find_codec
from ..engine.workspace import Workspace, block_at, borrow, give_back
from ..errors import OptionError, shown
from ..format import spec
from ..format.names import dotted
from ..layout import Box, Shard, chunks_of, size_of
from ..options import Options, options_of
from ..stores.url import open_store
from ..worker import in_worker
from .base_choice import step_before

DEFAULT_CODECS = (
    *("lossless", "delta", "delta:replay", "excp"),
    *("compact:high", "compact:balanced", "compact:small", "compact:tiny"),
)
SAMPLE_BYTES = 1 << 30
UNIT_BYTES = 256 << 20  # of one parameter; of a larger one the first rows


@dataclass(slots=True)
class Trial:
    """Sizes, times and losses of one codec on the sample; `Trials` holds them.

    Attributes:
        codec: its name, as for `save`.
        size_bytes, stored_bytes: size of the elements, and of their encoded form.
        encode_s, decode_s: seconds of processor time.
        squared_error, energy: squared sums of the errors, and of the coded values (differences from
            the base, and moments).
        roles: (size, stored) by role of the tensors: "weight", "master", "exp_avg", "exp_avg_sq",
            or "" for other tensors.

    Example::

        for trial in holdfast.try_codecs("runs/a/step-00001000").trials:
            print(trial.codec, trial.stored_bytes / trial.size_bytes)
    """

    codec: str
    size_bytes: int = 0
    stored_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    squared_error: float = 0.0
    energy: float = 0.0
    roles: dict[str, tuple[int, int]] = field(default_factory=dict)

    __repr__ = brief

    def add(self, role: str, block: Block, stored_bytes: int, loss: Loss | None) -> None:
        """Add a chunk; for holdfast's own use.

        Args:
            role, block, stored_bytes, loss: of the chunk.
        """
        size, stored = self.roles.get(role, (0, 0))
        self.roles[role] = size + block.size_bytes, stored + stored_bytes
        self.size_bytes += block.size_bytes
        self.stored_bytes += stored_bytes
        if loss is not None:
            self.squared_error += loss.squared_error
            self.energy += loss.energy


@dataclass(frozen=True, slots=True)
class Trials:
    """Results of `try_codecs`.

    Attributes:
        base: name of the base of the tried delta checkpoints; "" if there is none.
        size_bytes: size of the whole checkpoint.
        trials: one result for each codec.

    Example::

        trials = holdfast.try_codecs("runs/a/step-00001000", codecs=["lossless"])
        print(trials.size_bytes, trials.trials[0].stored_bytes)
    """

    base: str
    size_bytes: int
    trials: tuple[Trial, ...]

    __repr__ = brief


@in_worker
def try_codecs(
    path: "str | os.PathLike[str]",
    base: "str | os.PathLike[str] | None" = None,
    *,
    codecs: Sequence["str | Codec"] = DEFAULT_CODECS,
    sample_bytes: int = SAMPLE_BYTES,
    options: Options | None = None,
    report: Callable[[int], None] = lambda _: None,
) -> Trials:
    """Encode and decode a sample of a checkpoint under several codecs; nothing is written.

    Args:
        path: directory of a checkpoint.
        base: directory of an earlier checkpoint of the same run, as the base of deltas. Default:
            the base of ``path``, or the newest step before it. If there is none, delta codecs are
            left out.
        codecs: names or codecs, as for `save`.
        sample_bytes: approximate size of the sample, which is spread over the checkpoint.
        options: settings such as ``io``.
        report: called with the bytes of elements that all codecs tried since the last call.

    Returns:
        Sizes, times and losses of each codec.

    Raises:
        OptionError: an unknown codec, an invalid sample, or ``base`` is ``path``.
        NotCommittedError: there is no checkpoint at ``path`` or ``base``.
        CorruptError: one of them, or one of their bases, fails a check.

    Example:
        ``print(holdfast.try_codecs("runs/a/step-00001000", codecs=["lossless", "delta"]))``
    """
    if not is_positive(sample_bytes):
        raise OptionError(
            f"sample_bytes is {shown(sample_bytes)}; expected a number of bytes above 0"
        )
    if isinstance(codecs, (str, bytes)) or not isinstance(codecs, Sequence):
        raise OptionError(f'codecs is {shown(codecs)}; expected a list, such as ["lossless"]')
    options = options_of(options)
    chain = open_chain(open_store(path))
    found = [(find_codec(codec), codec) for codec in codecs]
    below = _open_base(chain, base)
    sources = _Sources(chain, below, options)
    tried = [
        (Trial(_told(given)), codec)
        for codec, given in found
        if below is not None or codec.every == 1
    ]
    for number, unit in enumerate(_sample(chain, sample_bytes)):
        held = sources.read(unit)
        for trial, codec in tried:
            if not number:
                _try(held, codec, Trial(""))  # memory is touched, and pages of code
            _try(held, codec, trial)
        report(size_of(shard for _, shard in unit))
    tensors = chain[-1].manifest.table.header.tensors
    name = os.path.basename(below[-1].store.location) if below else ""
    return Trials(name, size_of(tensors), tuple(trial for trial, _ in tried))


def _told(codec: "str | Codec") -> str:
    return codec if isinstance(codec, str) else codec.name


def _open_base(chain: Chain, base: "str | os.PathLike[str] | None") -> Chain | None:
    store, header = chain[-1].store, chain[-1].manifest.table.header
    if base is not None:
        there = open_store(base, "base")
        if os.path.realpath(there.location) == os.path.realpath(store.location):
            raise OptionError(
                f"base is {store.location}, the checkpoint itself; expected an earlier checkpoint "
                "of the run, or None"
            )
        return open_chain(there)
    place = header.base.name if header.base else os.path.basename(step_before(store))
    return open_chain(store.sibling(place)) if place else None


def _sample(chain: Chain, sample_bytes: int) -> list[Unit]:
    """Return parameters that are spread over a checkpoint, with some rows of the largest."""
    manifest = chain[-1].manifest
    tensors = manifest.table.header.tensors
    shards = [manifest.shard(index) for index in range(len(manifest.table.shard_tensor))]
    units = [_cut(unit) for unit in units_of(shards, tensors, find_groups(tensors))]
    total = sum(size_of(shard for _, shard in unit) for unit in units)
    if total <= sample_bytes:
        return units
    chosen, due = [], 0.0
    for unit in units:
        size = size_of(shard for _, shard in unit)
        due += size * sample_bytes / total
        if due >= size / 2:
            chosen.append(unit)
            due -= size
    return chosen or units[:1]


def _cut(unit: Unit) -> Unit:
    size = size_of(shard for _, shard in unit)
    box = unit[0][1].box
    if size <= UNIT_BYTES or not box.shape:
        return unit
    rows = max(1, box.shape[0] * UNIT_BYTES // size)
    part = Box(box.offset, (rows, *box.shape[1:]))
    return tuple((role, Shard(shard.tensor, part)) for role, shard in unit)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """A chunk of each tensor of a parameter; and the same of the base, as far as it is there."""

    piece: Piece
    digests: Mapping[str, bytes]
    base_digests: Mapping[str, bytes]

    def for_codec(self, codec: Codec) -> Piece:
        """Return the piece with what a save under a codec would know of the base."""
        blocks = self.piece.blocks
        bases = {
            role: address
            for role, address in self.piece.bases.items()
            if codec.every > 1 and codec.keeps(role, blocks[role].dtype, blocks)
        }
        return replace(self.piece, bases=bases)


@dataclass(frozen=True, slots=True)
class _Held:
    """A parameter in memory.

    Attributes:
        memory: what addresses in ``chunks`` point to.
    """

    memory: Sequence[torch.Tensor]
    chunks: Sequence[_Chunks]
    is_alone: bool


class _Sources:
    """Reads parameters of a checkpoint, and of its base."""

    def __init__(self, chain: Chain, below: Chain | None, options: Options) -> None:
        self._chain, self._below, self._options = chain, below, options
        self._known = set(below[-1].manifest.table.header.tensors) if below else set()

    def read(self, unit: Unit) -> _Held:
        """Read a parameter."""
        shards = [shard for _, shard in unit]
        here = self._read(self._chain, shards)
        there: dict[Shard, torch.Tensor] = {}
        if self._below is not None:
            there = self._read(self._below, [s for s in shards if s.tensor in self._known])
        most = self._chain[-1].manifest.table.header.chunk_elements
        chunks = list(_chunks_of(unit, here, there, most))
        return _Held([*here.values(), *there.values()], chunks, len(unit) == 1)

    def _read(self, chain: Chain, shards: Sequence[Shard]) -> dict[Shard, torch.Tensor]:
        parts = {
            shard: torch.empty(shard.size_bytes, dtype=torch.uint8, device="cpu")
            for shard in shards
        }
        store = chain[-1].store
        with lease(store, self._options) as leased:
            read_parts(chain, leased, parts)
        return parts


def _chunks_of(
    unit: Unit,
    here: Mapping[Shard, torch.Tensor],
    there: Mapping[Shard, torch.Tensor],
    most: int,
) -> Iterator[_Chunks]:
    name = dotted(unit[-1][1].tensor.path)
    for chunks in zip(*(chunks_of(shard, most) for _, shard in unit), strict=True):
        blocks, digests, bases, base_digests = {}, {}, {}, {}
        for (role, shard), chunk in zip(unit, chunks, strict=True):
            at = chunk.first * chunk.size_bytes // chunk.elements
            blocks[role] = block_at(chunk, here[shard].data_ptr() + at)
            _, digests[role] = hash_chunk(blocks[role].address, chunk.size_bytes, 0)
            if shard in there:
                bases[role] = there[shard].data_ptr() + at
                _, base_digests[role] = hash_chunk(bases[role], chunk.size_bytes, 0)
        yield _Chunks(Piece(name, blocks, bases), digests, base_digests)


def _try(held: _Held, codec: Codec, trial: Trial) -> None:
    """Encode and decode a parameter."""
    room, back = borrow(), borrow()
    pieces = [chunks.for_codec(codec) for chunks in held.chunks]
    started = time.thread_time()
    known = codec.survey(pieces) if codec.is_lossy else None
    trial.encode_s += time.thread_time() - started
    for chunks, piece in zip(held.chunks, pieces, strict=True):
        room.clear()
        started = time.thread_time()
        same = chunks.base_digests if codec.every > 1 else {}
        made = encode(piece, chunks.digests, same, codec, known, room)
        between = time.thread_time()
        _decode(piece, made, codec, back)
        trial.decode_s += time.thread_time() - between
        trial.encode_s += between - started
        for role, block in piece.blocks.items():
            payload = made[role].payload
            trial.add("" if held.is_alone else role, block, payload.size_bytes, payload.loss)
    give_back(room)
    give_back(back)


def _decode(piece: Piece, made: Mapping[str, Coded], codec: Codec, back: Workspace) -> None:
    back.clear()
    near: dict[str, int] = {}
    for role in (role for role in codec.order if role in piece.blocks):
        payload, block = made[role].payload, piece.blocks[role]
        if payload.mode not in (spec.MODE_RAW, spec.MODE_UNCHANGED):
            address = back.take(block.size_bytes)
            decode(
                payload, replace(block, address=address), codec.name, near | bases_of(role, piece)
            )
        near[role] = made[role].decoded
