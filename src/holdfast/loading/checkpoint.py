"""An open checkpoint: what is in it, and any part of it, verified, without reading the rest."""

import difflib
import os
from collections.abc import Callable, Iterable
from dataclasses import astuple
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..arguments import check_torch
from ..codecs.base import Loss
from ..engine.chain import Chain, open_chain
from ..engine.check import check_alone, read_manifest
from ..engine.pool import lease
from ..engine.trust import check_of
from ..errors import CorruptError, MismatchError, OptionError, ReplacedError, shown
from ..faults.damage import Damage, Subject, check_decodable, find_damage, find_wrong, of_base
from ..format.header import Header
from ..format.names import display_names
from ..layout import Box, Path, Shape, whole
from ..options import SLOT_BYTES, Options, options_of
from ..plan.choice import Patterns, chosen, without_gaps
from ..plan.load_plan import box_of, plan_load
from ..plan.rename import Rename
from ..stores.url import open_store
from ..worker import in_worker
from .described import Described
from .names import TensorInfo
from .selection import Selection, moved_paths, selection_of

if TYPE_CHECKING:
    import torch

    Device = str | int | torch.device


class Checkpoint(Described):
    """A committed checkpoint, open for reading; `holdfast.open` returns it.

    Its MANIFEST is read and checked on opening. Each call reads and verifies only the data that it
    returns. It is a mapping of the names of tensors and values. Thread-safe.

    Args:
        path: directory of the checkpoint.
        options, types, include, exclude, rename: as for `holdfast.open`.

    Raises:
        HoldfastError: as `holdfast.open`.

    Example::

        checkpoint = holdfast.open("runs/a/step-00001000")
        for name in checkpoint.names():
            print(checkpoint.info(name).shape, name, checkpoint.path_of(name))
        weight = checkpoint["model.weight"]
        bias = checkpoint.get("model.bias", None)
        first_rows = checkpoint.tensor("model.weight", box=([0, 0], [2, 8]))
        both = checkpoint.tensors(["model.weight", "model.bias"])
        everything, values = checkpoint.state(), checkpoint.objects()
        model = checkpoint.state(include="model")
        print([fault.what for fault in checkpoint.verify()])
    """

    _without_torch = "names, info, objects and verify"

    def __init__(
        self,
        path: "str | os.PathLike[str]",
        options: Options | None = None,
        types: Iterable[type] = (),
        *,
        include: Patterns = (),
        exclude: Patterns = (),
        rename: Rename | None = None,
    ) -> None:
        self._options = options_of(options)  # first: they may say how the store is reached
        self._store = open_store(path)
        self._manifest = read_manifest(self._store, check_of(self._options.trust))
        check_alone(self._store)
        self._chain: Chain = ()  # opened when something is read
        self._begin(self._manifest.table.header, types, selection_of(include, exclude, rename))

    def _begin(self, header: Header, types: Iterable[type], selection: Selection | None) -> None:
        """Take up what a header says."""
        self._header = header
        self._losses = {n.tensor: Loss(*astuple(n)[1:]) for n in header.losses}
        self._tensors: dict[Path, int] = {t.path: i for i, t in enumerate(header.tensors)}
        self._tensors |= dict(header.ties)
        self._objects = dict(header.objects)
        self._types: tuple[type, ...] = ()
        if types != ():
            from ..format.revive import revive_objects, types_by_name

            known = types_by_name(types)
            self._types = (*known.values(),)
            self._objects = revive_objects(self._objects, known, self.location)
        self._name(display_names([*self._tensors, *self._objects]))
        self._new_names: dict[str, str] | None = None  # None: all of them, as they were saved
        if selection is not None:
            kept, new = selection.names([*self._names.values()], self.location)
            self._show({name: new[name] for name in self._names.values() if name in kept})

    def _name(self, names: dict[Path, str]) -> None:
        self._names = names
        self._paths = {name: path for path, name in names.items()}
        self._first: dict[int, Path] = {}  # of tied names
        for path, index in self._tensors.items():
            self._first.setdefault(index, path)

    def _show(self, names: dict[str, str]) -> None:
        """Show a part of the names, under new ones."""
        shown = {path: name for path, name in self._names.items() if name in names}
        at = {shown[path]: here for path, here in moved_paths(shown, names).items()}
        tensors = {n: i for path, i in self._tensors.items() if (n := self._names[path]) in names}
        objects = {n: v for path, v in self._objects.items() if (n := self._names[path]) in names}
        self._tensors = {at[name]: index for name, index in tensors.items()}
        self._objects = {at[name]: value for name, value in objects.items()}
        self._name({at[name]: new for name, new in names.items()})
        self._new_names = names

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is held open between calls."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Let itself be copied, and sent to other processes, which open it again."""
        how = (self.location, self._options, self._types, self._new_names, self.save_id)
        return Checkpoint._again, how

    @classmethod
    def _again(
        cls,
        path: str,
        options: Options,
        types: tuple[type, ...],
        names: dict[str, str] | None,
        save_id: str,
    ) -> "Checkpoint":
        found = cls(path, options, types)
        if found.save_id != save_id:
            raise ReplacedError(
                f"{path} holds the save {found.save_id[:8]} now; expected {save_id[:8]}, as where "
                "it was opened first. Open it there again too"
            )
        if names is not None:
            found._show(names)
        return found

    def __repr__(self) -> str:
        return f"<Checkpoint {self.location} step={self.step} tensors={len(self._tensors)}>"

    def names(self) -> list[str]:
        """Return the dotted names of all tensors, in the order of the state."""
        return [self._names[path] for path in self._tensors]

    def objects(self) -> dict[str, Any]:
        """Return all values other than tensors, by dotted name."""
        return {self._names[path]: value for path, value in self._objects.items()}

    def path_of(self, name: str) -> Path:
        """Return the typed keys of a tensor or value (docs/format.md, Paths).

        In another checkpoint the same keys may have another name, if the dotted one is ambiguous.

        Args:
            name: from `names` or `objects`.

        Raises:
            MismatchError: the checkpoint has no such name.
        """
        is_here = isinstance(name, str) and name in self._paths
        return self._paths[name] if is_here else self._path(name)

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape, sizes and codec of a tensor.

        Args:
            name: from `names`.

        Raises:
            MismatchError: the checkpoint has no such tensor; the text names similar ones.
        """
        path = self._path(name)
        index = self._tensors[path]
        manifest, tensor = self._manifest, self._header.tensors[index]
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
            tied_to=None if self._first[index] == path else self._names[self._first[index]],
            loss=self._losses.get(index),
        )

    @in_worker
    def tensor(
        self,
        name: str,
        box: "tuple[Shape, Shape] | None" = None,
        *,
        device: "Device" = "cpu",
        dtype: "torch.dtype | None" = None,
    ) -> "torch.Tensor":
        """Return a tensor, or a box of it, read and verified; no other chunks are read.

        Args:
            name: from `names`.
            box: (offset, shape) in elements of the whole tensor; default: all of it.
            device: where it is to be.
            dtype: what to convert it to, as ``cast`` of `holdfast.load` does; default: its own.

        Raises:
            MismatchError: no such tensor, the box exceeds it, or it cannot be converted.
            OptionError: an invalid argument.
            CorruptError: a chunk fails its check.
        """
        path = self._path(name)
        tensor = self._header.tensors[self._tensors[path]]
        part = box_of(name, tensor.shape, box)
        return self._read({path: part}, device, dtype)[path]

    @in_worker
    def tensors(
        self, names: Iterable[str], *, device: "Device" = "cpu"
    ) -> "dict[str, torch.Tensor]":
        """Return several whole tensors by name; faster than one by one.

        Args:
            names: from `names`.
            device: where they are to be.

        Raises:
            MismatchError: no such tensor.
            CorruptError: a chunk fails its check.
        """
        if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
            raise OptionError(f"names is {shown(names)}; expected a list of names")
        paths = {name: self._path(name) for name in list(names)}
        header = self._header
        found = self._read(
            {p: whole(header.tensors[self._tensors[p]].shape) for p in paths.values()}, device
        )
        return {name: found[path] for name, path in paths.items()}

    @in_worker
    def state(
        self, *, device: "Device" = "cpu", include: Patterns = (), exclude: Patterns = ()
    ) -> dict[Any, Any]:
        """Return everything as a new nested dict of ordinary tensors; tied names share one tensor.

        Containers come back as dicts, lists and tuples; of a list in part, as dicts. To fill
        modules and optimizers, use `holdfast.load`.

        Args:
            device: where the tensors are to be.
            include: names, or patterns of names, of what is read: ``"model"`` is all below it,
                ``"*.bias"`` every bias. Default: everything.
            exclude: names or patterns of what is not read, of this.

        Raises:
            MismatchError: a pattern means no name.
            CorruptError: a chunk fails its check.
        """
        from ..state.tree import rebuild

        names = chosen([*self], include, exclude, self.location)
        paths = [self._paths[name] for name in names]
        owners: dict[int, Path] = {}
        for path in paths:
            if path in self._tensors:
                owners.setdefault(self._tensors[path], path)
        tensors = self._header.tensors
        own = self._read({path: whole(tensors[i].shape) for i, path in owners.items()}, device)
        found = [path for path in paths if path in self._tensors]
        leaves: dict[Path, Any] = {path: own[owners[self._tensors[path]]] for path in found}
        leaves |= {path: self._objects[path] for path in paths if path in self._objects}
        if len(paths) < len(self) and leaves:
            leaves = without_gaps(leaves, [*self._tensors, *self._objects])
        result: dict[Any, Any] = rebuild(leaves) if leaves else {}
        return result

    @in_worker
    def verify(
        self, report: Callable[[int], None] = lambda _: None, *, deep: bool = False
    ) -> list[Damage]:
        """Check every byte under the checkpoint's directory; return all faults, none if whole.

        For a delta checkpoint, also check that each of its bases is there and unchanged. To check
        the bytes of the bases too, use `holdfast.verify`.

        Args:
            report: called with the number of encoded bytes checked since the last call.
            deep: also decode everything, and compare it with the digests of the saved state.

        Raises:
            StoreError: the disk or the network failed; the checkpoint may be whole.
            VersionError: a newer holdfast wrote one of its bases.
            OptionError: ``deep`` is given, and torch is not installed.
        """
        if deep:
            check_decodable()
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
        """Its MANIFEST and options, for other modules of holdfast."""
        return Subject(self._store, self._manifest, self._options)

    def _open_chain(self) -> Chain:
        self._chain = self._chain or open_chain(self._store, self._manifest)
        return self._chain

    def _path(self, name: str) -> Path:
        if not isinstance(name, str):
            raise OptionError(f"name is {shown(name)}; expected the name of a tensor, from names()")
        path = self._paths.get(name)
        if path is not None and path in self._tensors:
            return path
        text = f"{self.location} has no tensor {name!r}"
        if path is None and any(known.startswith(f"{name}.") for known in self._paths):
            raise MismatchError(f"{text}, but names below it: use state(include={name!r})")
        raise MismatchError(f"{text}; {self._similar(name)}")

    def _similar(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.names(), 3)
        shown = near or self.names()[:3]
        more = " …" if len(self._tensors) > len(shown) else ""
        return f"expected one of {', '.join(shown)}{more}" if shown else "it has no tensors"

    def _read(
        self,
        parts: "dict[Path, Box]",
        device: "Device" = "cpu",
        dtype: "torch.dtype | None" = None,
    ) -> "dict[Path, torch.Tensor]":
        check_torch("reading tensors", f"Without torch, {self._without_torch} work")
        from ..state.new import new_tensor

        tensors = self._header.tensors
        result = {
            path: new_tensor(tensors[self._tensors[path]], box.shape, device, dtype)
            for path, box in parts.items()
        }
        self._fill(parts, result)
        return result

    def _fill(self, parts: "dict[Path, Box]", into: "dict[Path, torch.Tensor]") -> None:
        from ..engine.read_pipeline import read_chain

        wanted = {path: (self._tensors[path], [box]) for path, box in parts.items()}
        targets = {path: [(tensor, parts[path])] for path, tensor in into.items()}
        runs = plan_load(self._manifest, wanted, SLOT_BYTES)
        with lease(self._store, self._options) as leased:
            read_chain(self._open_chain(), leased, runs, targets)
