"""What a checkpoint offers to a state that is to be filled. Knows no files."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..format.names import dotted, escaped
from ..layout import Key, Path, Tensor


@dataclass(frozen=True, slots=True)
class Source:
    """What a checkpoint offers.

    Attributes:
        tensors, objects: by path; tied names are included.
        is_repaired: True if a repair left something out.
        gone: names that a repair has lost, or that the user has left out; sorted.
        left_out: what the user has left out: paths in the checkpoint, and their names here.
        origins: of paths here that the checkpoint has under another one.
    """

    tensors: Mapping[Path, Tensor]
    objects: Mapping[Path, Any]
    is_repaired: bool = False
    gone: tuple[str, ...] = ()
    left_out: Mapping[Path, str] = field(default_factory=dict)
    origins: dict[Path, Path] = field(default_factory=dict)
    _left_names: set[str] = field(default_factory=set)
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

    def leaves_out(self, path: Path) -> bool:
        """Whether the user has left out what is at a path, or something below it."""
        if not self._left_names:
            self._left_names.update(self.left_out.values())
        return dotted(path) in self._left_names or not self._left_names.isdisjoint(
            f"{dotted(path)}.{rest[-1]}" for rest in self.gone_below(path)
        )

    def gone_below(self, *paths: Path) -> list[Path]:
        """Return what is gone below ``paths``; the rest of each name is one key."""
        found = []
        for path in paths:
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
