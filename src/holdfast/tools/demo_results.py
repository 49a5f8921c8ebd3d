"""What the demo saw, and the claims that it proves or does not. Pure: no processes, no files."""

import math
import statistics
from dataclasses import dataclass, field

from .demo_run import Kill

# Other numbers of ranks sum the same float32 numbers in another order, which moves a loss near 3 by
# some units in the last place, 2.4e-7 each. A wrong or stale weight moves it by 1e-3 and more.
LOSS_TOLERANCE = 5e-6

Losses = dict[int, float]  # by step


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of each counted save of one kind, and what it left on the disk."""

    name: str
    seconds: list[float]
    disk_bytes: int

    @property
    def median_s(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class Flip:
    """One bit flipped in a copy of a checkpoint, and what was said of it.

    Attributes:
        file: relative to the checkpoint.
        load_error: kind and text; None: it was loaded.
        faults: all that verify found.
    """

    file: str
    byte: int
    bit: int
    load_error: str | None
    faults: list[str]


@dataclass(slots=True)
class Results:
    """Everything seen, in the order it was seen.

    Attributes:
        kept: committed steps after the kill.
        refusal: error of an attempt to open the killed step; None: it opened.
        final_step: the last checkpoint of both runs.
        equal_tensors, tensors: of the two final checkpoints, compared by their bits.
        next_losses: of the step after the final checkpoint, by number of processes that loaded it.
    """

    size: str
    steps: int
    every: int
    machine: str
    unbroken: Losses = field(default_factory=dict)
    killed: Losses = field(default_factory=dict)
    kill: Kill | None = None
    kept: list[int] = field(default_factory=list)
    refusal: str | None = None
    restored: int = 0
    resumed: Losses = field(default_factory=dict)
    final_step: int = 0
    equal_tensors: int = 0
    tensors: int = 0
    parameters: int = 0
    state_bytes: int = 0
    next_losses: Losses = field(default_factory=dict)
    flip: Flip | None = None
    timings: list[Timing] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence, whether it holds, and what was seen."""

    text: str
    holds: bool
    seen: str


def same_bits(some: Losses, reference: Losses) -> int:
    """Count the losses that equal those of the same step in every bit."""
    return sum(s in reference and loss.hex() == reference[s].hex() for s, loss in some.items())


def judge(results: Results) -> list[Claim]:
    """Return every claim of the demo; one that could not be tested does not hold."""
    return [_killed_in_save(results), *_resumed(results), _resharded(results), *_flipped(results)]


def _killed_in_save(results: Results) -> Claim:
    kill = results.kill
    text = "SIGKILL hit in the middle of a save: data files, but no MANIFEST"
    if kill is None:
        return Claim(text, False, "the run ended before a save could be hit")
    data_files = sum(name.startswith("data/") for name in kill.files)
    manifest = "MANIFEST" if kill.committed else "no MANIFEST"
    seen = f"step {kill.step}: data files: {data_files}, {manifest}"
    return Claim(text, data_files > 0 and not kill.committed, seen)


def _resumed(results: Results) -> list[Claim]:
    last = max(results.kept, default=0)
    killed, resumed = results.killed, results.resumed
    complete = sorted(resumed) == list(range(results.restored + 1, results.steps + 1))
    before, after = same_bits(killed, results.unbroken), same_bits(resumed, results.unbroken)
    return [
        Claim(
            "the killed save is no checkpoint",
            results.refusal is not None,
            "it opened" if results.refusal is None else results.refusal.partition(":")[0],
        ),
        Claim(
            "the resumed run restored the last committed step",
            0 < last == results.restored,
            f"committed: {results.kept}, restored: {results.restored}",
        ),
        Claim(
            "until the kill, losses equal the unbroken run's bit for bit",
            0 < len(killed) == before,
            f"{before} of {len(killed)}",
        ),
        Claim(
            "after the resume, losses equal the unbroken run's bit for bit",
            complete and 0 < len(resumed) == after,
            f"{after} of {len(resumed)}, to step {max(resumed, default=0)} of {results.steps}",
        ),
        Claim(
            "the final checkpoints of both runs hold the same bits",
            0 < results.tensors == results.equal_tensors,
            f"{results.equal_tensors} of {results.tensors} tensors at step {results.final_step}",
        ),
    ]


def difference(results: Results) -> float:
    """Return the largest distance of a next loss from that of the unbroken run; NaN without any."""
    reference = results.unbroken.get(results.final_step + 1, math.nan)
    gaps = [abs(loss - reference) for loss in results.next_losses.values()]
    return math.nan if any(map(math.isnan, gaps)) else max(gaps, default=math.nan)


def _resharded(results: Results) -> Claim:
    counts = sorted(results.next_losses)
    return Claim(
        f"1 and 3 processes load what 2 wrote; the next loss agrees within {LOSS_TOLERANCE:.0e}",
        counts == [1, 3] and difference(results) <= LOSS_TOLERANCE,
        f"largest difference {difference(results):.1e}, tolerance {LOSS_TOLERANCE:.0e}",
    )


def _flipped(results: Results) -> list[Claim]:
    flip = results.flip
    refused = flip is not None and (flip.load_error or "").startswith("CorruptError")
    faults = [] if flip is None else flip.faults
    named = flip is not None and any(flip.file in fault for fault in faults)
    return [
        Claim(
            "load refuses a copy with one flipped bit",
            refused,
            "CorruptError" if refused else str(flip and flip.load_error),
        ),
        Claim("verify names the file with the flipped bit", named, f"faults found: {len(faults)}"),
    ]
