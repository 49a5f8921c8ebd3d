"""Draws what `watch.py` has found, by rich, at any width from 40 columns on. Reads no files."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.bar import Bar
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .behind import behind_text
from .text import clip, cut, is_colourful, printable, screen_size, show_bytes, show_count
from .waiting import leaving

Document = dict[str, Any]

TICK_S = 1.0
IDLE_SHARE = 10  # of the time that a look takes: very many steps, or a slow disk
SILENT_S = 15.0  # without a word a job may hang
RANKS_SHOWN_MAX = 16
STEP_ROWS = 5
NARROW = 72  # columns: of fewer, not all figures fit
_RUNNING = ("staging", "writing", "committing")


def show(look: Callable[[], Document], *, once: bool) -> None:
    """Draw until Ctrl-C; on anything but a terminal, or with ``once``, a single time.

    The terminal shows another screen meanwhile, and its own again afterwards.
    """
    colours = is_colourful(sys.stdout)
    console = Console(
        width=screen_size()[0], no_color=not colours, highlight=False, markup=False, emoji=False
    )
    if once or not console.is_terminal:
        console.print(draw(look(), *screen_size()))
        return
    first, took_s = draw(look(), *screen_size()), 0.0  # what fails is said on the terminal itself
    own = Console(no_color=not colours)
    with (
        _ending_well(),
        Live(first, console=own, screen=True, auto_refresh=False) as live,
        leaving(live.stop),
    ):
        while True:
            time.sleep(max(TICK_S, IDLE_SHARE * took_s))
            began_s = time.perf_counter()
            document = look()
            took_s = time.perf_counter() - began_s
            live.update(draw(document, live.console.width, live.console.height), refresh=True)


@contextlib.contextmanager
def _ending_well() -> Iterator[None]:
    """Let SIGTERM end the block as an error does: the terminal gets its own screen back."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)  # as shells report it

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def draw(document: Document, width: int, lines: int) -> RenderableType:
    """Return the screen: where, the save in flight, the last steps."""
    ranks = document["ranks"]
    parts: list[RenderableType] = [_heading(document, width)]
    parts += [Text(line) for line in behind_text(document["behind"], width)]
    if ranks:
        parts += [_training(document), Text()]
        parts += _flight(document, width, max(3, min(RANKS_SHOWN_MAX, lines - STEP_ROWS - 10)))
    else:
        parts += [_unseen(document["process"])]
        if document["saves"] and (error := document["saves"][-1]["error"]) is not None:
            parts += [_failed(document["saves"][-1]["step"], error, width)]
    room = lines - 3 - sum(_height(part) for part in parts)
    parts += [Text(), *_last(document, max(2, room - 1), width)]
    return Group(*parts)


def _height(part: RenderableType) -> int:
    return part.row_count if isinstance(part, Table) else 1


def _heading(document: Document, width: int) -> Text:
    size = show_count(document["steps"], "step")
    free = document["free_bytes"]
    facts = f"   {size}" + (f"   {show_bytes(free)} free" if free is not None else "")
    where = cut(printable(document["path"]), max(width - cell_len(facts), 12))
    return Text.assemble((where, "bold"), facts)


def _unseen(process: int | None) -> Text:
    """Say what is known of a job without a progress file."""
    if process is None:
        return Text("no job says that it runs here", style="yellow")
    text = (
        f"process {process} on this machine has this run. It writes no progress here: with local="
    )
    return Text(f"{text}, watch its local directory")


def _is_silent(document: Document, said: Document) -> bool:
    return bool(said["has_ended"] or document["now_s"] - said["time_s"] > SILENT_S)


def _training(document: Document) -> Text:
    ranks = document["ranks"]
    first = ranks[0]
    hosts = len({said["host"] for said in ranks})
    size = first["world_size"]
    text = f"step {first['step']:,} of training" if first["step"] >= 0 else "before the first step"
    text += f"   {show_count(size, 'rank')} on {show_count(hosts, 'host')}"
    silent = [said["rank"] for said in ranks if _is_silent(document, said)]
    are_all = len(silent) == len(ranks)
    if are_all:
        text = f"last known: {text}"
    elif first["due_step"] >= 0:
        text += f"   next save at step {first['due_step']:,}"
    elif first["due_s"] > 0:
        text += f"   next save in {max(0.0, first['due_s'] - document['now_s']):.0f} s"
    line = Text(text)
    if silent:
        oldest_s = document["now_s"] - min(s["time_s"] for s in ranks)
        who = "the job" if are_all else f"rank {', '.join(map(str, silent[:4]))}"
        why = "it hangs, or was killed"
        if ended := [s["pid"] for s in ranks if s["has_ended"]]:
            why = f"process {', '.join(map(str, ended[:4]))} has ended"
        line.append(f"\n{who} has said nothing for {oldest_s:.0f} s: {why}", style="bold red")
    ahead_s = max(s["time_s"] for s in ranks) - document["now_s"]
    if ahead_s > SILENT_S:
        text = f"\nthe job's clock is {ahead_s:,.0f} s ahead of this one: times are not comparable"
        line.append(text, style="yellow")
    if len(ranks) < size:
        line.append(f"\n{show_count(size - len(ranks), 'rank')} not heard of", style="yellow")
    return line


