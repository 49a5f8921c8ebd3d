"""Planning for thousands of ranks: a whole save's plan and MANIFEST, and the load of one rank.

The ranks are simulated: what each would tell the others goes through the real planner, format and
checks, in one process, as it would on the coordinator. A name is cut into 5 x 5 shards of two
chunks, held by the 25 ranks of one group, as 2-D parallelism does it; a load takes the share of one
of 1.6 times as many ranks, cut otherwise. Beside it DCP's default planner, at the sizes that it can
do in a minute: dedup, global plan, pickled metadata; and its read items for the same load.

    python benchmarks/scale.py --picture docs/pictures/scale.png
"""

import argparse
import json
import pickle
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import machine
import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as pyplot
import numpy as np
import torch
from torch.distributed.checkpoint import _dedup_save_plans as dcp_dedup
from torch.distributed.checkpoint import default_planner as dcp
from torch.distributed.checkpoint import planner as dcp_planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from holdfast.format import spec
from holdfast.format.header import Header
from holdfast.format.manifest import Manifest, decode_manifest, encode_manifest
from holdfast.format.rows import Written, digest_boxes, join_written
from holdfast.format.tiling import check_tiling
from holdfast.layout import Box, Shard, Tensor
from holdfast.plan.load_plan import plan_load
from holdfast.plan.local_states import (
    Values,
    decode_local_states,
    encode_local_state,
    local_state_of,
)
from holdfast.plan.save_plan import SavePlan, plan_save

OUT = Path(__file__).parent / "out"
GRID = 5  # parts of a name along each dimension
GROUP = GRID * GRID  # ranks that hold the same names
ROWS, COLUMNS = 1024, 2048  # of one shard: two chunks
CHUNK_ELEMENTS = 1 << 20
FILE_BYTES = 256 << 30
SHARDS = (500, 5_000, 50_000, 500_000)
SHARDS_OF_A_RANK = 122
DCP_SHARDS_MAX = 50_000
DOTS_PER_INCH = 110
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Job:
    """Ranks and what they hold."""

    tensors: tuple[Tensor, ...]
    shards: tuple[tuple[Shard, ...], ...]  # for each rank


