"""One rank of a job on a store: saves a sharded state, or loads it in another layout.

python ranks_program.py VERB PATH RANK RANKS STORE_FILE
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast

ROWS, COLUMNS = 1000, 1200


def main() -> None:
    """Run the rank."""
    verb, path, rank, ranks, meeting = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(ranks)
    )
    mesh = init_device_mesh("cpu", (int(ranks),))
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
    if verb == "save":
        holdfast.save({"w": distribute_tensor(whole, mesh, [Shard(0)]), "n": 3}, path)
    elif verb == "run":
        with holdfast.Checkpointer(path, every=1, keep=holdfast.Keep.latest(2)) as checkpointer:
            first = checkpointer.restore({"w": (w := whole.clone()), "n": 0}) or 0
            for step in range(first + 1, first + 200):
                print(f"step {step}", flush=True)
                checkpointer.step(step, {"w": w.fill_(step), "n": step})
    else:
        target = {"w": distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(1)]), "n": 0}
        holdfast.load(path, into=target)
        loaded = target["w"]
        assert isinstance(loaded, DTensor) and torch.equal(loaded.full_tensor(), whole)
        assert target["n"] == 3
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
