"""An open checkpoint as a mapping of names, and what is said of a tensor. Reads nothing."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..brief import brief
from ..codecs.base import Loss
from ..layout import Shape


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a checkpoint, as its MANIFEST describes it.

    Attributes:
        name: dotted name.
        dtype: as in docs/format.md, such as ``bf16``.
        shape: of the whole tensor, in elements.
        size_bytes: size of the decoded elements.
        stored_bytes: encoded size in the data files.
        codec: name of its codec.
        shards: (offset, shape) of each stored box.
        tied_to: name of the tensor that it shares its elements with, or None.
        loss: its error against the saved tensor, or None if it is exact.

    Example::

        info = holdfast.open("runs/a/step-00001000").info("model.weight")
        print(info.dtype, info.shape, info.stored_bytes / info.size_bytes)
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

    __repr__ = brief


class Names(Mapping[str, Any]):
    """What a checkpoint has under each dotted name: tensors, then other values.

    ``len``, ``in`` and iteration read nothing; each value is read when it is asked for.
    """

    is_checkpoint = True  # which a state is not: a target would be read, not filled

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all tensors."""

    @abstractmethod
    def objects(self) -> dict[str, Any]:
        """Return all values other than tensors."""

    @abstractmethod
    def tensor(self, name: str) -> Any:
        """Return a tensor; raise what is wrong with the name where there is none."""

    def __getitem__(self, name: str) -> Any:
        """Return a tensor or another value; a MismatchError if there is no such name."""
        objects = self.objects()
        return objects[name] if isinstance(name, str) and name in objects else self.tensor(name)

    def __iter__(self) -> Iterator[str]:
        """Go through the names of tensors, in the order of the state, then of other values."""
        return iter([*self.names(), *self.objects()])

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self.names()) + len(self.objects())

    def __contains__(self, name: object) -> bool:
        """Return whether there is such a name."""
        return isinstance(name, str) and (name in self.objects() or name in self.names())

    def get(self, name: str, default: Any = None) -> Any:
        """Return what is under ``name``, or ``default``.

        Raises:
            CorruptError: a chunk fails its check.
        """
        found = self.__contains__(name)
        return self[name] if found else default

    # Two are equal if they are one: comparing what they hold would read all of it.
    __eq__ = object.__eq__
    __hash__ = object.__hash__
