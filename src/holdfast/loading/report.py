"""What a load has done, for people and programs. Knows no files."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..brief import brief


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Results of a load on this rank; `load` returns it.

    Attributes:
        path: directory of the checkpoint.
        step: the step recorded in the checkpoint, or None.
        tensors: number of tensors filled.
        missing: names in the target that the checkpoint lacks; these are unchanged. If a repair
            lost a part of a parameter's optimizer state, all of that state is unchanged.
        unexpected: names in the checkpoint that are in no rank's target; these are not read.
        skipped: names that ``strict=False`` left out because they do not fit, and why: another
            shape, or a tensor here and a value there. These are unchanged. If a parameter is left
            out, so is its optimizer state.
        bytes_needed: bytes of the elements in this rank's target.
        bytes_read: bytes that this rank read from disk, for itself and for other ranks, with gaps.
        bytes_sent: bytes that this rank sent to other ranks.
        seconds: from call to return.

    Example::

        report = holdfast.load("runs/a/step-00001000", into=state, strict=False)
        print(report.tensors, report.missing, report.skipped)
    """

    path: str
    step: int | None
    tensors: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    bytes_needed: int
    bytes_read: int
    bytes_sent: int
    seconds: float = 0.0
    skipped: Mapping[str, str] = field(default_factory=dict)

    __repr__ = brief
