"""The whole save, on one page: flatten → plan → stage → encode → write → commit.

`save` walks it in the caller's thread. `save_async` walks as far as stage; the rest goes on in a
thread, which meets the other ranks without collectives.
"""

import contextlib
import errno
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from .. import worker
from ..arguments import check_order, check_state, encode_arguments
from ..chains.base_choice import begin_link, choose_base, encode_losses, end_link, join_losses
from ..engine.basis import Basis
from ..engine.commit import REVOKED, Commit, check_absent, discard
from ..engine.file_plan import lay_out
from ..engine.ledger import Ledger
from ..engine.origin import LiveTensors
from ..engine.pool import lease, staging
from ..engine.registry import describe_codec, find_codec
from ..engine.staging import LazyCopies, copy_now, hold
from ..engine.write_pipeline import write_shards
from ..errors import StoreError
from ..format.rows import Planned, encode_written
from ..format.table import Table
from ..format.values import encode_value
from ..group.base import COORDINATOR, BriefPhase, Outcome, Phase
from ..group.find import find_group
from ..group.replies import decode_replies, encode_reply
from ..options import Options, options_of
from ..plan import known
from ..plan.requests import encode_request
from ..plan.save_plan import decode_objects, encode_objects
from ..state.steps import changed_by_steps, hold_steps
from ..state.tree import Leaves, flatten
from ..stores.url import open_store
from ..version import __version__
from .agreement import Agreed, Described, agree, arguments_of_all, request_for
from .handle import SaveHandle, hold_step, raise_untold, reserve, take_flight
from .request import Wanted, check_background, check_wanted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..codecs.base import Codec
    from ..group.base import Group

    GroupLike = ProcessGroup | Group | Literal["alone"] | None

logger = logging.getLogger("holdfast")

_USAGE = 'save() takes the state first and the path second: holdfast.save(state, "runs/a")'
Records = list[dict[str, Any]]  # of every rank on the coordinator, of none elsewhere
Written = tuple[list[Table], Basis | None]  # a rank's data files, and what the next link needs


def save(
    state: Mapping[Any, Any],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    codec: "str | Codec" = "raw",
    group: "GroupLike" = None,
    options: Options | None = None,
) -> None:
    """Save a state as one committed checkpoint, durable when this returns, on every rank.

    Host memory is bounded by the pool, not by the state. All ranks of the group call it with the
    same arguments; each distinct piece is written once, by one of the ranks that hold it.

    Args:
        state: a nested dict of tensors, DTensors, JSON-like values and anything with
            ``state_dict()`` and ``load_state_dict()``: modules, optimizers, schedulers, scalers.
        path: directory of the checkpoint; made when needed. It must not hold one already. ``~`` is
            expanded; what is relative is so to the working directory of this call. All ranks give
            the same absolute path, also where it is mounted in several places.
        step: recorded in the checkpoint.
        metrics: numbers that judge the step, recorded too; the coordinator's count. Other ranks
            give the same names, or none.
        codec: how chunks are stored: "raw"; "lossless": every bit, in fewer bytes; "delta": the
            same, and of weights only what has changed since the checkpoint before, in the same
            directory; with loss "compact", "compact:tiny" to "compact:high", "excp". Or one of
            `holdfast.codecs` with options. docs/codecs.md says what each loses.
        group: ranks that save together; default: the default process group, or this process.
            ``"alone"``: this process by itself, whatever process group there is.

    Raises:
        OptionError: an invalid argument, or the ranks gave different ones; the text says which
            rank gave what.
        StateError: the state cannot be saved as given; the text names the leaf.
        AlreadyCommittedError: there is a checkpoint at ``path``.
        StoreError: disk, network or permission; `NoSpaceError` when the disk is full.
        PeerError: another rank failed; nothing was committed.

    Example:
        ``holdfast.save({"model": model, "optimizer": optimizer}, "runs/a/step-1000")``
    """
    wanted = Wanted(path, step, metrics, codec, options_of(options))
    ranks = find_group(group, writing=True)
    worker.run(lambda: save_now(state, wanted, ranks))


