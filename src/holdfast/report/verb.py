"""`holdfast report`, and the files that `inspect --html` and `diff --html` write."""

import contextlib
import os
import re
from typing import Any

from ..errors import OptionError, StoreError
from ..tools.text import cut, printable, screen_size, show_bytes
from .document import document_of, page_of
from .read import read_run
from .trace import trace_of

Document = dict[str, Any]
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/([0-9]+)")
MARKS = {"bad": "bad", "warn": "warning", "note": "note", "good": "good"}


def report(path: str, *, output: str | None, trace: str | None, as_json: bool) -> Document:
    """Report on a run: write the page, and the trace where it is asked for.

    Args:
        output: file for the page; default: the run's name in this directory, and none with JSON.
        trace: file for the trace.

    Raises:
        NotCommittedError: there is no run.
        StoreError: a file cannot be written.
    """
    run = read_run(path)
    written: list[str] = []
    if trace is not None:
        written.append(write_file(trace, trace_of(run)))
    if output is not None or (trace is None and not as_json):
        name = output if output is not None else default_name(run.path)
        written.append(write_file(name, page_of(run)))
    return document_of(run) | {"written": written}


def default_name(location: str) -> str:
    """Return the name of a page in the working directory: of what it is about."""
    name = os.path.basename(location.rstrip("/")) or "run"
    kept = "".join(c if c.isalnum() or c in "-_." else "-" for c in printable(name)).lstrip(".-")
    return f"{kept[:100] or 'run'}.html"


def _descriptor_of(path: str) -> int | None:
    """Return the open file that a path such as /dev/stdout names: it goes on where that one is."""
    for _ in range(8):
        if found := _DESCRIPTOR.fullmatch(path):
            return int(found[1])
        if not os.path.islink(path):
            return None
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    return None


def write_file(path: str, text: str) -> str:
    """Write a file in one step, so that a page that is open is never half a page.

    A link is followed. What is no regular file, such as a device or a pipe, is written to; so is
    an open file, such as /dev/stdout.

    Raises:
        OptionError: the path is a directory.
        StoreError: it cannot be written.
    """
    if os.path.isdir(path):
        raise OptionError(f"{path} is a directory; give the name of a file, such as report.html")
    target, descriptor = os.path.realpath(path), _descriptor_of(path)
    in_place = not os.path.isfile(target) and (os.path.exists(path) or os.path.islink(target))
    pending = f"{target}.{os.getpid()}.part"
    place: str | int = path if in_place else pending
    try:
        place = place if descriptor is None else os.dup(descriptor)
        with open(place, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        if place == pending:
            os.replace(pending, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(pending)
        raise StoreError(
            f"cannot write {path}: {error.strerror or error}. Give another file, with -o for a "
            "report"
        ) from error
    return os.path.abspath(path)


def render(document: Document) -> list[str]:
    """Say what the report says first, as lines for the terminal."""
    width, _ = screen_size()
    lines = [printable(document["path"])]
    for finding in document["findings"]:
        lines.append(f"  {MARKS[finding['level']]}: {printable(finding['title'])}")
        if finding["level"] != "good":
            for text in (finding["text"], finding["advice"]):
                lines += [f"    {line}" for line in _wrapped(printable(text), width - 4)]
    for path in document["written"]:
        size = f", {show_bytes(os.path.getsize(path))}" if os.path.isfile(path) else ""
        lines.append(f"wrote {printable(path)}{size}")
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".strip()
        if len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(cut(word, width))
    return [line for line in lines if line]


def exit_code(document: Document) -> int:
    """Return 1 when a step is damaged, as `inspect` does; else 0."""
    return int(any(finding["kind"] == "damage" for finding in document["findings"]))
