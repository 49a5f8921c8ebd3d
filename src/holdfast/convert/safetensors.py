"""safetensors as a `Source`: one file, or a directory with an index of shards. Knows no torch.

A file is 8 bytes (the length of the header), the header in JSON, and the elements, without a gap
(https://github.com/huggingface/safetensors). Nothing in it can run code.
"""

import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, TypeGuard

from ..errors import CorruptError, NotCommittedError, VersionError, shown
from ..format.spec import DIMENSIONS_MAX
from ..layout import Shape, Tensor
from .source import FileSource, Span, list_names, open_file, read_at

KIND = "safetensors"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
# In the order in which files of the library have them: large elements first, that all lie aligned.
DTYPES = {
    **{"U64": "u64", "I64": "i64", "F64": "f64", "C64": "c64", "F32": "f32", "U32": "u32"},
    **{"I32": "i32", "BF16": "bf16", "F16": "f16", "U16": "u16", "I16": "i16"},
    **{"F8_E5M2FNUZ": "f8_e5m2fnuz", "F8_E4M3FNUZ": "f8_e4m3fnuz", "F8_E8M0": "f8_e8m0fnu"},
    **{"F8_E4M3": "f8_e4m3fn", "F8_E5M2": "f8_e5m2", "I8": "i8", "U8": "u8"},
    **{"F4": "f4_e2m1fn_x2", "BOOL": "bool"},
}
HEADER_BYTES_MAX = 100_000_000  # as the library has it
INDEX_BYTES_MAX = 100_000_000
METADATA = "__metadata__"


def open_safetensors(path: str) -> FileSource:
    """Open a file, or a directory with an index or with one file.

    Args:
        path: absolute.

    Raises:
        CorruptError: a header or an index fails a check.
        NotCommittedError: the directory has neither.
        StoreError: a file cannot be read.
    """
    source = FileSource(path, KIND)
    try:
        if os.path.isdir(path):
            _open_directory(source, path)
        else:
            _add_file(source, path, None)
        _add_ties(source)
    except BaseException:
        source.close()
        raise
    return source


def shard_files(names: Iterable[str]) -> list[str]:
    """Return which files of a directory are looked at: an index; else the only file there is."""
    found = sorted(names)
    indexes = [name for name in found if name.endswith(INDEX_SUFFIX)]
    files = [name for name in found if name.endswith(SUFFIX)]
    for usual in (f"model{INDEX_SUFFIX}", f"model{SUFFIX}", f"adapter_model{SUFFIX}"):
        if usual in found:
            return [usual]
    return indexes if len(indexes) == 1 else files if len(files) == 1 and not indexes else []


def _open_directory(source: FileSource, path: str) -> None:
    names = list_names(path)
    found = shard_files(names)
    if not found:
        several = sorted(name for name in names if name.endswith((SUFFIX, INDEX_SUFFIX)))
        raise NotCommittedError(
            f"{path} holds {', '.join(several[:5]) or f'no file of *{SUFFIX}'}; expected "
            f"model{INDEX_SUFFIX}, model{SUFFIX} or one such file. Give the path of one file"
        )
    if found[0].endswith(SUFFIX):
        _add_file(source, f"{path}/{found[0]}", None)
        return
    index = f"{path}/{found[0]}"
    weights = _read_index(index)
    for file in dict.fromkeys(weights.values()):
        if file not in names:
            lost = sum(other == file for other in weights.values())
            raise CorruptError(
                f"{index} says that {lost} tensors are in {file}, which is missing. Get that file "
                "again, into the same directory"
            )
        _add_file(source, f"{path}/{file}", weights)
    held = {tensor.path for tensor in source.tensors}
    if lost_names := [name for name, file in weights.items() if (name,) not in held]:
        name = lost_names[0]
        raise CorruptError(
            f"{index} says that {name} is in {weights[name]}, which has no such tensor"
            f"{f', nor {len(lost_names) - 1} others' if len(lost_names) > 1 else ''}. Index and "
            "shards are of different checkpoints: get both again"
        )


