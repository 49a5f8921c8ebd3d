"""What a checkpoint offers to a state that is to be filled. Knows no files."""

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
        lost: names of the tensors that it left out.
    """

    tensors: Mapping[Path, Tensor]
    objects: Mapping[Path, Any]
    is_repaired: bool = False
    lost: tuple[str, ...] = ()
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

    def lost_below(self, *paths: Path) -> list[Path]:
        """Return what a repair lost below ``paths``; the rest of each name is one key."""
        return [
            (*path, name[len(start) :])
            for path in paths
            for start in {f"{dotted(path)}.", f"{escaped(path)}."}
            for name in self.lost
            if name.startswith(start)
        ]

    def lost_state(self, path: Path, current: Mapping[Key, Any]) -> list[Path]:
        """Return what a repair lost of the state of one parameter.

        Nothing names the values that were lost with a MANIFEST: ``current`` shows them, if the
        optimizer has state.
        """
        found = self.below(path)
        known = {leaf[len(path)] for leaf in found if len(leaf) > len(path)}
        gone = [(*path, key) for key in current if found and key not in known]
        return [*dict.fromkeys([*self.lost_below(path), *gone])]