def main() -> None:
    """Measure every size, print a table, write the JSON and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, nargs="*", default=SHARDS)
    parser.add_argument("--rounds", type=int, default=5, help="of each step; medians count")
    parser.add_argument("--json", type=Path, default=OUT / "scale.json", help="result file")
    parser.add_argument("--picture", type=Path, help="PNG to write: seconds against chunks")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    rows = []
    for count in options.shards:
        job = make_job(count)
        rows.append(measure(job, options.rounds))
        if count <= DCP_SHARDS_MAX:
            rows[-1] |= measure_dcp(job, options.rounds)
        print(rows[-1], file=sys.stderr, flush=True)
    result = {
        "command": shlex.join(["python", "benchmarks/scale.py", *sys.argv[1:]]),
        "machine": machine.describe(OUT),
        "rows": rows,
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))
    if options.picture:
        draw(rows, options.picture)


def make_job(shards: int) -> Job:
    """Cut names into 5 x 5 shards, for groups of 25 ranks."""
    names = shards // GROUP
    groups = max(1, round(shards / SHARDS_OF_A_RANK / GROUP))
    shape = (GRID * ROWS, GRID * COLUMNS)
    tensors = tuple(
        Tensor((f"model.layers.{i // 12}.parts.{i % 12}.weight",), "f32", shape)
        for i in range(names)
    )
    boxes = [
        Box((row * ROWS, column * COLUMNS), (ROWS, COLUMNS))
        for row in range(GRID)
        for column in range(GRID)
    ]
    held = [
        tuple(Shard(tensor, box) for tensor in tensors[group::groups])
        for group in range(groups)
        for box in boxes
    ]
    return Job(tensors, tuple(held))


def measure(job: Job, rounds: int) -> dict[str, Any]:
    """Time every step of a save that belongs to the coordinator, and the load of one rank."""
    encoded = [
        encode_local_state(
            local_state_of(_boxes(held), {}, None, Values({}, {}), f"node {rank // 8}")
        )
        for rank, held in enumerate(job.shards)
    ]
    local_states, decode_s = timed(lambda: decode_local_states(encoded), rounds)
    plan, plan_s = timed(
        lambda: plan_save(local_states, FILE_BYTES, CHUNK_ELEMENTS, "rank"), rounds
    )
    header = Header(
        "ab" * 16, 7, len(encoded), None, {}, "holdfast", CHUNK_ELEMENTS, plan.tensors, (), ()
    )
    written = [written_by(plan, rank) for rank in range(len(encoded))]

    def build() -> bytes:
        return encode_manifest(join_written(header, plan.planned, written))

    data, build_s = timed(build, rounds)
    manifest, parse_s = timed(lambda: decode_manifest(data, "MANIFEST"), rounds)
    _, tiles_s = timed(lambda: check_tiling(manifest), rounds)
    wanted = share_of_another_layout(job)
    runs, load_s = timed(lambda: plan_load(manifest, wanted, 16 << 20), rounds)
    return {
        "ranks": len(encoded),
        "names": len(job.tensors),
        "shards": len(plan.tensor),
        "chunks": len(manifest.chunk_start),
        "gathered_bytes": sum(map(len, encoded)),
        "manifest_bytes": len(data),
        "decode_s": decode_s,
        "plan_s": plan_s,
        "build_s": build_s,
        "parse_s": parse_s,
        "tiles_s": tiles_s,
        "load_plan_s": load_s,
        "chunks_of_the_load": sum(len(run.chunks) for run in runs),
        "most_of_a_rank": _fullest(plan, manifest),
    }


def written_by(plan: SavePlan, rank: int) -> Written:
    """Return what a rank would tell of its one data file, had it written it."""
    rows = slice(int(plan.first[rank]), int(plan.first[rank + 1]))
    elements = plan.boxes.elements[rows]
    counts = -(-elements // CHUNK_ELEMENTS)
    chunks = np.full(counts.sum(), CHUNK_ELEMENTS * 4, np.int64)
    starts = spec.LARGE_ALIGN_BYTES + np.cumsum(chunks) - chunks
    numbers = np.stack([plan.boxes.offset[rows], plan.boxes.shape[rows]], axis=1)
    columns = {
        "file_bytes": np.array([int(starts[-1] + chunks[-1]) + (1 << 20)], "<u8"),
        "file_footer_checksum": np.zeros(1, "<u8"),
        "shard_digest": np.zeros((len(counts), 2), "<u8"),
        "chunk_checksum": np.zeros(len(chunks), "<u8"),
        "file_number": np.zeros(1, "<u4"),
        "file_chunks": np.array([len(chunks)], "<u4"),
        "file_shards": np.array([len(counts)], "<u4"),
        "chunk_size_mode": chunks.astype("<u4"),
        "chunk_offset": (starts // spec.SMALL_ALIGN_BYTES).astype("<u4"),
    }
    return Written(digest_boxes([numbers.reshape(-1)]), columns)


def _boxes(held: Sequence[Shard]) -> list[tuple[Tensor, tuple[Box, ...]]]:
    return [(shard.tensor, (shard.box,)) for shard in held]


def share_of_another_layout(job: Job) -> dict[Any, tuple[int, list[Box]]]:
    """Return what the first of 1.6 times as many ranks holds: an eighth of some names, by rows."""
    rows = job.tensors[0].shape[0] // 8
    count = max(1, round(len(job.tensors) * 8 / (1.6 * len(job.shards))))
    return {
        tensor.path: (index, [Box((rows, 0), (rows, tensor.shape[1]))])
        for index, tensor in enumerate(job.tensors[:count])
    }


def measure_dcp(job: Job, rounds: int) -> dict[str, Any]:
    """Time the same of DCP's default planner."""
    plans = [dcp_planner.SavePlan([_write_item(shard) for shard in held]) for held in job.shards]

    def plan() -> tuple[Any, bytes]:
        deduped = dcp_dedup.dedup_save_plans(plans)
        _, metadata = dcp.create_default_global_save_plan(deduped)
        return metadata, pickle.dumps(metadata)

    (metadata, data), plan_s = timed(plan, rounds)
    _, parse_s = timed(lambda: pickle.loads(data), rounds)
    wanted = share_of_another_layout(job)

    def load() -> list[Any]:
        items: list[Any] = []
        for (name,), (_, (box,)) in wanted.items():
            parts = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))]
            stored = metadata.state_dict_metadata[name]
            items += create_read_items_for_chunk_list(name, stored, parts)
        return items

    _, load_s = timed(load, rounds)
    return {
        "dcp_plan_s": plan_s,
        "dcp_parse_s": parse_s,
        "dcp_load_plan_s": load_s,
        "dcp_metadata_bytes": len(data),
    }


