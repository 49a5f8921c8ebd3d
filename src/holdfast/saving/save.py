"""The whole save, on one page: flatten → plan → stage → encode → write → commit.

`save_async` walks as far as stage. A thread does the rest, and uses no collectives.
"""

import contextlib
import errno
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from .. import worker
from ..arguments import check_saved, encode_arguments
from ..chains.base_choice import begin_link, choose_base, end_link, join_losses, losses_of
from ..engine.basis import Basis
from ..engine.commit import REVOKED, Begun, begin, check_absent, commit
from ..engine.file_plan import lay_out
from ..engine.ledger import Ledger
from ..engine.origin import LiveTensors
from ..engine.pool import lease, staging
from ..engine.registry import CODECS, describe_codec, find_codec
from ..engine.replace import check_replaceable, commit_over, remove_replaced
from ..engine.staging import LazyCopies, copy_now, hold
from ..engine.write import make_durable
from ..engine.write_pipeline import write_shards
from ..errors import StoreError
from ..format.rows import written_in
from ..format.spec import MANIFEST_NAME
from ..format.table import Table
from ..format.values import encode_value
from ..group.base import COORDINATOR
from ..group.phase import BriefPhase, Outcome, Phase, find_group
from ..group.replies import encode_reply
from ..options import DEFAULTS, SLOT_BYTES, Options, options_of
from ..plan import cached_plans
from ..plan.local_states import encode_local_state
from ..plan.save_plan import header_with, objects_from
from ..state.steps import changed_by_steps, hold_steps
from ..state.tree import Leaves, flatten
from ..stores.base import Store
from ..stores.url import open_store
from .agreement import Agreement, Proposal, agree, arguments_of_all, local_state_for
from .handle import SaveHandle, hold_step, raise_now, reserve, take_flight
from .request import SaveRequest, check_background, checked_request, moved_deadline
from .share import Share, decode_shares, discard, encode_share

if TYPE_CHECKING:
    from ..codecs.base import Codec
    from ..group.base import Group
    from ..group.torch import GroupLike

logger = logging.getLogger("holdfast")

Records = list[dict[str, Any]]  # of every rank on the coordinator, of none elsewhere
Files = tuple[list[Table], Basis | None]  # a rank's data files, and what the next link needs
Begin = Callable[[list[Table], Basis | None], object]  # called with them before they are synced
Write = Callable[[Begin], Files]


def save(
    state: Mapping[Any, Any],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    codec: "str | Codec" = "raw",
    replace: bool = False,
    group: "GroupLike" = None,
    options: Options | None = None,
) -> None:
    """Save a state as one checkpoint, which is committed and durable when this returns.

    Host memory is bounded by the pool, not by the state. All ranks of the group call it with the
    same arguments. Each distinct piece is written once, by one of the ranks that hold it.

    Args:
        state: a nested dict of tensors, DTensors, JSON-like values and anything with
            ``state_dict()`` and ``load_state_dict()``: modules, optimizers, schedulers, scalers.
        path: directory of the new checkpoint. ``~`` is expanded; a relative path starts at the
            working directory. All ranks give the same absolute path.
        step: number of the step, recorded in the checkpoint.
        metrics: numbers recorded in the checkpoint, for `Keep.best`; those of rank 0 count. Other
            ranks give the same names, or none.
        codec: "raw"; "lossless": exact, in fewer bytes; "delta": exact, and of weights only the
            change since the previous checkpoint in the same directory; or lossy: "compact",
            "compact:tiny" to "compact:high", "excp" (docs/codecs.md); or one of `holdfast.codecs`.
        replace: whether to replace a checkpoint at ``path``, in one atomic step (docs/replace.md).
        group: ranks that save together; default: the default process group, or this process.
            ``"alone"``: this process by itself, even if there is a process group.
        options: settings such as ``io`` and ``writers``.

    Raises:
        OptionError: an invalid argument, or the ranks gave different ones.
        StateError: the state cannot be saved as given; the text names the leaf.
        AlreadyCommittedError: there is a checkpoint at ``path``; or one that ``replace`` refuses.
        ReplacedError, FencedError: as docs/replace.md says of ``replace``.
        StoreError: disk, network or permission; `NoSpaceError` when the disk is full.
        PeerError: another rank failed; nothing was committed.

    Example:
        ``holdfast.save({"model": model, "optimizer": optimizer}, "runs/b/step-00001000")``
    """
    chosen = DEFAULTS if options is None else options_of(options)
    request = SaveRequest(path, step, metrics, codec, chosen, replace=replace)
    ranks = find_group(group, writing=True)
    worker.run(lambda: save_now(state, request, ranks))


