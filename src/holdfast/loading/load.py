"""The whole load, on one page: open → plan → read → decode → place."""

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Literal

from .. import worker
from .._core import xxh3_128
from ..arguments import (
    camps,
    check_alike,
    check_into,
    decode_arguments,
    encode_arguments,
)
from ..brief import show_bytes
from ..engine.chain import Chain, Link, open_chain
from ..engine.check import check_alone, check_files, check_share, read_manifest
from ..engine.exchange import Exchange
from ..engine.pool import Lease, lease
from ..engine.read import still_there
from ..engine.read_pipeline import Done, read_chain, read_shards
from ..engine.trust import check_of
from ..errors import CorruptError, MismatchError, NotCommittedError, PeerError, StoreError
from ..format.names import misnamed, step_name
from ..group.base import COORDINATOR, sends
from ..group.phase import Phase, find_group
from ..group.replies import decode_replies, encode_reply
from ..options import DEFAULTS, SLOT_BYTES, Options, options_of
from ..plan.choice import Patterns
from ..plan.load_plan import find_chunks
from ..plan.reads import coalesce
from ..plan.rename import Rename
from ..plan.share_plan import Holders, SharedRun, encode_rows, share_out
from ..state.filled import Target
from ..state.source import Source
from ..state.target import bind
from ..stores.url import open_store
from .agreed import agreed, what_else
from .fit import Fit, check_fit, describe_fit, source_of, wanted_of
from .reach import Reach
from .report import LoadReport
from .request import LoadRequest
from .selection import Selection, digest_of

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from ..engine.ledger import Ledger
    from ..format.manifest import Manifest
    from ..group.base import Group
    from ..stores.base import Store

logger = logging.getLogger("holdfast")

OPENINGS = 2  # of a checkpoint that may be rebased at that time


def load(
    path: str | os.PathLike[str],
    into: Mapping[Any, Any] | None = None,
    *,
    strict: bool = True,
    partial: bool = False,
    cast: bool = False,
    types: Iterable[type] = (),
    include: Patterns = (),
    exclude: Patterns = (),
    rename: Rename | None = None,
    assign: "bool | str | torch.device" = False,
    group: "ProcessGroup | Group | Literal['alone'] | None" = None,
    options: Options | None = None,
) -> LoadReport:
    """Fill a state from a checkpoint, in place. Its layout may differ from the one that saved.

    Each chunk is verified in host memory before any byte of it reaches a tensor. With ``strict``,
    the names on both sides must be the same, and the ranks check all bytes of the directory.

    Args:
        path: a checkpoint, or one of another format; or a run, whose newest step is loaded.
        into: as given to `save`; values other than tensors are replaced in their dict or list.
        strict: raise when names or shapes differ. Otherwise load what fits, and report the rest.
        partial: the checkpoint may have more names than the target (weights without the optimizer).
        cast: convert to the target's dtype; otherwise a different dtype is a mismatch.
        types: enumerations and dataclasses that values come back as; others come as `Tagged`.
        include, exclude: names of the checkpoint, such as ``"model"`` (all below it) or
            ``"*.bias"``. The rest of the target stays as it is, and is not missing.
        rename: a dict of names or their beginnings, pairs for `re.sub`, or a function of a name.
        assign: give modules on the meta device new parameters, on the CPU or the given device.
        group: ranks that load together; ``"alone"``: this process. Default: the default group.
        options: settings such as ``io`` and ``trust``.

    Returns:
        What was loaded and what was not.

    Raises:
        NotCommittedError: there is no checkpoint at ``path``.
        CorruptError: a check failed; ``.filled`` names the tensors that were filled by then. A
            TrustError if no key of ``options.trust`` has signed the checkpoint.
        MismatchError: names, shapes, dtypes or the ranks' checkpoints differ. Nothing was changed.
        OptionError: an invalid argument, or the ranks gave different ones.
        VersionError, StoreError, PeerError: a newer holdfast wrote it; disk or network; a rank.

    Example:
        ``holdfast.load("runs/a/step-00001000", into={"model": model, "optimizer": optimizer})``
    """
    started = time.perf_counter()
    ranks, chosen = find_group(group), DEFAULTS if options is None else options_of(options)
    selects = include != () or exclude != () or rename is not None
    selection = Selection(include, exclude, rename) if selects else None
    request = LoadRequest(strict, partial, cast, types, selection, assign)
    report = worker.run(lambda: load_from(path, ranks, into, request, chosen))
    seconds = time.perf_counter() - started
    if logger.isEnabledFor(logging.INFO):
        logger.info("loaded %s: %s in %.2f s", report.path, show_bytes(report.bytes_read), seconds)
    return replace(report, seconds=seconds)


