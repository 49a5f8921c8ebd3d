"""The paths of a target → those of a checkpoint of which a part is left out, under other names."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..format.names import dotted, escaped
from ..layout import Path


@dataclass(frozen=True, slots=True)
class Moves:
    """Which path of a checkpoint a path of the target means.

    A name that stayed as it is means its own path, as without ``rename``. The other paths, whose
    keys cut the same text elsewhere, mean it only where no two names have that text.

    Attributes:
        new: the path here, of each path of the checkpoint.
        changed: paths of the checkpoint, by those names that are new.
    """

    new: Mapping[Path, Path]
    changed: Mapping[str, Path]
    _by_text: dict[str, list[Path]] = field(default_factory=dict)
    _by_beginning: dict[str, list[Path]] = field(default_factory=dict)

    def find(self, path: Path) -> Path | None:
        """Return the path in the checkpoint; None if there is none, or no single one."""
        if self.new.get(path) == path:
            return path
        if (known := self.changed.get(escaped(path))) is not None:
            return known
        if not self._by_text:
            for known, here in self.new.items():
                self._by_text.setdefault(dotted(here), []).append(known)
        found = self._by_text.get(dotted(path), [])
        is_one = len(found) == 1 and not self._is_of_other_keys(found[0], found[0], path)
        return found[0] if is_one else None

    def below(self, path: Path) -> dict[Path, Path]:
        """Return what is below a path: the paths here, and those in the checkpoint."""
        if not self._by_beginning:
            for known, here in self.new.items():
                name = dotted(here)
                ends = [0, *(n for n, mark in enumerate(name) if mark == "."), len(name)]
                for end in ends:
                    self._by_beginning.setdefault(name[:end], []).append(known)
        text, found = dotted(path), list[tuple[Path | None, Path, Path]]()
        for known in self._by_beginning.get(text, []):
            cut = _cut(self.new[known], text) if path else ((), self.new[known])
            if cut and not self._is_of_other_keys(known, cut[0], path):
                found.append((cut[0], (*path, *cut[1]), known))
        # Several beginnings that look the same: only the one that is the same is meant.
        beginnings = {beginning for beginning, _, _ in found} - {None}
        if path in beginnings or len(beginnings) > 1:
            beginnings = {path}
        return {
            leaf: known
            for beginning, leaf, known in found
            if (beginning is None or beginning in beginnings) and self.find(leaf) == known
        }

    def _is_of_other_keys(self, known: Path, beginning: Path | None, path: Path) -> bool:
        """Whether a name stayed as it is, and its keys differ from a path's in their types."""
        if beginning is None or beginning == path or self.new[known] != known:
            return False
        return [dotted((key,)) for key in beginning] == [dotted((key,)) for key in path]


NO_MOVES = Moves({}, {})


def _cut(path: Path, text: str) -> tuple[Path | None, Path] | None:
    """Cut a path behind the keys that show a text; within a key, only the rest is known.

    Returns:
        None: the path does not begin with the text.
    """
    at = 0
    for n, key in enumerate(path):
        own = dotted((key,))
        left = len(text) - at
        if left == len(own):
            return path[: n + 1], path[n + 1 :]
        if left < len(own):
            return (None, (own[left + 1 :], *path[n + 1 :])) if own[left] == "." else None
        at += len(own) + 1
    return None
