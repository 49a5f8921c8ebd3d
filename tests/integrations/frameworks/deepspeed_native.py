"""An engine of DeepSpeed: ``save_checkpoint`` every other step, ``load_checkpoint`` of the latest.

``deepspeed_native.py CHECKPOINTS RESULT LAYOUT [STAGE]``, with a layout such as ``zero3-drop``,
``zero1-bf16``, ``zero2-fp16``, ``zero2-offload``, ``zero1-moe`` or ``zero1-pipe``. With a stage,
"sync" or "eager", holdfast is attached.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed_cpu import deepspeed, prepare
from results import finish, say_step

import holdfast
from holdfast.integrations.deepspeed import attach

STEPS, EVERY, BATCH, WIDTH = 12, 2, 12, 16


def config_of(layout: str, ranks: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration."""
    stage = int(layout.removeprefix("zero")[0])
    zero: dict[str, Any] = {"stage": stage}
    adam: dict[str, Any] = {"lr": 1e-2, "torch_adam": True}
    if "offload" in layout:
        zero["offload_optimizer"] = {"device": "cpu"}
    fp16 = {"enabled": "fp16" in layout, "initial_scale_power": 20, "loss_scale_window": 3}
    micro = 1 if "pipe" in layout else 0
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 3 if micro else BATCH // ranks,
        "optimizer": {"type": "AdamW", "params": adam},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 6, "warmup_max_lr": 1e-2},
        },
        "zero_optimization": zero,
        "bf16": {"enabled": "bf16" in layout},
        "fp16": fp16 | {"hysteresis": 1},
        "gradient_clipping": 0.0 if "pipe" in layout else 1.0,
        "zero_force_ds_cpu_optimizer": False,  # which is compiled first
        "steps_per_print": 10**9,
    }


class Mixture(torch.nn.Module):
    """Two layers, and four experts between them."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.first = torch.nn.Linear(WIDTH, WIDTH)
        expert = torch.nn.Sequential(torch.nn.Linear(WIDTH, 23), torch.nn.Linear(23, WIDTH))
        self.experts = MoE(WIDTH, expert, num_experts=6, ep_size=ranks, k=1, use_rts=False)
        self.last = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.last(self.experts(torch.relu(self.first(x)))[0])


def model_of(layout: str, ranks: int) -> Any:
    """Return the model of a layout: experts, stages, or layers of which one is frozen."""
    layers: list[Any] = [torch.nn.Linear(WIDTH, 61), torch.nn.ReLU(), torch.nn.Linear(61, WIDTH)]
    if "moe" in layout:
        return Mixture(ranks)
    if "pipe" in layout:
        from deepspeed.pipe import PipelineModule

        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)]
        loss = lambda x, y: (x - y).square().mean()  # noqa: E731
        return PipelineModule(layers, num_stages=ranks, loss_fn=loss, partition_method="uniform")
    frozen = torch.nn.Linear(WIDTH, WIDTH)
    frozen.requires_grad_(False)
    if "drop" in layout:  # random numbers are of a rank
        layers += [torch.nn.Dropout(0.1)]
    return torch.nn.Sequential(*layers, torch.nn.LayerNorm(WIDTH), frozen)


class Held:
    """What a rank holds of the optimizer, to be compared: as ZeRO-1 and 2 hold it, flat.

    ZeRO-3 pads what it holds of each parameter, and never sets the padding: there, whole ones.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """Return the master weights beside the moments."""
        if self._engine.zero_optimization_partition_weights():
            held = [_whole(p) for p in self._engine.module.parameters() if p.requires_grad]
        else:
            optimizer = self._engine.optimizer
            states = getattr(optimizer, "optimizer", optimizer).state
            held = [{**state, "master": flat} for flat, state in states.items()]
        tensors = [{key: torch.as_tensor(each[key]) for key in each} for each in held]
        return {"state": dict(enumerate(tensors))}


def _whole(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Gather what ZeRO-3 holds of a parameter; all ranks call it."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    moments = ("exp_avg", "exp_avg_sq")
    found = {key: safe_get_full_optimizer_state(parameter, key) for key in moments}
    return found | {"master": safe_get_full_fp32_param(parameter)}


def main(root: Path, result: str, layout: str, how: str = "") -> None:
    """Train, from the latest checkpoint where there is one."""
    prepare()
    deepspeed.init_distributed("gloo")
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = model_of(layout, ranks)
    given = [p for p in model.parameters() if p.requires_grad]
    if "moe" in layout:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        given = split_params_into_different_moe_groups_for_optimizer(
            {"params": given, "name": "all"}
        )
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=given, config=config_of(layout, ranks)
    )
    half = torch.bfloat16 if "bf16" in layout else torch.float16
    dtype = half if "16" in layout else torch.float32
    rows = torch.randn(STEPS + 1, BATCH, WIDTH, generator=torch.Generator().manual_seed(3))
    if how:
        attached = attach(engine, stage=how, keep=holdfast.Keep.latest(2))
    path, client = engine.load_checkpoint(str(root))
    start = client["step"] if path else 0
    losses = {}
    for step in range(start + 1, STEPS + 1):
        say_step(step)
        if "pipe" in layout:
            parts = iter([(x, x) for x in rows[step].to(dtype).split(3)])
            loss = engine.train_batch(data_iter=parts)
        else:
            x = rows[step].view(ranks, BATCH // ranks, WIDTH)[rank].to(dtype)
            loss = (engine(x) - x).square().mean()
            engine.backward(loss)
            engine.step()
        total = loss.detach().double()
        torch.distributed.all_reduce(total)
        losses[step] = total.item() / ranks
        if step % EVERY == 0:
            save(engine, root, step)
    if how:
        attached.wait()
    finish(result, losses, engine.module, [Held(engine)])


def save(engine: Any, root: Path, step: int) -> None:
    """Save; a disk that is full ends no training."""
    try:
        engine.save_checkpoint(str(root), client_state={"step": step})
    except holdfast.errors.HoldfastError as error:
        print(f"step {step} is not saved: {error}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
