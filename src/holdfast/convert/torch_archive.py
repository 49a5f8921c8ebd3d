"""What torch.save wrote, opened: the pickle as plain data, and where each storage's bytes lie.

The zip format of torch 1.6 and newer. The pickle is read by a machine that runs nothing
(`pickles`). The elements of each storage are one record of the archive.
"""

from typing import Any, NamedTuple

from ..errors import CorruptError, OptionError
from ..layout import Box, whole
from .archive import MAGIC, Record, Region, read_archive, record_bytes
from .contents import plain
from .files import Files
from .inert import Names
from .pickles import MEMORY_MAX_BYTES, read_pickle
from .pieces import Piece
from .rebuild import TENSORS, Storage, StoredTensor

PICKLE = "data.pkl"
PICKLE_BYTES_MAX = 128 << 20  # it holds no elements
LEGACY = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_MARK_BYTES_MAX = 64  # of the small records beside the pickle


class TorchArchive(NamedTuple):
    """One file of torch.save, or a part of a file that is one.

    Attributes:
        path: of the file.
        where: the same, or the part, for people.
        root: what was saved, with `StoredTensor` in the place of tensors.
        records: by the keys of storages.
    """

    path: str
    where: str
    root: Any
    records: dict[str, Record]

    def record(self, storage: Storage) -> Record:
        """Return the record of a storage.

        Raises:
            CorruptError: there is none, or it has another size.
        """
        record = self.records.get(storage.key)
        if record is None:
            raise CorruptError(
                f"{self.where} is damaged: it has no record for the storage {storage.key:.80}"
            )
        if record.size_bytes != storage.size_bytes:
            raise CorruptError(
                f"{self.where} is damaged: the storage {storage.key:.80} has "
                f"{record.size_bytes:,} bytes; expected {storage.size_bytes:,}"
            )
        return record

    def piece(self, tensor: StoredTensor, box: "Box | None" = None) -> Piece:
        """Return where a tensor's elements lie.

        Args:
            box: which elements of a larger tensor they are; default: it is that tensor.

        Raises:
            CorruptError: as `record`.
        """
        record = self.record(tensor.storage)
        offset = record.offset + tensor.offset * tensor.dtype.itemsize
        return Piece(box or whole(tensor.shape), self.path, offset, tensor.strides, record)


class _Bytes(Files):
    """The bytes of one file, in memory."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data = data

    def read(self, path: str, offset: int, memory: memoryview) -> None:
        memory[:] = self._data[offset : offset + len(memory)]


def plain_value(data: bytes, where: str) -> Any:
    """Return plain data that torch.save made bytes of, namespaces too.

    Raises:
        CorruptError, OptionError: these are no such bytes.
        StateError: the value holds something else; the text names it.
    """
    return plain(read_torch_archive(Region(_Bytes(data), "", 0, len(data), where)).root)


def read_torch_archive(
    region: Region, names: Names = TENSORS, *, memory_max_bytes: int = MEMORY_MAX_BYTES
) -> TorchArchive:
    """Read all of an archive but the elements.

    Raises:
        CorruptError: the archive or its pickle fails a check.
        OptionError: it is of the format before torch 1.6, a TorchScript archive, or compressed.
        StoreError: it cannot be read.
    """
    _check_format(region)
    records = read_archive(region)
    prefix = _prefix(region, records)
    order = records.get(f"{prefix}/byteorder")
    if order is not None and record_bytes(region, order, _MARK_BYTES_MAX) != b"little":
        raise OptionError(
            f"{region.where} was saved on a big-endian machine; expected little-endian numbers. "
            "Load it with torch.load, and save it again"
        )
    data = record_bytes(region, records[f"{prefix}/{PICKLE}"], PICKLE_BYTES_MAX)
    try:
        found = read_pickle(data, names, memory_max_bytes=memory_max_bytes)
    except CorruptError as error:
        raise CorruptError(f"{region.where}: {error}") from error
    start = f"{prefix}/data/"
    storages = {
        name.removeprefix(start): record
        for name, record in records.items()
        if name.startswith(start)
    }
    return TorchArchive(region.path, region.where, found.root, storages)


def _check_format(region: Region) -> None:
    head = region.read(0, min(len(LEGACY), region.size_bytes))
    if head == LEGACY:
        raise OptionError(
            f"{region.where} has the format that torch.save had before torch 1.6; expected the zip "
            "format. Save it again, which needs its size in memory: "
            "torch.save(torch.load(path, weights_only=True), new_path)"
        )
    if not head.startswith(MAGIC):
        raise CorruptError(
            f"{region.where} is no file of torch.save: it begins with {head[:4]!r}, expected "
            f"{MAGIC!r}"
        )


def _prefix(region: Region, records: dict[str, Record]) -> str:
    """Return the folder that all records are in."""
    (prefix, *others) = {name.split("/")[0] for name in records} or {""}
    if others or f"{prefix}/{PICKLE}" not in records:
        raise CorruptError(
            f"{region.where} is no file of torch.save: it has no {PICKLE} in its only folder"
        )
    if f"{prefix}/constants.pkl" in records:
        raise OptionError(
            f"{region.where} is a TorchScript archive, which holds code; expected a file of "
            "torch.save. Load it with torch.jit.load, and save its state_dict()"
        )
    return prefix
