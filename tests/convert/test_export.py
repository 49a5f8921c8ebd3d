"""Export to safetensors: the libraries' own bytes, names, dtypes, and nothing left by a failure."""

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import holdfast
from holdfast import Options
from holdfast.cli import main
from holdfast.convert.emit import BATCH_BYTES
from holdfast.convert.targets import bytes_in
from holdfast.errors import (
    AlreadyCommittedError,
    CorruptError,
    HoldfastError,
    MismatchError,
    NoSpaceError,
    NotCommittedError,
    OptionError,
    StoreError,
)
from holdfast.stores.building import PREFIX
from holdfast.testing import Fault, faulty, recording

NewPath = Callable[[], Path]
State = dict[str, torch.Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
DTYPES += (torch.float64, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64)


def some_tensor(chance: random.Random, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of random bits."""
    shape = [chance.choice((1, 2, 3, 7, 64)) for _ in range(chance.randrange(4))]
    if chance.random() < 0.1:
        shape.append(0)
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    numbers = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return numbers.view(dtype).reshape(shape)


def export(source: Path, target: Path, **given: Any) -> holdfast.Conversion:
    return holdfast.export_checkpoint(source, target, **given)


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_a_file_has_the_bytes_that_the_library_writes(codec: str, new_path: NewPath) -> None:
    chance = random.Random(3)
    torch.manual_seed(3)
    state = {f"layer.{n}.é": some_tensor(chance, chance.choice(DTYPES)) for n in range(60)}
    source, target, theirs = new_path(), new_path().with_suffix(".safetensors"), new_path()
    holdfast.save(state, source, codec=codec)
    report = export(source, target)
    safetensors.torch.save_file(state, theirs, metadata={"format": "pt"})
    assert target.read_bytes() == theirs.read_bytes()
    assert report.tensors == 60 and report.left_out == () and report.files == (target.name,)
    assert report.size_bytes == sum(tensor.nbytes for tensor in state.values())


def test_tensors_larger_than_the_window_come_whole(new_path: NewPath) -> None:
    torch.manual_seed(4)
    state = {
        "bytes": torch.randint(0, 256, (BATCH_BYTES + 4097,), dtype=torch.uint8),
        "matrix": torch.randn(3, 1021, 4099),
        "small": torch.randn(5),
    }
    source, target = new_path(), new_path().with_suffix(".safetensors")
    holdfast.save(state, source)
    export(source, target, options=Options(pool_bytes=48 << 20))
    found = safetensors.torch.load_file(target)
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_chain_of_deltas_is_exported(new_path: NewPath) -> None:
    run, target = new_path(), new_path().with_suffix(".safetensors")
    state = {"weight": torch.randn(300, 300), "bias": torch.randn(300)}
    for step in (1, 2, 3):
        state["weight"][step] += 1
        holdfast.save(state, run / f"step-{step:08d}", step=step, codec="delta")
    assert holdfast.open(run / "step-00000003").base
    export(run / "step-00000003", target)
    found = safetensors.torch.load_file(target)
    assert all(torch.equal(found[name], state[name]) for name in state)


STATE = {
    "model": {"a.weight": torch.randn(4, 3), "a.bias": torch.randn(4), "b.weight": torch.ones(2)},
    "optimizer": {"exp": torch.randn(4, 3)},
    "step": 7,
}


@pytest.fixture
def saved(new_path: NewPath) -> Path:
    """A checkpoint of `STATE`."""
    path = new_path()
    holdfast.save(STATE, path)
    return path


NAMES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "all": ({}, {"model.a.weight", "model.a.bias", "model.b.weight", "optimizer.exp"}),
    "included": ({"include": "model"}, {"model.a.weight", "model.a.bias", "model.b.weight"}),
    "excluded": ({"include": "model", "exclude": "*.bias"}, {"model.a.weight", "model.b.weight"}),
    "stripped": ({"include": ["model"], "strip": "model."}, {"a.weight", "a.bias", "b.weight"}),
    "renamed": (
        {
            "include": "model.a",
            "strip": "model.",
            "rename": [(r"^a\.(.*)", r"x.\1"), ("bias$", "b")],
        },
        {"x.weight", "x.b"},
    ),
    "renamed by its beginning": (
        {"include": "model", "rename": {"model.a": "x", "model": ""}},
        {"x.weight", "x.bias", "b.weight"},
    ),
}


@pytest.mark.parametrize("what", NAMES)
def test_names_are_chosen_and_changed(what: str, saved: Path, new_path: NewPath) -> None:
    given, names = NAMES[what]
    target = new_path().with_suffix(".safetensors")
    report = export(saved, target, **given)
    assert set(safetensors.torch.load_file(target)) == names
    assert report.left_out == (("step",) if what == "all" else ())


def test_tied_tensors_are_written_once(new_path: NewPath) -> None:
    weight = torch.randn(5, 2)
    source = new_path()
    holdfast.save({"embed": weight, "head": weight, "other": torch.ones(1)}, source)
    for given, names, ties in (
        ({}, {"embed", "other"}, {"head": "embed"}),
        ({"include": "head"}, {"head"}, {}),
        ({"rename": {"embed": "e"}}, {"e", "other"}, {"head": "e"}),
    ):
        target = new_path().with_suffix(".safetensors")
        report = export(source, target, **given)  # type: ignore[arg-type]
        assert set(safetensors.torch.load_file(target)) == names
        with safetensors.safe_open(target, "pt") as file:
            assert file.metadata() == {"format": "pt"} | ties
        assert report.ties == len(ties)


def test_shards_are_shared_out_as_huggingface_hub_does(new_path: NewPath) -> None:
    sizes = [6, 6, 2, 6, 2, 2, 30, 1]
    state = {f"t{n}": torch.full((size,), n, dtype=torch.uint8) for n, size in enumerate(sizes)}
    source, target = new_path(), new_path()
    holdfast.save(state, source)
    export(source, target, shard_size=10)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": sum(sizes), "total_size": sum(sizes)}
    shards = [sorted(safetensors.torch.load_file(path)) for path in sorted(target.glob("*.saf*s"))]
    assert shards == [["t0"], ["t1", "t2"], ["t6"], ["t3", "t4", "t5"], ["t7"]]
    for name, file in index["weight_map"].items():
        assert torch.equal(safetensors.torch.load_file(target / file)[name], state[name])
    assert sorted(index["weight_map"].values())[0] == "model-00001-of-00005.safetensors"


@pytest.mark.parametrize(
    ("size", "found"), [("1MB", 10**6), ("1 MiB", 1 << 20), ("0.5kB", 500), (7, 7), ("9", 9)]
)
def test_a_shard_size_is_read(size: Any, found: int) -> None:
    assert bytes_in(size) == found


def test_floats_are_converted_and_all_else_stays(new_path: NewPath) -> None:
    state = {
        "f32": torch.randn(7, 1000),
        "f64": torch.randn(9).double(),
        "f16": torch.randn(9).half(),
        "f8": torch.randn(8).to(torch.float8_e4m3fn),
        "i64": torch.arange(9),
    }
    source, target = new_path(), new_path().with_suffix(".safetensors")
    holdfast.save(state, source)
    export(source, target, dtype=torch.bfloat16)
    found = safetensors.torch.load_file(target)
    for name in ("f32", "f64", "f16"):
        assert torch.equal(found[name], state[name].bfloat16()), name
    for name in ("f8", "i64"):
        assert found[name].dtype == state[name].dtype


def test_large_tensors_are_converted_part_by_part(new_path: NewPath) -> None:
    state = {"w": torch.arange(BATCH_BYTES // 2, dtype=torch.float64)}
    source, target = new_path(), new_path().with_suffix(".safetensors")
    holdfast.save(state, source)
    export(source, target, dtype="f32")
    assert torch.equal(safetensors.torch.load_file(target)["w"], state["w"].float())


@pytest.mark.parametrize("dtype", ["f16", "f8_e4m3fn", "f8_e5m2"])
def test_a_number_that_overflows_is_said(dtype: str, new_path: NewPath) -> None:
    state = {"fine": torch.ones(3), "huge": torch.tensor([1.0, -70000.0, float("inf"), 1.0])}
    source, target = new_path(), new_path().with_suffix(".safetensors")
    holdfast.save(state, source)
    with pytest.raises(OptionError, match=r"huge has 70000, which .* cannot hold"):
        export(source, target, dtype=dtype)
    assert sorted(os.listdir(target.parent)) == sorted([source.name])
    export(source, target, dtype=dtype, allow_overflow=True)
    found = safetensors.torch.load_file(target)["huge"].float()
    assert abs(found[1]) != 70000 and found[0] == found[3] == 1


def test_infinite_numbers_alone_are_no_overflow(new_path: NewPath) -> None:
    state = {"w": torch.tensor([float("inf"), float("nan"), 1.0])}
    source, target = new_path(), new_path().with_suffix(".safetensors")
    holdfast.save(state, source)
    export(source, target, dtype="f16")
    assert safetensors.torch.load_file(target)["w"].isfinite().tolist() == [False, False, True]


@pytest.fixture
def beside(new_path: NewPath) -> Path:
    """A directory as transformers writes it."""
    path = new_path()
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "x", "dtype": "float32"}))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"old")
    (path / "pytorch_model.bin.index.json").write_text("{}")
    (path / ".cache").write_text("")
    (path / "__0_0.distcp").write_text("")
    (path / "sub").mkdir()
    return path


def test_config_and_tokenizer_are_copied(saved: Path, beside: Path, new_path: NewPath) -> None:
    target = new_path()
    report = export(saved, target, files_from=beside, include="model")
    assert sorted(os.listdir(target)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(report.files) == sorted(os.listdir(target))
    assert (target / "config.json").read_bytes() == (beside / "config.json").read_bytes()


def test_files_of_holdfast_and_of_training_are_not_copied(saved: Path, new_path: NewPath) -> None:
    target = new_path()
    for name in ("config.json", "trainer_state.json", "SIGNATURE"):
        (saved / name).write_text("{}")
    export(saved, target, files_from=saved, include="model")
    assert sorted(os.listdir(target)) == ["config.json", "model.safetensors"]


def test_the_copied_config_has_the_new_dtype(saved: Path, beside: Path, new_path: NewPath) -> None:
    target = new_path()
    export(saved, target, files_from=beside, dtype="bf16")
    config = json.loads((target / "config.json").read_text())
    assert config == {"model_type": "x", "dtype": "bfloat16"}


def test_an_adapter_is_written_as_peft_does(new_path: NewPath, beside: Path) -> None:
    name = "base_model.model.q_proj.lora_A.default.weight"
    source, target = new_path(), new_path()
    model = {name: torch.ones(2), "base_model.model.q_proj.w": torch.ones(1)}
    moments = {name: {"exp_avg": torch.ones(2)}}
    holdfast.save({"model": model, "optimizer": {"state": moments}}, source)
    (beside / "adapter_config.json").write_text("{}")
    page = (Path(__file__).parents[2] / "docs" / "howto" / "export.md").read_text()
    include, strip = re.findall(r'--include "(\S*lora_\S*)" --strip (\S+)`', page)[0]
    export(source, target, include=include, strip=strip, files_from=beside)
    assert (target / "adapter_config.json").exists()
    found = safetensors.torch.load_file(target / "adapter_model.safetensors")
    assert set(found) == {"base_model.model.q_proj.lora_A.weight"}


def test_safetensors_are_exported_as_well(new_path: NewPath) -> None:
    source, target = new_path().with_suffix(".safetensors"), new_path().with_suffix(".safetensors")
    state = {"b": torch.randn(40, 40), "a": torch.ones(3)}
    safetensors.torch.save_file(state, source)
    report = export(source, target, include="b", rename=[("b", "c")])
    assert torch.equal(safetensors.torch.load_file(target)["c"], state["b"])
    assert report.kind == report.to == "safetensors"


BAD: dict[str, tuple[dict[str, Any], type[HoldfastError], str]] = {
    "a collision": ({"rename": ("[ab]\\.", "")}, MismatchError, "one name of two"),
    "a collision with what is stripped": (
        {"strip": "model.", "rename": [("optimizer.exp", "a.bias")]},
        MismatchError,
        "one name of two",
    ),
    "a regex of nothing": ({"rename": ("zzz", "y")}, MismatchError, "fits 'zzz'"),
    "a beginning that is not there": ({"rename": {"zzz": "y"}}, MismatchError, "fits 'zzz'"),
    "no regex": ({"rename": ("(", "y")}, OptionError, "cannot be used"),
    "a group that is not there": ({"rename": ("a", r"\7")}, OptionError, "group"),
    "renames that are none": ({"rename": [5]}, OptionError, "expected a dict"),
    "a beginning of nothing": ({"strip": "zzz"}, MismatchError, "begins with 'zzz'"),
    "a pattern of nothing": ({"include": "zzz"}, MismatchError, "zzz"),
    "no tensor": ({"include": "step"}, OptionError, "no tensor"),
    "an unknown dtype": ({"dtype": "bf17"}, OptionError, "'bf17'; expected one of f64"),
    "integers as the dtype": ({"dtype": "i64"}, OptionError, "expected one of"),
    "a dtype that is a number": ({"dtype": 16}, OptionError, "expected one of"),
    "an unknown format": ({"to": "zip"}, OptionError, "expected one of safetensors"),
    "shards of a file": ({"shard_size": "1MB"}, OptionError, "needs a directory"),
    "a config beside a file": ({"files_from": "."}, OptionError, "needs a directory"),
    "trust": ({"options": Options(trust="missing.pem")}, OptionError, ""),
}


@pytest.mark.parametrize("what", BAD)
def test_an_invalid_request_is_refused_and_leaves_nothing(
    what: str, saved: Path, new_path: NewPath
) -> None:
    given, kind, text = BAD[what]
    target = new_path().with_suffix(".safetensors")
    with pytest.raises(HoldfastError) as caught:
        export(saved, target, **given)
    assert isinstance(caught.value, kind) and text in str(caught.value)
    assert os.listdir(target.parent) == [saved.name]


@pytest.mark.parametrize("size", ["", "5 apples", 0, -1, 1.5, True])
def test_an_invalid_shard_size_is_refused(size: Any, saved: Path, new_path: NewPath) -> None:
    with pytest.raises(OptionError, match="shard_size"):
        export(saved, new_path(), shard_size=size)


def test_an_unknown_suffix_is_refused(saved: Path, new_path: NewPath) -> None:
    for name in ("a.onnx", "a.safetensor"):
        with pytest.raises(OptionError, match=r"expected one of \.safetensors"):
            export(saved, new_path() / name)
    target = new_path() / "llama-3.1"
    export(saved, target)
    assert os.listdir(target) == ["model.safetensors"]
    export(saved, new_path() / "a.v2", to="safetensors")


def test_what_is_there_already_is_never_overwritten(saved: Path, new_path: NewPath) -> None:
    file = new_path().with_suffix(".safetensors")
    file.write_bytes(b"mine")
    directory = new_path()
    directory.mkdir()
    export(saved, directory)
    for target in (file, directory, saved):
        with pytest.raises(AlreadyCommittedError, match="never overwritten"):
            export(saved, target)
    assert file.read_bytes() == b"mine"
    assert os.listdir(directory) == ["model.safetensors"]


@pytest.mark.parametrize("name", ["data/a.pt", "data/deep/a.safetensors", "data/directory"])
def test_nothing_is_exported_among_the_files_of_a_checkpoint(
    saved: Path, new_path: NewPath, name: str
) -> None:
    with pytest.raises(OptionError, match=f"{name} is within a committed checkpoint, {saved},"):
        export(saved, saved / name)
    (file := new_path()).write_bytes(b"")
    with pytest.raises(StoreError, match="is within a file; choose another place"):
        export(saved, file / name)
    assert sorted(os.listdir(saved)) == ["MANIFEST", "data"]
    assert len(os.listdir(saved / "data")) == 1


@pytest.mark.parametrize("name", ["model.safetensors", "hf"])
def test_an_export_may_stand_beside_the_files_of_a_checkpoint(saved: Path, name: str) -> None:
    """As where a framework keeps its own files in the same directory."""
    export(saved, saved / name)
    assert not holdfast.verify(saved).damage
    holdfast.open(saved)


def test_there_is_nothing_to_export(new_path: NewPath) -> None:
    with pytest.raises(NotCommittedError, match="nothing at"):
        export(new_path(), new_path())


def test_only_one_of_two_exports_gets_the_name(saved: Path, new_path: NewPath) -> None:
    for target in (new_path(), new_path().with_suffix(".safetensors")):
        ends: list[object] = []
        begin = threading.Barrier(2)

        def one(target: Path = target, ends: list[object] = ends) -> None:
            begin.wait()  # noqa: B023
            try:
                ends.append(export(saved, target))
            except AlreadyCommittedError as error:
                ends.append(error)

        threads = [threading.Thread(target=one) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(type(end).__name__ for end in ends) == ["AlreadyCommittedError", "Conversion"]
        assert not leftovers(target.parent)


def leftovers(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(PREFIX)]


OPERATIONS = ("create", "write", "allocate", "truncate", "sync", "sync_directory", "link")
OPERATIONS += ("rename", "make_directory", "read", "open")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("is_file", [True, False])
def test_a_failed_call_of_the_system_leaves_nothing(
    operation: str, is_file: bool, saved: Path, beside: Path, new_path: NewPath
) -> None:
    root = new_path()
    root.mkdir()
    for nth in range(1, 100):
        target = root / ("a.safetensors" if is_file else "a")
        more = {} if is_file else {"shard_size": 40, "files_from": beside}
        fault = Fault(operation, nth=nth, persistent=True, argument=errno.EIO)
        try:
            with faulty(fault):
                export(saved, target, include="model", **more)
        except StoreError as error:
            assert error.errno == errno.EIO
            assert os.listdir(root) == []
        else:
            assert len(safetensors_in(target)) == 3
            break
    else:
        pytest.fail("it never succeeds")
    assert nth > 1 or operation in ("link", "rename", "allocate")


def safetensors_in(target: Path) -> set[str]:
    from holdfast.convert.kinds import open_source

    with open_source(target) as source:
        return set(source.names().values())


@pytest.mark.parametrize("is_file", [True, False])
def test_all_is_durable_before_it_has_its_name(
    is_file: bool, saved: Path, beside: Path, new_path: NewPath
) -> None:
    target = new_path() / "new" / ("a.safetensors" if is_file else "a")
    target.parent.parent.mkdir()
    more: dict[str, Any] = {} if is_file else {"shard_size": 40, "files_from": beside}
    with recording() as disk:
        export(saved, target, include="model", **more)
    trace = [entry for entry in disk.trace() if str(target.parent) in entry[1]]
    step = next(n for n, entry in enumerate(trace) if entry[0] in ("link", "rename"))
    created = [entry[1] for entry in trace[:step] if entry[0] == "create"]
    assert len(created) == (1 if is_file else 5)
    for path in created:
        last = max(n for n, entry in enumerate(trace) if entry[:2] == ("write", path))
        assert ("sync", path) in [entry[:2] for entry in trace[last:step]], path
    hidden = os.path.dirname(created[0])
    made = max(n for n, entry in enumerate(trace) if entry[0] == "create")
    assert ("sync_directory", hidden) in [entry[:2] for entry in trace[made:step]]
    after = [entry[1] for entry in disk.trace() if entry[0] == "sync_directory"][-2:]
    assert after == [str(target.parent), str(target.parent.parent)], "the new name, and its place"


def test_a_damaged_source_leaves_nothing(new_path: NewPath) -> None:
    source, target = new_path(), new_path()
    state = {f"w{n}": torch.randn(1000) for n in range(9)}
    holdfast.save(state, source)
    file = next(source.rglob("*.hf"))
    data = bytearray(file.read_bytes())
    data[data.find(state["w5"].numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError):
        export(source, target)
    assert os.listdir(target.parent) == [source.name]


def test_a_full_disk_is_said_before_anything_is_written(
    saved: Path, new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.stores.local import LocalStore

    monkeypatch.setattr(LocalStore, "free_bytes", lambda _: 100)
    target = new_path()
    with pytest.raises(NoSpaceError, match="Nothing was written"):
        export(saved, target)
    assert not target.exists()


KILLED = """
import sys, torch, holdfast
torch.set_num_threads(1)
print("ready", flush=True)
sys.stdin.readline()
print("begun", flush=True)
holdfast.export_checkpoint(sys.argv[1], sys.argv[2], shard_size="8MB")
print("done", flush=True)
"""


def kill_exports(root: Path, times: int, seed: int) -> int:
    """Kill exports at random moments; return how many were killed in the middle.

    Each leaves the whole target, or nothing that looks like one; the next one clears what is left.
    """
    chance, source = random.Random(seed), root / "source"
    state = {f"w{n}": torch.randn(1000, 1000) for n in range(12)}
    holdfast.save(state, source)
    killed, longest_s = 0, 0.3
    for number in range(times):
        target = root / ("a" if number % 2 else "b")
        command = [sys.executable, "-c", KILLED, str(source), str(target)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "begun\n"
        started = time.perf_counter()
        time.sleep(chance.uniform(0, longest_s))
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        if "done" in rest:
            longest_s = max(0.02, 0.8 * (time.perf_counter() - started))
        else:
            killed += 1
        names = set(os.listdir(root)) - {"source"}
        hidden = {name for name in names if name.startswith(PREFIX)}
        assert names - hidden <= {target.name}
        assert len(hidden) <= 2, "what an earlier one has left is still there"
        if target.exists():
            assert safetensors_in(target) == set(state), "a torn target"
            subprocess.run(["rm", "-r", target], check=True)
    for name in ("a", "b"):
        holdfast.export_checkpoint(source, root / name)
    assert not leftovers(root)
    return killed


def test_a_killed_export_leaves_nothing_that_looks_like_a_result(new_path: NewPath) -> None:
    root = new_path()
    root.mkdir()
    assert kill_exports(root, 10, seed=random.randrange(1 << 30)) > 0


def test_the_command_line_exports(
    saved: Path, new_path: NewPath, capsys: pytest.CaptureFixture[str]
) -> None:
    target = new_path().with_suffix(".safetensors")
    arguments = ["--include", "model", "--strip", "model.", "--rename", r"^a\.=c.", "--json"]
    assert main(["export", str(saved), str(target), *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tensors"] == 3 and document["files"] == [target.name]
    assert set(safetensors.torch.load_file(target)) == {"c.weight", "c.bias", "b.weight"}
    assert main(["export", str(saved), str(new_path())]) == 0
    assert "left out, as the format has no place for them: step" in capsys.readouterr().out
    for wrong in (["--rename", "a"], ["--to", "zip"], ["--from", "zip"], ["--dtype", "x"]):
        assert main(["export", str(saved), str(new_path()), *wrong]) == 2
        assert "expected" in capsys.readouterr().err


def test_the_command_line_exports_to_dcp(
    saved: Path, new_path: NewPath, capsys: pytest.CaptureFixture[str]
) -> None:
    target = new_path()
    assert main(["export", str(saved), str(target), "--to", "dcp"]) == 0
    assert (target / ".metadata").exists()
    assert main(["export", str(saved), str(new_path()), "--to", "dcp", "--dtype", "bf16"]) == 2
    assert "no meaning for --to dcp" in capsys.readouterr().err


def test_convert_to_a_file_is_an_export(
    saved: Path, new_path: NewPath, capsys: pytest.CaptureFixture[str]
) -> None:
    file, unknown, directory = new_path().with_suffix(".safetensors"), new_path(), new_path()
    assert main(["convert", str(saved), str(file)]) == 0
    assert len(safetensors.torch.load_file(file)) == 4
    assert main(["convert", str(saved), str(unknown.with_suffix(".onnx"))]) == 2
    assert "has the suffix .onnx" in capsys.readouterr().err
    assert main(["convert", str(saved), str(new_path().with_suffix(".pt")), "--pickled"]) == 2
    assert main(["convert", str(saved), str(directory)]) == 0
    assert (directory / ".metadata").exists(), "without a suffix it is DCP's"
    assert main(["convert", str(directory), str(new_path() / "a.v2")]) == 0
    assert "is a checkpoint of holdfast" in capsys.readouterr().out
