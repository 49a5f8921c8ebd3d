"""A GPT of Megatron-Core with its distributed optimizer, saved by ``dist_checkpointing``.

``megatron_native.py CHECKPOINTS RESULT LAYOUT [HOW]``, with a layout such as ``tp2``, ``tp1`` or
``pp2``. HOW is "sync" or "eager", which saves in the background; without it, holdfast is not there.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from megatron_cpu import prepare
from results import finish, say_step

prepare()

from megatron.core import dist_checkpointing as checkpointing  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # noqa: E402
from megatron.core.distributed import DistributedDataParallel as DDP  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import holdfast  # noqa: E402
from holdfast.integrations.adapter import install  # noqa: E402

STEPS, EVERY, LENGTH, WORDS = 12, 2, 8, 32
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


def model_of(layout: str) -> tuple[Any, Any]:
    """Return this rank's part of a model, and its optimizer."""
    tensor, pipeline = int(layout[2:]) if "tp" in layout else 1, 2 if "pp" in layout else 1
    parallel_state.initialize_model_parallel(tensor, pipeline)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=WORDS,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    wrapped = DDP(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, use_distributed_optimizer=True, clip_grad=1.0
    )
    return wrapped, get_megatron_optimizer(options, [wrapped])


def loss_of(batches: Any, model: Any) -> Any:
    """Compute the losses of a batch; they become one number on the last stage."""
    tokens = next(batches)
    positions = torch.arange(LENGTH).expand_as(tokens[:, :-1])
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    out = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())
    return out, lambda found: (found.mean(), {"loss": found.mean().detach()})


def step_of(model: Any, optimizer: Any, rows: torch.Tensor) -> float:
    """Take a step; return the mean loss of all ranks."""
    group = parallel_state.get_data_parallel_group()
    mine = rows.chunk(parallel_state.get_data_parallel_world_size())[group.rank()]
    model.zero_grad_buffer()
    optimizer.zero_grad()
    found = get_forward_backward_func()(
        forward_step_func=loss_of,
        data_iterator=iter(mine.chunk(2)),
        model=model,
        num_microbatches=2,
        seq_length=LENGTH,
        micro_batch_size=len(mine) // 2,
        forward_only=False,
    )
    optimizer.step()
    losses = [float(each["loss"]) for each in found]  # none but on the last stage
    total = torch.tensor([sum(losses), len(losses)], dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return float(total[0] / total[1])


def sharded(model: Any, optimizer: Any, step: int, *, loading: bool) -> dict[str, Any]:
    """Return the sharded state of the model and the optimizer."""
    weights = model.module.sharded_state_dict(metadata=SHARDING)
    moments = optimizer.sharded_state_dict(weights, is_loading=loading, metadata=SHARDING)
    return {"model": weights, "optimizer": moments, "step": step}


class Held:
    """What a rank holds, to be compared."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state_dict = lambda: state


def weights_of(model: Any) -> dict[str, Any]:
    """Return the weights of this rank."""
    found = model.module.state_dict().items()
    return {name: value for name, value in found if isinstance(value, torch.Tensor)}


def moments_of(optimizer: Any) -> dict[str, Any]:
    """Return the master weights and moments of this rank."""
    inner = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
    held = [{**state, "master": p} for p, state in inner.state.items()]
    return {"state": {n: {k: torch.as_tensor(e[k]) for k in e} for n, e in enumerate(held)}}


def newest(root: Path) -> Path | None:
    """Return the newest checkpoint that Megatron takes for whole."""
    found = [p.parent for p in root.glob("iter_*/metadata.json")]
    return max(found, default=None)


def main(root: Path, result: str, layout: str, how: str = "") -> None:
    """Train, from the newest checkpoint where there is one."""
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    if how:
        install("megatron")
    model, optimizer = model_of(layout)
    start, queue = 0, AsyncCallsQueue()
    if (path := newest(root)) is not None:
        for each in getattr(optimizer, "chained_optimizers", [optimizer]):
            each._init_optimizer_states_with_dummy_values()  # or it has no step to load into
        state = checkpointing.load(sharded(model, optimizer, 0, loading=True), str(path))
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    rows = torch.randint(
        WORDS, (STEPS + 1, 12, LENGTH + 1), generator=torch.Generator().manual_seed(3)
    )
    losses = {}
    for step in range(start + 1, STEPS + 1):
        say_step(step)
        losses[step] = step_of(model, optimizer, rows[step])
        queue.maybe_finalize_async_calls()
        if step % EVERY == 0:
            save(root, model, optimizer, step, queue, how)
    queue.maybe_finalize_async_calls(blocking=True)
    finish(result, losses, Held(weights_of(model)), [Held(moments_of(optimizer))])  # type: ignore


def save(root: Path, model: Any, optimizer: Any, step: int, queue: Any, how: str) -> None:
    """Save; a disk that is full ends no training."""
    place = root / f"iter_{step:07d}"
    if torch.distributed.get_rank() == 0:
        place.mkdir(exist_ok=True)
    torch.distributed.barrier()
    state = sharded(model, optimizer, step, loading=False)
    try:
        request = checkpointing.save(state, str(place), async_sharded_save=how == "eager")
    except holdfast.errors.HoldfastError as error:
        print(f"step {step} is not saved: {error}", flush=True)
        return
    if request is not None:
        queue.schedule_async_request(request)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
