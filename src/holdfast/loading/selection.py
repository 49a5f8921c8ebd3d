"""Which part of a checkpoint is meant, under which names: include, exclude and rename.

Knows names and paths; reads nothing.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeVar

from .._core import xxh3_128
from ..format.names import display_names, dotted, escaped, is_integer, key_of, split_escaped
from ..layout import Key, Path
from ..plan.choice import Patterns, chosen
from ..plan.rename import Rename, renamed
from ..state.moves import Moves
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
        left_out = {path for path, name in names.items() if name not in kept}
        taken = {new[name] for name in kept}  # which what is left out cannot have, too
        moving = {p: n for p, n in names.items() if p not in left_out or new[n] not in taken}
        found = replace(
            source,
            tensors={p: t for p, t in source.tensors.items() if p not in left_out},
            objects={p: value for p, value in source.objects.items() if p not in left_out},
            left_out=left_out,
            moves=moves_of(moving, new),
        )
        return found if self.rename is None else renamed_source(found)


def selection_of(include: Patterns, exclude: Patterns, rename: Rename | None) -> Selection | None:
    """Return what is selected; None: everything, as it is."""
    is_all = include == () and exclude == () and rename is None
    return None if is_all else Selection(include, exclude, rename)


def digest_of(source: Source) -> str:
    """Return a short text that differs where other names are offered, for other ranks."""
    names = display_names([*source.tensors, *source.objects])
    return xxh3_128("\n".join(names.values()).encode()).hex()[:8]


def moved(path: Path, name: str, old: str = "") -> Path:
    """Return the keys of a path for a new name: as many of the old ones as fit.

    Where the last key changed, it stays one key, and a flat dict stays flat.

    Args:
        old: the name of the path. If it is escaped, the new one is, too.

    Example:
        ``("model", "0.weight")`` and ``"net.0.weight"`` → ``("net", "0.weight")``
    """
    if name == old:
        return path
    is_escaped = old not in ("", dotted(path))
    keys = [[escaped((key,))] if is_escaped else dotted((key,)).split(".") for key in path]
    parts = split_escaped(name) if is_escaped else name.split(".")
    first, last = 0, len(path)
    while last and parts and parts[-len(keys[last - 1]) :] == keys[last - 1]:
        last -= 1
        del parts[-len(keys[last]) :]
    while first < last and len(parts) > len(keys[first]) and _begins(parts, keys[first]):
        del parts[: len(keys[first])]
        first += 1
    if not parts:
        return path[last:]
    middle, sizes = path[first:last], [*map(len, keys[first:last])]
    if sum(sizes) == len(parts):  # cut as before
        ends = [0, *accumulate(sizes)]
        cut = [parts[start:end] for start, end in pairwise(ends)]
        between: Path = tuple(
            old_key if part == texts else _key(part, is_escaped)
            for old_key, texts, part in zip(middle, keys[first:last], cut, strict=True)
        )
    elif middle and last == len(path):
        between = (_key(parts, is_escaped),)
    else:
        between = tuple(_key([part], is_escaped) for part in parts)
    return (*path[:first], *between, *path[last:])


def moved_paths(old: Mapping[Path, str], new: Mapping[str, str]) -> dict[Path, Path]:
    """Return the new path of each path, no two the same.

    Args:
        old: their names.
        new: what becomes of each name.
    """
    found = {path: moved(path, new[name], name) for path, name in old.items()}
    count = Counter(found.values())
    for path, name in old.items():
        if count[found[path]] > 1 and new[name] != name:  # then each dot is one between keys
            found[path] = tuple(
                int(part) if is_integer(part) else key_of(part) for part in split_escaped(new[name])
            )
    return found


def _begins(parts: Sequence[str], beginning: Sequence[str]) -> bool:
    return parts[: len(beginning)] == beginning


def _key(parts: Sequence[str], is_escaped: bool) -> Key:
    """Make one key of parts of a name."""
    if not is_escaped:
        return ".".join(parts)
    keys = [*map(key_of, parts)]
    return keys[0] if len(keys) == 1 else dotted((*keys,))


class _ByName(Mapping[Path, Entry]):
    """Entries by the path that a target has for them."""

    def __init__(self, entries: Mapping[Path, Entry], moves: Moves, origins: dict[Path, Path]):
        self._entries = dict[Path | None, Entry](entries.items())
        self._paths, self._moves, self._origins = [*entries], moves, origins

    def __getitem__(self, path: Path) -> Entry:
        known = self._moves.find(path)
        entry = self._entries[known]
        if known is not None:
            self._origins[path] = known
        return entry

    def __iter__(self) -> Iterator[Path]:
        return iter([self._moves.new[path] for path in self._paths])

    def __len__(self) -> int:
        return len(self._entries)


class _Renamed(Source):
    """What a checkpoint offers under other names.

    ``origins`` grows with each path that is looked up.
    """

    def below(self, path: Path) -> list[Path]:
        """Return the paths that begin with ``path``: their further keys are the checkpoint's."""
        found = {
            leaf: known
            for leaf, known in self.moves.below(path).items()
            if known not in self.left_out
        }
        self.origins.update(found)
        return [*found]


def moves_of(old: Mapping[Path, str], new: Mapping[str, str]) -> Moves:
    """Return where paths go whose names change.

    Args:
        old: their names.
        new: what becomes of each name.
    """
    changed = {new[name]: path for path, name in old.items() if new[name] != name}
    return Moves(moved_paths(old, new), changed)


def renamed_source(source: Source) -> Source:
    """Return what a checkpoint offers under the names that its ``moves`` give."""
    origins: dict[Path, Path] = {}
    return _Renamed(
        _ByName(source.tensors, source.moves, origins),
        _ByName(source.objects, source.moves, origins),
        *(source.is_repaired, source.gone, source.left_out, source.moves, origins),
    )
