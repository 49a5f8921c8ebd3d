"""safetensors opened, inspected, compared and loaded as if they were holdfast's own."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

import holdfast
from holdfast import Options
from holdfast.cli import main
from holdfast.errors import (
    CorruptError,
    MismatchError,
    NotCommittedError,
    OptionError,
    TrustError,
)
from holdfast.loading import foreign

from .test_source import header_file, same

NewPath = Callable[[], Path]


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return {
        "a.weight": torch.randn(30, 20),
        "a.bias": torch.randn(30).bfloat16(),
        "b": torch.randn(8, 8).to(torch.float8_e4m3fn),
        "n": torch.tensor(5),
        "none": torch.empty(0, 3),
    }


@pytest.fixture
def file(new_path: NewPath) -> Path:
    """A file of `state`."""
    path = new_path().with_suffix(".safetensors")
    safetensors.torch.save_file(state(), path)
    return path


def test_an_open_file_is_a_mapping_of_names(file: Path) -> None:
    with holdfast.open(file) as opened:
        assert set(opened) == set(opened.names()) == set(state())
        assert all(same(opened[name], value) for name, value in state().items())
        assert opened.kind == "safetensors" and opened.step is None and opened.save_id == ""
        assert opened.info("a.weight").shape == (30, 20) and opened.base is None
        part = opened.tensor("a.weight", ([2, 3], [4, 5]), dtype=torch.float64)
        assert torch.equal(part, state()["a.weight"][2:6, 3:8].double())
        assert set(opened.state(include="a")) == {"a.weight", "a.bias"}
        assert opened.objects() == {} and opened.file_names == ()
        with pytest.raises(MismatchError, match=r"has no tensor 'a\.wei'"):
            opened["a.wei"]
        again = pickle.loads(pickle.dumps(opened))
        assert again.names() == opened.names()
    assert holdfast.open(new_own(file)).kind == "holdfast"


def new_own(file: Path) -> Path:
    path = file.with_suffix(".own")
    holdfast.save(state(), path)
    return path


def test_what_has_no_checksums_is_not_verified(file: Path) -> None:
    with pytest.raises(OptionError, match="no checksums; 'holdfast import'"):
        holdfast.open(file).verify()


def test_trust_takes_nothing_that_nobody_can_sign(file: Path) -> None:
    key = Ed25519PrivateKey.generate().public_key()
    line = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    options = Options(trust=line.decode())
    for call in (
        lambda: holdfast.open(file, options=options),
        lambda: holdfast.load(file, into=state(), options=options),
        lambda: holdfast.export_checkpoint(file, file.with_suffix(".pt"), options=options),
        lambda: holdfast.import_checkpoint(file, file.with_suffix(".x"), options=options),
    ):
        with pytest.raises((TrustError, NotCommittedError, holdfast.errors.StoreError)):
            call()


def test_a_state_is_loaded_from_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "PIECE_BYTES", 500)  # so that the large ones come in pieces
    into: dict[str, Any] = {name: torch.zeros_like(value) for name, value in state().items()}
    into["a.weight"] = torch.zeros(20, 30).t()  # of other strides
    report = holdfast.load(file, into=into)
    assert all(torch.equal(into[n].float(), value.float()) for n, value in state().items())
    assert report.tensors == 5 and report.missing == report.unexpected == ()
    assert report.bytes_read == report.bytes_needed == sum(v.nbytes for v in state().values())
    cast = {"a.weight": torch.zeros(30, 20, dtype=torch.float64)}
    holdfast.load(file, into=cast, partial=True, cast=True)
    assert torch.equal(cast["a.weight"], state()["a.weight"].double())


def test_a_box_of_a_tensor_is_loaded(file: Path) -> None:
    box = torch.zeros(10, 20)
    shard = holdfast.Shard(box, (30, 20), offset=(20, 0))
    holdfast.load(file, into={"a.weight": shard}, partial=True)
    assert torch.equal(box, state()["a.weight"][20:])


def test_what_does_not_fit_is_said_and_nothing_is_loaded(file: Path) -> None:
    into = {"a.weight": torch.zeros(30, 20), "c": torch.zeros(1)}
    with pytest.raises(MismatchError, match="1 is missing in the checkpoint: c"):
        holdfast.load(file, into=into)
    assert not into["a.weight"].any()
    assert holdfast.load(file, into=into, strict=False).missing == ("c",)
    with pytest.raises(MismatchError, match="4 are missing in the target"):
        holdfast.load(file, into={"a.weight": torch.zeros(30, 20)})
    with pytest.raises(MismatchError, match=r"f32 \[30, 20\] in the checkpoint"):
        holdfast.load(file, into={"a.weight": torch.zeros(3, 2)}, partial=True)


def test_a_bad_file_is_corrupt_and_no_missing_checkpoint(new_path: NewPath) -> None:
    path = header_file(new_path().with_suffix(".safetensors"), b"{")
    with pytest.raises(CorruptError):
        holdfast.open(path)
    with pytest.raises(CorruptError):
        holdfast.load(path, into={"a": torch.zeros(1)})
    with pytest.raises(NotCommittedError):
        holdfast.open(new_path())


def test_the_command_line_takes_files(
    file: Path, new_path: NewPath, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["written_by"] == "safetensors" and document["totals"]["tensors"] == 5
    assert main(["inspect", str(file)]) == 0
    assert "by safetensors" in capsys.readouterr().out
    own = new_own(file)
    assert main(["diff", str(file), str(own)]) == 0
    changed = state() | {"n": torch.tensor(6)}
    holdfast.save(changed, new := new_path())
    assert main(["diff", str(file), str(new)]) == 1


class Net(nn.Module):
    """Tied, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)


