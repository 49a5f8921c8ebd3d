"""Checkpoints of other formats, open and loaded as if they were holdfast's. Reads by a `Source`.

They have no checksums: what is read is what the file says. Each rank reads all that it needs.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ..arguments import check_alike, decode_arguments, encode_arguments
from ..convert.importing import header_of
from ..convert.kinds import open_source
from ..convert.source import Part, Source
from ..engine.place import copy_elements, is_plain
from ..errors import OptionError
from ..faults.damage import Damage, Subject
from ..format.revive import types_by_name
from ..group.base import COORDINATOR
from ..group.phase import Phase
from ..group.replies import decode_replies, encode_reply
from ..layout import ITEM_BYTES, Box, Path, Tensor, batches, whole
from ..options import Options
from ..plan.choice import Patterns
from ..plan.rename import Rename
from ..state.ambient import ordinary_torch
from ..state.target import bind
from ..state.tensors import TORCH_DTYPES
from ..stores.url import open_store
from .checkpoint import Checkpoint
from .fit import check_fit, describe_fit, source_of
from .names import TensorInfo
from .report import LoadReport
from .request import LoadRequest
from .selection import digest_of, selection_of

if TYPE_CHECKING:
    from ..group.base import Group

logger = logging.getLogger("holdfast")

PIECE_BYTES = 64 << 20  # in memory for what cannot be read into its place


class ForeignCheckpoint(Checkpoint):
    """An open checkpoint of another format; `holdfast.open` returns it. Thread-safe.

    Args:
        path: file or directory.
        options: settings of holdfast's own checkpoints, which it keeps for its copies.
        types: as for `holdfast.open`.
    """

    _without_torch = "names, info and objects"

    def __init__(
        self,
        path: Any,
        options: Options,
        types: Iterable[type] = (),
        *,
        include: Patterns = (),
        exclude: Patterns = (),
        rename: Rename | None = None,
    ) -> None:
        self._source = open_source(path, None, options)
        self._store, self._options = open_store(self._source.location), options
        self._kind = self._source.kind
        header = replace(header_of(self._source, (), options), save_id="")
        self._begin(header, types, selection_of(include, exclude, rename))

    def __reduce__(self) -> tuple[Any, ...]:
        """Let itself be copied, and sent to other processes, which open it again."""
        how = (self.location, self._options, self._types, self._new_names, self.save_id)
        return ForeignCheckpoint._again, how

    @property
    def kind(self) -> str:
        """Name of its format."""
        return self._kind

    @property
    def base(self) -> str | None:
        """None: it is no delta."""
        return None

    @property
    def written_by(self) -> str:
        """Name of its format: what wrote it, it does not say."""
        return self._kind

    @property
    def file_names(self) -> tuple[str, ...]:
        """Nothing: these are not holdfast's."""
        return ()

    @property
    def file_bytes(self) -> tuple[int, ...]:
        """Nothing: these are not holdfast's."""
        return ()

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape and size of a tensor, as `Checkpoint.info` does."""
        path = self._path(name)
        tensor, first = self._header.tensors[self._tensors[path]], self._first[self._tensors[path]]
        return TensorInfo(
            name=name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            size_bytes=tensor.size_bytes,
            stored_bytes=tensor.size_bytes,
            codec="raw",
            shards=((whole(tensor.shape).offset, tensor.shape),),
            tied_to=None if first == path else self._names[first],
            loss=None,
        )

    def verify(
        self, report: Callable[[int], None] = lambda _: None, *, deep: bool = False
    ) -> list[Damage]:
        """Raise an OptionError: these files have no checksums."""
        raise self._without_checksums()

    @property
    def subject(self) -> Subject:
        """Raise an OptionError, as `verify` does."""
        raise self._without_checksums()

    def _without_checksums(self) -> OptionError:
        return OptionError(
            f"{self.location} is {self._kind}, which has no checksums; 'holdfast import' makes a "
            "checkpoint of it that can be verified"
        )

    def _fill(self, parts: "dict[Path, Box]", into: "dict[Path, torch.Tensor]") -> None:
        tensors = self._header.tensors
        wanted = [(tensors[self._tensors[path]], into[path], box) for path, box in parts.items()]
        fill(self._source, wanted)


Filled = tuple[Tensor, torch.Tensor, Box]  # of the source; what takes a box of it


@ordinary_torch()
def fill(source: Source, targets: Iterable[Filled]) -> None:
    """Read boxes of tensors into tensors of any strides, device and dtype; memory is bounded."""
    straight, others = list[Part](), list[Filled]()
    for tensor, target, box in targets:
        if not box.elements:
            continue
        if target.dtype == TORCH_DTYPES[tensor.dtype] and is_plain(target):
            flat = target.detach().reshape(-1).view(torch.uint8)
            straight.append(Part(tensor, box, flat.numpy().data))
        else:
            others += [(tensor, *piece) for piece in _pieces(tensor, target, box)]
    if straight:
        source.read_all(straight)
    for batch in batches(others, lambda each: each[2].elements, PIECE_BYTES // 16):
        held = [
            torch.empty(box.shape, dtype=TORCH_DTYPES[tensor.dtype], device="cpu")
            for tensor, _, box in batch
        ]
        memory = [new.reshape(-1).view(torch.uint8).numpy().data for new in held]
        source.read_all([Part(t, b, m) for (t, _, b), m in zip(batch, memory, strict=True)])
        for new, (_, target, _) in zip(held, batch, strict=True):
            copy_elements(new, target.detach())


def _pieces(tensor: Tensor, target: torch.Tensor, box: Box) -> Iterable[tuple[torch.Tensor, Box]]:
    """Cut a large box along its first dimension."""
    row = prod(box.shape[1:]) * ITEM_BYTES[tensor.dtype]
    step = max(1, PIECE_BYTES // row) if box.shape else 1
    if not box.shape or box.shape[0] <= step:
        yield target, box
        return
    for first in range(0, box.shape[0], step):
        count = min(step, box.shape[0] - first)
        offset = (box.offset[0] + first, *box.offset[1:])
        yield target[first : first + count], Box(offset, (count, *box.shape[1:]))


def load_foreign(
    path: Any, ranks: "Group", into: Any, request: LoadRequest, options: Options
) -> LoadReport:
    """Fill a state, as `holdfast.load` does; the report lacks only the time.

    Raises:
        MismatchError: it does not fit on some rank, or the ranks found different names.
    """
    with contextlib.ExitStack() as held:
        with Phase(ranks) as prepared:
            given = held.enter_context(open_source(path, None, options))
            header = header_of(given, (), options)
            known = types_by_name(request.types) if request.types != () else {}
            source = source_of(header, known, request, given.location)
            target = bind(into, source, skips=not request.strict, assign=request.assign)
            fit = describe_fit(header, target, source, request)
            alike = {"call": "load", **request.arguments(), "types": sorted(known)}
            alike["names"] = digest_of(source)
            asks = encode_arguments(f"the load of {given.location}", alike)
            prepared.answer = encode_reply(arguments=asks, fit=json.dumps(fit).encode())
        replies = decode_replies(prepared.answers)
        firsts = [decode_arguments(reply.get("arguments")) for reply in replies]
        check_alike(firsts[COORDINATOR]["what"], [first["arguments"] for first in firsts])
        fits = [json.loads(reply["fit"]) for reply in replies]
        missing, unexpected, skipped = check_fit(given.location, header, fits, request)
        owners = {tensor.path: tensor for tensor in header.tensors}
        owners |= {further: header.tensors[index] for further, index in header.ties}
        owners |= {new: owners[at] for new, at in source.origins.items() if at in owners}
        plain = zip(target.plain.paths, target.plain.tensors, strict=True)
        wanted = [(owners[at], tensor, whole(owners[at].shape)) for at, tensor in plain]
        for at, parts in target.targets().items():
            wanted += [(owners[at], tensor, box) for tensor, box in parts]
        try:
            with Phase(ranks):
                fill(given, wanted)
            with Phase(ranks):
                target.finish()
        finally:
            target.note_change()
    return LoadReport(
        path=given.location,
        step=header.step,
        tensors=len(target.tensors) + len(target.plain.paths),
        missing=missing,
        unexpected=unexpected,
        bytes_needed=target.size_bytes(),
        bytes_read=sum(box.elements * ITEM_BYTES[tensor.dtype] for tensor, _, box in wanted),
        bytes_sent=0,
        skipped=skipped,
    )
