"""The whole export, on one page: open → choose names → plan files → write them → give the name."""

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..brief import show_bytes
from ..engine.around import check_outside
from ..errors import NoSpaceError, OptionError
from ..layout import ITEM_BYTES, whole
from ..options import Options, options_of
from ..plan.choice import Patterns
from ..plan.rename import Rename
from ..stores.building import building, check_free
from ..stores.url import absolute, open_store
from ..worker import in_worker
from .as_transformers import as_saved
from .beside import ADAPTER_CONFIG, copy_beside, files_beside
from .cast import CAST_FROM, dtype_named
from .emit import Piece, Report, write_files
from .kinds import open_source
from .names import Choice, Chosen, without_adapter_name
from .targets import bytes_in, format_of
from .to_safetensors import ADAPTER, WEIGHTS, Written, plan_directory

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Conversion:
    """Results of an export or an import.

    Attributes:
        source, target: absolute paths.
        kind: format of the source.
        to: format of the target.
        tensors: number of tensors written; tied names count once.
        ties: number of further names of these tensors.
        left_out: names of values that the target's format has no place for.
        size_bytes: bytes of the elements, as written.
        files: names of the files in the target; of a single file its own.

    Example::

        report = holdfast.export_checkpoint("runs/a/step-00001000", "model.safetensors")
        print(report.tensors, report.left_out)
    """

    source: str
    target: str
    kind: str
    to: str
    tensors: int
    ties: int
    left_out: tuple[str, ...]
    size_bytes: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """An export that can be run.

    Attributes:
        result: what comes of it.
        read_bytes: of the elements that are read.
        run: does it; calls its argument with the bytes read since the last call.
        close: gives back the source.
    """

    result: Conversion
    read_bytes: int
    run: Callable[[Report], None]
    close: Callable[[], None]