def load_from(
    path: "str | os.PathLike[str]",
    ranks: "Group",
    into: Mapping[Any, Any] | None,
    request: LoadRequest,
    options: Options,
    step: int | None = None,
    ledger: "Ledger | None" = None,
    reach: Reach | None = None,
) -> LoadReport:
    """Walk all the way; the report lacks only the time.

    Args:
        step: of a run, by the directory's name; what does not belong there is let be.
        ledger: gets the spans.
        reach: where the files are, if not all of them are at ``path``.
    """
    opened = _open_alike(path, ranks, into, request, options, step, reach)
    if not isinstance(opened, tuple):
        return _load_other(opened, path, ranks, into, request, options)
    links, source, target, fits = opened
    store, manifest = links[-1].store, links[-1].manifest
    chain, header = links if len(links) > 1 else (), manifest.table.header
    missing, unexpected, skipped = check_fit(store.location, header, fits, request)
    wants, targets = wanted_of(manifest, target, source)
    chunks, holders = find_chunks(manifest, wants), reach.holders if reach is not None else None

    senders = ranks if not chain and ranks.world_size > 1 and sends(ranks) else None
    with contextlib.ExitStack() as held:
        with Phase(ranks) as checked:
            if request.strict and not request.partial:
                _check_around(store, manifest, ranks, holders, strangers=step is not None)
            elif ranks.rank == COORDINATOR:
                check_alone(store)
            pool: AbstractContextManager[Lease] = lease(store, options)
            if senders is not None:  # taken before others count on what this rank reads
                pool = contextlib.nullcontext(held.enter_context(pool))
                checked.answer = encode_rows(chunks)
        exchange, shared = None, tuple[SharedRun, ...]()
        if any(told := checked.answers):
            runs, shared = share_out(manifest, chunks, told, ranks.rank, SLOT_BYTES, holders)
        else:
            runs = coalesce(manifest, chunks, SLOT_BYTES, store.run_bytes)
        if senders is not None:
            exchange = Exchange(senders, shared)
        began = time.perf_counter()
        with _telling_of_change(target):
            with Phase(ranks) as read, pool as leased:
                if chain:  # each rank reads all that it needs
                    done = read_chain(chain, leased, runs, targets)
                else:
                    done = read_shards(store, leased, manifest, runs, targets, exchange)
            ended = time.perf_counter()
            _finish(target, done, ranks)
    if ledger is not None:
        _note_spans(ledger, checked, (began, ended - read.waited_s, ended), done.read_bytes)
    which = (store.location, header.step, len(target.tensors) + len(target.plain.paths))
    moved = (target.size_bytes(), done.read_bytes, done.sent_bytes)
    return LoadReport(*which, missing, unexpected, *moved, skipped=skipped)


def _note_spans(
    ledger: "Ledger", checked: Phase, times: tuple[float, float, float], read_bytes: int
) -> None:
    """Say when each phase ran; they count from the end of the meeting in which it was checked.

    Args:
        times: when reading began and ended on this rank, and on all.
    """
    now, (began, read_until, ended) = time.perf_counter(), times
    met = checked.met or began
    ledger.met, ledger.clock = met, time.time() - (now - met)
    waited = met - checked.waited_s
    ledger.spans += [("plan", ledger.started, waited, 0), ("wait", waited, met, 0)]
    ledger.spans += [("plan", met, began, 0), ("read", began, read_until, read_bytes)]
    ledger.spans += [("wait", read_until, ended, 0), ("place", ended, now, 0)]


def _finish(target: Target, done: Done, ranks: "Group") -> None:
    """Put in place what is no tensor, when no rank has found damage."""
    with Phase(ranks):
        if done.damage is not None:
            raise done.damage
        target.finish()


