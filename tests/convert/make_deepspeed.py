"""Write `foreign/deepspeed.tgz` with DeepSpeed: a few ranks of gloo, no accelerator.

    DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8
    python make_deepspeed.py DIRECTORY && tar -C DIRECTORY -czf foreign/deepspeed.tgz .

Each checkpoint is converted into a universal one too, by DeepSpeed itself.
"""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

TAG = "global_step2"
# name: (stage, whether in bf16, ranks, weights in a sub-group)
CASES = {
    "stage-1": (1, True, 2, 10_000),
    "stage-2": (2, False, 3, 10_000),
    "stage-3": (3, True, 2, 10_000),
    "stage-3-parts": (3, False, 3, 12),
}


class Net(torch.nn.Module):
    """Weights of odd sizes, two of them frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(7, 5)
        self.a = torch.nn.Linear(5, 9)
        self.frozen = torch.nn.Linear(9, 9).requires_grad_(False)
        self.b = torch.nn.Linear(9, 3, bias=False)
        self.register_buffer("count", torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self.frozen(torch.relu(self.a(self.emb(x)))))

    def groups(self) -> list[dict[str, Any]]:
        decayed = {"params": [self.emb.weight, self.a.weight], "weight_decay": 0.1}
        return [decayed, {"params": [self.a.bias, self.b.weight], "weight_decay": 0.0}]


def train(rank: int, directory: str, case: str) -> None:
    stage, in_bf16, ranks, part = CASES[case]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_SIZE": str(ranks), "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    torch.manual_seed(0)
    net = Net()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": part}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "bf16": {"enabled": in_bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = import_module("deepspeed").initialize(
        model=net, model_parameters=net.groups(), config=config, dist_init_required=True
    )
    torch.manual_seed(10 + rank)
    for _ in range(2):
        engine.backward(engine(torch.randint(0, 7, (2, 4))).float().pow(2).mean())
        engine.step()
    client = {"note": "x", "universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    engine.save_checkpoint(directory, tag=TAG, client_state=client)
    dist.barrier()
    os._exit(0)  # its end aborts without an accelerator


def main(root: Path) -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29591"}
    for case, (_, _, ranks, _) in CASES.items():
        directory = root / case
        multiprocessing.spawn(train, (str(directory), case), ranks)
        program = Path(str(import_module("deepspeed").__file__)).parent / "checkpoint"
        given = [
            "--input_folder",
            directory / TAG,
            "--output_folder",
            directory / f"{TAG}_universal",
        ]
        workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        subprocess.run(
            [sys.executable, program / "ds_to_universal.py", *given, *workers], check=True
        )
        for script in directory.glob("*.py"):
            script.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
