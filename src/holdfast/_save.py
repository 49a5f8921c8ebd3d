"""The whole save, on one page: flatten → plan → stage → encode → write → commit."""

import logging
import os
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from . import __version__
from .codecs.registry import check_codec
from .engine.commit import check_absent, commit, discard, encode_tables
from .engine.pipeline import write_shards
from .engine.pool import lease
from .engine.write import WriterPlan
from .errors import OptionError
from .format.table import Header
from .group.base import COORDINATOR, Phase
from .group.torch import find_group
from .layout import size_of
from .options import Options
from .plan.save_plan import Request, SavePlan, decode_request, encode_request, plan_save
from .state.tree import Leaves, flatten
from .stores.url import open_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .group.base import Group
    from .stores.base import Store

logger = logging.getLogger("holdfast")


def save(
    state: Mapping[Any, Any],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    codec: str = "raw",
    group: "ProcessGroup | Group | Literal['alone'] | None" = None,
    options: Options | None = None,
) -> None:
    """Save a state as one committed checkpoint, durable when this returns, on every rank.

    Host memory is bounded by the pool, not by the state. All ranks of the group call it with the
    same path; each distinct piece is written once, by one of the ranks that hold it.

    Args:
        state: a nested dict of tensors, DTensors, JSON-like values and anything with
            ``state_dict()`` and ``load_state_dict()``: modules, optimizers, schedulers, scalers.
        path: directory of the checkpoint; made when needed. It must not hold one already.
        step: recorded in the checkpoint.
        metrics: numbers that judge the step, recorded too; the coordinator's count.
        codec: how chunks are stored.
        group: ranks that save together; default: the default process group, or this process.
            ``"alone"``: this process by itself, whatever process group there is.

    Raises:
        StateError: the state cannot be saved as given; the text names the leaf.
        AlreadyCommittedError: there is a checkpoint at ``path``.
        StoreError: disk, network or permission; `NoSpaceError` when the disk is full.
        PeerError: another rank failed; nothing was committed.

    Example:
        ``holdfast.save({"model": model, "optimizer": optimizer}, "runs/a/step-1000")``
    """
    started = time.perf_counter()
    ranks = find_group(group)
    store = open_store(path)
    saved_bytes = _walk(store, ranks, state, step, metrics, codec, options or Options())
    if ranks.rank == COORDINATOR:
        seconds = time.perf_counter() - started
        logger.info("saved %s: %.3f GB in %.2f s", store.location, saved_bytes / 1e9, seconds)


def _walk(
    store: "Store",
    ranks: "Group",
    state: Mapping[Any, Any],
    step: int | None,
    metrics: Mapping[str, float] | None,
    codec: str,
    options: Options,
) -> int:
    """Walk all the way; return the bytes of the tensors saved."""
    with Phase(ranks) as described:
        _check_arguments(step, metrics, codec)
        if ranks.rank == COORDINATOR:
            check_absent(store)
        leaves = flatten(state)
        request = _request(leaves, step, metrics, compare=ranks.world_size > 1)
        described.answer = encode_request(request)

    requests = [decode_request(data) for data in described.answers]
    plan = plan_save(requests, options.file_bytes)
    header, shards = _header(plan, ranks.world_size, options), plan.shards[ranks.rank]

    try:
        with Phase(ranks, gather=True) as written:
            files = WriterPlan(header, ranks.rank, 0, size_of(shards), options.file_bytes)
            with lease(store.vfs, store.location, options) as leased:
                tables = write_shards(store, leased, files, shards, leaves.sources(), codec)
            written.answer = encode_tables(tables)
    except BaseException as error:
        discard(store, plan.save_id, ranks.rank, error)
        raise

    with Phase(ranks):
        if ranks.rank == COORDINATOR:
            commit(store, header, written.answers)
    return size_of(plan.tensors)


def _check_arguments(step: int | None, metrics: Mapping[str, float] | None, codec: str) -> None:
    check_codec(codec)
    for name, value in (metrics or {}).items():
        if not isinstance(name, str) or type(value) is bool or not isinstance(value, (int, float)):
            kind = type(value).__name__
            raise OptionError(
                f"metrics[{name!r}] is a {kind}; expected a number, such as loss.item()"
            )
    if step is not None and (type(step) is not int or step < 0):
        raise OptionError(f"step is {step!r}; expected an integer from 0, or None")


def _request(
    leaves: Leaves, step: int | None, metrics: Mapping[str, float] | None, *, compare: bool
) -> Request:
    digests = {
        path: digest
        for path, tensor in leaves.tensors.items()
        if compare and (digest := tensor.small_digest()) is not None
    }
    shards = tuple(tensor.shard for tensor in leaves.tensors.values())
    save_id = secrets.token_hex(16)  # that of the coordinator counts
    ties, numbers = leaves.ties(), dict(metrics or {})
    return Request(save_id, step, leaves.mesh, numbers, shards, ties, digests, leaves.objects)


def _header(plan: SavePlan, world_size: int, options: Options) -> Header:
    return Header(
        save_id=plan.save_id,
        step=plan.step,
        world_size=world_size,
        mesh=plan.mesh,
        metrics=plan.metrics,
        written_by=f"holdfast {__version__}",
        chunk_elements=options.chunk_elements,
        tensors=plan.tensors,
        ties=plan.ties,
        objects=plan.objects,
    )
