"""Foreign checkpoints that lie, and exports that cannot be: a typed error, and soon."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from convert.unpacked import unpacked
from holdfast.convert import deepspeed
from holdfast.convert.files import OPEN_MAX, Files
from holdfast.convert.kinds import open_source
from holdfast.errors import CorruptError, OptionError, StateError, StoreError
from holdfast.layout import whole

from .test_pickles import call, named, text
from .test_pickles import whole as pickled

NewPath = Callable[[], Path]
ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
METADATA = "torch.distributed.checkpoint.metadata."


def safetensors(path: Path, header: dict[str, Any], data: bytes = b"\0" * 4) -> Path:
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def read_all(path: Path, kind: str | None = None) -> None:
    with open_source(path, kind) as source:
        for tensor in source.tensors:
            source.read(tensor, whole(tensor.shape), memoryview(bytearray(tensor.size_bytes)))


def test_a_tensor_in_two_shards_is_refused_though_no_index_lists_it(tmp_path: Path) -> None:
    weights = {}
    for number in range(2):
        weights[f"w{number}"] = f"m{number}.safetensors"
        header = {"same": ONE, f"w{number}": {**ONE, "data_offsets": [4, 8]}}
        safetensors(tmp_path / f"m{number}.safetensors", header, b"\0" * 8)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(CorruptError, match="same, and so does another shard"):
        open_source(tmp_path)


def test_metadata_of_safetensors_that_is_no_text_is_no_tie(tmp_path: Path) -> None:
    file = safetensors(tmp_path / "a.safetensors", {"__metadata__": {"a": [1]}, "w": ONE})
    with open_source(file) as source:
        assert source.ties == {}


@pytest.mark.parametrize(
    ("name", "target", "what"),
    [
        ("\ud800", "x.safetensors", "not valid Unicode"),
        ("\ud800", "x.npz", "not valid Unicode"),
        ("n" * 70_000, "x.npz", "at most 65,535"),
    ],
)
def test_a_name_that_the_target_cannot_hold_is_refused(
    name: str, target: str, what: str, tmp_path: Path
) -> None:
    file = safetensors(tmp_path / "a.safetensors", {name: ONE})
    with pytest.raises(OptionError, match=what):
        holdfast.export_checkpoint(file, tmp_path / target)
    assert not (tmp_path / target).exists()


@pytest.mark.parametrize("target", ["x.safetensors", "directory"])
def test_no_tensor_takes_the_place_of_the_metadata(target: str, tmp_path: Path) -> None:
    torch.save({"__metadata__": torch.ones(2), "w": torch.ones(3)}, tmp_path / "a.pt")
    with pytest.raises(OptionError, match="keeps the name __metadata__"):
        holdfast.export_checkpoint(tmp_path / "a.pt", tmp_path / target)


def test_a_shape_that_no_checkpoint_can_hold_is_refused_before_the_commit(tmp_path: Path) -> None:
    shape = {"dtype": "F32", "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}
    file = safetensors(tmp_path / "a.safetensors", {"w": shape}, b"")
    with pytest.raises(StateError, match="too large for a checkpoint"):
        holdfast.import_checkpoint(file, tmp_path / "x")
    assert not (tmp_path / "x" / "MANIFEST").exists()


def test_an_endless_shard_size_is_refused(tmp_path: Path) -> None:
    file = safetensors(tmp_path / "a.safetensors", {"w": ONE})
    with pytest.raises(OptionError, match="shard_size"):
        holdfast.export_checkpoint(file, tmp_path / "x", shard_size="9" * 400)


@pytest.mark.parametrize("name", ["file", "nothing"])
def test_a_named_kind_of_what_is_no_directory_is_a_typed_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StoreError, match="directory"):
        open_source(tmp_path / name, "deepspeed")


def test_a_large_stride_of_a_side_of_one_is_no_step(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(4.0).as_strided((1, 2), (1 << 62, 2))}, tmp_path / "a.pt")
    with open_source(tmp_path / "a.pt") as source:
        memory = bytearray(8)
        source.read(source.tensors[0], whole((1, 2)), memoryview(memory))
    assert torch.frombuffer(memory, dtype=torch.float32).tolist() == [0.0, 2.0]


def test_a_file_that_was_replaced_while_it_was_closed_is_noticed(tmp_path: Path) -> None:
    files, first = Files(), tmp_path / "0"
    for number in range(OPEN_MAX + 2):
        (tmp_path / f"{number}").write_bytes(b"old")
        files.size(str(tmp_path / f"{number}"))
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "new").replace(first)
    with pytest.raises(CorruptError, match="was changed while"):
        files.read(str(first), 0, memoryview(bytearray(3)))
    files.close()


# DCP.


def record(name: str, *fields: bytes) -> bytes:
    return named(METADATA + name) + b")\x81}(" + b"".join(fields) + b"ub"


def doubled(levels: int) -> bytes:
    """Lists of the same list twice, whose text has 2^levels parts."""
    found = b"]q\x00"
    for number in range(levels):
        found += b"0](h%ch%ceq%c" % (number, number, number + 1)
    return found


def stored(fqn: bytes) -> bytes:
    place = (text("relative_path"), text("f"), text("offset"), b"K\x00", text("length"), b"K\x01")
    return record("MetadataIndex", text("fqn"), fqn) + record("_StorageInfo", *place)


def dcp_bombs() -> dict[str, bytes]:
    """Fields of a ``.metadata``."""
    items, places, keys = map(text, ("state_dict_metadata", "storage_data", "planner_data"))
    value = b"}(" + text("w") + record("BytesStorageMetadata") + b"u"
    size, none = call("torch.Size", b"(K\x02t"), call("torch.Size", b"(K\x00t")
    chunk = record("ChunkStorageMetadata", text("offsets"), none, text("sizes"), size)
    chunks = b"](" + chunk + b"q\xc8" + b"h\xc8" * 100_000 + b"eq\xc9"
    properties = record("TensorProperties", text("dtype"), named("torch.float32"))
    head = text("size") + size + text("properties") + properties + text("chunks")
    names = [text(f"{number}") for number in range(2000)]
    tensors = [
        name + record("TensorStorageMetadata", head, b"h\xc9" if number else chunks)
        for number, name in enumerate(names)
    ]
    many = b"}(" + b"".join(tensors) + b"u" + places + b"}(" + b"".join(map(stored, names)) + b"u"
    return {
        "a name that is no text": items + b"}" + places + b"}(" + stored(doubled(40)) + b"u",
        "keys of a planner": items + value + places + b"}(" + stored(text("w")) + b"u" + keys
        + b"}(" + text("w") + doubled(40) + b"\x85u",
        "chunks of all tensors": items + many,
    }  # fmt: skip


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", dcp_bombs())
def test_metadata_of_dcp_takes_no_endless_time(name: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    (tmp_path / ".metadata").write_bytes(pickled(record("Metadata", dcp_bombs()[name])))
    with pytest.raises(CorruptError, match="the same parts again and again"):
        open_source(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_two_tensors_of_dcp_in_one_place_are_both_checked(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(4), "b": torch.arange(100.0)}, checkpoint_id=tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    places = {index.fqn: index for index in metadata.storage_data}
    metadata.storage_data[places["b"]] = metadata.storage_data[places["a"]]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptError, match="holds another tensor"):
        read_all(tmp_path)


# Others.


@pytest.mark.timeout(30)
def test_keys_of_torchsnapshot_that_double_are_refused(tmp_path: Path) -> None:
    manifest: dict[str, Any] = {
        "0/" + "/".join("a" * depth): {"type": "dict", "keys": ["a", "a"]} for depth in range(1, 50)
    }
    manifest["0/" + "/".join("a" * 50)] = {"type": "int", "serialized_value": "1"}
    metadata = {"world_size": 1, "manifest": manifest}
    (tmp_path / ".snapshot_metadata").write_text(json.dumps(metadata))
    with pytest.raises(CorruptError, match="with a key twice"):
        open_source(tmp_path)


@pytest.fixture
def by_deepspeed(new_path: NewPath) -> Path:
    return unpacked("deepspeed", new_path())


@pytest.mark.parametrize("case", ["stage-1", "stage-2", "stage-3"])
def test_two_files_of_one_rank_are_refused(case: str, by_deepspeed: Path) -> None:
    directory = by_deepspeed / case / "global_step2"
    (file,) = directory.glob("*zero_pp_rank_1_*optim_states.pt")
    plain = file.name.removeprefix("bf16_")
    shutil.copy(file, directory / (plain if plain != file.name else f"bf16_{plain}"))
    with pytest.raises(CorruptError, match="both of rank 1"):
        open_source(directory)


@pytest.mark.parametrize("case", ["stage-1", "stage-2", "stage-3"])
def test_ranks_with_another_dtype_are_refused(
    case: str, by_deepspeed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_archive = deepspeed.read_torch_archive

    def changed(region: Any) -> Any:
        found = read_archive(region)
        if "rank_1_" in region.path and "optim" in region.path:
            root = found.root["optimizer_state_dict"]
            for key in {"fp32_flat_groups", "single_partition_of_fp32_groups"} & root.keys():
                root[key] = [flat._replace(dtype=torch.float16) for flat in root[key]]
        return found

    monkeypatch.setattr(deepspeed, "read_torch_archive", changed)
    with pytest.raises(CorruptError, match="other than the ranks before"):
        read_all(by_deepspeed / case / "global_step2")
