"""Which kind of checkpoint a path is of: the table, and `open_source`. Imports a kind on use.

A new kind is one more row of `KINDS`, and a module that opens it.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from ..engine.marker import without_marker
from ..engine.newest import newest_in
from ..errors import (
    HoldfastError,
    NotCommittedError,
    OptionError,
    StoreError,
    TrustError,
    shown,
)
from ..format.names import DCP_METADATA_NAME, LATEST_BYTES_MAX, some, step_of
from ..format.spec import MANIFEST_NAME
from ..options import Options, options_of
from ..stores.base import Store
from ..stores.url import is_remote, located, open_store
from .source import list_names

if TYPE_CHECKING:
    from .source import Source

OWN = "holdfast"
LATEST_TAG = "latest"  # in a directory of DeepSpeed: the name of its newest checkpoint
Names = frozenset[str]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of checkpoint that can be read.

    Attributes:
        name: as ``--from`` has it.
        what: a path of this kind, for people.
        suffixes: of single files of this kind.
        is_directory: whether a directory with these names in it is of this kind; first match wins.
        opener: "module.function" of this room, called with the absolute path; our own also with
            the options.
    """

    name: str
    what: str
    suffixes: tuple[str, ...]
    is_directory: Callable[[Names], bool]
    opener: str


def _has_safetensors(names: Names) -> bool:
    return any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)


def _has_torch_shards(names: Names) -> bool:
    return any(name == "pytorch_model.bin" or name.endswith(".bin.index.json") for name in names)


def _has_model_states(names: Names) -> bool:
    return LATEST_TAG in names or any(name.endswith("_model_states.pt") for name in names)


KINDS = (
    Kind(
        OWN, "a directory with MANIFEST", (), lambda names: MANIFEST_NAME in names, "own.OwnSource"
    ),
    Kind(
        "safetensors",
        "a file *.safetensors, or a directory of them",
        (".safetensors",),
        _has_safetensors,
        "safetensors.open_safetensors",
    ),
    Kind(
        "torch",
        "a file *.pt, *.pth or *.bin of torch.save, or a directory of such shards with an index",
        (".pt", ".pth", ".bin"),
        _has_torch_shards,
        "torch_file.open_torch",
    ),
    Kind(
        "torchsnapshot",
        "a directory with .snapshot_metadata",
        (),
        lambda names: ".snapshot_metadata" in names,
        "torchsnapshot.open_torchsnapshot",
    ),
    Kind(
        "deepspeed",
        "a directory with latest, or with *_model_states.pt, as DeepSpeed writes it",
        (),
        _has_model_states,
        "deepspeed.open_deepspeed",
    ),
    Kind(
        "megatron",
        "a directory with metadata.json and .metadata, as Megatron-Core writes it (torch_dist)",
        (),
        lambda names: {DCP_METADATA_NAME, "metadata.json"} <= names,
        "megatron.open_megatron",
    ),
    Kind(
        "dcp",
        "a directory with .metadata, as PyTorch's DCP writes it",
        (),
        lambda names: DCP_METADATA_NAME in names,
        "dcp.open_dcp",
    ),
    Kind(
        "bytecheckpoint",
        "a directory with the folders model and optimizer, as ByteCheckpoint writes it",
        (),
        lambda names: "model" in names and bool({"optimizer", "extra_state"} & names),
        "bytecheckpoint.open_bytecheckpoint",
    ),
)


