"""How many bytes a server sends for the part of a checkpoint that is wanted: read amplification.

    python benchmarks/store_reads.py

The double of S3 (`discard_server.cpp`) counts requests and the bytes of objects that it sends,
MANIFEST among them. Prints a table.
"""

import sys

import torch
from store_servers import BUCKET, discarding

import holdfast

MIB = 1 << 20
TENSORS = 64


def main() -> None:
    """Print the table."""
    elements = 4 * MIB // 4
    state = {f"t{n:02d}": torch.randn(elements) for n in range(TENSORS)}
    state["long"] = torch.randn(64 * elements)
    base = f"s3://{BUCKET}/kept/a"
    with discarding() as up:
        holdfast.save(state, base)
        print("| wanted | MiB | sent / wanted | GET | HEAD | LIST |\n|---|---|---|---|---|---|")
        for what, target in _targets(elements):
            up.counts()
            holdfast.load(base, into=target, partial=True)
            counts = up.counts()
            wanted = sum(_bytes(leaf) for leaf in target.values())
            ratio = counts["sent_bytes"] / wanted
            row = (counts.get(kind, 0) for kind in ("GET", "HEAD", "LIST"))
            print(f"| {what} | {wanted / MIB:.0f} | {ratio:.3f} |", " | ".join(map(str, row)), "|")
            sys.stdout.flush()


def _targets(elements: int) -> list[tuple[str, dict[str, object]]]:
    every_second = {f"t{n:02d}": torch.zeros(elements) for n in range(0, TENSORS, 2)}
    whole = {f"t{n:02d}": torch.zeros(elements) for n in range(TENSORS)}
    return [
        ("all tensors of 4 MiB", whole),
        ("every second tensor of 4 MiB", every_second),
        ("4 MiB of a tensor of 256 MiB, at a bound of chunks", _cut(elements, 8 * elements)),
        ("4 MiB of it, across a bound", _cut(elements, 8 * elements + elements // 2)),
        ("64 MiB of it, across bounds", _cut(16 * elements, 8 * elements + elements // 2)),
    ]


def _cut(count: int, start: int) -> dict[str, object]:
    whole = (64 << 20,)
    return {"long": holdfast.Shard(torch.zeros(count), whole, offset=(start,))}


def _bytes(leaf: object) -> int:
    tensor = leaf if isinstance(leaf, torch.Tensor) else leaf.data  # type: ignore[attr-defined]
    return tensor.nbytes


if __name__ == "__main__":
    main()