def _flight(document: Document, width: int, rows: int) -> list[RenderableType]:
    """Return the save in flight, with a bar for each rank; the ranks that are behind come first."""
    ranks = document["ranks"]
    step = max(said["save_step"] for said in ranks)
    if step < 0:
        return [Text("no save yet", style="dim")]
    here = [said for said in ranks if said["save_step"] == step]
    running = [said for said in here if said["state"] in _RUNNING]
    failed = [said for said in ranks if said["failed_s"] > said["committed_s"]]
    found: list[RenderableType] = []
    if failed:
        found.append(_failed(failed[0]["failed_step"], failed[0]["failed"], width))
    written = sum(said["written_bytes"] for said in here)
    total = sum(said["total_bytes"] for said in here)
    head = f"saving step {step:,}: {show_bytes(written)} of {show_bytes(total)}"
    if all(_is_silent(document, said) for said in ranks):
        return [*found, Text(f"last known: {head}")] if running else found
    if not running:
        if not failed:
            found.append(Text(f"no save in flight; the last one was step {step:,}"))
        return found
    taken_s = max(0.0, document["now_s"] - min(said["began_s"] for said in here))
    rate = f"   {show_bytes(int(written / taken_s))}/s" if written and taken_s > 0 else ""
    found.append(Text(f"{head}{rate}   {taken_s:.0f} s", style="bold"))
    here.sort(key=lambda said: (_share(said), said["rank"]))
    found.append(_bars(here[:rows], width))
    if len(here) > rows:
        found.append(Text(f"… {show_count(len(here) - rows, 'rank')} further ahead", style="dim"))
    return found


def _failed(step: int, error: str, width: int) -> Text:
    text = f"the save of step {step:,} failed: {printable(error)}"
    return Text(clip(text, 2 * width), style="bold red")


def _share(said: Document) -> float:
    if said["state"] in ("committing", "committed"):
        return 1.0
    share: float = said["written_bytes"] / max(said["total_bytes"], 1)
    return min(share, 1.0)


def _bars(ranks: list[Document], width: int) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), width=width)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for said in ranks:
        share = _share(said)
        bar = Bar(1.0, 0.0, share, color="green" if share >= 1 else "cyan", bgcolor="grey23")
        host = cut(printable(said["host"]), max(width // 8, 8))
        table.add_row(
            *(Text(f"rank {said['rank']}"), Text(host), bar),
            *(Text(f"{100 * share:.0f} %"), Text(printable(said["state"]))),
        )
    return table


def _last(document: Document, rows: int, width: int) -> list[RenderableType]:
    saves = document["saves"][-rows:]
    if not saves:
        return [Text("metrics.jsonl has no save yet", style="dim")]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("at (UTC)", no_wrap=True)
    names = ("took", "stall", "written", "ranks") if width >= NARROW else ("took",)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for save in reversed(saves):
        if save["error"] is not None:
            failed = (f"{save['step']:,}", "failed", _when(save, width))
            table.add_row(*map(Text, failed), style="red")
            continue
        size = show_bytes(save["stored_bytes"]) if save["stored_bytes"] else ""
        cells = (
            f"{save['step']:,}",
            cut(printable(save["verb"]), 8),
            _when(save, width),
            f"{save['took_s']:.2f} s",
            f"{save['stall_s']:.2f} s",
            size,
            f"{save['ranks']:,}",
        )
        table.add_row(*map(Text, cells[: 3 + len(names)]))
    return [table]


def _when(save: Document, width: int) -> str:
    """Show the date and the time, or on a narrow screen the time alone."""
    return cut(printable(save["time"]).replace("T", " ")[:19], 19)[0 if width >= NARROW else 11 :]
