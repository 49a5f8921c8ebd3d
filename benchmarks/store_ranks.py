"""How many requests a server gets for a save of real ranks: what `store_requests.py` simulates.

    python benchmarks/store_ranks.py --ranks 1 8

The ranks are processes with gloo. The double of S3 (`discard_server.cpp`) counts. Each rank has
one data file of one part. Prints a table: the requests of one save of a run that keeps every step,
after a few, and after many steps. On S3 the client deletes by POST; the double counts that as
DELETE.
"""

import argparse
import json
import os
import subprocess
import sys

from store_servers import BUCKET, Up, discarding

KINDS = ("PUT", "POST", "GET", "HEAD", "LIST", "DELETE")
PROGRAM = """
import json, os, sys, urllib.request
import torch, torch.distributed as dist, holdfast

def counts():
    with urllib.request.urlopen(os.environ["AWS_ENDPOINT_URL"] + "/?counts") as answer:
        return json.load(answer)

url, early, late = sys.argv[1], *map(int, sys.argv[2:])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
part = holdfast.Shard(torch.randn(64, 64), (64 * ranks, 64), offset=(64 * rank, 0))
with holdfast.Checkpointer(url, every=1) as checkpointer:
    for step in range(1, late + 1):
        dist.barrier()
        if rank == 0:
            counts()
        dist.barrier()
        checkpointer.step(step, {"a": part})
        checkpointer.wait()
        dist.barrier()
        if rank == 0 and step in (early, late):
            print(json.dumps(counts()), flush=True)
dist.destroy_process_group()
"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, nargs=2, default=[4, 20], help="when it is counted")
    given = parser.parse_args()
    print("| ranks | steps there |", " | ".join(KINDS), "|")
    print("|---" * (2 + len(KINDS)) + "|")
    with discarding() as up:
        for ranks in given.ranks:
            found = counted(up, ranks, given.steps)
            for step, counts in zip(given.steps, found, strict=True):
                row = " | ".join(str(counts.get(kind, 0)) for kind in KINDS)
                print(f"| {ranks} | {step} | {row} |", flush=True)


def counted(up: Up, ranks: int, steps: list[int]) -> list[dict[str, int]]:
    """Return the requests of the save of each of these steps."""
    command = [sys.executable, "-c", PROGRAM, f"s3://{BUCKET}/kept/{ranks}", *map(str, steps)]
    shared = os.environ | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(up.port + 1), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(command, env=shared | {"RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(ranks)
    ]
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank failed")
    return [json.loads(line) for line in said[0].splitlines()]


if __name__ == "__main__":
    main()