def save_async(
    state: Mapping[Any, Any],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    codec: "str | Codec" = "raw",
    stage: Literal["eager", "lazy"] = "eager",
    busy: Literal["wait", "skip", "fail"] = "wait",
    replace: bool = False,
    group: "GroupLike" = None,
    options: Options | None = None,
    **moved: Any,
) -> SaveHandle:
    """Copy a state to host memory; save the copy as `save` does, while training goes on.

    Each rank copies the share that it writes, into memory that is kept for the next save. All
    ranks of the group call it with the same path.

    Args:
        state, path, step, metrics, codec, replace, group, options: as for `save`.
        stage: "eager": returns once the state is copied. "lazy": returns at once; parameters and
            optimizer state are copied during forward and backward, and the next ``step()`` of the
            state's optimizers waits for the copy. Everything else is copied before it returns. A
            parameter that changes in another way before its copy fails the save. A change that
            torch counts is always noticed. An uncounted one (through ``.data`` or NumPy) is found
            by samples; on CUDA devices, few of them (docs/saving.md).
        busy: if the previous save is still in flight on any rank: "wait" for it, "skip" this save
            (the handle's ``skipped``), or "fail" with a BusyError.
        moved: an argument that is a field of `Options` now: ``deadline_s`` still works, and warns.

    Returns:
        The save: ``wait_staged()``, ``result()``, ``done()``, ``progress()``, ``cancel()``.

    Raises:
        HoldfastError: as `save`; or the previous save's, not raised yet. Nothing is saved then.

    Example:
        ``handle = holdfast.save_async({"model": model}, "runs/a/step-00000007")``
    """
    chosen = DEFAULTS if options is None else options_of(options)
    deadline_s = moved_deadline(moved) if moved else chosen.deadline_s
    request = SaveRequest(path, step, metrics, codec, chosen, stage, busy, deadline_s, replace)
    ranks = find_group(group, writing=True)
    handle = worker.run(lambda: start_save(state, request, ranks), dropped=SaveHandle.cancel)
    handle.is_given = True  # by no call, before which an interrupt may come
    return handle


def save_now(
    state: Mapping[Any, Any], request: SaveRequest, ranks: "Group", ledger: Ledger | None = None
) -> Records:
    """Walk all the way in this thread; with a ``ledger`` that counts already, or a new one."""
    ledger, options = ledger or Ledger(), request.options
    told = BriefPhase(ranks, cached_plans.NUMBERS, cached_plans.settled)
    with told:
        proposal = _propose(told, state, request, ranks)
    agreement, store = agree(proposal, told, ranks.rank), proposal.store
    ledger.planned(agreement.files.payload_bytes, told.waited_s, told.met)

    def write(begin: Begin) -> Files:
        files, shards, codec = agreement.files, agreement.cached.shards, agreement.codec
        basis = begin_link(agreement.writing, options) if codec.every > 1 else None
        with lease(store, options) as leased:
            live = LiveTensors(shards, proposal.leaves.tensors, files.header.chunk_elements)
            tables = write_shards(store, leased, files, shards, live, codec, basis, ledger, begin)
        return tables, basis

    records = _finish(agreement, ranks, write, ledger, request)
    ledger.stall_s = time.perf_counter() - ledger.started
    return records


