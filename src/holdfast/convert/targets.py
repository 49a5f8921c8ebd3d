"""What an export can write: the table of formats, and the sizes that a user writes. Pure."""

import os
import re
from dataclasses import dataclass
from math import isfinite

from ..errors import OptionError, shown

SHARD_BYTES = 50_000_000_000  # as transformers has it
_SUFFIX = re.compile(r"\.[A-Za-z]\w*")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", re.IGNORECASE)
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class Format:
    """One format that can be written.

    Attributes:
        name: as ``--to`` has it.
        suffixes: of single files.
        is_directory: whether a target without such a suffix is a directory.
        planner: "module.function" of this room: (name of the file, tensors, what was chosen) →
            (`PlannedFile`, names of what it has no place for).
    """

    name: str
    suffixes: tuple[str, ...]
    is_directory: bool
    planner: str


FORMATS = (
    Format("safetensors", (".safetensors",), True, "to_safetensors.plan_file"),
    Format("torch", (".pt", ".pth", ".bin"), False, "to_torch.plan_file"),
    Format("npz", (".npz",), False, "to_npz.plan_file"),
)


def format_of(path: str, to: str | None) -> tuple[Format, bool]:
    """Return (format, whether the target is one file).

    Raises:
        OptionError: the format or the suffix is unknown.
    """
    names = ", ".join(form.name for form in FORMATS)
    found = next((form for form in FORMATS if path.endswith(form.suffixes)), None)
    if to is None:
        suffix = os.path.splitext(path)[1]
        if found is None and _SUFFIX.fullmatch(suffix):
            every = ", ".join(suffix for form in FORMATS for suffix in form.suffixes)
            raise OptionError(
                f"{path} has the suffix {suffix}; expected one of {every}, or a directory without "
                f"a suffix. --to (to=) names a format whatever the suffix: {names}"
            )
        return (FORMATS[0], False) if found is None else (found, True)
    named = next((form for form in FORMATS if form.name == to), None)
    if named is None:
        raise OptionError(f"the format is {shown(to)}; expected one of {names}")
    return named, named is found or not named.is_directory


def bytes_in(size: int | str | None) -> int:
    """Return the size of a shard in bytes: ``"5GB"`` → 5,000,000,000; ``"5GiB"`` is a little more.

    Raises:
        OptionError: it is none.
    """
    if size is None:
        return SHARD_BYTES
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is not None:
        unit = (1024 if match[3] else 1000) ** _UNITS[match[2].lower()]
        exact = float(match[1]) * unit
        size = int(exact) if isfinite(exact) else size
    if type(size) is not int or size < 1:
        raise OptionError(
            f"shard_size is {shown(size)}; expected bytes as a number from 1, or such as '5GB'"
        )
    return size
