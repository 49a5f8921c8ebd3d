"""Which part of a checkpoint is meant, under which names: include, exclude and rename.

Knows names and paths; reads nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TypeVar

from .._core import xxh3_128
from ..format.names import display_names, dotted, escaped
from ..layout import Path
from ..plan.choice import Patterns, chosen
from ..plan.rename import Rename, renamed
from ..state.source import Source

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class Selection:
    """What was given to a call; see `holdfast.load`."""

    include: Patterns = ()
    exclude: Patterns = ()
    rename: Rename | None = None

    def names(self, every: Sequence[str], where: str) -> tuple[set[str], dict[str, str]]:
        """Return the names that are meant, and the new ones of all.

        Raises:
            OptionError, MismatchError: as `chosen` and `renamed`.
        """
        kept = {*chosen(every, self.include, self.exclude, where)}
        if self.rename is None:
            return kept, {name: name for name in every}
        return kept, renamed(every, self.rename, kept, where)

    def of(self, source: Source, where: str) -> Source:
        """Return what is meant of a checkpoint, as a target finds it."""
        names = display_names([*source.tensors, *source.objects])
        kept, new = self.names([*names.values()], where)
        left_out = {path: new[name] for path, name in names.items() if name not in kept}
        found = replace(
            source,
            tensors={p: t for p, t in source.tensors.items() if p not in left_out},
            objects={p: value for p, value in source.objects.items() if p not in left_out},
            left_out=left_out,
            gone=tuple(sorted({*source.gone, *left_out.values()})),
        )
        if self.rename is None:
            return found
        return renamed_source(found, {p: new[name] for p, name in names.items() if name in kept})


def selection_of(include: Patterns, exclude: Patterns, rename: Rename | None) -> Selection | None:
    """Return what is selected; None: everything, as it is."""
    is_all = include == () and exclude == () and rename is None
    return None if is_all else Selection(include, exclude, rename)


def digest_of(source: Source) -> str:
    """Return a short text that differs where other names are offered, for other ranks."""
    names = display_names([*source.tensors, *source.objects])
    return xxh3_128("\n".join(names.values()).encode()).hex()[:8]


def moved(path: Path, name: str) -> Path:
    """Return the keys of a path for a new name, or the end of one: as many of the old ones as fit.

    Where the last key changed, it stays one key, and a flat dict stays flat.

    Example:
        ``("model", "0.weight")`` and ``"net.0.weight"`` → ``("net", "0.weight")``
    """
    texts = [dotted((key,)) for key in path]
    first, last, rest = 0, len(path), name
    while last and rest and (rest == texts[last - 1] or rest.endswith(f".{texts[last - 1]}")):
        rest = rest[: -len(texts[last - 1])].removesuffix(".")
        last -= 1
    while first < last and rest.startswith(f"{texts[first]}."):
        rest = rest.removeprefix(f"{texts[first]}.")
        first += 1
    if not rest:
        return path[last:]
    middle, parts = path[first:last], rest.split(".")
    sizes = [text.count(".") + 1 for text in texts[first:last]]
    if sum(sizes) == len(parts):  # cut as before
        ends = [0, *accumulate(sizes)]
        cut = [".".join(parts[start:end]) for start, end in pairwise(ends)]
        between: Path = tuple(
            old if text == dotted((old,)) else text for old, text in zip(middle, cut, strict=True)
        )
    else:
        between = (rest,) if middle and last == len(path) else (*parts,)
    return (*path[:first], *between, *path[last:])


class _ByName(Mapping[Path, Entry]):
    """Entries by path, whichever way the keys of a path cut its name."""

    def __init__(self, entries: Mapping[str, tuple[Path, Entry]], origins: dict[Path, Path]):
        self._entries, self._origins = entries, origins

    def __getitem__(self, path: Path) -> Entry:
        found = self._entries.get(dotted(path)) or self._entries[escaped(path)]
        self._origins[path] = found[0]
        return found[1]

    def __iter__(self) -> Iterator[Path]:
        return iter([(name,) for name in self._entries])

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True, slots=True)
class _Renamed(Source):
    """What a checkpoint offers under other names.

    ``origins`` grows with each path that is looked up.

    Attributes:
        names: by the paths of the checkpoint.
    """

    names: Mapping[Path, str] = field(default_factory=dict)
    _named: dict[str, list[Path]] = field(default_factory=dict)

    def below(self, path: Path) -> list[Path]:
        """Return the paths that begin with ``path``: their further keys are the checkpoint's."""
        if not self._named:
            for known, name in self.names.items():
                ends = [0, *(n for n, mark in enumerate(name) if mark == "."), len(name)]
                for end in ends:
                    self._named.setdefault(name[:end], []).append(known)
        found = []
        for known in self._named.get(dotted(path), []):
            rest = self.names[known][len(dotted(path)) :].removeprefix(".")
            leaf = (*path, *moved(known, rest)) if rest else path
            self.origins[leaf] = known
            found.append(leaf)
        return found


def renamed_source(source: Source, names: Mapping[Path, str]) -> Source:
    """Return what a checkpoint offers under other names, by its own paths."""
    origins: dict[Path, Path] = {}
    tensors = {names[path]: (path, tensor) for path, tensor in source.tensors.items()}
    objects = {names[path]: (path, value) for path, value in source.objects.items()}
    return _Renamed(
        _ByName(tensors, origins),
        _ByName(objects, origins),
        *(source.is_repaired, source.gone, source.left_out, origins),
        names=names,
    )