def save_async(
    state: Mapping[Any, Any],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    codec: "str | Codec" = "raw",
    stage: Literal["eager", "lazy"] = "eager",
    busy: Literal["wait", "skip", "fail"] = "wait",
    deadline_s: float = 1800.0,
    group: "GroupLike" = None,
    options: Options | None = None,
) -> SaveHandle:
    """Copy a state to host memory; save the copy, as `save` does, while training goes on.

    Each rank copies the share that it writes, into memory that is kept for the next save. All
    ranks of the group call it with the same path.

    Args:
        state, path, step, metrics, codec, group: as `save` takes them.
        stage: "eager": returns when the copy is made. "lazy": returns at once; parameters and
            optimizer state are copied during forward and backward, and the next ``step()`` of the
            state's optimizers waits for that. Everything else is copied before it returns. A
            parameter that changes in another way before its copy fails the save. A change that
            torch counts is always seen. One that it does not count (through ``.data`` or NumPy) is
            looked for in samples of tensors in host memory; on CUDA devices it is not seen.
            docs/saving.md says how likely samples meet a change.
        busy: when the save before is still in flight, on any rank: "wait" for it, "skip" this one
            (the handle says so), or "fail" with a BusyError.
        deadline_s: seconds from here until a save that is not committed fails, on all ranks; the
            smallest of any rank counts.

    Returns:
        the save in flight: ``wait_staged()``, ``result()``, ``done()``, ``progress()``,
        ``cancel()``.

    Raises:
        HoldfastError: as `save`; also the failure of the save before, when nobody has been told
            of it: nothing of this one is saved then.

    Example:
        ``handle = holdfast.save_async({"model": model, "optimizer": optimizer}, "runs/a/step-7")``
    """
    wanted = Wanted(path, step, metrics, codec, options_of(options), stage, busy, deadline_s)
    ranks = find_group(group, writing=True)
    handle = worker.run(lambda: start_save(state, wanted, ranks), dropped=SaveHandle.cancel)
    handle.is_given = True  # by no call, before which an interrupt may come
    return handle


def save_now(state: Mapping[Any, Any], wanted: Wanted, ranks: "Group") -> Records:
    """Walk all the way in this thread."""
    ledger, options = Ledger(), wanted.options
    with BriefPhase(ranks, known.NUMBERS, known.settled) as told:
        mine = _describe(told, state, wanted, ranks, ledger)
    arguments_of_all(told)
    agreed, store = _agree(mine, told, ranks, ledger), mine.store

    def write() -> Written:
        files, shards, codec = agreed.files, agreed.shards, agreed.codec
        basis = begin_link(agreed.writing(ranks.rank), options)
        with lease(store.vfs, store.location, options) as leased:
            live = LiveTensors(shards, mine.leaves.tensors, files.header.chunk_elements)
            tables = write_shards(store, leased, files, shards, live, codec, basis, ledger)
        return tables, basis

    records = _finish(agreed, ranks, write, ledger, wanted.check_last)
    ledger.stall_s = time.perf_counter() - ledger.started
    return records