def _write_item(shard: Shard) -> dcp_planner.WriteItem:
    offset, shape = torch.Size(shard.box.offset), torch.Size(shard.box.shape)
    data = dcp_planner.TensorWriteData(
        ChunkStorageMetadata(offset, shape),
        TensorProperties(dtype=torch.float32),
        torch.Size(shard.tensor.shape),
    )
    index = MetadataIndex(str(shard.tensor.path[0]), offset)
    return dcp_planner.WriteItem(index, dcp_planner.WriteItemType.SHARD, tensor_data=data)


def timed(call: Callable[[], Found], rounds: int) -> tuple[Found, float]:
    """Return what a call gives, and its median seconds."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        found = call()
        seconds.append(time.perf_counter() - started)
    return found, median(seconds)


def _fullest(plan: SavePlan, manifest: Manifest) -> float:
    sizes = manifest.boxes(np.arange(len(plan.tensor))).elements
    loads = np.add.reduceat(sizes, plan.first[:-1])
    return float(loads.max() / loads.mean())


def report(result: dict[str, Any]) -> str:
    """Return a result as Markdown."""
    lines = [f"- {key}: {value}" for key, value in result["machine"].items()]
    lines += [
        "",
        "| chunks | shards, names, ranks | tables decoded | plan | MANIFEST built | MB | parsed "
        "and checked | tiles checked | load of a rank planned | DCP: plan | MB | parsed | load |",
        "|" + "---|" * 13,
    ]
    for row in result["rows"]:
        cells = [f"{row['chunks']:,}", f"{row['shards']:,}, {row['names']:,}, {row['ranks']:,}"]
        cells += [f"{row[key]:.3f}" for key in ("decode_s", "plan_s", "build_s")]
        cells.append(f"{row['manifest_bytes'] / 1e6:.1f}")
        cells += [f"{row[key]:.3f}" for key in ("parse_s", "tiles_s", "load_plan_s")]
        if "dcp_plan_s" in row:
            cells += [f"{row['dcp_plan_s']:.3f}", f"{row['dcp_metadata_bytes'] / 1e6:.1f}"]
            cells += [f"{row[key]:.3f}" for key in ("dcp_parse_s", "dcp_load_plan_s")]
        else:
            cells += [""] * 4
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    """Draw seconds against chunks."""
    figure, axis = pyplot.subplots(figsize=(8, 4), layout="constrained")
    lines = {
        "plan of a save, MANIFEST built": ("decode_s", "plan_s", "build_s"),
        "MANIFEST parsed and checked": ("parse_s", "tiles_s"),
        "load of one rank planned": ("load_plan_s",),
        "DCP: plan of a save": ("dcp_plan_s",),
        "DCP: load of one rank planned": ("dcp_load_plan_s",),
    }
    for name, keys in lines.items():
        found = [row for row in rows if keys[0] in row]
        chunks = [row["chunks"] for row in found]
        seconds = [sum(row[key] for key in keys) for row in found]
        style = "--" if name.startswith("DCP") else "-"
        axis.plot(chunks, seconds, style, marker="o", markersize=3, linewidth=1, label=name)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("chunks of the checkpoint", fontsize=8)
    axis.set_ylabel("seconds", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=7, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=DOTS_PER_INCH)


if __name__ == "__main__":
    main()
