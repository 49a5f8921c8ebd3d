"""Checkpoints of PyTorch's DCP as sources: chunks of many files, values, and what is refused."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import holdfast
from holdfast.convert import files
from holdfast.convert.kinds import open_source
from holdfast.errors import CorruptError, HoldfastError, OptionError, StateError
from holdfast.layout import whole

from .test_torch_file import assert_same, look_up, read_box, training_state

pytestmark = pytest.mark.filterwarnings("ignore")
NewPath = Callable[[], Path]


def test_a_state_has_the_names_and_elements_of_holdfast_save(new_path: NewPath) -> None:
    theirs, saved, state = new_path(), new_path(), training_state()
    del state["optimizer"], state["empty"]  # DCP makes text of its keys, and leaves out the other
    dcp.save(state, checkpoint_id=theirs)
    holdfast.save(state, saved)
    with open_source(theirs) as source, open_source(saved) as own:
        assert source.kind == "dcp"
        assert_same(source, state)
        assert set(source.tensors) == set(own.tensors)
        assert {k: repr(v) for k, v in source.values.items()} == {
            k: repr(v) for k, v in own.values.items()
        }


def test_the_state_of_an_optimizer_is_read(new_path: NewPath) -> None:
    theirs, state = new_path(), {"optimizer": training_state()["optimizer"]}
    dcp.save(state, checkpoint_id=theirs)
    with open_source(theirs) as source:
        for tensor in source.tensors:
            path = [int(key) if str(key).isdigit() else key for key in tensor.path]
            found = read_box(source, tensor, whole(tensor.shape))
            assert torch.equal(found, look_up(state, path))
        groups = {path[-1]: value for path, value in source.values.items()}
        assert groups["param_groups"] == state["optimizer"]["param_groups"]


def chunked(directory: Path, tensor: torch.Tensor, rows: int, **changed: Any) -> None:
    """Write a tensor as DCP does, in chunks of rows, each in a file."""
    directory.mkdir()
    chunks, places = [], {}
    for number, part in enumerate(tensor.split(rows)):
        offset = torch.Size((number * rows, *[0] * (tensor.ndim - 1)))
        torch.save(part.clone(), directory / f"__{number}_0.distcp")
        size = (directory / f"__{number}_0.distcp").stat().st_size
        chunks.append(ChunkStorageMetadata(offset, part.shape))
        places[MetadataIndex("w", offset)] = dcp.filesystem._StorageInfo(
            f"__{number}_0.distcp", 0, size
        )
    properties = TensorProperties(dtype=tensor.dtype)
    described = {"w": TensorStorageMetadata(properties, tensor.shape, chunks)}
    metadata = Metadata(described, storage_data=places)
    for name, value in changed.items():
        setattr(metadata, name, value(getattr(metadata, name)))
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def test_chunks_of_many_files_are_one_tensor(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "OPEN_MAX", 3)
    theirs, tensor = new_path(), torch.randn(50, 7)
    chunked(theirs, tensor, 3)
    with open_source(theirs) as source:
        assert_same(source, {"w": tensor})
        (w,) = source.tensors
        box = type(whole(w.shape))((4, 2), (31, 4))
        assert torch.equal(read_box(source, w, box), tensor[4:35, 2:6])
        assert len(source.files._open) <= 3  # type: ignore[attr-defined]


def test_a_chunk_that_is_lost_or_twice_is_refused(new_path: NewPath) -> None:
    tensor = torch.randn(12, 2)

    def without(described: Any) -> Any:
        described["w"].chunks.pop(1)
        return described

    def larger(described: Any) -> Any:
        described["w"].chunks[0].sizes = torch.Size((4, 2))
        return described

    for change, text in ((without, r"cover 18 of 24"), (larger, "overlap")):
        theirs = new_path()
        chunked(theirs, tensor, 3, state_dict_metadata=change)
        with pytest.raises(CorruptError, match=text):
            open_source(theirs)


def test_lies_of_the_metadata_are_typed_errors(new_path: NewPath) -> None:
    def places(change: Callable[[Any], None]) -> Callable[[Any], Any]:
        def changed(found: Any) -> Any:
            for info in found.values():
                change(info)
            return found

        return changed

    def set_to(name: str, value: Any) -> Callable[[Any], None]:
        return lambda info: setattr(info, name, value)

    lies = {
        "outside": places(set_to("relative_path", "../x")),
        "outside it": places(set_to("relative_path", "/etc/passwd")),
        "missing": places(set_to("relative_path", "nothing")),
        "missing or not a file": places(set_to("relative_path", ".")),
        "not within": places(set_to("offset", -1)),
        "not within the file": places(set_to("length", 1 << 40)),
        "unknown way": places(set_to("offset", "0")),
        "no data for it": lambda found: {},
        "not the metadata": lambda found: None,
    }
    for text, change in lies.items():
        theirs = new_path()
        chunked(theirs, torch.ones(4, 2), 2, storage_data=change)
        with pytest.raises(CorruptError, match=text):
            open_source(theirs)
    theirs = new_path()
    change = places(set_to("transform_descriptors", ["zstd"]))
    chunked(theirs, torch.ones(4, 2), 2, storage_data=change)
    with pytest.raises(OptionError, match="extension"):
        open_source(theirs)


def test_a_chunk_of_another_shape_is_found_when_it_is_read(new_path: NewPath) -> None:
    theirs = new_path()
    chunked(theirs, torch.ones(4, 2), 2)
    torch.save(torch.ones(2, 3), theirs / "__0_0.distcp")
    size = (theirs / "__0_0.distcp").stat().st_size
    metadata = pickle.loads((theirs / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).length = size
    (theirs / ".metadata").write_bytes(pickle.dumps(metadata))
    with open_source(theirs) as source, pytest.raises(CorruptError, match="holds another tensor"):
        read_box(source, source.tensors[0], whole((4, 2)))


def test_a_flipped_bit_is_found(new_path: NewPath) -> None:
    theirs = new_path()
    dcp.save({"w": torch.zeros(1000)}, checkpoint_id=theirs)
    (file,) = theirs.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(bytes(4000)) + 1000] ^= 4
    file.write_bytes(data)
    with open_source(theirs) as source, pytest.raises(CorruptError, match="CRC-32"):
        read_box(source, source.tensors[0], whole((1000,)))


class Custom:
    pass


def test_a_value_that_is_no_plain_data_is_refused(new_path: NewPath) -> None:
    theirs = new_path()
    dcp.save({"a": Custom(), "w": torch.ones(2)}, checkpoint_id=theirs)
    with pytest.raises(StateError, match=r"a \(.*Custom\)"):
        open_source(theirs)


def test_bytes_of_another_planner_are_refused(new_path: NewPath) -> None:
    theirs = new_path()
    theirs.mkdir()
    (theirs / "f").write_bytes(b"abcdef")
    places = {MetadataIndex("x"): dcp.filesystem._StorageInfo("f", 0, 6)}
    metadata = Metadata({"x": BytesStorageMetadata()}, storage_data=places)
    (theirs / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(OptionError, match="a planner of its own"):
        open_source(theirs)


def test_metadata_that_is_cut_or_changed_is_a_typed_error(new_path: NewPath) -> None:
    theirs, tensor = new_path(), torch.arange(8.0).view(4, 2)
    chunked(theirs, tensor, 2)
    data = (theirs / ".metadata").read_bytes()
    for length in range(0, len(data), 5):
        (theirs / ".metadata").write_bytes(data[:length])
        with pytest.raises(CorruptError):
            open_source(theirs)
    for place in range(0, len(data), 3):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        (theirs / ".metadata").write_bytes(changed)
        try:
            with open_source(theirs) as source:
                for each in source.tensors:
                    read_box(source, each, whole(each.shape))
        except HoldfastError:
            pass
