"""Files of torch.save as a `Source`: .pt, .pth, .bin, or a directory of shards with an index."""

import os

from ..errors import CorruptError, NotCommittedError, shown
from ..format.names import dotted
from ..layout import Tensor
from ..state.tensors import DTYPE_NAMES
from .archive import region_of
from .contents import Contents, lay_flat
from .json_file import read_json
from .pieces import PiecedSource
from .source import list_names
from .torch_archive import TorchArchive, read_torch_archive

KIND = "torch"
SUFFIXES = (".pt", ".pth", ".bin")
USUAL = "pytorch_model.bin"
INDEX_SUFFIX = ".bin.index.json"
GROWTH_MAX = 16  # bytes of tensors for each byte of a file: views may repeat elements
GROWTH_FREE_BYTES = 64 << 20


def open_torch(path: str) -> PiecedSource:
    """Open a file, or a directory with an index or with one file.

    Args:
        path: absolute.

    Raises:
        CorruptError: an archive, a pickle or an index fails a check.
        OptionError: it is of the format before torch 1.6, or compressed.
        StateError: it holds objects that are no plain data.
        NotCommittedError: the directory has neither.
        StoreError: it cannot be read.
    """
    source = PiecedSource(path, KIND)
    try:
        if os.path.isdir(path):
            _add_directory(source, path)
        else:
            _add_file(source, path)
    except BaseException:
        source.close()
        raise
    return source


def _add_file(source: PiecedSource, path: str) -> Contents:
    archive = read_torch_archive(region_of(source.files, path))
    contents = lay_flat(archive.root, path)
    contents.check_plain(path)
    add_tensors(source, archive, contents)
    source.values = {**source.values, **contents.values}
    return contents


def add_tensors(source: PiecedSource, archive: TorchArchive, contents: Contents) -> None:
    """Add the tensors of one archive to a source.

    Raises:
        CorruptError: a storage is missing, or views repeat elements without end.
        StateError: a name stands in another file too.
    """
    ties = contents.ties()
    tensors = []
    for path, stored in contents.tensors.items():
        if path in source.pieces or path in source.ties:
            raise CorruptError(f"{archive.where} holds {dotted(path)}, and so does another shard")
        piece = archive.piece(stored)
        if path not in ties:
            tensors.append(Tensor(path, DTYPE_NAMES[stored.dtype], stored.shape))
            source.pieces[path] = [piece]
    size_bytes = sum(tensor.size_bytes for tensor in tensors)
    held_bytes = sum(record.size_bytes for record in archive.records.values())
    if size_bytes > GROWTH_FREE_BYTES + GROWTH_MAX * held_bytes:
        raise CorruptError(
            f"{archive.where} holds {held_bytes:,} bytes of elements, and tensors of "
            f"{size_bytes:,} bytes that repeat them; expected at most {GROWTH_MAX} times as many"
        )
    source.tensors += tuple(tensors)
    source.ties = {**source.ties, **ties}


def _add_directory(source: PiecedSource, path: str) -> None:
    names = list_names(path)
    indexes = sorted(name for name in names if name.endswith(INDEX_SUFFIX))
    if USUAL in names and not indexes:
        _add_file(source, f"{path}/{USUAL}")
        return
    if len(indexes) != 1:
        raise NotCommittedError(
            f"{path} holds {len(indexes)} files *{INDEX_SUFFIX}; expected one, or {USUAL}. Give "
            "the path of one file"
        )
    index = f"{path}/{indexes[0]}"
    weights = _read_index(source, index)
    for file in dict.fromkeys(weights.values()):
        if file not in names:
            lost = sum(other == file for other in weights.values())
            raise CorruptError(
                f"{index} says that {lost} tensors are in {file}, which is missing. Get that file "
                "again, into the same directory"
            )
        held = _add_file(source, f"{path}/{file}").tensors
        for name, place in weights.items():
            if place == file and (name,) not in held:
                raise CorruptError(
                    f"{index} says that {name:.80} is in {file}, which has no such tensor. Index "
                    "and shards are of different checkpoints: get both again"
                )


def _read_index(source: PiecedSource, path: str) -> dict[str, str]:
    """Return the file of each tensor.

    Raises:
        CorruptError: it is no index; or names a file that is not beside it.
    """
    found = read_json(source.files, path)
    weights = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise CorruptError(f"{path} has no weight_map; expected an index as transformers writes it")
    for name, file in weights.items():
        fits = isinstance(file, str) and file.endswith(SUFFIXES) and "/" not in file
        if not fits or "\0" in file:
            raise CorruptError(
                f"{path} says that {name:.80} is in {shown(file)}; expected the name of a file "
                "*.bin in the same directory"
            )
    return weights
