"""Seeded damage larger than a bit: files in, files out, the same from the same seed.

Knows bytes by name and nothing of what they mean; so it damages any format alike.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

Files = Mapping[str, bytes]
Blocks = (16, 64, 512, 4096)  # a vector, the unit of offsets, a sector, a page


@dataclass(frozen=True)
class Scene:
    """What damage can happen to.

    Attributes:
        files: the checkpoint's, by path relative to the directory that holds it (and its bases).
        others: those of other saves (earlier ones, of the same shapes), each with as many files in
            the same order.
        top: the directory of the checkpoint itself; others hold what it was made from.
    """

    files: Files
    others: Sequence[Files] = ()
    top: str = ""


Damage = Callable[[random.Random, Scene], dict[str, bytes]]
KINDS: dict[str, Damage] = {}


def damage(seed: int, scene: Scene, kinds: Sequence[str] = ()) -> tuple[str, dict[str, bytes]]:
    """Return what happened, and all files after it. Some damage changes nothing."""
    chance = random.Random(seed)
    kind = chance.choice(kinds or list(KINDS))
    return kind, KINDS[kind](chance, scene)


def kind_of(name: str) -> Callable[[Damage], Damage]:
    """Add a function to `KINDS`."""

    def add(change: Damage) -> Damage:
        KINDS[name] = change
        return change

    return add


def in_one_file(name: str) -> Callable[[Callable[[random.Random, bytes], bytes]], None]:
    """Add a function that damages the bytes of one file."""

    def add(change: Callable[[random.Random, bytes], bytes]) -> None:
        @kind_of(name)
        def _(chance: random.Random, scene: Scene) -> dict[str, bytes]:
            file = _any(chance, scene.files)
            return {**scene.files, file: change(chance, scene.files[file])}

    return add


def _any(chance: random.Random, files: Files) -> str:
    return chance.choice(sorted(files))


def _span(chance: random.Random, content: bytes) -> tuple[int, int]:
    """Choose a range: a whole block on its grid, or any bytes."""
    size = len(content)
    if not size:
        return 0, 0
    if chance.random() < 0.7:
        block = chance.choice(Blocks)
        start = chance.randrange(-(-size // block)) * block
        return start, min(start + block, size)
    start = chance.randrange(size)
    return start, min(size, start + 1 + int(chance.expovariate(1 / 60)))


def _put(content: bytes, start: int, piece: bytes) -> bytes:
    return content[:start] + piece + content[start + len(piece) :]


@in_one_file("truncate")
def _(chance: random.Random, content: bytes) -> bytes:
    block = chance.choice((1, 1, *Blocks))
    return content[: chance.randrange(len(content) // block + 1) * block]


@in_one_file("empty")
def _(chance: random.Random, content: bytes) -> bytes:
    return b""


@in_one_file("extend")
def _(chance: random.Random, content: bytes) -> bytes:
    count = chance.choice((1, 8, 64, 4096, chance.randrange(1, 5000)))
    more = (bytes(count), chance.randbytes(count), content[-count:], content[:count])
    return content + chance.choice(more)


@in_one_file("zero")
def _(chance: random.Random, content: bytes) -> bytes:
    start, end = _span(chance, content)
    return _put(content, start, bytes(end - start))


@in_one_file("fill with ones")
def _(chance: random.Random, content: bytes) -> bytes:
    start, end = _span(chance, content)
    return _put(content, start, b"\xff" * (end - start))


@in_one_file("garbage")
def _(chance: random.Random, content: bytes) -> bytes:
    start, end = _span(chance, content)
    return _put(content, start, chance.randbytes(end - start))


@in_one_file("flip some bits")
def _(chance: random.Random, content: bytes) -> bytes:
    damaged = bytearray(content)
    for _ in range(chance.randint(1, 8) if content else 0):
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    return bytes(damaged)


@in_one_file("add to a number")
def _(chance: random.Random, content: bytes) -> bytes:
    if len(content) < 8:
        return content
    at = chance.randrange(len(content) // 8) * 8
    number = int.from_bytes(content[at : at + 8], "little")
    more = chance.choice((1, -1, 64, -64, 4096, 1 << 32, 1 << 63, chance.getrandbits(64)))
    return _put(content, at, ((number + more) % (1 << 64)).to_bytes(8, "little"))


@in_one_file("swap two blocks")
def _(chance: random.Random, content: bytes) -> bytes:
    block = chance.choice(Blocks)
    if len(content) < 2 * block:
        return content
    a, b = (at * block for at in chance.sample(range(len(content) // block), 2))
    return _put(_put(content, a, content[b : b + block]), b, content[a : a + block])


@in_one_file("shift")
def _(chance: random.Random, content: bytes) -> bytes:
    at, count = chance.randrange(len(content) + 1), chance.choice((1, 8, 64, 512))
    if chance.random() < 0.5:
        shifted = content[:at] + bytes(count) + content[at:]
    else:
        shifted = content[:at] + content[at + count :]
    # Of the size it had, where what moved is a range within the file.
    return shifted[: len(content)].ljust(len(content), b"\0") if chance.random() < 0.6 else shifted


@kind_of("misdirected write")
def _(chance: random.Random, scene: Scene) -> dict[str, bytes]:
    source, target = _any(chance, scene.files), _any(chance, scene.files)
    content = scene.files[target]
    start, end = _span(chance, scene.files[source])
    block = chance.choice(Blocks)
    at = chance.randrange(len(content) // block + 1) * block
    piece = scene.files[source][start:end][: len(content) - at]
    return {**scene.files, target: _put(content, at, piece)}


@kind_of("swap two files")
def _(chance: random.Random, scene: Scene) -> dict[str, bytes]:
    a, b = _any(chance, scene.files), _any(chance, scene.files)
    return {**scene.files, a: scene.files[b], b: scene.files[a]}


@kind_of("duplicate a file")
def _(chance: random.Random, scene: Scene) -> dict[str, bytes]:
    # Among the data files: beside MANIFEST it would be nobody's.
    beside = [name for name in scene.files if "data/" in name] or ["data/"]
    source, directory = _any(chance, scene.files), chance.choice(sorted(beside)).rpartition("/")[0]
    name = chance.choice((source.rpartition("/")[2], "copy", "00000-9.hf", "MANIFEST~"))
    return {**scene.files, f"{directory}/{name}": scene.files[source]}


@kind_of("lose a file")
def _(chance: random.Random, scene: Scene) -> dict[str, bytes]:
    lost = _any(chance, scene.files)
    return {name: content for name, content in scene.files.items() if name != lost}


@kind_of("lose a directory")
def _(chance: random.Random, scene: Scene) -> dict[str, bytes]:
    lost = _any(chance, scene.files).rpartition("/")[0]
    return {name: content for name, content in scene.files.items() if not name.startswith(lost)}


@kind_of("rename a file")
def _(chance: random.Random, scene: Scene) -> dict[str, bytes]:
    files = dict(scene.files)
    content = files.pop(name := _any(chance, files))
    return {**files, f"{name}{chance.choice(('~', '.bak', '0'))}": content}


@kind_of("a file of another save")
def _(chance: random.Random, scene: Scene) -> dict[str, bytes]:
    """A stale file under a newer MANIFEST, or the other way round; or all but one."""
    theirs = [content for _, content in sorted(chance.choice(scene.others).items())]
    mine = sorted(scene.files)
    number = chance.randrange(len(mine))
    rest = chance.random() < 0.3
    pairs = [(name, theirs[n % len(theirs)]) for n, name in enumerate(mine)]
    return {
        **scene.files,
        **dict(pairs[:number] + pairs[number + 1 :] if rest else [pairs[number]]),
    }


@kind_of("part of a file of another save")
def _(chance: random.Random, scene: Scene) -> dict[str, bytes]:
    """Blocks that were not written the second time, from one on or here and there."""
    theirs = [content for _, content in sorted(chance.choice(scene.others).items())]
    mine = sorted(scene.files)
    number = chance.randrange(len(mine))
    content, stale = scene.files[mine[number]], theirs[number % len(theirs)]
    if chance.random() < 0.5:
        start, end = _span(chance, content)
        mixed = _put(content, start, stale[start:end])
    else:
        at = chance.randrange(len(content) + 1)
        mixed = content[:at] + stale[at:] if chance.random() < 0.5 else stale[:at] + content[at:]
    return {**scene.files, mine[number]: mixed}


@kind_of("a base of another save")
def _(chance: random.Random, scene: Scene) -> dict[str, bytes]:
    """A whole one, that nothing is wrong with; or all of it but one file."""
    places = sorted({name.split("/")[0] for name in scene.files} - {scene.top})
    if not places or not scene.top:
        return KINDS["a file of another save"](chance, scene)
    place = f"{chance.choice(places)}/"
    kept = {name: content for name, content in scene.files.items() if not name.startswith(place)}
    theirs = chance.choice(scene.others)
    put = [name for name in sorted(theirs) if name.startswith(place)]
    if chance.random() < 0.3:
        put.remove(chance.choice(put))
    return kept | {name: theirs[name] for name in put}


@kind_of("both saves in one directory")
def _(chance: random.Random, scene: Scene) -> dict[str, bytes]:
    theirs = dict(chance.choice(scene.others))
    return {**theirs, **scene.files}  # the other way round it is the other checkpoint


@kind_of("several at once")
def _(chance: random.Random, scene: Scene) -> dict[str, bytes]:
    files = dict(scene.files)
    for _ in range(chance.randint(2, 4)):
        kinds = [kind for kind in KINDS if kind != "several at once"]
        files = damage(chance.getrandbits(32), replace(scene, files=files), kinds)[1] or files
    return files
