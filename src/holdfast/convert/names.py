"""Which tensors of a source go to a target, and under which names. Reads no elements."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MismatchError, OptionError, writable
from ..layout import Path, Tensor
from ..plan.choice import Patterns, chosen
from ..plan.rename import Rename, check_distinct, renamed
from .source import Source


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is taken of a source, by its new name.

    Attributes:
        tensors: in the order of the source; of tied ones, the first that is taken.
        ties: further name → name in ``tensors``.
        values: of what is no tensor.
    """

    tensors: Mapping[str, Tensor]
    ties: Mapping[str, str]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a caller asks for.

    Attributes:
        include, exclude: as `holdfast.plan.choice.chosen` takes them; names as in the source.
        strip: a beginning that is taken off every name that has it.
        rename: as `holdfast.plan.rename.renamed` takes it, of names without ``strip``.
    """

    include: Patterns = ()
    exclude: Patterns = ()
    strip: str = ""
    rename: Rename | None = None

    def of(self, source: Source) -> Chosen:
        """Choose.

        Raises:
            MismatchError: a pattern, the beginning or an expression means no name; or two names
                become the same.
            OptionError: an invalid one.
        """
        names = {name: path for path, name in source.names().items()}
        kept = self.names([*names], source.location)
        renamed = self._renamed(kept, source.location)
        tensors, ties, values = dict[str, Tensor](), dict[str, str](), dict[str, Any]()
        owners = {tensor.path: tensor for tensor in source.tensors}
        first: dict[Path, str] = {}  # of an owner's names, the first that is taken
        for old, new in renamed.items():
            path = names[old]
            if path in source.values:
                values[new] = source.values[path]
                continue
            owner = owners[source.ties.get(path, path)]
            if owner.path in first:
                ties[new] = first[owner.path]
            else:
                first[owner.path], tensors[new] = new, owner
        return Chosen(tensors, ties, values)

    def names(self, every: Sequence[str], where: str) -> list[str]:
        """Return the names that are meant, as in the source.

        Raises:
            MismatchError, OptionError: as `of`.
        """
        return chosen(every, self.include, self.exclude, where)

    def _renamed(self, names: Sequence[str], where: str) -> dict[str, str]:
        """Return the new name of each; all are different."""
        new = {name: name.removeprefix(self.strip) for name in names}
        if self.strip and names and not any(name.startswith(self.strip) for name in names):
            raise MismatchError(
                f"no name in {where} begins with {self.strip!r}; it has names such as "
                f"{', '.join(names[:3])}"
            )
        check_distinct(new, where)
        if self.rename is not None:
            again = renamed([*new.values()], self.rename, {*new.values()}, where)
            new = {old: again[name] for old, name in new.items()}
        for name in new.values():
            if writable(name) != name:
                raise OptionError(
                    f"the name {name!r:.80} is not valid Unicode; rename it, or exclude it"
                )
        return new


def without_adapter_name(taken: Chosen) -> Chosen:
    """Take the adapter's own name out of names, as PEFT does: its loader puts it there again."""

    def plain(name: str) -> str:
        return re.sub(r"\.default(?=\.|$)", "", name)

    tensors = {plain(name): tensor for name, tensor in taken.tensors.items()}
    if len(tensors) < len(taken.tensors):
        raise OptionError("two names are the same without .default; rename or exclude one of them")
    ties = {plain(name): plain(owner) for name, owner in taken.ties.items()}
    return Chosen(tensors, ties, taken.values)
