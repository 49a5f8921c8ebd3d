"""What becomes of damaged checkpoints: refused, loaded as saved, or silently with wrong data.

The damage is that of tests/damage, the same seeds for each format. A load that ends its process, or
does not end, is counted as such and is no silent one. Damage that leaves every byte as it was, or
puts another save there as a whole, is no case.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # before this file, of the same name

import holdfast
from damage.generator import Scene, damage

OUT = Path(__file__).parent / "out"
MEMORY = Path("/dev/shm")
MEMORY_MAX = 16 << 30  # of address space: torch alone takes a few
SECONDS_MAX = 20  # of processor time, for a load
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Format:
    """A way to save and load."""

    name: str
    save: Callable[[State, Path], None]
    load: Callable[[Path, State], State]


def main() -> None:
    """Damage each format alike; print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=20_000, help="of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formats", help="of these names only, with commas")
    parser.add_argument("--json", type=Path, default=OUT / "damage.json", help="result file")
    options = parser.parse_args()
    found = {}
    for form in formats():
        if options.formats is None or form.name in options.formats.split(","):
            found[form.name] = _measure(form, range(options.seed, options.seed + options.cases))
            print(form.name, dict(sum(found[form.name].values(), Counter())), flush=True)
    result = {
        "command": shlex.join(["python", "benchmarks/damage.py", *sys.argv[1:]]),
        "versions": {name: _version(name) for name in ("torch", "safetensors", "orbax.checkpoint")},
        "found": found,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))


