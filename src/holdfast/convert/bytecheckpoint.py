"""Checkpoints of ByteCheckpoint as a `Source`: folders of a model, an optimizer and extra states.

``.metadata`` is like that of DCP. The bytes of a storage lie plainly in a file, and a small pickle
in the metadata describes the tensor in it. Nothing has a checksum, so damage of elements is not
noticed. Values are files of torch.save.
"""

import os
from typing import Any

from ..errors import CorruptError, OptionError
from ..format.names import DCP_METADATA_NAME
from ..layout import Box, Path, Shape, Tensor
from ..state.tensors import DTYPE_NAMES
from .archive import region_of
from .contents import lay_flat
from .dcp import DcpSource
from .dcp_metadata import DcpMetadata, Stored, fields_of, read_dcp_metadata
from .dcp_paths import path_of
from .pickles import read_pickle
from .pieces import Piece
from .rebuild import TENSORS, StoredTensor
from .torch_archive import TorchArchive, read_torch_archive
from .torch_file import add_tensors

KIND = "bytecheckpoint"
FOLDERS = ("model", "optimizer")
EXTRA = "extra_state"
FLAT = "fsdp_flat_param_to_fqns"
TENSOR_PICKLE_BYTES_MAX = 1 << 16


def open_bytecheckpoint(path: str) -> DcpSource:
    """Open the directory of a step. The state of each rank stands under ``extra_state``.

    Args:
        path: absolute, of a directory such as ``global_step_100``.

    Raises:
        CorruptError: the metadata, a value or the size of a file fails a check.
        OptionError: it holds the flat parameters of FSDP1.
        StateError: a value is no plain data.
        StoreError: a file cannot be read.
    """
    source = DcpSource(path, KIND)
    try:
        for folder in FOLDERS:
            if os.path.lexists(f"{path}/{folder}/{DCP_METADATA_NAME}"):
                _add_folder(source, folder)
        extra = f"{path}/{EXTRA}"
        for file in sorted(os.listdir(extra)) if os.path.isdir(extra) else ():
            if file.endswith(".pt"):
                archive = read_torch_archive(region_of(source.files, f"{extra}/{file}"))
                _add_value(source, archive, (EXTRA, file.removesuffix(".pt")))
        source.check_whole()
    except BaseException:
        source.close()
        raise
    return source


def _add_folder(source: DcpSource, folder: str) -> None:
    metadata = read_dcp_metadata(f"{source.location}/{folder}")
    noted = metadata.fields.get("user_defined_dict")
    if isinstance(noted, dict) and FLAT in noted:
        raise OptionError(
            f"{source.location}/{folder} holds the flat parameters of FSDP1; expected tensors by "
            "their names. Load it with ByteCheckpoint, and save it with "
            "save_decomposed_model_optimizer=True"
        )
    sizes: dict[str, int] = {}
    described = _described(metadata, f"{source.location}/{folder}/{DCP_METADATA_NAME}")
    tensors = []
    for fqn, item in metadata.tensors.items():
        path: Path = (folder, *path_of(fqn, metadata.keys))
        if item.dtype not in DTYPE_NAMES:
            raise CorruptError(f"{folder}/{fqn} has the dtype {item.dtype}, which holdfast has not")
        tensors.append(Tensor(path, DTYPE_NAMES[item.dtype], item.shape))
        source.pieces[path] = [
            _piece(source, box, _in(folder, stored), fqn, described.get((fqn, box.offset)), sizes)
            for box, stored in item.chunks
            if box.elements
        ]
        dtypes = {described[fqn, box.offset].dtype for box, _ in item.chunks if box.elements}
        if dtypes - {item.dtype}:
            raise CorruptError(f"{folder}/{fqn} has chunks of another dtype than {item.dtype}")
    source.tensors += tuple(tensors)
    for fqn, stored in metadata.values.items():
        archive = source.value_archive(fqn, _in(folder, stored), sizes)
        _add_value(source, archive, (folder, *path_of(fqn, metadata.keys)))


def _in(folder: str, stored: Stored) -> Stored:
    return stored._replace(file=f"{folder}/{stored.file}")


def _described(metadata: DcpMetadata, where: str) -> dict[tuple[str, Shape], StoredTensor]:
    """Read the pickles that describe tensors, by name and offset."""
    pickles: Any = metadata.fields.get("all_tensor_metadata")
    found: dict[tuple[str, Shape], StoredTensor] = {}
    for index, data in pickles.items() if isinstance(pickles, dict) else ():
        key = fields_of(index, where)
        fqn, offset = key.get("fqn"), key.get("offset")
        if type(data) is not bytes or len(data) > TENSOR_PICKLE_BYTES_MAX:
            continue  # of a value
        root = read_pickle(data, TENSORS).root
        if isinstance(fqn, str) and isinstance(offset, tuple) and type(root) is StoredTensor:
            found[fqn, tuple(offset)] = root
    return found


def _piece(
    source: DcpSource,
    box: Box,
    stored: Stored,
    fqn: str,
    tensor: StoredTensor | None,
    sizes: dict[str, int],
) -> Piece:
    place = source.within(stored, fqn, sizes)
    fits = tensor is not None and tensor.shape == box.shape
    if tensor is None or not fits or tensor.storage.size_bytes != place.size_bytes:
        raise CorruptError(
            f"{place.file}[{place.offset}:+{place.size_bytes}] ({fqn}) is not described as "
            f"{list(box.shape)} in so many bytes. Use another checkpoint"
        )
    offset = place.offset + tensor.offset * tensor.dtype.itemsize
    return Piece(box, place.file, offset, tensor.strides)


def _add_value(source: DcpSource, archive: TorchArchive, path: Path) -> None:
    contents = lay_flat(archive.root, archive.where, path)
    contents.check_plain(archive.where)
    add_tensors(source, archive, contents)
    source.values = {**source.values, **contents.values}
