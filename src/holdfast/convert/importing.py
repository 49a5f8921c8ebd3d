"""The whole import, on one page: open → plan → read, hash and write → commit."""

import os
import secrets
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ..engine.commit import begin, check_absent, commit
from ..engine.discard import remove_files
from ..engine.file_plan import WriterPlan
from ..engine.ledger import Ledger
from ..engine.pool import lease
from ..engine.registry import RAW
from ..engine.write_pipeline import write_shards
from ..errors import OptionError, StateError, shown
from ..format import spec
from ..format.header import Header
from ..format.names import dotted
from ..format.rows import planned_of, written_in
from ..format.values import encode_value, path_text
from ..layout import ITEM_BYTES, Path, Shard, Tensor, whole
from ..options import Options, options_of
from ..plan.shard_table import ShardTable, table_of
from ..stores.base import Store
from ..stores.url import open_store
from ..version import __version__
from ..worker import in_worker
from .chunks import FromSource
from .emit import Report
from .export import Conversion, check_room
from .kinds import OWN, open_source
from .source import Source


@dataclass(frozen=True, slots=True)
class PlannedImport:
    """An import that can be run.

    Attributes:
        result: what comes of it.
        run: does it; calls its argument with the bytes read since the last call.
        close: gives back the source.
        advice: what was left out of the source, for people.
    """

    result: Conversion
    run: Callable[[Report], None]
    close: Callable[[], None]
    advice: tuple[str, ...] = ()


@in_worker
def import_checkpoint(
    source: "str | os.PathLike[str]",
    target: "str | os.PathLike[str]",
    *,
    kind: str | None = None,
    under: str = "",
    options: Options | None = None,
    report: Report = lambda _: None,
) -> Conversion:
    """Write a checkpoint of another format as one of holdfast. Memory is bounded.

    The checkpoint appears whole and durable, or not at all. Nothing that a file says is executed.

    Args:
        source: a file or directory of safetensors.
        target: directory of the new checkpoint.
        kind: of the source; default: as it is recognised.
        under: a key that everything is put under: with ``"model"``, ``holdfast.load(target,
            into={"model": model})`` fills a module with these names.
        options: settings such as ``io`` and ``chunk_elements``.
        report: called with the bytes of elements read since the last call.

    Returns:
        What was written.

    Raises:
        NotCommittedError: there is no checkpoint at ``source``.
        AlreadyCommittedError: there is one at ``target``.
        OptionError: an invalid option; ``source`` is of no kind that can be read.
        CorruptError: the source fails a check.
        StateError: a value in it cannot be saved.
        StoreError: the disk failed; a NoSpaceError if it is full.

    Example:
        ``holdfast.import_checkpoint("llama.safetensors", "runs/llama", under="model")``
    """
    planned = plan_import(source, target, kind=kind, under=under, options=options)
    try:
        planned.run(report)
    finally:
        planned.close()
    return planned.result


def plan_import(
    source: "str | os.PathLike[str]",
    target: "str | os.PathLike[str]",
    *,
    kind: str | None,
    under: str,
    options: Options | None = None,
) -> PlannedImport:
    """Look at everything that may be wrong before an element is read.

    Raises:
        HoldfastError: as `import_checkpoint` tells.
    """
    chosen = options_of(options)
    if not isinstance(under, str):
        raise OptionError(f"under is {shown(under)}; expected the name of a key, such as 'model'")
    there = open_store(target, "target")
    check_absent(there)
    given = open_source(source, kind, chosen)
    try:
        header = header_of(given, (under,) if under else (), chosen)
    except BaseException:
        given.close()
        raise

    def run(report: Report) -> None:
        check_room(there.location, given.size_bytes)
        _write(given, there, header, chosen, report)

    result = Conversion(
        source=given.location,
        target=there.location,
        kind=given.kind,
        to=OWN,
        tensors=len(header.tensors),
        ties=len(header.ties),
        left_out=(),
        size_bytes=given.size_bytes,
        files=(),
    )
    return PlannedImport(result, run, given.close, given.advice)


def header_of(source: Source, under: Path, options: Options) -> Header:
    """Describe the new checkpoint.

    Raises:
        StateError: a name or value cannot be saved.
    """
    tensors = tuple(replace(tensor, path=(*under, *tensor.path)) for tensor in source.tensors)
    index = {tensor.path: number for number, tensor in enumerate(source.tensors)}
    ties = tuple(((*under, *path), index[owner]) for path, owner in source.ties.items())
    objects = tuple(((*under, *path), value) for path, value in source.values.items())
    for tensor in source.tensors:
        size = prod(n or 1 for n in tensor.shape) * ITEM_BYTES[tensor.dtype]
        if size > spec.TENSOR_BYTES_MAX:
            raise StateError(
                f"{dotted(tensor.path):.80} has the shape {list(tensor.shape)}, too large for a "
                "checkpoint even without its sides of 0"
            )
    for path in (*(tensor.path for tensor in tensors), *(path for path, _ in ties)):
        path_text(path)
    for path, value in objects:
        path_text(path)
        encode_value(value, path)
    return Header(
        save_id=secrets.token_hex(16),
        step=getattr(source, "step", None),
        world_size=1,
        mesh=None,
        metrics={},
        written_by=f"holdfast {__version__}",
        chunk_elements=options.chunk_elements,
        tensors=tensors,
        ties=ties,
        objects=objects,
    )


def _write(source: Source, there: Store, header: Header, options: Options, report: Report) -> None:
    """Write all tensors as the only rank, and commit."""
    shards = _table(header.tensors)
    files = WriterPlan(header, 0, 0, shards.size_bytes, options.file_bytes)
    theirs = _table(source.tensors)  # the same, by their own paths
    try:
        with (
            lease(there, options) as leased,
            closing(FromSource(source, theirs, header.chunk_elements, report)) as origin,
        ):
            tables = write_shards(there, leased, files, shards, origin, RAW, None, Ledger())
        first = np.array([0, len(shards)], np.int64)
        planned = planned_of(
            header.tensors, header.chunk_elements, shards.tensor, shards.boxes, first
        )
        commit(there, begin(there, header, planned, [written_in(tables)]))
    except BaseException:
        if not there.exists(spec.MANIFEST_NAME):
            remove_files(there, header.save_id)
        raise


def _table(tensors: tuple[Tensor, ...]) -> ShardTable:
    """Return every tensor that has elements as one shard."""
    return table_of([Shard(t, whole(t.shape)) for t in tensors if t.size_bytes], tensors)
