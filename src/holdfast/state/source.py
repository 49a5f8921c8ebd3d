"""What a checkpoint offers to a state that is to be filled. Knows no files."""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..format.names import dotted, escaped
from ..layout import Key, Path, Tensor
from .moves import NO_MOVES, Moves


@dataclass(frozen=True, slots=True)
class Source:
    """What a checkpoint offers.

    Attributes:
        tensors, objects: by path; tied names are included.
        is_repaired: True if a repair left something out.
        gone: names that a repair has lost; sorted.
        left_out: paths in the checkpoint that the user has left out.
        moves: which of its paths are meant here, left out or not.
        origins: of paths here that the checkpoint has under another one.
    """

    tensors: Mapping[Path, Tensor]
    objects: Mapping[Path, Any]
    is_repaired: bool = False
    gone: tuple[str, ...] = ()
    left_out: Collection[Path] = ()
    moves: Moves = NO_MOVES
    origins: dict[Path, Path] = field(default_factory=dict)
    _below: dict[Path, list[Path]] = field(default_factory=dict)

    def below(self, path: Path) -> list[Path]:
        """Return the paths that begin with ``path``."""
        if not self._below:
            for known in (*self.tensors, *self.objects):
                for n in range(len(known) + 1):
                    self._below.setdefault(known[:n], []).append(known)
        return self._below.get(path, [])

    def values_below(self, path: Path) -> dict[Path, Any]:
        """Return the objects whose paths begin with ``path``, by the rest of their paths."""
        return {p[len(path) :]: self.objects[p] for p in self.below(path) if p in self.objects}

    def not_left_out(self, paths: Sequence[Path]) -> list[Path]:
        """Return those paths of the target which, with all below them, the user has not left out.

        What is left out covers a path that only looks the same if its own path is not among them.
        """
        if not self.left_out:
            return [*paths]
        covering: dict[Path, list[tuple[Path, bool]]] = {}
        for path in paths:
            found = {*self.moves.below(path).values()}
            if (known := self.moves.find(path)) is not None:
                found.add(known)
            covering[path] = [
                (known, self.moves.new[known][: len(path)] == path)
                for known in found
                if known in self.left_out
            ]
        owned = {known for found in covering.values() for known, is_own in found if is_own}
        return [
            path
            for path, found in covering.items()
            if not any(is_own or known not in owned for known, is_own in found)
        ]

    def gone_below(self, *paths: Path) -> list[Path]:
        """Return what is gone below ``paths``; the rest of a name that a repair lost is one key."""
        found: list[Path] = []
        for path in paths:
            if self.left_out:
                below = self.moves.below(path).items()
                found += [leaf for leaf, at in below if at in self.left_out and leaf != path]
            for start in {f"{dotted(path)}.", f"{escaped(path)}."}:
                for name in self.gone[bisect_left(self.gone, start) :]:
                    if not name.startswith(start):
                        break
                    found.append((*path, name[len(start) :]))
        return found

    def gone_state(self, path: Path, current: Mapping[Key, Any]) -> list[Path]:
        """Return what is gone of the state of one parameter.

        Nothing names the values that were lost with a MANIFEST: ``current`` shows them, if the
        optimizer has state.
        """
        if not self.is_repaired:
            return self.gone_below(path)
        found = self.below(path)
        known = {leaf[len(path)] for leaf in found if len(leaf) > len(path)}
        gone = [(*path, key) for key in current if found and key not in known]
        return [*dict.fromkeys([*self.gone_below(path), *gone])]
