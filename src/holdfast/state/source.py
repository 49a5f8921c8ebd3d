"""What a checkpoint offers to a state that is to be filled. Knows no files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..layout import Path, Tensor


@dataclass(frozen=True, slots=True)
class Source:
    """What a checkpoint offers: tensors (tied names included) and objects by path."""

    tensors: Mapping[Path, Tensor]
    objects: Mapping[Path, Any]
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
