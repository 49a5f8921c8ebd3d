"""Small checkpoints of every codec, alone and in chains, of one and of several ranks, to damage.

They are the golden cases, and stand in a directory in memory where there is one; what is in them
is known to the bit.
"""

import contextlib
import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import holdfast
from format.make_golden import ALL_CASES
from format.simulated_ranks import Piece, pieces, save_pieces
from holdfast import Options
from holdfast.engine.basis import forget_bases
from holdfast.format.spec import MANIFEST_NAME

from .generator import Scene

# Of these every bit is flipped by the campaign: each codec, each mode, chains, several ranks.
CODECS = {
    "raw": "boxes",
    "lossless": "lossless",
    "delta": "link",
    "delta:replay": "step",
    "compact": "high",
    "compact, bound": "bound",
    "compact, exact bf16": "rounding",
    "excp": "pruned",
}
# Large, of no new kind, or with positions in containers that no state has.
LEFT_OUT = ("aligned", "coded-symbols", "empty", "key", "objects")
NAMES = [name for name in ALL_CASES if name not in LEFT_OUT]
NAMES += ["chain"]
OPTIONS = Options(pool_bytes=32 << 20, io="buffered")


class Target:
    """Memory that a load fills: what was not filled is told from what was, to the byte."""

    def __init__(self, state: Any) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        sizes = [t.nbytes for t in tensors_of(state)]
        self.flat = torch.zeros(sum(-(-size // 16) * 16 for size in sizes), dtype=torch.uint8)
        self._end, self._used = 0, torch.zeros_like(self.flat)
        self.state = self._copy(state)
        self.truth = self.flat.clone()
        self.unfilled = self.truth ^ self._used
        self.values = repr(values_of(state))
        self.reset()

    def reset(self) -> None:
        """Make it as it was before any load."""
        self.flat.copy_(self.unfilled)

    def is_whole(self) -> bool:
        """Whether it holds what was saved."""
        return torch.equal(self.flat, self.truth) and repr(values_of(self.state)) == self.values

    def is_right(self, truth: torch.Tensor | None = None) -> bool:
        """Whether each byte is as it was saved, or was not filled.

        Args:
            truth: what was saved, if not what this was made from.
        """
        if torch.equal(self.flat, self.unfilled):
            return True
        saved = self.truth if truth is None else truth
        return bool(((self.flat == saved) | (self.flat == self.unfilled)).all())

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._tensors:
                start, self._end = self._end, self._end + -(-value.nbytes // 16) * 16
                part = self.flat[start : start + value.nbytes]
                self._used[start : start + value.nbytes] = 0xFF
                if value.nbytes:
                    part.copy_(value.reshape(-1).view(torch.uint8))
                self._tensors[id(value)] = part.view(value.dtype).view(value.shape)
            return self._tensors[id(value)]
        if isinstance(value, dict):
            return {key: self._copy(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._copy(item) for item in value)
        return value


def tensors_of(state: Any) -> list[torch.Tensor]:
    """All tensors of a nested state."""
    if isinstance(state, torch.Tensor):
        return [state]
    items = state.values() if isinstance(state, dict) else state
    return [t for item in items for t in tensors_of(item)] if isinstance(state, NESTED) else []


def values_of(state: Any) -> Any:
    """A nested state without its tensors."""
    if isinstance(state, torch.Tensor):
        return None
    if isinstance(state, dict):
        return {key: values_of(item) for key, item in state.items()}
    return type(state)(map(values_of, state)) if isinstance(state, (list, tuple)) else state


NESTED = (dict, list, tuple)


@dataclass
class Subject:
    """A checkpoint on the disk, with what it was made from beside it, and what it holds."""

    name: str
    root: Path
    path: Path
    scene: Scene
    target: Target
    second: Target  # of another rank
    others: Mapping[bytes, torch.Tensor]  # by their MANIFEST, the bytes of the others of the scene

    def truth(self, files: dict[str, bytes]) -> torch.Tensor:
        """What was saved under the MANIFEST that is there, which may be that of another whole."""
        manifest = files.get(f"{self.scene.top}/{MANIFEST_NAME}", b"")
        return self.others.get(manifest, self.target.truth)

    @contextmanager
    def damaged(self, files: dict[str, bytes]) -> Iterator[None]:
        """Put other files in the place of its own; then its own again."""
        own = self.scene.files
        changed = {name for name in own.keys() | files.keys() if own.get(name) != files.get(name)}
        try:
            self._put({name: files.get(name) for name in changed})
            yield
        finally:
            self._put({name: own.get(name) for name in changed})
            for name in changed - own.keys():  # a directory of its own was made for it
                for parent in (self.root / name).parents:
                    with contextlib.suppress(OSError):
                        parent.rmdir()

    def is_harmless(self, files: dict[str, bytes]) -> bool:
        """Whether nothing of what the format counts as the checkpoint is another than it was."""
        return self._own(files) == self._own(dict(self.scene.files))

    def is_another(self, files: dict[str, bytes]) -> bool:
        """Whether several damages together have put another save there, whole, which is none."""
        return any(
            all(files.get(n) == content for n, content in other.items() if self._is_own(n))
            for other in self.scene.others
        )

    def needs(self, files: dict[str, bytes]) -> bool:
        """Whether something of the checkpoint itself is another, and not only of what is below."""
        return any(
            files.get(name) != self.scene.files.get(name)
            for name in self._own(files).keys() | self._own(dict(self.scene.files)).keys()
            if self._is_own(name)
        )

    def _is_own(self, name: str) -> bool:
        return name.startswith(f"{self.scene.top}/")

    def _own(self, files: dict[str, bytes]) -> dict[str, bytes]:
        """Files but for what docs/format.md §1 lets lie beside them: what dead saves have left."""
        saves = {name.split("/")[2] for name in self.scene.files if "/data/" in name}
        places = {name.split("/")[0] for name in self.scene.files}
        dead = re.compile(r"[^/]+/(\.manifest-[^/]*$|data/([^/]+)/)")
        return {
            name: content
            for name, content in files.items()
            if name.split("/")[0] in places
            and not ((m := dead.match(name)) and (m[2] is None or m[2] not in saves))
        }

    def _put(self, files: "dict[str, bytes | None]") -> None:
        for name, content in files.items():
            path = self.root / name
            if content is None:
                path.unlink(missing_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)


def make(name: str, root: Path) -> Subject:
    """Save a case below ``root``, and two more like it, of other values."""
    own, *others = (_save(name, root / place, seed) for seed, place in enumerate(("", ".a", ".b")))
    with holdfast.open(own, options=OPTIONS) as checkpoint:
        targets = [Target(checkpoint.state()) for _ in range(2)]
    truths = {}
    for path in others:
        with holdfast.open(path, options=OPTIONS) as checkpoint:
            truths[(path / MANIFEST_NAME).read_bytes()] = Target(checkpoint.state()).truth
    files, *rest = (_files(path.parent) for path in (own, *others))
    for path in others:
        shutil.rmtree(path.parent)
    return Subject(name, root, own, Scene(files, rest, own.name), *targets, truths)


def _files(root: Path) -> dict[str, bytes]:
    files = (p for p in sorted(root.rglob("*")) if p.is_file())
    found = {p.relative_to(root).as_posix(): p.read_bytes() for p in files}
    return {name: content for name, content in found.items() if name[0] != "."}


def _save(name: str, root: Path, seed: int) -> Path:
    """Save a case with what it is made from; with a seed, of other values."""
    root.mkdir(parents=True, exist_ok=True)
    if name == "chain":
        return _save_chain(root, seed)
    case = ALL_CASES[name]()
    forget_bases()
    if case.base:
        _save(case.base, root, seed)
    states = [{key: _moved(value, seed) for key, value in s.items()} for s in case.states]
    _write(
        root / name,
        states if seed else case.states,
        seed,
        ties=case.ties,
        mesh=case.mesh,
        step=case.step,
        metrics=case.metrics,
        options=case.options,
        codec=case.codec,
    )
    return root / name


def _write(path: Path, states: Any, seed: int, **keywords: Any) -> None:
    """Save under an id that is the same each time."""
    save_id = hashlib.sha256(f"{path.name} {seed}".encode()).hexdigest()[:32]
    with patch("holdfast.saving.save.secrets.token_hex", lambda size: save_id):
        save_pieces(path, states, **keywords)


def _moved(value: Any, seed: int) -> Any:
    """The same shape, with the elements in another order."""
    if isinstance(value, Piece):
        return replace(value, data=_moved(value.data, seed))
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    words = value.contiguous().view(WORDS[value.itemsize])
    return words.flip(tuple(range(words.ndim))).roll(seed, 0).view(value.dtype)


WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _save_chain(root: Path, seed: int) -> Path:
    """Three links of delta, by three ranks, two and one."""
    torch.manual_seed(seed)
    w, h = torch.randn(12, 20) / 50, torch.randn(9, 11).bfloat16()
    for step, ranks in enumerate((3, 2, 1)):
        boxes = [((r * 12 // ranks, 0), (12 // ranks, 20)) for r in range(ranks)]
        cuts = pieces(w, boxes)
        states: list[dict[Any, Any]] = [{("w",): piece} for piece in cuts]
        states[-1] |= {("h",): h}
        states[0] |= {("step",): step}
        _write(
            path := root / f"step-{step:08d}",
            states,
            seed,
            step=step,
            codec="delta",
            options=replace(OPTIONS, chunk_elements=70),
        )
        w = w + 1e-5 * torch.randn(12, 20)
    forget_bases()
    return path
