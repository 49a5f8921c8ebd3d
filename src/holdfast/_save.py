"""The whole save, on one page: flatten → plan → stage → encode → write → commit."""

import json
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

logger = logging.getLogger("holdfast")

STEP_LIMIT = 1 << 53  # as docs/format.md says


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
    where, saved_bytes = _walk(path, ranks, state, step, metrics, codec, options or Options())
    if ranks.rank == COORDINATOR:
        seconds = time.perf_counter() - started
        logger.info("saved %s: %.3f GB in %.2f s", where, saved_bytes / 1e9, seconds)


def _walk(
    path: "str | os.PathLike[str]",
    ranks: "Group",
    state: Mapping[Any, Any],
    step: int | None,
    metrics: Mapping[str, float] | None,
    codec: str,
    options: Options,
) -> tuple[str, int]:
    """Walk all the way; return where, and the bytes of the tensors saved."""
    with Phase(ranks) as described:
        store = open_store(path)
        _check_arguments(step, metrics, codec)
        if ranks.rank == COORDINATOR:
            check_absent(store)
        leaves = flatten(state)
        request = _request(leaves, step, metrics, compare=ranks.world_size > 1)
        described.answer = _settings(options, codec) + b"\n" + encode_request(request)

    # What has to be the same on all ranks is the coordinator's.
    settings = json.loads(described.answers[COORDINATOR].partition(b"\n")[0])
    requests = [decode_request(data.partition(b"\n")[2]) for data in described.answers]
    plan = plan_save(requests, settings["file_bytes"])
    header, shards = _header(plan, ranks.world_size, settings), plan.shards[ranks.rank]

    written = Phase(ranks, gather=True)
    try:
        with written:
            files = WriterPlan(header, ranks.rank, 0, size_of(shards), settings["file_bytes"])
            with lease(store.vfs, store.location, options) as leased:
                sources, chosen = leaves.sources(), settings["codec"]
                tables = write_shards(store, leased, files, shards, sources, chosen)
            written.answer = encode_tables(tables)
    except BaseException as error:
        discard(store, plan.save_id, ranks.rank, written, error)
        raise

    with Phase(ranks):
        if ranks.rank == COORDINATOR:
            commit(store, header, written.answers)
    return store.location, size_of(plan.tensors)


def _settings(options: Options, codec: str) -> bytes:
    """Write what all ranks have to do alike as one line of JSON."""
    settings = {
        "chunk_elements": options.chunk_elements,
        "file_bytes": options.file_bytes,
        "codec": codec,
        "written_by": f"holdfast {__version__}",
    }
    return json.dumps(settings).encode()


def _check_arguments(step: int | None, metrics: Mapping[str, float] | None, codec: str) -> None:
    check_codec(codec)
    if metrics is not None and not isinstance(metrics, Mapping):
        raise OptionError(f"metrics is a {type(metrics).__name__}; expected a dict of numbers")
    for name, value in (metrics or {}).items():
        if not isinstance(name, str) or type(value) is bool or not isinstance(value, (int, float)):
            kind = type(value).__name__
            raise OptionError(
                f"metrics[{name!r}] is a {kind}; expected a number, such as loss.item()"
            )
    if step is not None and (type(step) is not int or not 0 <= step < STEP_LIMIT):
        raise OptionError(f"step is {step!r}; expected an integer from 0 below 2^53, or None")


def _request(
    leaves: Leaves, step: int | None, metrics: Mapping[str, float] | None, *, compare: bool
) -> Request:
    digests = {
        path: digest
        for path, tensor in leaves.tensors.items()
        if compare and (digest := tensor.digest()) is not None
    }
    shards = tuple(tensor.shard for tensor in leaves.tensors.values())
    save_id = secrets.token_hex(16)  # that of the coordinator counts
    ties, numbers = leaves.ties(), dict(metrics or {})
    return Request(save_id, step, leaves.mesh, numbers, shards, ties, digests, leaves.objects)


def _header(plan: SavePlan, world_size: int, settings: Mapping[str, Any]) -> Header:
    return Header(
        save_id=plan.save_id,
        step=plan.step,
        world_size=world_size,
        mesh=plan.mesh,
        metrics=plan.metrics,
        written_by=settings["written_by"],
        chunk_elements=settings["chunk_elements"],
        tensors=plan.tensors,
        ties=plan.ties,
        objects=plan.objects,
    )