@in_worker
def export_checkpoint(
    source: "str | os.PathLike[str]",
    target: "str | os.PathLike[str]",
    *,
    to: str | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
    strip: str = "",
    rename: Rename | None = None,
    dtype: "str | torch.dtype | None" = None,
    allow_overflow: bool = False,
    shard_size: int | str | None = None,
    files_from: "str | os.PathLike[str] | None" = None,
    options: Options | None = None,
    report: Report = lambda _: None,
) -> Conversion:
    """Write the tensors of a checkpoint in another format. Memory is bounded, whatever its size.

    The target appears whole and durable, or not at all. Checkpoints of holdfast are verified.

    Args:
        source: a checkpoint; a run, for its newest step; or another format that import reads.
        target: a file ``*.safetensors``, ``*.pt`` (`torch.save`) or ``*.npz``; or a new directory,
            as transformers writes it.
        to: format; default: by the suffix of ``target``.
        include: names or patterns of names, as for `Checkpoint.state`; default: all tensors.
        exclude: names or patterns of what is left out, of these.
        strip: a beginning that is taken off every name that has it, such as ``"model."``.
        rename: as for `holdfast.load`; of names without ``strip``.
        dtype: convert floating-point tensors to it, such as ``"bf16"``; those of 8 bits stay.
        allow_overflow: let numbers that the dtype cannot hold become infinite or NaN.
        shard_size: largest size of a file in a directory, such as ``"5GB"``; default: 50 GB.
        files_from: a directory whose config.json, tokenizer and other files are copied into the
            target. With adapter_config.json among them, the target is an adapter.
        options: settings such as ``io`` and ``trust``.
        report: called with the bytes of elements read since the last call.

    Returns:
        What was written, and which values were left out.

    Raises:
        NotCommittedError: there is no checkpoint at ``source``.
        AlreadyCommittedError: something is at ``target``.
        OptionError: an invalid option or place, an unknown suffix, a number ``dtype`` cannot hold.
        MismatchError: a pattern means no name, or two names become the same.
        CorruptError: the source fails a check.
        StoreError: the disk failed; a NoSpaceError if it is full.

    Example:
        ``holdfast.export_checkpoint("runs/a/step-00001000", "model.safetensors")``
    """
    choice = Choice(include, exclude, strip, rename)
    more: dict[str, Any] = {"dtype": dtype, "allow_overflow": allow_overflow, "options": options}
    more |= {"shard_size": shard_size, "files_from": files_from}
    planned = plan_export(Request(source, target, to=to, choice=choice, **more))
    try:
        planned.run(report)
    finally:
        planned.close()
    return planned.result


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What an export was asked for; see `export_checkpoint`.

    Attributes:
        kind: of the source; None: as it is recognised.
    """

    source: "str | os.PathLike[str]" = field(kw_only=False)
    target: "str | os.PathLike[str]" = field(kw_only=False)
    to: str | None = None
    kind: str | None = None
    choice: Choice
    dtype: "str | torch.dtype | None" = None
    allow_overflow: bool = False
    shard_size: int | str | None = None
    files_from: "str | os.PathLike[str] | None" = None
    options: Options | None = None


def plan_export(request: Request) -> Planned:
    """Look at everything that may be wrong before an element is read.

    Raises:
        HoldfastError: as `export_checkpoint` tells.
    """
    place = absolute(request.target, "target", "the path of a file or directory")
    form, is_file = format_of(place, request.to)
    becomes = dtype_named(request.dtype)
    shard_bytes = bytes_in(request.shard_size)
    for name, given in (("shard_size", request.shard_size), ("files_from", request.files_from)):
        if is_file and given is not None:
            flag = {"shard_size": "--shard-size", "files_from": "--with"}[name]
            raise OptionError(f"{name} ({flag}) needs a directory as the target; found {place}")
    check_free(place, is_file=is_file)
    check_outside(open_store(place))
    beside = files_beside(request.files_from) if request.files_from is not None else ("", [])
    source = open_source(request.source, request.kind, request.options)
    try:
        taken = request.choice.of(source)
        if not taken.tensors:
            raise OptionError(f"there is no tensor to export in {source.location}")
        is_adapter = ADAPTER_CONFIG in beside[1]
        taken = without_adapter_name(taken) if is_adapter else taken
        tensors = as_written(taken, becomes)
        if is_file:
            module, function = form.planner.split(".")
            plan = getattr(import_module(f".{module}", __package__), function)
            file, left_out = plan(os.path.basename(place), tensors, taken)
            files = [file]
        else:
            tensors, left_out = as_saved(tensors, beside), tuple(taken.values)
            files = plan_directory(ADAPTER if is_adapter else WEIGHTS, tensors, taken, shard_bytes)
    except BaseException:
        source.close()
        raise

    def run(report: Report) -> None:
        check_room(place, sum(file.size_bytes for file in files))
        with building(place, is_file=is_file) as store:
            overflow, options = request.allow_overflow, options_of(request.options)
            write_files(store, files, source, report, allow_overflow=overflow, options=options)
            copy_beside(store, *beside, becomes)

    result = Conversion(
        source=source.location,
        target=place,
        kind=source.kind,
        to=form.name,
        tensors=len(tensors),
        ties=len(taken.ties),
        left_out=left_out,
        size_bytes=sum(written.piece.size_bytes for written in tensors),
        files=(*(file.name for file in files), *beside[1]),
    )
    return Planned(result, _read_bytes(tensors), run, source.close)


def as_written(taken: Chosen, dtype: str | None = None) -> Sequence[Written]:
    """Return every tensor as it is to be written.

    Args:
        dtype: that floating-point tensors are converted to.
    """
    return [
        Written(
            Piece(
                name,
                tensor,
                whole(tensor.shape),
                dtype if dtype is not None and tensor.dtype in CAST_FROM else tensor.dtype,
            ),
            tensor.shape,
        )
        for name, tensor in taken.tensors.items()
    ]


def _read_bytes(tensors: Sequence[Written]) -> int:
    pieces = [written.piece for written in tensors]
    return sum(piece.box.elements * ITEM_BYTES[piece.tensor.dtype] for piece in pieces)


def check_room(place: str, needed: int) -> None:
    """Check that so many bytes fit on the disk, before anything is written.

    Raises:
        NoSpaceError: they do not.
    """
    free = open_store(os.path.dirname(place)).free_bytes()
    if free is not None and needed > free:
        error = NoSpaceError(
            f"not enough space to write {place}: it needs {show_bytes(needed)}, and "
            f"{show_bytes(free)} are free there. Nothing was written"
        )
        error.errno = errno.ENOSPC
        raise error
