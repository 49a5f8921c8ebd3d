"""Tensors → files of safetensors as transformers writes them: one, or shards with an index.

The bytes are those that the libraries write: their order, their padding, their index. Pure; reads
no elements.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import OptionError
from .emit import Content, Piece, PlannedFile
from .names import Chosen
from .safetensors import DTYPES, INDEX_SUFFIX, METADATA, SUFFIX, stored_shape

CODES = {dtype: code for code, dtype in DTYPES.items()}
ORDER = {dtype: number for number, dtype in enumerate(DTYPES.values())}
HEADER_ALIGN_BYTES = 8
WEIGHTS, ADAPTER = "model", "adapter_model"


@dataclass(frozen=True, slots=True)
class Written:
    """A tensor as a file has it: its shape may be another than that of the box it is made of."""

    piece: Piece
    shape: tuple[int, ...]


def plan_file(
    name: str, tensors: Sequence[Written], taken: Chosen
) -> tuple[PlannedFile, tuple[str, ...]]:
    """Plan one file; return it, and the names of what it has no place for.

    Args:
        taken: its ties are noted as `safetensors.torch.save_model` does.

    Raises:
        OptionError: the format has no name for a dtype.
    """
    return _plan_file(name, tensors, taken.ties), tuple(taken.values)


def _plan_file(name: str, tensors: Sequence[Written], ties: Mapping[str, str]) -> PlannedFile:
    metadata = {"format": "pt"} | dict(sorted(ties.items()))
    header: dict[str, object] = {METADATA: metadata}
    contents: list[Content] = []
    end = 0
    for written in sorted(tensors, key=lambda each: (_order(each.piece), each.piece.name)):
        piece = written.piece
        if piece.name == METADATA:
            raise OptionError(
                f"safetensors keeps the name {METADATA} for itself; rename that tensor, or exclude "
                "it"
            )
        begin, end = end, end + piece.size_bytes
        header[piece.name] = {
            "dtype": CODES[piece.dtype],
            "shape": stored_shape(piece.dtype, written.shape),
            "data_offsets": [begin, end],
        }
        contents.append(piece)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGN_BYTES)
    return PlannedFile(name, [len(text).to_bytes(8, "little") + text, *contents])


def plan_directory(
    stem: str, tensors: Sequence[Written], taken: Chosen, shard_bytes: int
) -> list[PlannedFile]:
    """Plan the files of a directory: one, or shards of at most ``shard_bytes``, and their index.

    Args:
        stem: of the files' names.

    Raises:
        OptionError: the format has no name for a dtype.
    """
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        return [_plan_file(f"{stem}{SUFFIX}", shards[0], taken.ties)]
    files, weights = list[PlannedFile](), dict[str, str]()
    for number, shard in enumerate(shards, 1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}{SUFFIX}"
        weights |= {written.piece.name: file for written in shard}
        here = {tie: owner for tie, owner in taken.ties.items() if weights.get(owner) == file}
        files.append(_plan_file(file, shard, here))
    metadata = {
        "total_parameters": sum(written.piece.box.elements for written in tensors),
        "total_size": sum(written.piece.size_bytes for written in tensors),
    }
    index = {"metadata": metadata, "weight_map": weights}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    return [*files, PlannedFile(f"{stem}{INDEX_SUFFIX}", [text.encode()])]


def _shards(tensors: Sequence[Written], shard_bytes: int) -> list[list[Written]]:
    """Share tensors out in their order, as huggingface_hub does; a larger one is alone."""
    shards, current, size = list[list[Written]](), list[Written](), 0
    for written in tensors:
        here = written.piece.size_bytes
        if here > shard_bytes:
            shards.append([written])
            continue
        if size + here > shard_bytes:
            shards.append(current)
            current, size = [], 0
        current.append(written)
        size += here
    return [*shards, current] if current or not shards else shards


def _order(piece: Piece) -> int:
    if piece.dtype not in ORDER:
        raise OptionError(
            f"{piece.name} is {piece.dtype}, which safetensors has no name for; leave it out with "
            "--exclude, or export to another format"
        )
    return ORDER[piece.dtype]
