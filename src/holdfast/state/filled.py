"""What a load fills: plain tensors as columns, without an object or a call for each, and all else.

Plain is what lies in host memory just as the checkpoint has it: of its dtype and shape, elements
behind each other. All else is described one by one (`tensors`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch.autograd.graph import increment_version

from .._core import overlapping
from ..layout import Path, Tensor
from .ambient import ordinary_torch
from .memory import ORDINARY
from .tensors import TORCH_DTYPES, LocalTensor, Part, local_tensor

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor

# A tensor, its path, and what the checkpoint has there; or what to call, which is no tensor.
Waiting = tuple[Any, Path, Tensor] | Callable[[], None]


@dataclass(slots=True)
class Plain:
    """Plain tensors, in parallel lists.

    Attributes:
        addresses, sizes: of the elements, in bytes.
        at: place of each in the lists, by its address; no two have one address.
    """

    paths: list[Path] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    at: dict[int, int] = field(default_factory=dict)

    def take(self, waiting: Iterable[Waiting], take_other: Callable[[Any, Path], None]) -> None:
        """Sort out what is plain, in order; call `take_other` with each of the rest.

        Call it in `ordinary_torch`.
        """
        paths, tensors, addresses, sizes = self.paths, self.tensors, self.addresses, self.sizes
        for entry in waiting:
            if not isinstance(entry, tuple):
                entry()
                continue
            value, path, wanted = entry
            try:
                is_plain = (
                    type(value) in ORDINARY
                    and not _is_wrapped(value)
                    and value.is_cpu
                    and value.layout is torch.strided
                    and not value.is_nested
                    and value.dtype is TORCH_DTYPES[wanted.dtype]
                    and value.shape == wanted.shape
                    and value.is_contiguous()
                    and not (value.is_conj() or value.is_neg())
                )
                if is_plain:
                    address, size = value.data_ptr(), value.nbytes
                    # Frameworks free the storage of a tensor they keep.
                    end = value.storage_offset() * value.element_size() + size
                    is_plain = not size or (
                        address != 0
                        and end <= value.untyped_storage().nbytes()
                        and self.at.setdefault(address, len(paths)) == len(paths)
                    )
            except RuntimeError:  # some kinds have no memory, and no shape
                is_plain = False
            if not is_plain:
                take_other(value, path)
                continue
            paths.append(path)
            tensors.append(value)
            addresses.append(address)
            sizes.append(size)

    def local(self, number: int) -> LocalTensor:
        """Describe one of them by itself."""
        return local_tensor(self.tensors[number], self.paths[number])

    def touching(self, others: Iterable[LocalTensor]) -> dict[Path, LocalTensor]:
        """Describe those that share memory with each other, or may share some with others."""
        ranges: list[tuple[int, int]] = []
        for leaf in others:
            held = [leaf.data] if leaf.plain else [data for data, _ in leaf.boxed]
            ranges += [_storage(data) for data in held if data.is_cpu]
        addresses = [*self.addresses, *map(itemgetter(0), ranges)]
        sizes = [*self.sizes, *map(itemgetter(1), ranges)]
        found: dict[Path, LocalTensor] = {}
        for number in overlapping(addresses, sizes):
            if number < len(self.paths):
                found[self.paths[number]] = self.local(number)
        return found


@dataclass(slots=True)
class Target:
    """What a load fills.

    Attributes:
        tensors: to be filled, by path; without those that are plain.
        plain: tensors that lie in memory as in the checkpoint.
        around: DTensors, by path; autograd counts their changes, and those of their local parts.
        missing: paths the target wants and the checkpoint has not.
        values: tensors here that are values there.
        used: paths of the checkpoint that the target takes.
        conflicts: what else does not fit, one sentence each.
        skipped: paths of the checkpoint that are left out because they do not fit, and why.
    """

    tensors: dict[Path, LocalTensor] = field(default_factory=dict)
    plain: Plain = field(default_factory=Plain)
    around: dict[Path, torch.Tensor] = field(default_factory=dict)
    missing: list[Path] = field(default_factory=list)
    values: list[Path] = field(default_factory=list)
    used: set[Path] = field(default_factory=set)
    conflicts: list[str] = field(default_factory=list)
    skipped: dict[Path, str] = field(default_factory=dict)
    actions: list[Callable[[], None]] = field(default_factory=list)

    def targets(self) -> dict[Path, tuple[Part, ...]]:
        """Return what this process holds of each tensor that is not plain."""
        return {path: leaf.parts for path, leaf in self.tensors.items()}

    def size_bytes(self) -> int:
        """Return the bytes of all elements that this process holds."""
        total = sum(self.plain.sizes)
        if self.tensors:
            with ordinary_torch():
                for leaf in self.tensors.values():
                    boxed = sum([data.nbytes for data, _ in leaf.boxed])
                    total += leaf.data.nbytes if leaf.plain else boxed
        return total

    def note_change(self) -> None:
        """Tell autograd that the tensors have changed: it does not see what is filled by address.

        A backward that needs what was in them then fails, as after any change in place.
        """
        changed = [*self.plain.tensors]
        for path, leaf in self.tensors.items():
            changed += [leaf.data, *map(itemgetter(0), leaf.boxed)]
            if path in self.around:
                changed.append(self.around[path])
        increment_version(changed)

    def finish(self) -> None:
        """Put everything that is not a tensor in place; call it once all tensors are filled."""
        for action in self.actions:
            action()


def _storage(data: torch.Tensor) -> tuple[int, int]:
    memory = data.untyped_storage()
    return memory.data_ptr(), memory.nbytes()