@contextlib.contextmanager
def _telling_of_change(target: Target) -> Iterator[None]:
    """Tell autograd; and say of a failure, an interrupt too, that the target is not what it was."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, CorruptError):  # which names the tensors
            error.add_note(
                "The target of this load is partly filled: some of its tensors hold the "
                "checkpoint's values, others their old ones. Load again before you use it"
            )
        raise
    finally:
        target.note_change()


def _open_alike(
    path: "str | os.PathLike[str]",
    ranks: "Group",
    into: Mapping[Any, Any] | None,
    request: LoadRequest,
    options: Options,
    step: int | None,
    reach: Reach | None = None,
) -> tuple[Chain, Source, Target, list[Fit]] | str | None:
    """Open one checkpoint on all ranks; once more when they found different ones.

    A rebase may have replaced MANIFEST between the reads of two ranks.

    Returns:
        (the checkpoint with its bases, what it offers, the target, what `describe_fit` returned on
        each rank); or of a run, the path of its newest step; or of another format, None.

    Raises:
        MismatchError: they found different ones again; the same text on every rank.
        OptionError: the arguments differ between the ranks.
    """
    found, known = list[str](), dict[str, type]()
    for _ in range(OPENINGS):
        with Phase(ranks) as prepared:
            if not isinstance(into, Mapping):
                check_into(path, into)
            if request.types != () and not known:
                known = _by_name(request.types)
            store, manifest = open_store(path) if reach is None else reach.store, None
            try:
                manifest = _read_manifest(store, options, step, ranks.rank)
            except (NotCommittedError, StoreError) as error:
                if step is not None:
                    raise
                prepared.answer = encode_reply(**what_else(path, store, options, error))
            if manifest is not None:
                header, is_link = manifest.table.header, len(manifest.based) > 0
                chain = open_chain(store, manifest) if is_link else (Link(store, manifest),)
                source = source_of(header, known, request, store.location)
                target = bind(into, source, skips=not request.strict, assign=request.assign)
                fit = describe_fit(header, target, source, request)
                digests = [*map(attrgetter("manifest.digest"), chain)]
                if ranks.world_size > 1:
                    what, shown = f"the load of {store.location}", _shown(chain)
                    alike = {"call": "load", **request.arguments(), "types": sorted(known)}
                    alike |= {"names": digest_of(source)} if request.selection else {}
                    asks = encode_arguments(what, alike, manifests=digests, shown=shown)
                    prepared.answer = encode_reply(arguments=asks, fit=json.dumps(fit).encode())
        if ranks.world_size == 1 and manifest is not None:
            return chain, source, target, [fit]
        replies = decode_replies(prepared.answers)
        if manifest is None or any("newest" in reply or "foreign" in reply for reply in replies):
            newest = agreed(replies, store.location)
            return None if newest is None else f"{store.location}/{newest}"
        firsts = [decode_arguments(reply.get("arguments")) for reply in replies]
        check_alike(firsts[COORDINATOR]["what"], list(map(itemgetter("arguments"), firsts)))
        if list(map(itemgetter("manifests"), firsts)).count(digests) == len(firsts):
            return chain, source, target, [json.loads(reply["fit"]) for reply in replies]
        found = [first["shown"] for first in firsts]
    raise _different(found)


def _different(found: list[str]) -> MismatchError:
    return MismatchError(
        f"nothing was loaded: the ranks found different checkpoints. {camps(found)}. Give all "
        "ranks the same checkpoint, or the same copy of it"
    )


def _load_other(
    newest: str | None,
    path: "str | os.PathLike[str]",
    ranks: "Group",
    into: Mapping[Any, Any] | None,
    request: LoadRequest,
    options: Options,
) -> LoadReport:
    """Load another format, or the newest step of a run.

    Where that was retired meanwhile, the one that is newest then is loaded. Damage is no reason to
    take an older one: that is for `Checkpointer.restore`.
    """
    if newest is None:
        from .foreign import load_foreign  # which most programs do not need

        return load_foreign(path, ranks, into, request, options)
    failure: BaseException | None = None
    report: LoadReport | None = None
    try:
        report = load_from(newest, ranks, into, request, options)
    except BaseException as error:  # whatever it is: the other ranks are on their way to judge it
        failure = error
    with Phase(ranks) as judged:
        if failure is not None and not isinstance(failure, (NotCommittedError, PeerError)):
            raise failure
        judged.answer = b"gone" if isinstance(failure, NotCommittedError) else b""
    if b"gone" in judged.answers:
        logger.info("%s was deleted meanwhile; loading the newest step again", newest)
        found = _open_alike(path, ranks, into, request, options, None)
        return load_from(found if isinstance(found, str) else path, ranks, into, request, options)
    if failure is not None or report is None:
        raise failure or NotCommittedError(f"{newest} was not loaded")
    return report


def _by_name(types: Iterable[type]) -> dict[str, type]:
    from ..format.revive import types_by_name  # which most programs do not need

    return types_by_name(types)


def _shown(chain: Chain) -> str:
    """Say which checkpoint a rank found."""
    *bases, top = chain
    header = top.manifest.table.header
    digest = xxh3_128("".join(base.manifest.digest for base in bases).encode()).hex()[:8]
    return (
        f"{top.store.location} (step {header.step}, save {header.save_id[:8]}, MANIFEST "
        f"{top.manifest.digest[:8]}{f', bases {digest}' if bases else ''})"
    )


def _read_manifest(store: "Store", options: Options, step: int | None, rank: int) -> "Manifest":
    """Read it; check who signed it, and its step.

    Then let the disk begin with this rank's file, if it is small, while the target is bound.
    """
    manifest = read_manifest(store, check_of(options.trust) if options.trust else None)
    found = manifest.table.header.step
    if step is not None and (wrong := misnamed(step_name(step), found)):
        raise MismatchError(
            f"{store.location} {wrong}. To start another run from it, use holdfast.load"
        )
    files = manifest.table.file_bytes
    if rank < len(files) and files[rank] < options.block_bytes:
        store.start_read(manifest.file_names[rank])
    return manifest


def _check_around(
    store: "Store",
    manifest: "Manifest",
    ranks: "Group",
    holders: Holders | None,
    *,
    strangers: bool,
) -> None:
    """Check a rank's part of all bytes that are no payload."""
    with still_there(store):
        if holders is None:
            check_share(store, manifest, ranks.rank, ranks.world_size, names=not strangers)
        else:
            files = range(len(manifest.file_names))
            here = ranks.rank, ranks.world_size
            check_files(store, manifest, [n for n in files if holders.reader_of(n, *here)])