def start_save(
    state: Mapping[Any, Any],
    request: SaveRequest,
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
        told = BriefPhase(ranks, cached_plans.NUMBERS, cached_plans.settled)
        with told:
            check_background(request, ranks)
            is_mine = stack.enter_context(reserve(request.busy, request.deadline_s))
            ledger = Ledger(tell=request.tell)
            proposal = _propose(told, state, request, ranks, is_mine=is_mine)
            # A connection in use is not looked at: this save is not going to begin.
            meet = ranks.connect() if is_mine else ranks.background
        firsts = arguments_of_all(told)
        deadline_s = min([request.deadline_s, *(first["deadline_s"] for first in firsts)])
        handle = SaveHandle(proposal.store.location, proposal.step, ledger, deadline_s)
        if busy := [rank for rank, first in enumerate(firsts) if first["busy"]]:
            return handle.skip(busy, request.busy)
        agreement = agree(proposal, told, ranks.rank)
        ledger.planned(agreement.files.payload_bytes, told.waited_s, told.met)
        background = meet(agreement.files.header.save_id, handle.deadline)
        take_flight(handle)
        try:
            write = _stage(agreement, proposal.leaves, handle, request)
        except BaseException as error:
            failure = error  # the others are on their way: they are told of it as of any other
            handle.staged()  # as far as it will be: no step has to wait for them
            fail = lambda begin: raise_now(failure)  # noqa: E731
            handle.start(lambda: _finish(agreement, background, fail, ledger, request))
            raise
        ledger.stall_s = time.perf_counter() - called  # with the wait for the save before
        handle.start(lambda: _finish(agreement, background, write, ledger, request), after)
        begun(handle)
    return handle


def _propose(
    told: BriefPhase,
    state: Mapping[Any, Any],
    request: SaveRequest,
    ranks: "Group",
    *,
    is_mine: bool | None = None,
) -> Proposal:
    """Lay the state flat, and tell the others what this rank holds and how it is set.

    Args:
        is_mine: whether the process's one save in the background is this one; None: it is none.
    """
    if not isinstance(state, Mapping):
        check_saved(request.path, state)
    store = open_store(request.path, limit_s=request.deadline_s)
    named = request.codec
    codec = (CODECS.get(named) if isinstance(named, str) else None) or find_codec(named)
    request = checked_request(request)
    word: dict[str, Any] = {}
    if ranks.rank == COORDINATOR:
        check_replaceable(store) if request.replace else check_absent(store, reclaims=False)
        word["save_id"], word["step"] = secrets.token_hex(16), request.step
        word["base"] = choose_base(store, codec, ranks.rank) if codec.every > 1 else None
        metrics = dict(request.metrics or {})
        word["metrics"] = encode_value(metrics, ("metrics",)) if metrics else {}
        if request.free_bytes is not None:
            word["free_bytes"] = request.free_bytes()
        if not store.shows_pending:
            store.reclaim(MANIFEST_NAME)  # not before: an older job has been refused by now
    leaves = flatten(state)
    background, busy = is_mine is not None, is_mine is False
    settings = request.settings(codec, ranks.world_size, background=background)
    local_state = local_state_for(leaves, compare=ranks.world_size > 1)
    key, before = cached_plans.find(ranks.rank, settings, local_state)

    def arguments(**more: Any) -> bytes:
        given = request.arguments(store.location, codec, background=background)
        what = f"the save of {store.location}"
        return encode_arguments(what, given, deadline_s=request.deadline_s, **more)

    def everything() -> bytes:
        chosen = settings | {"codec": describe_codec(codec)}
        asks = arguments(settings=chosen, word=word, busy=busy)
        return encode_reply(arguments=asks, local_state=encode_local_state(local_state))

    if before is not None and ranks.world_size == 1 and not busy:
        told.numbers = ()
    elif before is not None:
        told.numbers = cached_plans.numbers(before, local_state, arguments(), word, busy=busy)
    told.tell = everything
    return Proposal(store, leaves, local_state, key, before, word, request.step)


def _stage(agreement: Agreement, leaves: Leaves, handle: SaveHandle, request: SaveRequest) -> Write:
    """Copy what has to be copied now; return what copies the rest, and writes."""
    ledger, store, files = handle.ledger, agreement.store, agreement.files
    shards, codec = agreement.cached.shards, agreement.codec
    with ledger.timed("stage"):
        images = lay_out(files, shards)
        lease = staging(store, request.options, images.size_bytes)
        handle.when_ended(lease.give_back)
        later = changed_by_steps(leaves) if request.stage == "lazy" else frozenset()
        now, rest = hold(files, shards, leaves.tensors, images, lease.memory, later)
        copy_now(now)
        copies = LazyCopies(rest) if rest else None
        ledger.staged_bytes = now.live.shards.size_bytes
    if copies:
        hold_steps(leaves.optimizers, hold_step)
    worker.check()  # who left before may have changed what was copied; from here on steps wait
    handle.hold_with(copies) if copies else handle.staged()

    def write(begin: Begin) -> Files:
        staged = copies.finish(files, images) if copies else images
        if copies:
            handle.staged()
        ledger.staged_bytes = ledger.total_bytes
        basis = begin_link(agreement.writing, request.options) if codec.every > 1 else None
        tables = write_shards(store, lease, files, shards, staged, codec, basis, ledger)
        begin(tables, basis)
        if copies:
            copies.close()
        return tables, basis

    return write


def _finish(
    agreement: Agreement, ranks: "Group", write: Write, ledger: Ledger, request: SaveRequest
) -> Records:
    """Write this rank's share; commit when all ranks have written theirs."""
    store, plan, header = agreement.store, agreement.cached.plan, agreement.files.header
    written, begun = Phase(ranks, gather=True), None
    share: Share

    def begin_commit(tables: list[Table], basis: Basis | None) -> None:
        nonlocal share, begun
        share = Share(
            {"rank": ranks.rank},
            objects_from(plan, ranks.rank, agreement.objects) if plan.objects else [],
            losses_of(basis, header) if basis and basis.losses else [],
            written_in(tables),
        )
        # Large saves gain nothing. With several ranks, the manifest names the others' files too.
        if ranks.world_size == 1 and agreement.files.payload_bytes <= SLOT_BYTES:
            started = time.perf_counter()
            begun = _begin(agreement, [share])
            ledger.spans.append(("commit", started, time.perf_counter(), 0))

    try:
        with written:
            tables, basis = write(begin_commit)
            ledger.close()
            if request.here is not None and ranks.rank not in request.here:
                make_durable(store, tables)
                request.check_last()
            if ranks.rank != COORDINATOR:  # whose own record comes later
                share.record.update(ledger.record())
            written.answer = encode_share(share) if ranks.world_size > 1 else b""
    except BaseException as error:
        discard(store, header.save_id, ranks.rank, written, error)
        if written.others is not None and getattr(error, "errno", 0) == errno.ENOENT:
            raise written.others from error  # who failed first has removed what was written here
        raise
    records, started = Records(), time.perf_counter()
    ledger.spans.append(("wait", written.met - written.waited_s, written.met, 0))
    with Outcome(ranks) as outcome:
        if ranks.rank == COORDINATOR:
            shares = decode_shares(written.answers) if ranks.world_size > 1 else [share]
            records = [*map(attrgetter("record"), shares)]
            _commit(store, begun or _begin(agreement, shares), ledger, request)
            ledger.spans.append(("commit", started, time.perf_counter(), 0))
            outcome.answer = request.tell_ranks()
    request.heed(outcome.answers[0])
    cached_plans.remember(agreement.cached)
    if request.replace and ranks.rank == COORDINATOR:
        ledger.state = "committed"  # who waits need not give up: old files are deleted now
        remove_replaced(store)
    if basis:
        end_link(agreement.writing, basis)
    if ranks.rank == COORDINATOR:
        records[COORDINATOR].update(ledger.record())
        if logger.isEnabledFor(logging.INFO):
            logger.info("saved %s: %s", store.location, ledger.took(agreement.size_bytes))
    return records


def _begin(agreement: Agreement, shares: list[Share]) -> Begun:
    """Begin the commit of all ranks' files."""
    plan, header = agreement.cached.plan, agreement.files.header
    losses = [*map(attrgetter("losses"), shares)]
    if plan.objects or any(losses):
        objects = [*map(attrgetter("objects"), shares)]
        header = header_with(plan, header, objects, join_losses(losses) if any(losses) else ())
    return begin(agreement.store, header, plan.planned, [*map(attrgetter("written"), shares)])


def _commit(store: Store, begun: Begun, ledger: Ledger, request: SaveRequest) -> None:
    """Publish the checkpoint, on the coordinator."""
    publish = commit_over if request.replace else partial(commit, here=request.here)
    look = partial(ledger.check_last, request.check_last)
    try:
        publish(store, begun, look)
    except StoreError as error:
        if error.errno in REVOKED:
            look()  # the job that has taken this run over removes what was not published
        raise