def _read_index(path: str) -> dict[str, str]:
    """Return the file of each tensor.

    Raises:
        CorruptError: it is no index; or names a file that is not beside it.
    """
    descriptor = open_file(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > INDEX_BYTES_MAX:
            raise CorruptError(f"{path} has {size} bytes; expected at most {INDEX_BYTES_MAX}")
        data = bytearray(size)
        read_at(descriptor, path, 0, memoryview(data))
    finally:
        os.close(descriptor)
    weights = _parse(bytes(data), path).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise CorruptError(f"{path} has no weight_map; expected an index as transformers writes it")
    for name, file in weights.items():
        plain = isinstance(file, str) and file not in ("", ".", "..") and "/" not in file
        if not plain or "\0" in file or not file.endswith(SUFFIX):
            raise CorruptError(
                f"{path} says that {name:.80} is in {shown(file)}; expected the name of a file "
                f"*{SUFFIX} in the same directory"
            )
    return weights


def _add_file(source: FileSource, path: str, weights: Mapping[str, str] | None) -> None:
    """Add the tensors of a file.

    Args:
        weights: the file of each tensor, where an index says so.
    """
    descriptor = source.descriptor(path)
    size = os.fstat(descriptor).st_size
    header, start = _read_header(descriptor, path, size)
    metadata = header.pop(METADATA, {})
    name, tensors, end = os.path.basename(path), list[Tensor](), 0
    entries = [_entry(path, *item) for item in header.items()]
    for tensor, begin, stop in sorted(entries, key=lambda entry: entry[1:]):
        if begin != end:
            what = "overlaps the one before it" if begin < end else "leaves a gap before it"
            raise CorruptError(f"{path}: {tensor.path[0]} at byte {begin} {what}, at byte {end}")
        end = stop
    if start + end != size:
        raise CorruptError(
            f"{path} has {size} bytes; expected {start + end} by its header. It was cut or is "
            "still being written: get it again"
        )
    for tensor, begin, stop in entries:
        if weights is None or weights.get(str(tensor.path[0]), name) == name:
            if tensor.path in source.spans:
                raise CorruptError(
                    f"{path} holds {tensor.path[0]:.80}, and so does another shard. Get the index "
                    "and all shards of one checkpoint"
                )
            tensors.append(tensor)
            source.spans[tensor.path] = Span(path, start + begin, stop - begin)
    source.tensors += tuple(tensors)
    if isinstance(metadata, dict):
        # "format" is the framework's, whatever tensor has the name of one.
        kept = {key: value for key, value in metadata.items() if key != "format"}
        named = {key: value for key, value in kept.items() if isinstance(value, str)}
        source.ties = {**source.ties, **{(key,): (value,) for key, value in named.items()}}


def _add_ties(source: FileSource) -> None:
    """Keep of the metadata what `safetensors.torch.save_model` says of shared tensors."""
    held = {tensor.path for tensor in source.tensors}
    source.ties = {
        path: owner for path, owner in source.ties.items() if owner in held and path not in held
    }


def _read_header(descriptor: int, path: str, size: int) -> tuple[dict[str, Any], int]:
    """Return the header, and where the elements begin."""
    head = bytearray(8)
    if size < len(head):
        raise CorruptError(f"{path} has {size} bytes; expected a file of safetensors")
    read_at(descriptor, path, 0, memoryview(head))
    length = int.from_bytes(head, "little")
    if length > min(size - len(head), HEADER_BYTES_MAX):
        raise CorruptError(
            f"{path} says that its header has {length} bytes, of {size - len(head)} that follow; "
            f"expected at most {HEADER_BYTES_MAX}. It was cut, or is no file of safetensors"
        )
    data = bytearray(length)
    read_at(descriptor, path, len(head), memoryview(data))
    return _parse(bytes(data), path), len(head) + length


def _parse(data: bytes, path: str) -> dict[str, Any]:
    """Parse JSON, with every name once."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise CorruptError(f"{path}: its header has {name:.80} twice")
            found[name] = value
        return found

    try:
        parsed = json.loads(data.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path}: its header is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CorruptError(f"{path}: its header is {shown(parsed)}; expected an object of JSON")
    return parsed


def _entry(path: str, name: str, entry: Any) -> tuple[Tensor, int, int]:
    """Return a tensor, and where its bytes begin and end behind the header."""
    fields = entry if isinstance(entry, dict) else {}
    shape, place = fields.get("shape"), fields.get("data_offsets")
    if not _are_counts(shape) or not _are_counts(place) or len(place) != 2:
        raise CorruptError(
            f"{path}: {name:.80} has the shape {shown(shape)} and data_offsets {shown(place)}; "
            "expected numbers from 0, two of the latter"
        )
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields.get("dtype"), str) else None
    if dtype is None:
        raise VersionError(
            f"{path}: {name:.80} has the dtype {shown(fields.get('dtype'))}; expected one of "
            f"{', '.join(DTYPES)}"
        )
    begin, end = place
    tensor = Tensor((name,), dtype, _in_bytes(path, name, dtype, tuple(shape)))
    if len(shape) > DIMENSIONS_MAX or tensor.size_bytes != end - begin:
        raise CorruptError(
            f"{path}: {name:.80} is {dtype} {shown(shape)}, and has {end - begin} bytes; expected "
            f"{tensor.size_bytes}, and at most {DIMENSIONS_MAX} dimensions"
        )
    return tensor, begin, end


def _in_bytes(path: str, name: str, dtype: str, shape: Shape) -> Shape:
    """Return a shape as torch has it: two elements of 4 bits are one."""
    if dtype != "f4_e2m1fn_x2":
        return shape
    if not shape or shape[-1] % 2:
        raise CorruptError(
            f"{path}: {name:.80} has {prod(shape)} elements of 4 bits, an odd number in a row"
        )
    return (*shape[:-1], shape[-1] // 2)


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    is_short = isinstance(value, list) and len(value) <= 1000
    return is_short and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def stored_shape(dtype: str, shape: Shape) -> Shape:
    """Return a shape as the format counts elements: those of 4 bits one by one."""
    return (*shape[:-1], shape[-1] * 2) if dtype == "f4_e2m1fn_x2" and shape else shape
