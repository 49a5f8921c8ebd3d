"""How fast one core codes links of a chain, and decodes them: each codec, each kind of tensor.

    python benchmarks/links.py --steps 300 --between 50

Trains the model of `neox.py`; then codes its f32 weights and both moments chunk by chunk, as a save
does, by what the weights were `--between` steps before. Bytes are those of the elements: 12 a
parameter. What a save does besides (staging, checksums, decoding once more what loses something)
is not in it. Needs `pip install tokenizers`.
"""

import argparse
import time
from pathlib import Path

import torch
from lossless import CHUNK_ELEMENTS, Group, near_of, trained
from machine import describe
from save_load import OUT

from holdfast.codecs.base import Block, Codec, Piece
from holdfast.engine.decode import decode
from holdfast.engine.encode import bases_of
from holdfast.engine.registry import find_codec

CODECS = ("delta", "compact:high", "compact:balanced", "compact:small", "compact:tiny")
ROLES = ("exp_avg_sq", "exp_avg", "master")
Seconds = dict[tuple[str, str], list[float]]  # by role, and "in" or "out"


def pieces_of(groups: list[Group], codec: Codec) -> list[Piece]:
    """Return the chunks of all parameters."""
    pieces = []
    for group in groups:
        row = group["master"][0].numel() if group["master"].ndim > 1 else 1
        for first in range(0, group["master"].numel(), CHUNK_ELEMENTS):
            count = min(CHUNK_ELEMENTS, group["master"].numel() - first)
            blocks = {
                role: Block(near_of(group[role], first), count, "f32", row, first % row)
                for role in ROLES
            }
            kept = codec.keeps("master", "f32", ROLES)
            bases = {"master": near_of(group["master before"], first)} if kept else {}
            pieces.append(Piece("parameter", blocks, bases))
    return pieces


def run(codec: Codec, pieces: list[Piece], seconds: Seconds) -> int:
    """Code all pieces once; return the bytes of their payloads."""
    out = torch.empty(6 * CHUNK_ELEMENTS, dtype=torch.uint8).fill_(1)
    told = {role: torch.ones(CHUNK_ELEMENTS) for role in ROLES}
    back, stored = torch.ones(CHUNK_ELEMENTS), 0
    sums = dict.fromkeys(((role, way) for role in ROLES for way in ("in", "out")), 0.0)
    for piece in pieces:
        relatives: dict[str, int] = {}
        for role in (role for role in codec.order if role in ROLES):
            near, block = relatives | bases_of(role, piece), piece.blocks[role]
            decoded = told[role].data_ptr() if codec.is_lossy else block.address
            started = time.perf_counter()
            payload = codec.encode(role, piece, None, near, out.data_ptr(), decoded)
            ended = time.perf_counter()
            sums[role, "in"] += ended - started
            target = Block(back.data_ptr(), block.elements, "f32", block.row, block.column)
            if payload.mode and not decode(payload, target, codec.name, near):
                raise RuntimeError(f"{role} does not come back from {codec}")
            sums[role, "out"] += time.perf_counter() - ended
            stored += payload.size_bytes
            relatives[role] = decoded
    for key, taken in sums.items():
        seconds.setdefault(key, []).append(taken)
    return stored


def main() -> None:
    """Train, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--between", type=int, default=50, help="steps from the base")
    parser.add_argument("--rounds", type=int, default=5, help="of which the fastest counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = describe(OUT.parent if OUT.parent.exists() else Path())
    groups = trained(options.steps, options.between)
    parameters = sum(group["master"].numel() for group in groups)
    print("".join(f"- {key}: {value}\n" for key, value in machine.items()))
    print(f"| GB/s in / out | bits of 96 | {' | '.join(ROLES)} | all |\n|---|---|---|---|---|---|")
    for name in CODECS:
        codec, seconds = find_codec(name), Seconds()
        assert codec is not None
        pieces, stored = pieces_of(groups, codec), 0
        for _ in range(options.rounds):
            stored = run(codec, pieces, seconds)
        least = {key: min(taken) for key, taken in seconds.items()}
        cells = [f"{8 * stored / parameters:.2f}"]
        for roles in (*((role,) for role in ROLES), ROLES):
            size = 4 * parameters * len(roles) / 1e9
            ways = (sum(least[role, way] for role in roles) for way in ("in", "out"))
            cells.append(" / ".join(f"{size / taken:.2f}" for taken in ways))
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
