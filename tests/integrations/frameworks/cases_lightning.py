"""Lightning with holdfast, in one process. Run by `make frameworks-native`."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import holdfast
from holdfast.errors import MismatchError, OptionError
from holdfast.integrations import adapter, saves
from holdfast.integrations import fabric as fabrics
from holdfast.integrations.lightning import HoldfastCheckpointIO, HoldfastSingleDeviceStrategy

STEPS = 8
ROWS: Any = torch.randn(STEPS, 4, generator=torch.Generator().manual_seed(3))
KINDS = ("strategy", "strategy-lazy", "io")


class Net(lightning.LightningModule):
    """Draws numbers in every step."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4)
        )
        self.found: dict[int, float] = {}

    def training_step(self, *_: Any) -> torch.Tensor:
        batch = ROWS[self.global_step]  # a plain loader begins anew, whoever saves
        loss = (self.net(batch) - batch).square().mean()
        self.found[self.global_step] = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def train(root: Path, kind: str, steps: int, path: Any = None, seed: int = 0) -> Net:
    given: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
    if kind.startswith("strategy"):
        stage: Any = "lazy" if kind.endswith("lazy") else "eager"
        given = {"strategy": HoldfastSingleDeviceStrategy(device="cpu", stage=stage)}
    elif kind == "io":
        from holdfast.integrations.lightning import HoldfastRandomState

        given["plugins"] = [HoldfastCheckpointIO()]
        given["callbacks"] = [HoldfastRandomState()]
    keep = ModelCheckpoint(root, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = lightning.Trainer(
        **given | {"callbacks": [*given.get("callbacks", []), keep]},
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net = Net(seed)
    torch.manual_seed(5 if path is None else 6)
    trainer.fit(net, torch.utils.data.DataLoader(ROWS, 1), ckpt_path=path)
    return net


class Looks(lightning.Callback):
    """Notes where last.ckpt leads after each save, and which step is there."""

    def __init__(self, root: Path) -> None:
        self.last, self.found = root / "last.ckpt", list[tuple[int, str, int]]()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step % 2 == 0 and trainer.global_step < STEPS:
            step = holdfast.open(self.last).objects()["lightning.global_step"]
            self.found.append((trainer.global_step, os.readlink(self.last), int(step)))


@pytest.mark.parametrize("kind", ["strategy", "io"])
def test_a_link_leads_to_a_durable_checkpoint_from_the_first_save_on(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, linked = os.symlink, threading.Event()

    def symlink(*given: Any) -> None:
        stock(*given)
        linked.set()

    def published(place: str, final: str, publish: Any = saves._publish) -> None:
        linked.clear()
        linked.wait(0.2)  # a link that does not wait for the save is made here
        publish(place, final)

    monkeypatch.setattr(os, "symlink", symlink)
    monkeypatch.setattr(saves, "_publish", published)
    given: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
    if kind == "strategy":
        given = {"strategy": HoldfastSingleDeviceStrategy(device="cpu")}
    else:
        given["plugins"] = [HoldfastCheckpointIO()]
    root, looks = tmp_path / "new", Looks(tmp_path / "new")
    how: dict[str, Any] = {"filename": "{step}", "monitor": "step", "mode": "max"}
    keep = ModelCheckpoint(root, every_n_train_steps=2, save_top_k=1, save_last="link", **how)
    trainer = lightning.Trainer(
        **given,
        callbacks=[looks, keep],
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.callbacks = [keep, looks]  # Lightning puts those that save at the end
    trainer.fit(Net(), torch.utils.data.DataLoader(ROWS, 1))
    assert looks.found == [(step, f"step={step}.ckpt", step) for step in (2, 4, 6)]
    assert sorted(os.listdir(root)) == ["last.ckpt", f"step={STEPS}.ckpt"]


def same(one: Net, other: Net) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("kind", KINDS)
def test_it_resumes_bit_for_bit_beside_lightning_alone(tmp_path: Path, kind: str) -> None:
    whole = train(tmp_path / "stock", "", STEPS)
    train(tmp_path / "ours", kind, 4)
    place = tmp_path / "ours" / "step=4.ckpt"
    assert holdfast.verify(place).damage == ()
    resumed = train(tmp_path / "ours", kind, STEPS, str(place), seed=1)
    assert same(resumed, whole)
    assert resumed.found == {step: whole.found[step] for step in range(4, STEPS)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_lightning_alone_is_resumed(tmp_path: Path, kind: str) -> None:
    whole = train(tmp_path / "stock", "", 4)
    place = tmp_path / "stock" / "step=4.ckpt"
    resumed = train(tmp_path / "ours", kind, 5, str(place), seed=1)
    assert [*resumed.found] == [4] and [*whole.found] == [0, 1, 2, 3]
    assert (tmp_path / "ours" / "step=4.ckpt").exists() is False


def test_a_checkpoint_of_another_framework_is_refused(tmp_path: Path) -> None:
    holdfast.save({"model": Net(), **adapter.mark("transformers", "5.23.0")}, tmp_path / "a")
    with pytest.raises(MismatchError, match=r"saved by transformers 5\.23\.0; lightning cannot"):
        train(tmp_path / "ours", "strategy", STEPS, str(tmp_path / "a"))

    holdfast.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "plain")
    fabric = lightning.Fabric(strategy=fabrics.HoldfastSingleDeviceStrategy(device="cpu"))
    for name, by in (("a", r"transformers 5\.23\.0"), ("plain", "a program without a framework")):
        with pytest.raises(MismatchError, match=f"saved by {by}; lightning cannot"):
            train(tmp_path / "ours", "io", STEPS, str(tmp_path / name))
        with pytest.raises(MismatchError, match=f"saved by {by}; lightning cannot"):
            fabric.load(tmp_path / name, {"model": torch.nn.Linear(2, 2)})


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_model_is_refused_with_names(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, kind, 2)
    place, net = str(tmp_path / "step=2.ckpt"), Net.__init__

    def wider(self: Any, seed: int = 0) -> None:
        net(self, seed)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Linear(9, 4))

    monkeypatch.setattr(Net, "__init__", wider)
    with pytest.raises((MismatchError, RuntimeError), match=r"net\.[012]\.weight"):
        train(tmp_path, kind, 4, place)


def test_two_integrations_at_once_are_refused() -> None:
    both = {"plugins": [HoldfastCheckpointIO()]}
    with pytest.raises(OptionError, match="HoldfastSingleDeviceStrategy and HoldfastCheckpointIO"):
        lightning.Trainer(strategy=HoldfastSingleDeviceStrategy(device="cpu"), **both)
    with pytest.raises(OptionError, match="HoldfastSingleDeviceStrategy and HoldfastCheckpointIO"):
        lightning.Fabric(strategy=fabrics.HoldfastSingleDeviceStrategy(device="cpu"), **both)
    with pytest.raises(OptionError, match="Leave HoldfastCheckpointIO out"):
        HoldfastSingleDeviceStrategy(device="cpu", checkpoint_io=HoldfastCheckpointIO())


def test_a_checkpoint_of_a_strategy_is_no_checkpoint_of_the_plugin(tmp_path: Path) -> None:
    train(tmp_path, "strategy", 2)
    with pytest.raises(OptionError, match=r"a strategy of holdfast saved .*step=2\.ckpt; resume"):
        train(tmp_path, "io", 4, str(tmp_path / "step=2.ckpt"))


def test_fabric_loads_its_own_checkpoints_and_ours(tmp_path: Path) -> None:
    for ours in (False, True):
        given: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
        strategy = fabrics.HoldfastSingleDeviceStrategy(device="cpu")
        saving = lightning.Fabric(**({"strategy": strategy} if ours else given))
        saving.save(tmp_path / f"{ours}", {"model": torch.nn.Linear(2, 2), "step": 3})
        if ours:
            strategy.wait()
        loading = lightning.Fabric(strategy=fabrics.HoldfastSingleDeviceStrategy(device="cpu"))
        state: dict[str, Any] = {"model": torch.nn.Linear(2, 2), "step": 0}
        loading.load(tmp_path / f"{ours}", state)
        assert state["step"] == 3


PROGRAM = """
from importlib import metadata
found = metadata.version
metadata.version = lambda name: "2.99.0" if name == "lightning" else found(name)
import holdfast.integrations.lightning
"""


def test_an_unknown_version_is_refused_where_it_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode
    assert (
        "lightning 2.99.0 is installed; holdfast.integrations.lightning works with" in done.stderr
    )
