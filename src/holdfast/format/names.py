"""Names: of files and steps, and the dotted form of paths that people read.

Knows no file system.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from ..layout import Key, Path
from .spec import DATA_DIRECTORY, MANIFEST_NAME, PENDING_MANIFEST_PREFIX, SIGNATURE_NAME

LATEST_NAME = "LATEST"  # a hint beside the steps: the one that was committed last
METRICS_NAME = "metrics.jsonl"  # what saves and restores of a run have measured
METRICS_BYTES_MAX = 8 << 20  # then it gets a number: a store may write all of it for each line
METRICS_FILES_MAX = 64  # of those with a number, the newest
METRICS_PATTERN = re.compile(r"metrics-([0-9]{6,})\.jsonl")
LATEST_BYTES_MAX = 4096  # it holds one name; a longer one is not ours
_SAVE_ID = re.compile(r"[0-9a-f]{32}")
DCP_METADATA_NAME = ".metadata"  # of a checkpoint that PyTorch DCP wrote; or our marker
DCP_FIRST_NAME = "__0_0.distcp"  # what its first rank writes first
DCP_PATTERN = re.compile(r"\.metadata|.*\.distcp", re.DOTALL)  # all files of one
FOREIGN_MAX = 1000  # of names that are not ours, of all that there may be
NAMED_MAX = 3  # of many names, in a text
# (save_id, rank, number) → name of a data file, relative to its checkpoint.
data_file_name: Callable[[str, int, int], str] = (DATA_DIRECTORY + "/{}/{:05d}-{}.hf").format
STEP_PATTERN = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")  # as `step_name` has it
_INTEGER = re.compile(r"-?[0-9]+")
_SPECIAL = re.compile(r'[\\"\[\]()\x00-\x1f\x7f]')
_SHOWN_KEY = re.compile(r"(?:^|\.)((?:\\.|[^.])*)", re.DOTALL)
_POSITION = re.compile(r"\[([0-9]+)\]|\(([0-9]+)\)")
_QUOTED = re.compile(r'"(?:-?[0-9]+)?"')
_ESCAPE = re.compile(r"\\x([01][0-9a-f]|7f)|\\([^x])", re.DOTALL)


def is_foreign(name: str) -> bool:
    """Return whether a name in a checkpoint's directory is none of holdfast's."""
    ours = (MANIFEST_NAME, SIGNATURE_NAME, DATA_DIRECTORY, DCP_METADATA_NAME)
    return name not in ours and not name.startswith(PENDING_MANIFEST_PREFIX)


@dataclass(frozen=True, slots=True)
class Foreign:
    """Names in a checkpoint's directory that are none of holdfast's.

    Attributes:
        names: the first `FOREIGN_MAX` of them, sorted.
        count: of all.
        of_dcp: some of those that PyTorch DCP gives to its files.
    """

    names: tuple[str, ...] = ()
    count: int = 0
    of_dcp: tuple[str, ...] = ()


def foreign_of(names: Iterable[str]) -> Foreign:
    """Sort out the foreign names in a directory, holding no more than some of them."""
    count, kept, of_dcp = 0, list[str](), list[str]()
    for name in names:
        if not is_foreign(name):
            continue
        count += 1
        kept.append(name)
        if len(kept) > 2 * FOREIGN_MAX:
            kept = sorted(kept)[:FOREIGN_MAX]
        if len(of_dcp) < NAMED_MAX:
            of_dcp += names_of_dcp([name])
    return Foreign(tuple(sorted(kept)[:FOREIGN_MAX]), count, tuple(of_dcp))


def names_of_dcp(names: Iterable[str]) -> list[str]:
    """Return those names that PyTorch DCP gives to the files of a checkpoint."""
    return [name for name in names if DCP_PATTERN.fullmatch(name)]


def is_save_id(name: str) -> bool:
    """Return whether a directory of ``data`` is named as those of saves are."""
    return _SAVE_ID.fullmatch(name) is not None


def step_name(step: int) -> str:
    """Name the directory of a step: 1200 → ``step-00001200``."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step a directory name stands for, or None."""
    match = STEP_PATTERN.fullmatch(name)
    return int(match[1]) if match else None