def report(result: dict[str, Any]) -> str:
    """Return a result as Markdown: all kinds together, then each."""
    found = {name: {k: Counter(c) for k, c in each.items()} for name, each in _of(result).items()}
    lines = [
        "| | cases | refused | as saved | **wrong data, silently** | process ended | did not end |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, kinds in found.items():
        total = sum(kinds.values(), Counter[str]())
        cells = [
            f"{total[what]} ({total[what] / max(1, total.total()):.1%})"
            for what in ("refused", "as saved", "wrong", "ended", "endless")
        ]
        lines.append(f"| {name} | {total.total()} | {' | '.join(cells)} |")
    lines += ["", f"| wrong data, silently | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
    for kind in sorted({kind for kinds in found.values() for kind in kinds}):
        shares = [
            f"{kinds[kind]['wrong'] / kinds[kind].total():.1%}" if kind in kinds else ""
            for kinds in found.values()
        ]
        lines.append(f"| {kind} | {' | '.join(shares)} |")
    return "\n".join(lines)


def _of(result: dict[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    found: dict[str, dict[str, dict[str, int]]] = result["found"]
    return found


def formats() -> list[Format]:
    """Those that are installed."""
    found = [
        Format("holdfast", _save_holdfast, _load_holdfast),
        Format("torch.save", _save_torch, _load_torch),
        Format("torch DCP", _save_dcp, _load_dcp),
    ]
    if _version("safetensors"):
        found.append(Format("safetensors", _save_safetensors, _load_safetensors))
    if _version("orbax.checkpoint"):
        found.append(Format("Orbax", _save_orbax, _load_orbax))
    return found


def _state(seed: int) -> State:
    draw = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(40, 30, generator=draw),
        "half": torch.randn(50, 20, generator=draw).bfloat16(),
        "count": torch.randint(0, 1 << 40, (60,), generator=draw),
    }


def _save_holdfast(state: State, path: Path) -> None:
    holdfast.save(state, path)


def _load_holdfast(path: Path, into: State) -> State:
    holdfast.load(path, into=into)
    return into


def _save_torch(state: State, path: Path) -> None:
    path.mkdir()
    torch.save(state, path / "state.pt")


def _load_torch(path: Path, into: State) -> State:
    loaded: State = torch.load(path / "state.pt", weights_only=True)
    return loaded


def _save_dcp(state: State, path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=path, no_dist=True)


def _load_dcp(path: Path, into: State) -> State:
    import torch.distributed.checkpoint as dcp

    dcp.load(into, checkpoint_id=path, no_dist=True)
    return into


def _save_safetensors(state: State, path: Path) -> None:
    from safetensors.torch import save_file

    path.mkdir()
    save_file(state, path / "state.safetensors")


def _load_safetensors(path: Path, into: State) -> State:
    from safetensors.torch import load_file

    loaded: State = load_file(path / "state.safetensors")
    return loaded


def _save_orbax(state: State, path: Path) -> None:
    import orbax.checkpoint as orbax

    arrays = {name: tensor.view(torch.uint8).numpy() for name, tensor in state.items()}
    orbax.PyTreeCheckpointer().save(path.absolute(), arrays)


def _load_orbax(path: Path, into: State) -> State:
    import orbax.checkpoint as orbax

    arrays = orbax.PyTreeCheckpointer().restore(path.absolute())
    return {
        name: torch.from_numpy(arrays[name].copy()).view(tensor.dtype).view(tensor.shape)
        for name, tensor in into.items()
    }


def _measure(form: Format, seeds: range) -> dict[str, Counter[str]]:
    """Count outcomes by kind of damage; a process that ends is replaced by another."""
    found: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as scratch:
        saved = [Path(scratch, place, "save") for place in "abc"]
        for number, path in enumerate(saved):
            path.parent.mkdir()
            _in_a_process(form.save, _state(number), path)
        scenes = [_files(path) for path in saved]
        at = seeds.start
        while at < seeds.stop:
            here, there = multiprocessing.Pipe(duplex=False)
            scene = Scene(scenes[0], scenes[1:])
            work = (form, saved[0], scene, range(at, seeds.stop), there)
            process = multiprocessing.Process(target=_work, args=work)
            process.start()
            there.close()
            kind = ""
            while True:
                try:
                    at, kind, outcome = here.recv()
                except EOFError:
                    break
                if outcome:
                    if outcome != "none":
                        found.setdefault(kind, Counter())[outcome] += 1
                    kind = ""
            process.join()
            if kind:  # it had begun a case, and ended
                ended = "endless" if process.exitcode == -signal.SIGXCPU else "ended"
                found.setdefault(kind, Counter())[ended] += 1
            at += 1
            _put(saved[0], _files(saved[0]), scenes[0])
    return found


def _in_a_process(work: Callable[..., None], *arguments: Any) -> None:
    """Save elsewhere: threads that a format starts do not survive the fork of this process."""
    process = multiprocessing.Process(target=work, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0


def _work(form: Format, path: Path, scene: Scene, seeds: range, results: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    truth, own = _state(0), dict(scene.files)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX, MEMORY_MAX))
    others = [sorted(other.values()) for other in scene.others]
    for seed in seeds:
        kind, files = damage(seed, scene)
        if files == own or sorted(files.values()) in others or not files:
            results.send((seed, kind, "none"))
            continue
        results.send((seed, kind, ""))
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        limit = int(used) + SECONDS_MAX
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        _put(path, own, files)
        try:
            into = {name: torch.full_like(tensor, 7) for name, tensor in truth.items()}
            loaded = form.load(path, into)
            outcome = "as saved" if _same(loaded, truth) else "wrong"
        except BaseException:
            outcome = "refused"
        _put(path, files, own)
        results.send((seed, kind, outcome))


def _same(loaded: State, truth: State) -> bool:
    return loaded.keys() == truth.keys() and all(
        loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)
        for name, tensor in truth.items()
    )


def _files(root: Path) -> dict[str, bytes]:
    return {
        p.relative_to(root).as_posix(): p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


def _put(root: Path, old: dict[str, bytes], new: Any) -> None:
    for name in old.keys() | new.keys():
        if old.get(name) != new.get(name):
            file = root / name
            if name not in new:
                file.unlink(missing_ok=True)
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(new[name])
    for directory in sorted((p for p in root.rglob("*") if p.is_dir()), reverse=True):
        if not any(directory.iterdir()):
            shutil.rmtree(directory)


def _version(name: str) -> str | None:
    try:
        return str(import_module(name).__version__)
    except ImportError:
        return None


if __name__ == "__main__":
    main()
