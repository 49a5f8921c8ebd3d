"""Millions of damaged checkpoints: each loads as it was saved or meets an error of holdfast's own.

`make damage`. A case is a seed: it chooses a checkpoint and what happens to its files. Then the
checkpoint is loaded in full, `verify` looks at it, and the files are put back. What is counted:

- refused: the load raised a typed error, and every byte of the target is as saved or untouched;
- unharmed: the load gave what was saved, as the damage changed nothing that counts (a stray of a
  dead save, a block swapped with its like) or hit a part of a base that no link needs;
- faults: wrong data, damage that `verify` does not see, another exception, too long, too much
  memory.
"""

import argparse
import multiprocessing
import multiprocessing.connection
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a run as a program

import torch

import holdfast
from conftest import MEMORY
from damage.generator import damage
from damage.subjects import CODECS, NAMES, OPTIONS, Subject, make
from format.simulated_ranks import run_ranks
from holdfast.engine import check
from holdfast.errors import CorruptError, MismatchError, NotCommittedError, VersionError
from holdfast.format.manifest import Manifest
from holdfast.tools.verify import verify

# Damage is never the store's fault. A MANIFEST that has taken another's place fits no target.
EXPECTED = (CorruptError, VersionError, NotCommittedError, MismatchError)
SECONDS_MAX = 2.0  # of processor time, for one case: the machine may do other things too
MEMORY_MAX = 256 << 20  # more than at the beginning
RANKS_EVERY = 64  # so many cases one is loaded by two ranks


@dataclass
class Tally:
    """What has been counted."""

    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seen: int = 0  # damage that verify found
    harmless: int = 0  # damage that changed nothing
    slowest_s: float = 0.0
    grown: int = 0  # bytes of memory, since the beginning

    def add(self, other: "Tally") -> None:
        """Add what another process has counted."""
        self.cases += other.cases
        self.outcomes += other.outcomes
        self.kinds += other.kinds
        self.errors += other.errors
        self.faults += other.faults
        self.seen += other.seen
        self.harmless += other.harmless
        self.grown = max(self.grown, other.grown)
        self.slowest_s = max(self.slowest_s, other.slowest_s)


def try_case(subjects: list[Subject], seed: int, tally: Tally) -> None:
    """Damage a checkpoint as the seed says, and judge what a load and `verify` make of it."""
    subject = subjects[seed % len(subjects)]
    kind, files = damage(seed, subject.scene)
    if subject.is_another(files):
        files = dict(subject.scene.files)
    where = f"seed {seed}: {subject.name}, {kind}"
    started = time.process_time()
    with subject.damaged(files):
        judge(subject, files, where, tally, ranks=2 if seed % RANKS_EVERY == 0 else 1)
    seconds = time.process_time() - started
    tally.slowest_s = max(tally.slowest_s, seconds)
    tally.cases += 1
    tally.kinds[kind] += 1
    if seconds > SECONDS_MAX:
        tally.faults.append(f"{where}: took {seconds:.1f} s of processor time")


def judge(subject: Subject, files: dict[str, bytes], where: str, tally: Tally, ranks: int) -> None:
    """Load and verify the checkpoint as it stands; count what comes of it."""
    harmless = subject.is_harmless(files)
    loaded = _load(subject, files, where, tally, ranks)
    try:
        (seen,) = verify(subject.path)["checkpoints"]
        found = not seen["good"] or bool(seen["spared"])  # a fault of a base that costs nothing
    except EXPECTED:
        found = True
    except BaseException as error:
        found = True
        tally.faults.append(f"{where}: verify raised {error!r:.300}")
    tally.seen += found
    tally.harmless += harmless
    if found == harmless:
        tally.faults.append(
            f"{where}: verify {'refuses what is whole' if found else 'sees nothing'}"
        )
    if loaded and not harmless and subject.needs(files):
        tally.faults.append(f"{where}: a strict load saw nothing")
    if not loaded and harmless:
        tally.faults.append(f"{where}: a load refuses what is whole")
    tally.outcomes["unharmed" if loaded else "refused"] += 1


def _load(subject: Subject, files: dict[str, bytes], where: str, tally: Tally, ranks: int) -> bool:
    """Whether a full load by so many ranks succeeds; wrong data in the targets is a fault."""
    targets = [subject.target]
    try:
        if ranks == 1:
            holdfast.load(subject.path, into=targets[0].state, options=OPTIONS)
        else:
            targets = [subject.target, subject.second]
            run_ranks(
                ranks,
                lambda group: holdfast.load(
                    subject.path,
                    into=targets[group.rank].state,
                    group=group,  # type: ignore[arg-type]
                    options=OPTIONS,
                ),
            )
        if not all(target.is_whole() for target in targets):
            tally.faults.append(f"{where}: WRONG DATA, silently")
        return True
    except EXPECTED as error:
        tally.errors[type(error).__name__] += 1
        return False
    except BaseException as error:
        tally.faults.append(f"{where}: {error!r:.300}")
        return False
    finally:
        if not all(target.is_right(subject.truth(files)) for target in targets):
            tally.faults.append(f"{where}: wrong data in a target")
        for target in targets:
            target.reset()


