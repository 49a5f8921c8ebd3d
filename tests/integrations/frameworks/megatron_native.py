"""A GPT of Megatron-Core with its distributed optimizer, saved by ``dist_checkpointing``.

``megatron_native.py CHECKPOINTS RESULT LAYOUT [HOW]``. HOW is "sync" or "eager", which saves in the
background; without it, holdfast is not there. A layout has parts:

- ``tp2``, ``pp2``, ``ep2``: parallel sizes; ``moe``: experts; ``bf16``;
- ``drop``: dropout, and the random numbers are saved;
- ``full``: data-parallel ranks share saves and loads, by Megatron's wrappers;
- ``buckets``: moments are saved as they lie in the optimizer's buffers (``dp_reshardable``).
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron_cpu import prepare
from results import finish, say_step

prepare()

from megatron.core import dist_checkpointing as checkpointing  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from megatron.core.dist_checkpointing.serialization import (  # noqa: E402
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # noqa: E402
from megatron.core.dist_checkpointing.strategies.fully_parallel import (  # noqa: E402
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.distributed import DistributedDataParallel as DDP  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import holdfast  # noqa: E402
from holdfast.integrations.adapter import install  # noqa: E402

STEPS, EVERY, LENGTH, WORDS, ROWS = 12, 2, 8, 32, 16


class Parts:
    """What a layout says."""

    def __init__(self, layout: str) -> None:
        parts = layout.split("-")
        self.tensor, self.pipeline, self.experts = (
            next((int(part[2:]) for part in parts if part[:2] == name), 1)
            for name in ("tp", "pp", "ep")
        )
        self.moe, self.half, self.drop, self.full = (
            name in parts for name in ("moe", "bf16", "drop", "full")
        )
        kind = "dp_reshardable" if "buckets" in parts else "fully_reshardable"
        self.sharding = {"distrib_optim_sharding_type": kind}


def config_of(parts: Parts) -> TransformerConfig:
    """Return the settings of the model."""
    rate = 0.1 if parts.drop else 0.0
    return TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=parts.tensor,
        pipeline_model_parallel_size=parts.pipeline,
        expert_model_parallel_size=parts.experts,
        num_moe_experts=4 if parts.moe else None,
        pipeline_dtype=torch.bfloat16 if parts.half else torch.float32,
        bf16=parts.half,
        hidden_dropout=rate,
        attention_dropout=rate,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=finalize_model_grads,
    )


class Trained:
    """This rank's part of a model, with its optimizer and schedule."""

    def __init__(self, parts: Parts) -> None:
        parallel_state.initialize_model_parallel(
            parts.tensor, parts.pipeline, expert_model_parallel_size=parts.experts
        )
        torch.manual_seed(0)
        config = config_of(parts)
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(config.num_moe_experts),
            vocab_size=WORDS,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
        )
        self.inner = Float16Module(config, model) if parts.half else model
        wrapping = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.model, self.parts = DDP(config, wrapping, self.inner), parts
        options = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-3,
            use_distributed_optimizer=True,
            clip_grad=1.0,
            bf16=parts.half,
            params_dtype=torch.bfloat16 if parts.half else torch.float32,
        )
        self.optimizer: Any = get_megatron_optimizer(options, [self.model])
        self.chained = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        self.schedule = OptimizerParamScheduler(
            self.optimizer, 0.0, 1e-2, 1e-3, 3, STEPS, "cosine", 0.01, 0.01, STEPS, "constant"
        )

    def step(self, rows: torch.Tensor) -> float:
        """Take a step; return the mean loss of all ranks."""
        group = parallel_state.get_data_parallel_group()
        mine = rows.chunk(parallel_state.get_data_parallel_world_size())[group.rank()]
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=loss_of,
            data_iterator=iter(mine.chunk(2)),
            model=self.model,
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=len(mine) // 2,
            forward_only=False,
        )
        self.optimizer.step()
        self.schedule.step(1)
        losses = [float(each["loss"]) for each in found]  # none but on the last stage
        total = torch.tensor([sum(losses), len(losses)], dtype=torch.float64)
        torch.distributed.all_reduce(total)
        return float(total[0] / total[1])

    def sharded(self, step: int, *, loading: bool) -> dict[str, Any]:
        """Return the sharded state, as Megatron-LM puts it together."""
        kind = self.parts.sharding
        weights = self.inner.sharded_state_dict(metadata=kind)
        moments = self.optimizer.sharded_state_dict(weights, is_loading=loading, metadata=kind)
        state = {"model": weights, "optimizer": moments, "step": step}
        state["schedule"] = self.schedule.state_dict()
        if self.parts.drop:
            rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
            state["random"] = ShardedObject("random", torch.get_rng_state(), (ranks,), (rank,))
        return state

    def resume(self, path: Path) -> int:
        """Load a checkpoint; return its step."""
        for each in self.chained:
            each._init_optimizer_states_with_dummy_values()  # or it has no step to load into
        strategy = get_default_load_sharded_strategy(str(path))
        if self.parts.full:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            strategy = FullyParallelLoadStrategyWrapper(strategy, group)
        target = self.sharded(0, loading=True)
        state = checkpointing.load(target, str(path), strategy, strict="raise_all")
        self.inner.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        if self.parts.drop:
            torch.set_rng_state(state["random"])
        return int(state["step"])

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of this rank, to be compared."""
        found = self.inner.state_dict().items()
        return {name: value for name, value in found if isinstance(value, torch.Tensor)}

    def moments(self) -> dict[str, Any]:
        """Return the master weights, moments and steps of this rank, to be compared."""
        inner = [each.optimizer for each in self.chained]
        held = [{**state, "master": p} for each in inner for p, state in each.state.items()]
        return {"state": {n: {k: torch.as_tensor(e[k]) for k in e} for n, e in enumerate(held)}}


class Moments:
    """The moments, as `results` takes them."""

    def __init__(self, trained: Trained) -> None:
        self.state_dict = trained.moments


def loss_of(batches: Any, model: Any) -> Any:
    """Compute the losses of a batch; they become one number on the last stage."""
    tokens = next(batches)
    positions = torch.arange(LENGTH).expand_as(tokens[:, :-1])
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    out = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())
    return out, lambda found: (found.mean(), {"loss": found.mean().detach()})


def newest(root: Path) -> Path | None:
    """Return the newest checkpoint that Megatron takes for whole."""
    found = [p.parent for p in root.glob("iter_*/metadata.json") if p.stat().st_size]
    return max(found, default=None)


def main(root: Path, result: str, layout: str, how: str = "") -> None:
    """Train, from the newest checkpoint where there is one."""
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    if how:
        install("megatron")
    trained, queue = Trained(Parts(layout)), AsyncCallsQueue()
    path = newest(root)
    start = trained.resume(path) if path else 0
    seeded = torch.Generator().manual_seed(3)
    first = torch.randint(WORDS, (STEPS + 1, ROWS, 1), generator=seeded)
    rows = (first + 5 * torch.arange(LENGTH + 1)) % WORDS  # which can be learned
    losses = {}
    for step in range(start + 1, STEPS + 1):
        say_step(step)
        losses[step] = trained.step(rows[step])
        with saying_failure(step):
            queue.maybe_finalize_async_calls()
        if step % EVERY == 0:
            with saying_failure(step):
                save(root, trained, step, queue, how)
    with saying_failure(STEPS):
        queue.maybe_finalize_async_calls(blocking=True)
    finish(result, losses, trained, [Moments(trained)])  # type: ignore[arg-type]


@contextlib.contextmanager
def saying_failure(step: int) -> Iterator[None]:
    """Let training go on when a save has failed."""
    try:
        yield
    except holdfast.errors.HoldfastError as error:
        print(f"step {step} is not saved: {error}", flush=True)


def save(root: Path, trained: Trained, step: int, queue: Any, how: str) -> None:
    """Save."""
    place = root / f"iter_{step:07d}"
    if torch.distributed.get_rank() == 0:
        place.mkdir(exist_ok=True)
    torch.distributed.barrier()
    strategy = get_default_save_sharded_strategy()
    if trained.parts.full:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = FullyParallelSaveStrategyWrapper(strategy, group)
    state = trained.sharded(step, loading=False)
    request = checkpointing.save(state, str(place), strategy, async_sharded_save=how == "eager")
    if request is not None:
        queue.schedule_async_request(request)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