def start_save(
    state: Mapping[Any, Any],
    wanted: Wanted,
    ranks: "Group",
    after: Callable[[Records], None] = lambda _: None,
    begun: Callable[[SaveHandle], None] = lambda _: None,
) -> SaveHandle:
    """Walk as far as stage, and go on in the background.

    Args:
        after: called there, on every rank, when the checkpoint is committed.
        begun: called here when it is in flight, before another save is prepared.
    """
    called = time.perf_counter()
    with contextlib.ExitStack() as stack:
        with BriefPhase(ranks, known.NUMBERS, known.settled) as told:
            check_background(wanted, ranks)
            is_mine = stack.enter_context(reserve(wanted.busy, wanted.deadline_s))
            raise_untold()
            ledger = Ledger()
            mine = _describe(told, state, wanted, ranks, ledger, is_mine=is_mine)
            # A connection in use is not looked at: this save is not going to begin.
            meet = ranks.connect() if is_mine else ranks.background
        firsts = arguments_of_all(told)
        deadline_s = min([wanted.deadline_s, *(first["deadline_s"] for first in firsts)])
        handle = SaveHandle(mine.store.location, wanted.step, ledger, deadline_s)
        if busy := [rank for rank, first in enumerate(firsts) if first["busy"]]:
            return handle.skip(busy, wanted.busy)
        agreed = _agree(mine, told, ranks, ledger)
        background = meet(agreed.files.header.save_id, handle.deadline)
        take_flight(handle)
        try:
            write = _stage(agreed, ranks.rank, mine.leaves, handle, wanted)
        except BaseException as error:
            # The others are on their way: they are told as they would be of any other failure.
            failure = error
            handle.staged()  # as far as it will be: no step has to wait for them
            handle.start(lambda: _fail(agreed, background, failure, ledger))
            raise
        ledger.stall_s = time.perf_counter() - called  # with the wait for the save before
        handle.start(lambda: _finish(agreed, background, write, ledger, wanted.check_last), after)
        begun(handle)
    return handle


def _describe(
    told: BriefPhase,
    state: Mapping[Any, Any],
    wanted: Wanted,
    ranks: "Group",
    ledger: Ledger,
    *,
    is_mine: bool | None = None,
) -> Described:
    """Lay the state flat, and tell the others what this rank holds and how it is set.

    Args:
        is_mine: whether the process's one save in the background is this one; None: it is none.
    """
    with ledger.timed("plan"):
        check_order(wanted.path, state, _USAGE)
        store = open_store(wanted.path)
        check_wanted(wanted)
        check_state(state)
        busy = is_mine is False
        word: dict[str, Any] = {}
        if ranks.rank == COORDINATOR:
            check_absent(store)
            word["save_id"], word["step"] = secrets.token_hex(16), wanted.step
            word["base"] = choose_base(store, find_codec(wanted.codec), ranks.rank)
            word["metrics"] = encode_value(dict(wanted.metrics or {}), ("metrics",))
            if wanted.free_bytes is not None:
                word["free_bytes"] = wanted.free_bytes()
        options, leaves = wanted.options, flatten(state)
        settings = {
            "chunk_elements": options.chunk_elements,
            "file_bytes": options.file_bytes,
            "codec": describe_codec(find_codec(wanted.codec)),
            "writers": options.writers,
            "written_by": f"holdfast {__version__}",
            "world_size": ranks.world_size,
            "metrics": sorted(wanted.metrics or ()),  # of their values the coordinator's count
            # Of each rank itself; what is above has to be the same.
            "pool_bytes": None if is_mine is None else options.pool_bytes,
        }
        request = request_for(leaves, compare=ranks.world_size > 1)
        held = known.held_by(ranks.rank, settings, request)
        before = known.find(held)
        given = wanted.arguments(store.location, background=is_mine is not None)
        what = f"the save of {store.location}"
        asks = encode_arguments(what, given, deadline_s=wanted.deadline_s)  # the smallest counts
        if before is not None:
            told.numbers = known.numbers(before, request, asks, word, busy=busy)
        more = {"deadline_s": wanted.deadline_s, "settings": settings, "word": word, "busy": busy}
        told.tell = lambda: encode_reply(
            arguments=encode_arguments(what, given, **more), request=encode_request(request)
        )
    return Described(store, leaves, request, held, before)


def _agree(mine: Described, told: BriefPhase, ranks: "Group", ledger: Ledger) -> Agreed:
    """Plan, on every rank alike."""
    with ledger.timed("plan"):
        agreed = agree(mine, told, ranks.rank)
    ledger.total_bytes = agreed.files.payload_bytes
    return agreed


