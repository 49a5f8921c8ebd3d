"""An open checkpoint: what is in it, and any part of it, verified, without reading the rest."""

import difflib
import os
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..codecs.base import Loss
from ..engine.check import read_manifest
from ..engine.pool import lease
from ..engine.trust import check_of
from ..errors import CorruptError, MismatchError, OptionError, shown
from ..faults.damage import Damage, Subject, find_damage, find_wrong, of_base
from ..format.names import display_names
from ..layout import Box, Path, Shape, whole
from ..options import SLOT_BYTES, Options, options_of
from ..plan.load_plan import plan_load
from ..stores.url import open_store
from ..worker import in_worker

if TYPE_CHECKING:
    import torch

    from ..engine.chain import Chain


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a checkpoint says of one tensor.

    Attributes:
        name: dotted.
        dtype: as in docs/format.md, such as ``bf16``.
        shape: of the whole tensor, in elements.
        size_bytes: decoded bytes.
        stored_bytes: payload bytes in the data files.
        codec: how its chunks are stored.
        shards: (offset, shape) of each stored box.
        tied_to: the name it shares its elements with, or None.
        loss: what it has lost against what was saved; None: nothing.
    """

    name: str
    dtype: str
    shape: Shape
    size_bytes: int
    stored_bytes: int
    codec: str
    shards: tuple[tuple[Shape, Shape], ...]
    tied_to: str | None
    loss: Loss | None


class Checkpoint:
    """A committed checkpoint, open for reading; made by `holdfast.open`.

    The MANIFEST has been read and checked; everything else is read when asked for, and verified.
    Thread-safe.
    """

    def __init__(self, path: "str | os.PathLike[str]", options: Options | None = None) -> None:
        self._store = open_store(path)
        self._options = options_of(options)
        self._manifest = read_manifest(self._store, check_of(self._options.trust))
        self._chain: Chain = ()  # opened when something is read
        losses = self._manifest.table.header.losses
        self._losses = {n.tensor: Loss(*astuple(n)[1:]) for n in losses}
        header = self._manifest.table.header
        self._tensors: dict[Path, int] = {t.path: i for i, t in enumerate(header.tensors)}
        self._tensors |= dict(header.ties)
        self._objects = dict(header.objects)
        self._names = display_names([*self._tensors, *self._objects])
        self._paths = {name: path for path, name in self._names.items()}

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is held open between calls."""

    def __repr__(self) -> str:
        return f"<Checkpoint {self.location} step={self.step} tensors={len(self._tensors)}>"

    @property
    def location(self) -> str:
        """Where it is."""
        return self._store.location

    @property
    def step(self) -> int | None:
        """The step it was saved at, if that was given."""
        return self._manifest.table.header.step

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote it."""
        return self._manifest.table.header.world_size

    @property
    def base(self) -> str | None:
        """Name of the checkpoint beside it that it was made from, if it needs one."""
        base = self._manifest.table.header.base
        return base.name if base and len(self._manifest.based) else None

    @property
    def codecs(self) -> tuple[str, ...]:
        """Names of the codecs that its tensors are stored by."""
        return tuple(codec.name for codec in self._manifest.table.header.codecs)

    @property
    def mesh(self) -> dict[str, Any] | None:
        """Shape and dimension names of the device mesh that wrote it, if there was one."""
        return self._manifest.table.header.mesh

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers recorded with it."""
        return dict(self._manifest.table.header.metrics)

    @property
    def save_id(self) -> str:
        """The random identity of the save: 32 hexadecimal digits."""
        return self._manifest.table.header.save_id

    @property
    def written_by(self) -> str:
        """The holdfast that wrote it."""
        return self._manifest.table.header.written_by

    @property
    def file_names(self) -> tuple[str, ...]:
        """Data files, relative to `location`."""
        return self._manifest.file_names

    @property
    def file_bytes(self) -> tuple[int, ...]:
        """Bytes of each data file."""
        return tuple(self._manifest.table.file_bytes.tolist())

    def names(self) -> list[str]:
        """List the dotted names of all tensors, in the order of the state."""
        return [self._names[path] for path in self._tensors]

    def objects(self) -> dict[str, Any]:
        """Return the values that are no tensors, by dotted name."""
        return {self._names[path]: value for path, value in self._objects.items()}

    def path_of(self, name: str) -> Path:
        """Return the typed keys of a tensor or object (docs/format.md, Paths).

        The same keys may have another name in a checkpoint where their dotted form is ambiguous.

        Raises:
            MismatchError: there is no such name.
        """
        is_here = isinstance(name, str) and name in self._paths
        return self._paths[name] if is_here else self._path(name)

    def info(self, name: str) -> TensorInfo:
        """Describe a tensor.

        Raises:
            MismatchError: there is no such tensor; the text names similar ones.
        """
        path = self._path(name)
        index = self._tensors[path]
        manifest, tensor = self._manifest, self._manifest.table.header.tensors[index]
        shards = manifest.shards_of(index).tolist()
        boxes = [manifest.shard(i).box for i in shards]
        rows = [
            slice(first := int(manifest.shard_first_row[i]), first + int(count))
            for i in shards
            for count in [manifest.table.shard_chunks[i]]
        ]
        return TensorInfo(
            name=name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            size_bytes=tensor.size_bytes,
            stored_bytes=sum(int(manifest.chunk_bytes[part].sum()) for part in rows),
            codec=manifest.table.header.codec(index).name,
            shards=tuple((box.offset, box.shape) for box in boxes),
            tied_to=None if tensor.path == path else self._names[tensor.path],
            loss=self._losses.get(index),
        )

    @in_worker
    def tensor(self, name: str, box: "tuple[Shape, Shape] | None" = None) -> "torch.Tensor":
        """Read a tensor, or a box of it: only the chunks that hold it, verified.

        Args:
            box: (offset, shape) in elements of the whole tensor; default: all of it.

        Raises:
            MismatchError: no such tensor, or the box leaves it.
            CorruptError: a chunk fails its check.
        """
        path = self._path(name)
        tensor = self._manifest.table.header.tensors[self._tensors[path]]
        part = _checked_box(name, tensor.shape, box)
        return self._read({path: part})[path]

    @in_worker
    def tensors(self, names: Iterable[str]) -> "dict[str, torch.Tensor]":
        """Read several whole tensors at once, which costs less than one by one.

        Raises:
            MismatchError: no such tensor.
            CorruptError: a chunk fails its check.
        """
        if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
            raise OptionError(f"names is {shown(names)}; expected a list of names")
        paths = {name: self._path(name) for name in list(names)}
        header = self._manifest.table.header
        found = self._read(
            {p: whole(header.tensors[self._tensors[p]].shape) for p in paths.values()}
        )
        return {name: found[path] for name, path in paths.items()}

    @in_worker
    def state(self) -> dict[Any, Any]:
        """Read everything into a new nested state of ordinary tensors; tied names share one tensor.

        Containers come back as dicts, lists and tuples; `holdfast.load` fills modules and
        optimizers.
        """
        from ..state.tree import rebuild

        header = self._manifest.table.header
        own = self._read({tensor.path: whole(tensor.shape) for tensor in header.tensors})
        leaves: dict[Path, Any] = dict(own)
        leaves |= {path: own[header.tensors[index].path] for path, index in header.ties}
        result: dict[Any, Any] = rebuild(leaves | self._objects) if leaves or self._objects else {}
        return result

    @in_worker
    def verify(
        self, report: Callable[[int], None] = lambda _: None, *, deep: bool = False
    ) -> list[Damage]:
        """Check every byte under the checkpoint's directory; return all faults, none if whole.

        Of a link, that what it was made from is there and is the same, down to the one that needs
        no other: their bytes are checked by a `verify` of each.

        Args:
            report: called with the number of payload bytes checked since the last call.
            deep: also decode everything, through the bases of links, and compare it with the
                digests of what was saved.

        Raises:
            StoreError: the disk or the network failed, which says nothing about the checkpoint.
            VersionError: a newer holdfast wrote what a link was made from.
        """
        subject = self.subject
        found = list(find_damage(subject, report))
        if len(self._manifest.based):
            try:
                self._open_chain()
            except CorruptError as error:
                found.append(of_base(subject, self.location, error))
        if deep:
            found += find_wrong(subject, found, lambda _: None)
        return found

    @property
    def subject(self) -> Subject:
        """Its MANIFEST, for rooms that look deeper."""
        return Subject(self._store, self._manifest, self._options)

    def _open_chain(self) -> "Chain":
        from ..engine.chain import open_chain

        self._chain = self._chain or open_chain(self._store, self._manifest)
        return self._chain

    def _path(self, name: str) -> Path:
        if not isinstance(name, str):
            raise OptionError(
                f"name is {shown(name)}; expected the name of a tensor, as names() has it"
            )
        path = self._paths.get(name)
        if path is not None and path in self._tensors:
            return path
        raise MismatchError(f"{self.location} has no tensor {name!r}; {self._similar(name)}")

    def _similar(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.names(), 3)
        shown = near or self.names()[:3]
        return f"there are {', '.join(shown)}{' …' if len(self._tensors) > len(shown) else ''}"

    def _read(self, parts: "dict[Path, Box]") -> "dict[Path, torch.Tensor]":
        import torch

        from ..engine.chain import read_chain
        from ..state.tensors import TORCH_DTYPES

        header = self._manifest.table.header
        dtypes = {path: TORCH_DTYPES[header.tensors[self._tensors[path]].dtype] for path in parts}
        result = {
            path: torch.empty(box.shape, dtype=dtypes[path], device="cpu")
            for path, box in parts.items()
        }
        wanted = {path: (self._tensors[path], [box]) for path, box in parts.items()}
        targets = {path: [(tensor, parts[path])] for path, tensor in result.items()}
        runs = plan_load(self._manifest, wanted, SLOT_BYTES)
        with lease(self._store.vfs, self.location, self._options) as leased:
            read_chain(self._open_chain(), leased, runs, targets)
        return result


def _checked_box(name: str, shape: Shape, box: "tuple[Shape, Shape] | None") -> Box:
    if box is None:
        return whole(shape)
    try:
        offset, extent = (tuple(index(number) for number in part) for part in box)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"box is {shown(box)}; expected (offset, shape), each with a number for each dimension"
        ) from error
    inside = len(offset) == len(extent) == len(shape) and all(
        a >= 0 and n >= 0 and a + n <= s for a, n, s in zip(offset, extent, shape, strict=True)
    )
    if not inside:
        raise MismatchError(
            f"the box at {list(offset)} of shape {list(extent)} does not lie in {name}, "
            f"which has shape {list(shape)}"
        )
    return Box(offset, extent)


def open(path: "str | os.PathLike[str]", *, options: Options | None = None) -> Checkpoint:
    """Open a committed checkpoint for reading any part of it.

    Raises:
        NotCommittedError: there is none at ``path``.
        CorruptError: its MANIFEST fails a check.
        VersionError: a newer holdfast wrote it.

    Example:
        ``with holdfast.open("runs/a/step-1000") as checkpoint: w = checkpoint.tensor("model.w")``
    """
    return Checkpoint(path, options)
