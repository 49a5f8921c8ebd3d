"""The files that stand beside weights: configuration, tokenizer, code. Copied as they are.

But for the dtype in config.json, where the tensors have been converted to another.
"""

import json
import os

from ..errors import OptionError
from ..format.names import is_foreign
from ..state.tensors import TORCH_DTYPES
from ..stores.base import Store
from ..stores.url import absolute
from .source import open_file, read_at

COPY_BYTES = 8 << 20
# Weights in any form, and their indexes: those of the directory are not the ones exported.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".index.json")
OTHER_WEIGHTS = (".h5", ".msgpack", ".gguf", ".onnx", ".distcp")
TRAINER_STATE = "trainer_state.json"  # of a checkpoint of the Trainer: not of its model
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
CONFIG_BYTES_MAX = 16 << 20


def files_beside(directory: "str | os.PathLike[str]") -> tuple[str, list[str]]:
    """Return (absolute path, names of its files that belong to a model, without weights).

    The directory may be a checkpoint of the Trainer: files of holdfast and of training stay there.

    Raises:
        OptionError: it is no directory, or has no such file.
    """
    place = absolute(directory, "with")
    try:
        names = sorted(entry.name for entry in os.scandir(place) if entry.is_file())
    except OSError as error:
        raise OptionError(
            f"with is {place}: {error.strerror}; expected a directory with config.json"
        ) from error
    kept = [
        n
        for n in names
        if not n.startswith(".")
        and not n.lower().endswith(WEIGHTS + OTHER_WEIGHTS)
        and is_foreign(n)
        and n != TRAINER_STATE
    ]
    if not kept:
        raise OptionError(f"with is {place}, which has no files but weights; expected config.json")
    return place, kept


def copy_beside(store: Store, place: str, names: list[str], dtype: str | None) -> None:
    """Copy files durably.

    Args:
        dtype: that the tensors have been converted to.
    """
    for name in names:
        if name == CONFIG and dtype is not None:
            store.prepare(name, _converted(f"{place}/{name}", dtype))
        else:
            _copy(store, f"{place}/{name}", name)


def _copy(store: Store, path: str, name: str) -> None:
    source, target = open_file(path), store.create(name, direct=False)
    try:
        size, done = os.fstat(source).st_size, 0
        while done < size:
            part = bytearray(min(COPY_BYTES, size - done))
            read_at(source, path, done, memoryview(part))
            store.vfs.write(target, part, done)
            done += len(part)
        store.vfs.sync(target)
    finally:
        os.close(source)
        store.vfs.close(target)


def _converted(path: str, dtype: str) -> bytes:
    """Return config.json with the dtype that the tensors have."""
    descriptor = open_file(path)
    try:
        size = os.fstat(descriptor).st_size
        data = bytearray(min(size, CONFIG_BYTES_MAX))
        read_at(descriptor, path, 0, memoryview(data))
    finally:
        os.close(descriptor)
    try:
        config = json.loads(data)
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
        config |= dict.fromkeys(keys, str(TORCH_DTYPES[dtype]).removeprefix("torch."))
    except (ValueError, TypeError, RecursionError) as error:
        raise OptionError(f"{path} is no configuration in JSON: {error}; repair it") from error
    return (json.dumps(config, indent=2) + "\n").encode()
