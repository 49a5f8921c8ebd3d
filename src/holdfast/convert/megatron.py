"""Checkpoints of Megatron-Core in the format ``torch_dist`` as a `Source`.

These are files of DCP, with ``metadata.json`` and ``common.pt`` beside them. Tensors have the names
that Megatron gives to shards. Objects of each rank stand under ``NAME/shard_RANK_RANKS``.
"""

import os
from typing import Any

from ..errors import CorruptError, OptionError, shown
from ..layout import Path
from .archive import region_of
from .contents import Contents, lay_flat
from .dcp import DcpSource
from .dcp_metadata import read_dcp_metadata
from .json_file import read_json
from .torch_archive import TorchArchive, read_torch_archive
from .torch_file import add_tensors

KIND = "megatron"
CONFIG = "metadata.json"
COMMON = "common.pt"
BACKEND = "torch_dist"


def open_megatron(path: str) -> DcpSource:
    """Open a checkpoint of Megatron-Core.

    Objects of classes that are no plain data are left out; ``advice`` names them.

    Args:
        path: absolute, of a directory such as ``iter_0000100``.

    Raises:
        CorruptError: a file fails a check.
        OptionError: it is of another format than ``torch_dist``, or of an old version of it.
        StoreError: a file cannot be read.
    """
    source = DcpSource(path, KIND)
    try:
        _check_config(source)
        metadata = read_dcp_metadata(path)
        if metadata.fields.get("mcore_data"):
            raise OptionError(
                f"{path} keeps flat parts of tensors in other shapes, as Megatron-Core 0.15 and "
                "older did for some optimizers; expected whole boxes. Load it with Megatron-Core, "
                "and save it with version 0.16 or newer"
            )
        source.add_metadata(metadata)
        sizes: dict[str, int] = {}
        for fqn, stored in metadata.values.items():
            archive = source.value_archive(fqn, stored, sizes)
            held = archive.root
            if type(held) is list and len(held) == 1:  # one object of one rank
                archive = archive._replace(root=held[0])
            _add(source, archive, (fqn,))
        if os.path.lexists(f"{path}/{COMMON}"):
            _add(source, read_torch_archive(region_of(source.files, f"{path}/{COMMON}")), ())
    except BaseException:
        source.close()
        raise
    return source


def _add(source: DcpSource, archive: TorchArchive, below: Path) -> None:
    contents: Contents = lay_flat(archive.root, archive.where, below, leave_out=True)
    add_tensors(source, archive, contents)
    source.values = {**source.values, **contents.values}
    source.advice += contents.left_out()


def _check_config(source: DcpSource) -> None:
    path = f"{source.location}/{CONFIG}"
    found: Any = read_json(source.files, path)
    backend = found.get("sharded_backend") if isinstance(found, dict) else None
    if not isinstance(backend, str):
        raise CorruptError(f"{path} names no sharded_backend; expected {BACKEND}")
    if backend != BACKEND:
        raise OptionError(
            f"{path} names the format {shown(backend)}; expected {BACKEND}. Load it with Megatron, "
            f"and save it again with --ckpt-format {BACKEND}"
        )