def saved_forms(net: Net, new_path: NewPath) -> list[Path]:
    """The same module in every form."""
    paths = [new_path() for _ in range(3)] + [new_path().with_suffix(".safetensors")]
    holdfast.save({"model": net, "optimizer": {"x": torch.ones(3)}}, paths[0])
    holdfast.save(net.state_dict(), paths[1])
    holdfast.export_checkpoint(paths[1], paths[2])
    safetensors.torch.save_model(net, str(paths[3]))
    return paths


def test_a_module_without_memory_is_filled_from_any_form(new_path: NewPath) -> None:
    net = Net()
    net.norm.running_mean.uniform_()  # type: ignore[union-attr]
    for path in saved_forms(net, new_path):
        with torch.device("meta"):
            empty = Net()
        report = holdfast.load_model(path, empty)
        assert report.missing == () and empty.head.weight is empty.embed.weight
        assert isinstance(empty.embed.weight, nn.Parameter) and empty.embed.weight.requires_grad
        found, expected = empty.state_dict(), net.state_dict()
        assert found.keys() == expected.keys()
        assert all(same(found[name], expected[name]) for name in expected)
        assert empty.norm.num_batches_tracked is not None  # a buffer, still
        there = Net()
        weight = there.embed.weight
        holdfast.load_model(path, there)
        assert there.embed.weight is weight and torch.equal(weight, net.embed.weight)


def test_a_module_gets_the_dtype_that_is_asked_for(new_path: NewPath) -> None:
    net = Net()
    with torch.device("meta"):
        empty = Net()
    holdfast.load_model(saved_forms(net, new_path)[0], empty, dtype=torch.bfloat16)
    assert torch.equal(empty.embed.weight, net.embed.weight.bfloat16())
    assert empty.norm.num_batches_tracked.dtype == torch.int64  # type: ignore[union-attr]


def test_a_module_that_does_not_fit_is_left_as_it_is(file: Path, new_path: NewPath) -> None:
    with torch.device("meta"):
        other = nn.ModuleDict({"a": nn.Linear(20, 30), "c": nn.Linear(2, 2)})
        wrong = nn.ModuleDict({"a": nn.Linear(20, 31)})
        lost = nn.Module()
        lost.register_buffer("table", torch.empty(3), persistent=False)
    with pytest.raises(MismatchError, match=r"lacks c\.weight, c\.bias of the module"):
        holdfast.load_model(file, other)
    with pytest.raises(MismatchError, match=r"a\.weight is \[30, 20\] in the checkpoint"):
        holdfast.load_model(file, wrong)
    with pytest.raises(MismatchError, match="table of the module are on the meta device"):
        holdfast.load_model(file, lost)
    with pytest.raises(OptionError, match=r"torch\.nn\.Module"):
        holdfast.load_model(file, {})  # type: ignore[arg-type]
    assert all(p.is_meta for m in (other, wrong) for p in m.parameters())
    report = holdfast.load_model(file, other, strict=False)
    assert report.missing == ("c.weight", "c.bias")
    assert torch.equal(other["a"].weight, state()["a.weight"])  # type: ignore[arg-type]
    assert other["c"].weight.is_meta  # type: ignore[union-attr]
