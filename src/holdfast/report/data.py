"""What a report shows of a run, as frozen data: the same for HTML, JSON and traces.

Knows no store and no HTML. All times are in seconds, all sizes in bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..format.local_room import LocalRoom

_SAVING = ("wait", "plan", "stage", "encode", "write", "sync", "commit", "retire")
PHASES = (*_SAVING, "read", "place", "other")  # "other" is no span: what is in none


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a save or load on one rank; times count from when the ranks met."""

    phase: str
    start_s: float
    end_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one rank measured of one save or load.

    Attributes:
        local_rank: place among the ranks of its host.
        clock_offset_s: how far its clock is ahead of the first rank's.
        is_estimated: the spans are made from sums, as an older holdfast wrote no others.
    """

    rank: int
    host: str
    local_rank: int
    bytes: int
    stored_bytes: int
    stall_s: float
    total_s: float
    clock_offset_s: float
    seconds: Mapping[str, float]
    spans: tuple[Span, ...]
    is_estimated: bool


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """One phase of one save: over all ranks."""

    median_s: float
    max_s: float
    slowest_rank: int


@dataclass(frozen=True, slots=True)
class Save:
    """One save, or load, of all ranks.

    Attributes:
        verb: "save" or "load".
        time: when its line was written, in seconds since 1970.
        stall_s: the longest that a rank's training was held up.
        records: what each rank measured; empty for those of which only the summary is kept.
    """

    verb: str
    step: int
    time: float
    ranks: int
    bytes: int
    stored_bytes: int
    total_s: float
    stall_s: float
    slowest_rank: int
    phases: Mapping[str, PhaseSummary]
    records: tuple[RankRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class HeatRow:
    """The typical seconds of one rank in each phase, over the newest saves."""

    rank: int
    host: str
    local_rank: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Failure:
    """A save that failed; ``time`` is in seconds since 1970, 0.0 if it is not known."""

    step: int
    time: float
    error: str


@dataclass(frozen=True, slots=True)
class Timing:
    """What the metrics of a run hold.

    Attributes:
        saves: summaries, ascending in time; of very many, the newest and some of the older ones.
        counts: how many saves and loads there were in all.
        heat: of the newest saves, one row a rank.
        stored_bytes: of all saves together.
        skipped_lines: lines that are torn or damaged.
        clocks: the largest difference of two ranks' clocks.
        jumps: how often time went backwards from one save to the next.
        steps_saved: different steps that were saved.
        unread_files: older files of metrics that were not read, as there are very many lines.
        failures: the newest saves that failed; ``counts["failure"]`` says how many there were.
        is_failing: the newest save is one of them.
    """

    saves: tuple[Save, ...] = ()
    counts: Mapping[str, int] | None = None
    heat: tuple[HeatRow, ...] = ()
    heat_saves: int = 0
    stored_bytes: int = 0
    skipped_lines: int = 0
    clocks: float = 0.0
    jumps: int = 0
    steps_saved: int = 0
    unread_files: int = 0
    failures: tuple[Failure, ...] = ()
    is_failing: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One step that lies in the run.

    Attributes:
        state: as `holdfast inspect` has it: "committed", "uncommitted", "damaged", …
        size_bytes: of its elements.
        stored_bytes: of its payloads.
        fault: what is wrong with it; "" if nothing is known.
        parts: bytes stored of each part of the state, such as "model.layers"; of the newest steps.
        unfinished: why it is not committed; "" if it is.
    """

    name: str
    step: int | None
    state: str
    disk_bytes: int
    size_bytes: int
    stored_bytes: int
    codecs: tuple[str, ...]
    base: str | None
    world_size: int | None
    metrics: Mapping[str, float]
    fault: str
    parts: Mapping[str, int] = field(default_factory=dict)
    unfinished: str = ""


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of a checkpoint; ``loss`` is its relative squared error, or None if exact."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    stored_bytes: int
    codec: str
    loss: float | None


@dataclass(frozen=True, slots=True)
class BoxRow:
    """A box of a tensor, and the rank that wrote it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    rank: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What one checkpoint holds, and who wrote it.

    Attributes:
        rank_bytes: bytes in the files of each rank.
        boxes: of the largest tensors that are in several boxes, by name.
        mesh: names and shape of the device mesh, or None.
    """

    name: str
    tensors: tuple[TensorRow, ...]
    rank_bytes: tuple[int, ...]
    boxes: Mapping[str, tuple[BoxRow, ...]]
    mesh: Mapping[str, Any] | None
    objects: int


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know, in plain words.

    Attributes:
        level: "bad", "warn", "note" or "good".
        kind: what rule found it: "straggler", "disk", "damage", "explosion", …
        advice: what to do, or "".
    """

    level: str
    kind: str
    title: str
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class RunData:
    """Everything that the report of a run shows.

    Attributes:
        made: when it was made, in seconds since 1970.
        earlier_steps: older steps that were not opened.
        free_bytes: room on the disk, where that is known.
        contents: of the newest step that could be opened.
        behind: what `holdfast inspect` says of the store behind a local run; None: there is none.
        room: of a local run, what its disk does when it is full.
    """

    path: str
    made: float
    version: str
    latest: str | None
    steps: tuple[Step, ...]
    earlier_steps: int
    free_bytes: int | None
    timing: Timing
    contents: Contents | None
    scrubbed: str
    behind: Mapping[str, Any] | None = None
    room: LocalRoom | None = None
    findings: tuple[Finding, ...] = ()