def misnamed(name: str, step: int | None) -> str | None:
    """Say what is wrong with the name of a directory that holds a step; None: nothing is.

    Args:
        step: that MANIFEST says it is, if it says so.
    """
    named = step_of(name)
    if named is None or step is None or named == step:
        return None
    return (
        f"is named step {named}, but holds step {step}: it was renamed, or copied to the wrong "
        "place. Rename it back"
    )


def old_metrics(names: Iterable[str]) -> list[str]:
    """Return those names that files of metrics get when they are full, the oldest first."""
    found = {name: match[1] for name in names if (match := METRICS_PATTERN.fullmatch(name))}
    return sorted(found, key=lambda name: int(found[name]))


def all_metrics(names: Iterable[str]) -> list[str]:
    """Return the names of all files of metrics, the oldest first, the one that grows last."""
    return [*old_metrics(names), METRICS_NAME]


def next_metrics(full: Sequence[str]) -> str:
    """Return the name after the last of those that `old_metrics` returns."""
    last = METRICS_PATTERN.fullmatch(full[-1]) if full else None
    return f"metrics-{int(last[1]) + 1 if last else 1:06d}.jsonl"


def some(names: Sequence[str], count: int = 0) -> str:
    """Show a few of many names to people: ``a, b, c and 5 more``.

    Args:
        count: of all, where these are some of them.
    """
    left = max(len(names), count) - NAMED_MAX
    more = f" and {left:,} more" if left > 0 else ""
    return f"{', '.join(names[:NAMED_MAX])}{more}"


def named(steps: Collection[int]) -> str:
    """Show numbers of steps to people: ``step 1, 2, 3 and 5 more``."""
    return f"step {some([str(step) for step in sorted(steps)])}"


def dotted(path: Path) -> str:
    """Show a path to people: keys joined by dots; ambiguous keys are left as they are."""
    return ".".join(_plain(key) for key in path)


def escaped(path: Path) -> str:
    """Show a path so that no other path looks the same."""
    return ".".join(_escape(key) for key in path)


def display_names(paths: Iterable[Path]) -> dict[Path, str]:
    """Give each path of a checkpoint its dotted form, escaped where plain would be ambiguous."""
    plain = {path: dotted(path) for path in paths}
    count = Counter(plain.values())
    return {
        path: escaped(path) if count[name] > 1 or _SPECIAL.search(name) else name
        for path, name in plain.items()
    }


def _plain(key: Key) -> str:
    return str(key[1]) if isinstance(key, tuple) else str(key)


def _escape(key: Key) -> str:
    if isinstance(key, tuple):
        return f"({key[1]})" if key[0] == "tuple" else f"[{key[1]}]"
    if isinstance(key, int):
        return str(key)
    text = re.sub(
        r'[\\."\[\]()\x00-\x1f\x7f]',
        lambda m: f"\\{m[0]}" if m[0] >= " " and m[0] != "\x7f" else f"\\x{ord(m[0]):02x}",
        key,
    )
    return f'"{text}"' if not key or _INTEGER.fullmatch(key) else text


def split_escaped(name: str) -> list[str]:
    """Cut what `escaped` shows into its keys: ``a\\.b.[0]`` → ``a\\.b``, ``[0]``."""
    return [match[1] for match in _SHOWN_KEY.finditer(name)]


def is_integer(shown: str) -> bool:
    """Whether `escaped` shows an integer key so."""
    return _INTEGER.fullmatch(shown) is not None


def key_of(shown: str) -> Key:
    """Return the key that `escaped` shows so; an integer stays text."""
    if match := _POSITION.fullmatch(shown):
        return ("list", int(match[1])) if match[1] else ("tuple", int(match[2]))
    text = shown[1:-1] if _QUOTED.fullmatch(shown) else shown
    return _ESCAPE.sub(lambda m: chr(int(m[1], 16)) if m[1] else m[2], text)