def open_source(
    path: "str | os.PathLike[str]", kind: str | None = None, options: Options | None = None
) -> "Source":
    """Open what can be read as a checkpoint.

    Args:
        path: of a checkpoint; or of a run of holdfast, whose newest step is opened.
        kind: a name of `KINDS`; default: by the suffix of a file, and by the names in a directory.
        options: settings of the reads of a checkpoint of holdfast, such as ``trust``.

    Raises:
        OptionError: the kind is unknown, or none is recognised; the text lists all.
        NotCommittedError: there is nothing at ``path``, or nothing of this kind.
        CorruptError: it fails a check; a TrustError if ``trust`` is given, and it cannot be signed.
        StoreError: it cannot be read.
    """
    chosen = options_of(options)
    place = located(path, expected="the path of a checkpoint")
    if kind is None or kind == OWN:
        place = _step_of_run(place)
    found = find_kind(place) if kind is None else _named(kind)
    if chosen.trust is not None and found.name != OWN:
        raise TrustError(
            f"{place} is {found.name}, which cannot be signed. Leave trust out, or use a signed "
            "checkpoint of holdfast"
        )
    module, function = found.opener.split(".")
    opener = getattr(import_module(f".{module}", __package__), function)
    source: Source = opener(place, chosen) if found.name == OWN else opener(place)
    return source


def _step_of_run(path: str) -> str:
    """Return the newest step of a run; of what is no run, the path as it is."""
    nothing = NotCommittedError(f"there is no committed step in {path}")
    store = open_store(path)
    try:
        names = [*store.scan()]
        if tag := _tag_of(store, names):
            return f"{path}/{tag}"
    except StoreError:
        return path
    is_run = not any(kind.is_directory(frozenset(names)) for kind in KINDS)
    if not is_run or all(step_of(name) is None for name in names):
        return path
    return f"{path}/{newest_in(store, nothing)}"


def _tag_of(store: Store, names: list[str]) -> str:
    """Return the checkpoint of ours that DeepSpeed's file ``latest`` names; empty: none."""
    if LATEST_TAG not in names or MANIFEST_NAME in names:
        return ""
    tag = store.get(LATEST_TAG, LATEST_BYTES_MAX).decode(errors="replace").strip()
    is_name = bool(tag.strip(".")) and tag == os.path.basename(tag)
    return tag if is_name and store.exists(f"{tag}/{MANIFEST_NAME}") else ""


def find_kind(path: str) -> Kind:
    """Return the kind of what is at an absolute path.

    Raises:
        NotCommittedError: there is nothing.
        OptionError: it is of no kind.
    """
    if is_remote(path):
        return _named(OWN)
    if not os.path.isdir(path):
        if not os.path.lexists(path):
            raise NotCommittedError(f"there is nothing at {path}; expected {_all_kinds()}")
        for kind in KINDS:
            if path.endswith(kind.suffixes):
                return kind
        raise OptionError(f"{path} has no suffix of a kind; expected {_all_kinds()}")
    names = frozenset(list_names(path))
    if DCP_METADATA_NAME in names:  # the marker of ours stands for nothing by itself
        names = frozenset(without_marker(open_store(path), [*names]))
    for kind in KINDS:
        if kind.is_directory(names):
            return kind
    if inner := _checkpoints_in(path, names):
        raise NotCommittedError(
            f"{path} holds {len(inner)} checkpoints: {some(inner)}. Name one of them, for example "
            f"{path}/{inner[0]}, which was saved last"
        )
    raise NotCommittedError(f"{path} holds no checkpoint; expected {_all_kinds()}")


def _checkpoints_in(path: str, names: Names) -> list[str]:
    """Return the checkpoints of ours in a local directory, the newest first."""
    ages: dict[str, float] = {}
    for name in names:
        with contextlib.suppress(OSError):
            ages[name] = os.stat(f"{path}/{name}/{MANIFEST_NAME}").st_mtime
    return sorted(ages, key=lambda name: (ages[name], name), reverse=True)


def _named(name: str) -> Kind:
    for kind in KINDS:
        if kind.name == name:
            return kind
    names = ", ".join(kind.name for kind in KINDS)
    raise OptionError(f"the kind is {shown(name)}; expected one of {names}")


def _all_kinds() -> str:
    return "; ".join(f"{kind.name}: {kind.what}" for kind in KINDS)


def is_foreign(path: "str | os.PathLike[str]", options: Options) -> bool:
    """Return whether there is a checkpoint of another format, which no key has to have signed."""
    if options.trust is not None:
        return False
    try:
        return find_kind(located(path)).name != OWN
    except HoldfastError:
        return False
