"""The demo's results as text, for the terminal and for report.md. Pure: results in, lines out."""

import re
from collections.abc import Sequence
from pathlib import Path

from .demo_results import LOSS_TOLERANCE, Claim, Results, Timing, difference
from .demo_run import Kill
from .text import show_bytes

Table = Sequence[Sequence[str]]  # the first row is the header
_SAVE = re.compile(r"(?<=data/)[0-9a-f]{32}(?=/)")  # each save has a directory of its own


def finding(results: Results) -> str:
    """Say in one sentence what the demo found; only to be used when every claim holds."""
    step = results.kill.step if results.kill else 0
    return (
        f"Killed while saving step {step}, resumed from step {results.restored}: "
        f"the loss is the same, bit for bit"
    )


def brief(text: str, scratch: Path) -> str:
    """Shorten the paths in a text: what leads to the scratch directory, and the names of saves.

    ``"/a/runs-x1/killed/step-8 has no MANIFEST"`` → ``"killed/step-8 has no MANIFEST"``
    """
    return _SAVE.sub("…", text.replace(f"{scratch}/", ""))


def earlier(kill: Kill) -> str:
    """Say how long the whole saves took that were seen before the kill."""
    if not kill.saves_s:
        return ""
    return f" (earlier ones took {min(kill.saves_s):.3f} to {max(kill.saves_s):.3f} s)"


def tables(results: Results) -> dict[str, Table]:
    """Return every table by its title, in order."""
    return {
        "Kill and resume": _story(results),
        "Losses": _losses(results),
        "Durable saves of the same state": _saves(results),
        "Size on disk": _sizes(results),
    }


def _story(results: Results) -> Table:
    kill = results.kill
    rows = [["What", "Seen"]]
    rows.append(["model", f"GPT, {results.parameters:,} parameters, FSDP2 on 2 processes, AdamW"])
    rows.append(["state", f"{show_bytes(results.state_bytes)} in {results.tensors} tensors"])
    if kill is not None:
        data = [size for name, size in kill.files.items() if name.startswith("data/")]
        written = f"{show_bytes(kill.written_bytes)} of {show_bytes(sum(data))} written"
        manifest = "MANIFEST: yes" if kill.committed else "MANIFEST: no"
        rows.append(["step killed", f"{kill.step}, SIGKILL to {kill.processes} processes"])
        rows.append(["killed after", f"{kill.after_s:.3f} s of its save{earlier(kill)}"])
        rows.append(["left of that save", f"data files: {len(data)}, {written}; {manifest}"])
    rows.append(["committed steps then", ", ".join(map(str, results.kept))])
    rows.append(["step restored", str(results.restored)])
    return rows


def _losses(results: Results) -> Table:
    """Choose the steps where something happened; show bits too, so that anybody can compare."""
    rows = [["Step", "Run", "Loss", "Bits of the loss"]]
    first, last = results.restored + 1, results.steps
    for step in dict.fromkeys([first, results.final_step, last]):
        for name, losses in (("unbroken", results.unbroken), ("resumed", results.resumed)):
            if step in losses:
                rows.append([str(step), name, f"{losses[step]:.6f}", losses[step].hex()])
    for processes, loss in sorted(results.next_losses.items()):
        name = "1 process, plain" if processes == 1 else f"{processes} processes, FSDP2"
        rows.append([str(results.final_step + 1), name, f"{loss:.6f}", loss.hex()])
    return rows


def gigabytes_per_second(timing: Timing, results: Results) -> float:
    """Return the speed of the median save, in bytes of the state."""
    return results.state_bytes / timing.median_s / 1e9


def _saves(results: Results) -> Table:
    rows = [["Save", "Median", "Fastest", "Slowest", "Speed", "Time / holdfast"]]
    for timing in results.timings:
        seconds = (timing.median_s, min(timing.seconds), max(timing.seconds))
        speed = f"{gigabytes_per_second(timing, results):.2f} GB/s"
        ratio = f"{timing.median_s / results.timings[0].median_s:.2f}"
        rows.append([timing.name, *(f"{s:.3f} s" for s in seconds), speed, ratio])
    return rows


def save_times(results: Results) -> Table:
    """Return the table of saves without what follows from the rest of it."""
    return [row[:-1] for row in _saves(results)]


def _sizes(results: Results) -> Table:
    rows = [["What", "Bytes", "Beside the state"]]
    rows.append(["tensors of the state", f"{results.state_bytes:,}", ""])
    for timing in results.timings:
        extra = timing.disk_bytes / max(results.state_bytes, 1) - 1
        rows.append([timing.name, f"{timing.disk_bytes:,}", f"{extra:+.2%}"])
    return rows


def align(table: Table) -> list[str]:
    """Lay a table out as Markdown whose columns line up, so that it reads as plain text too."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    header, *rows = [
        "| " + " | ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)) + " |"
        for row in table
    ]
    return [header, "|" + "|".join("-" * (n + 2) for n in widths) + "|", *rows]


def verdict(claims: Sequence[Claim]) -> list[str]:
    """List the claims; one that does not hold with what was seen."""
    return [f"yes: {claim.text}" if claim.holds else _with_seen(claim) for claim in claims]


def _with_seen(claim: Claim) -> str:
    return f"{'yes' if claim.holds else 'NO'}: {claim.text} ({claim.seen})"


def notes(results: Results) -> list[str]:
    """Say how the numbers came about."""
    rounds = len(results.timings[0].seconds) if results.timings else 0
    return [
        f"Losses of 1 and 3 processes may differ by {LOSS_TOLERANCE:.0e} from that of 2, whose "
        f"sums run in another order; the largest difference is {difference(results):.1e}.",
        f"Saves: 2 processes (torch.save: rank 0 alone), medians of {rounds} rounds in shuffled "
        "order after one that warms up, each to a new directory and on the disk (fsync) when its "
        "time ends. Not counted: gathering the full state for torch.save, naming it for DCP.",
        f"Machine: {results.machine}. The demo took {results.seconds:.0f} s.",
    ]


def write_markdown(results: Results, claims: Sequence[Claim], *, picture: str | None) -> str:
    """Return report.md."""
    proven = all(claim.holds for claim in claims)
    lines = ["# holdfast demo", ""]
    lines += [f"{finding(results)}." if proven else "**Not every claim held; see below.**", ""]
    lines += [f"![loss across kill and resume, and save times]({picture})", ""] if picture else []
    for title, table in tables(results).items():
        lines += [f"## {title}", "", *align(table), ""]
    lines += ["## One flipped bit", "", *_flip_lines(results), ""]
    lines += ["## Claims", "", *(f"- {_with_seen(claim)}" for claim in claims), ""]
    lines += ["## Notes", "", *(f"- {note}" for note in notes(results))]
    return "\n".join(lines) + "\n"


def _flip_lines(results: Results) -> list[str]:
    flip = results.flip
    if flip is None:
        return ["No bit was flipped."]
    return [
        f"Bit {flip.bit} of byte {flip.byte:,} of `{flip.file}`,",
        "in a copy of the final checkpoint.",
        "",
        "`load` says:",
        "",
        "```",
        flip.load_error or "nothing: it was loaded",
        "```",
        "",
        "`verify` says:",
        "",
        "```",
        *(flip.faults or ["nothing: it found no fault"]),
        "```",
    ]
