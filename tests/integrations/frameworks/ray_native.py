"""Trains with Ray Train on a local cluster, and saves through holdfast, or not at all.

``ray_native.py ROOT RESULT WORKERS HOW``. WORKERS is a number, or "elastic": a second node is taken
from the cluster after step 4, and given back after step 8. HOW is "stock" or "holdfast". Each
worker writes its process id into ``RESULT.pid.RANK``, and its steps into ``RESULT.RANK.log``.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

import holdfast
from holdfast.integrations.ray import path_of, report

EVERY, BATCH, SIZE = 2, 12, 600
HERE = Path(__file__).parent


def train(config: dict[str, Any]) -> None:
    """Train; every worker of a group calls it, and again when the group begins anew."""
    sys.path.append(config["here"])
    from results import finish

    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    result, is_ours = config["result"], config["how"] == "holdfast"
    Path(f"{result}.pid.{rank}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    is_resized = config["workers"] == "elastic"
    rate, steps = (0.0, 40) if is_resized else (0.1, 14)
    layers = torch.nn.Linear(16, 64), torch.nn.Dropout(rate), torch.nn.Linear(64, 1)
    model = prepare_model(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(SIZE, 16, generator=torch.Generator().manual_seed(5))
    data = holdfast.DataState(SIZE, seed=1)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs), BATCH // ranks, sampler=data.sampler()
    )
    state = {"model": model, "optimizer": optimizer, "data": data}
    if rate:
        state["random"] = holdfast.RandomState()
    losses: dict[int, float] = {}
    with contextlib.ExitStack() as ended, open(f"{result}.{rank}.log", "a") as log:
        checkpointer = None
        if is_ours:
            keep = holdfast.Keep.latest(2)
            checkpointer = holdfast.Checkpointer(config["root"], every=EVERY, keep=keep)
            ended.enter_context(checkpointer)
        step = (checkpointer.restore(state) or 0) if checkpointer else 0
        batches = data.read(loader)
        while step < steps:
            step += 1
            print(f"step {step} of {ranks}", file=log, flush=True)
            time.sleep(0.1)  # for who kills workers
            if is_resized and step > 8 and ranks == 1:
                time.sleep(1)  # until there is a second one again
            (batch,) = next(batches)
            optimizer.zero_grad()
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            losses[step] = float(mean_of(loss))
            if checkpointer:
                checkpointer.step(step, state)
                if step % EVERY == 0:
                    report({"loss": losses[step], "step": step}, checkpointer)
        if checkpointer:
            checkpointer.save(steps, state)
            report({"loss": losses[steps], "step": steps}, checkpointer)
    finish(result, losses, model, [optimizer])


def mean_of(loss: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of all workers."""
    mean = loss.detach().clone()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(mean)
        mean /= torch.distributed.get_world_size()
    return mean


def steps_in(result: str) -> int:
    """Return how many steps rank 0 has begun."""
    log = Path(f"{result}.0.log")
    return log.read_text().count("step") if log.exists() else 0


def resize(cluster: Cluster, node: Any, result: str, more: list[subprocess.Popen[bytes]]) -> None:
    """Take a node from the cluster after some steps, and let another one join after more."""
    while steps_in(result) < 4:
        time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)
    while steps_in(result) < 8:
        time.sleep(0.05)
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus", "1"]
    more.append(subprocess.Popen([*command, "--address", cluster.address]))


def main(root: str, result: str, workers: str, how: str) -> None:
    """Train on a cluster of this machine."""
    elastic = workers == "elastic"
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1 if elastic else 3})
    node = cluster.add_node(num_cpus=1) if elastic else None
    ray.init(address=cluster.address, log_to_driver=True)
    more: list[subprocess.Popen[bytes]] = []
    try:
        if elastic and how == "holdfast":
            given = (cluster, node, result, more)
            threading.Thread(target=resize, args=given, daemon=True).start()
        names = {"root": root, "result": result, "how": how, "here": str(HERE), "workers": workers}
        trainer = TorchTrainer(
            train,
            train_loop_config=names,
            scaling_config=ScalingConfig(
                num_workers=(1, 2) if elastic else int(workers),
                elastic_resize_monitor_interval_s=2,
            ),
            run_config=RunConfig(
                name="run",
                storage_path=f"{root}.ray",
                failure_config=FailureConfig(max_failures=3),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
            ),
        )
        ended = trainer.fit()
        if how == "holdfast":
            assert ended.metrics is not None
            place = path_of(ended.checkpoint)
            assert holdfast.open(place).step == ended.metrics["step"], place
            assert place.endswith(f"-{holdfast.Checkpointer(root).latest():08d}"), place
    finally:
        ray.shutdown()
        for process in more:
            process.terminate()
            process.wait()
        cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