def flip_all(subject: Subject, tally: Tally, part: int, parts: int, step: int = 1) -> None:
    """Flip every bit of every file, one at a time (or a part of them, or a sample)."""
    number = 0
    for name, content in subject.scene.files.items():
        for bit in range(0, 8 * len(content), step):
            number += 1
            if number % parts != part:
                continue
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            files = {**subject.scene.files, name: bytes(flipped)}
            with subject.damaged(files):
                judge(subject, files, f"{subject.name}: bit {bit} of {name}", tally, ranks=1)
            tally.cases += 1


def make_all(names: list[str], scratch: Path) -> list[Subject]:
    """Make the checkpoints, and check that each is accepted as it is."""
    subjects = [make(name, scratch / name) for name in names]
    for subject in subjects:
        tally = Tally()
        judge(subject, dict(subject.scene.files), subject.name, tally, ranks=2)
        assert tally.faults == [] and tally.outcomes["unharmed"], tally.faults
    return subjects


@contextmanager
def whole_manifests_parsed_once(subjects: list[Subject]) -> Iterator[None]:
    """Remember what a MANIFEST that is as it was written parses to: half of the time goes there.

    One that is damaged in any byte is parsed as ever.
    """
    whole = {
        content
        for subject in subjects
        for name, content in subject.scene.files.items()
        if name.endswith("/MANIFEST")
    }
    parse, check_tiling, known = check.decode_manifest, check.check_tiling, dict[bytes, Manifest]()

    def remembered(data: bytes, where: str) -> Manifest:
        if data not in whole:
            return parse(data, where)
        if data not in known:
            check_tiling(manifest := parse(data, where))
            known[data] = manifest
        return known[data]

    def check_new(manifest: Manifest) -> None:
        if not any(manifest is other for other in known.values()):
            check_tiling(manifest)

    with (
        patch.object(check, "decode_manifest", remembered),
        patch.object(check, "check_tiling", check_new),
    ):
        yield


def work(part: int, options: argparse.Namespace, results: Connection) -> None:
    """Do one process's share of the cases, or of the flips; send the tally now and then."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as scratch:
        names = list(CODECS.values()) if options.flips else NAMES
        subjects = make_all(names, Path(scratch))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with whole_manifests_parsed_once(subjects):
            for tally in _share(part, options, subjects):
                grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
                if grown > MEMORY_MAX:
                    tally.faults.append(f"{grown >> 20} MiB more than at the beginning")
                tally.grown = max(0, grown)
                results.send(tally)
    results.send(None)


def _share(part: int, options: argparse.Namespace, subjects: list[Subject]) -> Iterator[Tally]:
    if options.flips:
        for codec, subject in zip(CODECS, subjects, strict=True):
            flip_all(subject, tally := Tally(), part, options.jobs, options.step)
            tally.kinds = Counter({f"bits of {codec}": tally.cases})
            yield tally
        return
    seeds = range(options.seed + part, options.seed + options.cases, options.jobs)
    for first in range(0, len(seeds), 500):
        tally = Tally()
        for seed in seeds[first : first + 500]:
            try_case(subjects, seed, tally)
        yield tally


def main() -> int:
    """Run a campaign; print what was counted; 1 where anything got through."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--flips", action="store_true", help="every bit of each codec instead")
    parser.add_argument("--step", type=int, default=1, help="with --flips: each so many bits")
    options = parser.parse_args()
    started, total = time.monotonic(), Tally()
    ends = []
    for part in range(options.jobs):
        here, there = multiprocessing.Pipe(duplex=False)
        multiprocessing.Process(target=work, args=(part, options, there), daemon=True).start()
        there.close()
        ends.append(here)
    shown = started
    while ends:
        for end in multiprocessing.connection.wait(ends):
            try:
                tally = end.recv()
            except EOFError:
                tally, total.faults = None, [*total.faults, "a process died"]
            if tally is None:
                ends.remove(end)
                continue
            for fault in tally.faults[: 100 - len(total.faults)]:
                print(fault, flush=True)
            total.add(tally)
            if time.monotonic() - shown > 60:
                shown = time.monotonic()
                print(f"{total.cases} cases, {len(total.faults)} faults", flush=True)
    print(report(total, options, time.monotonic() - started))
    return bool(total.faults)


def report(total: Tally, options: argparse.Namespace, seconds: float) -> str:
    """Return the counts as lines."""
    what = (
        "every bit"
        if options.flips
        else f"seeds {options.seed} to {options.seed + options.cases - 1}"
    )
    lines = [
        f"{total.cases} cases ({what}) in {seconds:.0f} s by {options.jobs} processes; "
        f"slowest {total.slowest_s:.2f} s of processor time, "
        f"{total.grown >> 20} MiB more memory at most",
        f"each loaded in full: {total.outcomes['refused']} refused "
        f"({', '.join(f'{n} {name}' for name, n in total.errors.most_common())}), "
        f"{total.outcomes['unharmed']} as saved",
        f"damage that `verify` finds: {total.seen}; that changed nothing: {total.harmless}",
        *(f"  {count:8} {kind}" for kind, count in sorted(total.kinds.items())),
        f"faults: {len(total.faults)}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
