"""Names: of files and steps, and the dotted form of paths that people read.

Knows no file system.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from ..layout import Key, Path
from .spec import DATA_DIRECTORY, MANIFEST_NAME, PENDING_MANIFEST_PREFIX, SIGNATURE_NAME

LATEST_NAME = "LATEST"  # a hint beside the steps: the one that was committed last
LATEST_BYTES_MAX = 4096  # it holds one name; a longer one is not ours
_SAVE_ID = re.compile(r"[0-9a-f]{32}")
DCP_METADATA_NAME = ".metadata"  # of a checkpoint that PyTorch DCP wrote; or our marker
DCP_PATTERN = re.compile(r"\.metadata|.*\.distcp", re.DOTALL)  # all files of one
NAMED_MAX = 3  # of many names, in a text
STEP_PATTERN = re.compile(r"step-(\d{8,})")
_INTEGER = re.compile(r"-?[0-9]+")
_SPECIAL = re.compile(r'[\\"\[\]()\x00-\x1f\x7f]')


def is_foreign(name: str) -> bool:
    """Return whether a name in a checkpoint's directory is none of holdfast's."""
    ours = (MANIFEST_NAME, SIGNATURE_NAME, DATA_DIRECTORY, DCP_METADATA_NAME)
    return name not in ours and not name.startswith(PENDING_MANIFEST_PREFIX)


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
    return int(match[1]) if match and step_name(int(match[1])) == name else None


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


def data_file_name(save_id: str, rank: int, number: int) -> str:
    """Name a data file relative to its checkpoint."""
    return f"{DATA_DIRECTORY}/{save_id}/{rank:05d}-{number}.hf"


def some(names: Sequence[str]) -> str:
    """Show a few of many names to people: ``a, b, c and 5 more``."""
    more = f" and {len(names) - NAMED_MAX:,} more" if len(names) > NAMED_MAX else ""
    return f"{', '.join(names[:NAMED_MAX])}{more}"


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