def _stage(
    agreed: Agreed, rank: int, leaves: Leaves, handle: SaveHandle, wanted: Wanted
) -> Callable[[], Written]:
    """Copy what has to be copied now; return what copies the rest, and writes."""
    ledger, store, files, shards = handle.ledger, agreed.store, agreed.files, agreed.shards
    with ledger.timed("stage"):
        images = lay_out(files, shards)
        lease = staging(store.vfs, store.location, wanted.options, images.size_bytes)
        handle.when_ended(lease.give_back)
        later = changed_by_steps(leaves) if wanted.stage == "lazy" else frozenset()
        now, rest = hold(files, shards, leaves.tensors, images, lease.memory, later)
        copy_now(now)
        copies = LazyCopies(rest) if rest else None
        ledger.staged_bytes = now.live.shards.size_bytes
    if copies:
        hold_steps(leaves.optimizers, hold_step)
    worker.check()  # who left before may have changed what was copied; from here on steps wait
    if copies:
        handle.hold_with(copies.before_step)
    else:
        handle.staged()

    def write() -> Written:
        if copies:
            copies.finish()
        ledger.staged_bytes = ledger.total_bytes
        handle.staged()
        basis = begin_link(agreed.writing(rank), wanted.options)
        tables = write_shards(store, lease, files, shards, images, agreed.codec, basis, ledger)
        if copies:
            copies.close()
        return tables, basis

    return write


def _finish(
    agreed: Agreed,
    ranks: "Group",
    write: Callable[[], Written],
    ledger: Ledger,
    check_last: Callable[[], None] = lambda: None,
) -> Records:
    """Write this rank's share; commit when all ranks have written theirs."""
    store, header = agreed.store, agreed.files.header
    written = Phase(ranks, gather=True)
    try:
        with written:
            tables, basis = write()
            ledger.close()
            written.answer = encode_reply(
                record=json.dumps({"rank": ranks.rank, **ledger.record()}).encode(),
                objects=encode_objects(agreed.made.plan, ranks.rank, agreed.objects),
                losses=encode_losses(basis, header),
                written=encode_written(tables),
            )
    except BaseException as error:
        discard(store, header.save_id, ranks.rank, written, error)
        if written.others is not None and getattr(error, "errno", 0) == errno.ENOENT:
            raise written.others from error  # who failed first has removed what was written here
        raise
    records: Records = []
    with Outcome(ranks), ledger.timed("commit"):
        if ranks.rank == COORDINATOR:
            records = _commit(agreed, written.answers, ledger, check_last)
    known.remember(agreed.made)
    end_link(agreed.writing(ranks.rank), basis)
    if ranks.rank == COORDINATOR:
        records[COORDINATOR].update(ledger.record())
        seconds, stall_s = time.perf_counter() - ledger.started, ledger.stall_s
        stalled = f", training held up for {stall_s:.3f} s" if stall_s else ""
        gigabytes = agreed.size_bytes / 1e9
        logger.info("saved %s: %.3f GB in %.2f s%s", store.location, gigabytes, seconds, stalled)
    return records


def _commit(
    agreed: Agreed, answers: list[bytes], ledger: Ledger, check_last: Callable[[], None]
) -> Records:
    """Publish what all ranks wrote, on the coordinator; return what each has measured."""
    replies = decode_replies(answers, "record", "objects", "losses", "written")
    plan, store = agreed.made.plan, agreed.store
    values = decode_objects(plan, [reply["objects"] for reply in replies])
    planned = Planned(plan.tensor, plan.boxes, plan.first)
    lost = join_losses([reply["losses"] for reply in replies])
    header = replace(agreed.files.header, objects=values, losses=lost)

    def look() -> None:
        check_last()  # on a slow disk it may take until the deadline
        ledger.check_deadline()

    try:
        with Commit(store, header.save_id) as made:
            made.prepare(header, planned, [reply["written"] for reply in replies])
            look()
            made.publish()
    except StoreError as error:
        if error.errno in REVOKED:
            look()  # the job that has taken this run over removes what was not published
        raise
    return [json.loads(reply["record"]) for reply in replies]


def _fail(agreed: Agreed, ranks: "Group", error: BaseException, ledger: Ledger) -> None:
    """Tell the other ranks that this one cannot do its part."""

    def write() -> Written:
        raise error

    _finish(agreed, ranks, write, ledger)
