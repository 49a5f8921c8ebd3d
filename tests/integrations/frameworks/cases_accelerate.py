"""accelerate with holdfast, in one process. Run by `make frameworks-native`."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.errors import MismatchError, NotCommittedError, OptionError, StoreError
from holdfast.integrations import adapter


class Counter:
    """An object of the program's own."""

    def __init__(self, name: str = "counter") -> None:
        self.steps, self.name = 0, name

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "name": self.name, "when": torch.tensor([self.steps])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["when"].tolist() == [state["steps"]]
        self.steps, self.name = state["steps"], state["name"]


class Program:
    """A training program."""

    def __init__(
        self, root: Path, *, width: int = 8, custom: int = 1, seed: int = 0, **project: Any
    ) -> None:
        given = {"automatic_checkpoint_naming": True} | project
        self.accelerator = Accelerator(
            cpu=True,
            project_config=ProjectConfiguration(project_dir=str(root), **given),
            dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
        )
        torch.manual_seed(seed)
        random.seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 4))
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12)
        rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))
        order = torch.Generator().manual_seed(4)  # its own: a loader draws when it begins
        loader = DataLoader(TensorDataset(rows), batch_size=2, generator=order)
        prepared = self.accelerator.prepare(net, optimizer, loader, schedule)
        self.net, self.optimizer, self.loader, self.schedule = prepared
        self.counters = [Counter() for _ in range(custom)]
        self.accelerator.register_for_checkpointing(*self.counters)
        self.losses: list[float] = []

    def train(self, steps: int, every: int = 2) -> None:
        for (batch,) in self.loader:
            noise = random.random() + torch.rand(())
            loss = (self.net(batch) * noise - batch).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.counters[0].steps += 1
            if self.counters[0].steps % every == 0:
                self.accelerator.save_state()
            if self.counters[0].steps == steps:
                break
        self.accelerator.end_training()


@pytest.fixture(autouse=True)
def installed() -> Iterator[adapter.Hook]:
    with adapter.install("accelerate") as hook:
        yield hook


@pytest.fixture
def whole(tmp_path: Path) -> Program:
    """A run that nothing interrupts."""
    program = Program(tmp_path / "whole")
    program.train(10)
    return program


def numbers(root: Path) -> list[int]:
    found = (root / "checkpoints").glob("checkpoint_*/MANIFEST")
    return sorted(int(path.parent.name.split("_")[1]) for path in found)


def weights(program: Program) -> list[torch.Tensor]:
    return [value.detach().clone() for value in program.net.state_dict().values()]


def test_it_resumes_with_data_and_noise_where_it_was(tmp_path: Path, whole: Program) -> None:
    Program(tmp_path / "a", total_limit=2).train(6)
    assert numbers(tmp_path / "a") == [1, 2]
    (tmp_path / "a" / "checkpoints" / "checkpoint_2" / "MANIFEST").unlink()
    program = Program(tmp_path / "a", total_limit=2, seed=5)
    torch.manual_seed(6)
    program.accelerator.load_state()
    program.train(10)
    assert program.losses == whole.losses[4:]
    assert all(map(torch.equal, weights(program), weights(whole)))
    assert numbers(tmp_path / "a") == [3, 4]
    assert program.counters[0].steps == 10
    for number in (3, 4):
        place = tmp_path / "a" / "checkpoints" / f"checkpoint_{number}"
        assert holdfast.verify(place).damage == ()
        names = [*holdfast.open(place)]
        assert "optimizer.state.0.weight.exp_avg" in names


def test_a_torn_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    Program(tmp_path).train(4)
    torn = tmp_path / "checkpoints" / "checkpoint_1"
    (torn / "MANIFEST").unlink()
    with pytest.raises(NotCommittedError, match=r"checkpoint_1 was never.*checkpoint_0"):
        Program(tmp_path).accelerator.load_state(str(torn))


def test_going_back_saves_over_later_checkpoints(tmp_path: Path, whole: Program) -> None:
    Program(tmp_path / "a").train(8)
    program = Program(tmp_path / "a")
    program.accelerator.load_state(str(tmp_path / "a" / "checkpoints" / "checkpoint_1"))
    program.train(6)
    assert numbers(tmp_path / "a") == [0, 1, 2, 3]
    again = Program(tmp_path / "a")
    again.accelerator.load_state()  # the newest save, which is number 2
    assert again.counters[0].steps == 6


@pytest.mark.parametrize("limit", [None, 2])
def test_nothing_of_an_earlier_run_is_deleted_or_saved_over(
    tmp_path: Path, limit: int | None
) -> None:
    Program(tmp_path, total_limit=limit).train(8)
    before = numbers(tmp_path)
    with pytest.raises(OptionError, match=r"checkpoint_3 of an earlier run.*iteration=4\)"):
        Program(tmp_path, total_limit=limit).train(4)
    assert numbers(tmp_path) == before
    Program(tmp_path, iteration=4).train(2)
    assert numbers(tmp_path) == [*before, 4]


def test_a_last_save_that_failed_is_raised_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "checkpoint_1").write_text("in the way")
    Program(tmp_path).train(6)
    assert "checkpoint_1 is not saved, and training goes on" in caplog.text
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"checkpoint_0 is not saved: .*there is no checkpoint"):
        Program(tmp_path / "file").train(2)


def test_a_directory_of_ones_own(tmp_path: Path) -> None:
    program = Program(tmp_path, automatic_checkpoint_naming=False)
    program.train(3, every=5)
    before = weights(program)
    assert program.accelerator.save_state(str(tmp_path / "mine")) == tmp_path / "mine"
    program.accelerator.save_state(str(tmp_path / "mine"))  # replaces it
    program.accelerator.end_training()
    later = Program(tmp_path, automatic_checkpoint_naming=False, seed=2)
    later.accelerator.load_state(str(tmp_path / "mine"))
    assert all(map(torch.equal, weights(later), before))
    with pytest.raises(OptionError, match="needs a directory"):
        later.accelerator.save_state()


def test_what_differs_is_refused_with_names(tmp_path: Path) -> None:
    Program(tmp_path, custom=2).train(2)
    for given, text in (({"width": 9}, r"model\.0\.weight"), ({"custom": 1}, "custom_1")):
        with pytest.raises(MismatchError, match=text):
            Program(tmp_path, **{"custom": 2} | given).accelerator.load_state()
    place = tmp_path / "checkpoints" / "checkpoint_7"
    holdfast.save({"model": torch.nn.Linear(1, 1), **adapter.mark("lightning", "2.6.6")}, place)
    with pytest.raises(MismatchError, match=r"saved by lightning 2\.6\.6"):
        Program(tmp_path).accelerator.load_state(str(place))


def test_only_one_integration_is_active(installed: adapter.Hook) -> None:
    stock = Accelerator.save_state
    with pytest.raises(OptionError, match="accelerate has holdfast installed already"):
        adapter.install("accelerate")
    assert Accelerator.save_state is stock
    installed.remove()
    assert Accelerator.save_state.__module__ == "accelerate.accelerator"
    assert Accelerator.save_state is not stock


def test_a_checkpoint_of_accelerate_itself_is_loaded(
    tmp_path: Path, installed: adapter.Hook
) -> None:
    installed.remove()
    stock = Program(tmp_path)
    stock.train(4)
    assert numbers(tmp_path) == []
    with adapter.install("accelerate"):
        program = Program(tmp_path, seed=1)
        program.accelerator.load_state(str(tmp_path / "checkpoints" / "checkpoint_1"))
    assert all(map(torch.equal, weights(program), weights(stock)))


def test_hooks_of_the_program_take_models_for_themselves(tmp_path: Path) -> None:
    program = Program(tmp_path)

    def save(models: list[Any], states: list[Any], place: str) -> None:
        torch.save(models[0].state_dict(), f"{place}/own.pt")
        states.pop()

    def take(models: list[Any], place: str) -> None:
        models.pop().load_state_dict(torch.load(f"{place}/own.pt"))

    program.accelerator.register_save_state_pre_hook(save)
    program.train(2)
    place = tmp_path / "checkpoints" / "checkpoint_0"
    assert not any(name.startswith("model") for name in holdfast.open(place))
    later = Program(tmp_path, seed=1)
    later.accelerator.register_load_state_pre_hook(take)
    later.accelerator.load_state()
    assert all(map(torch.equal, weights(later), weights(program)))


@pytest.mark.parametrize("safe", [True, False])
def test_weights_are_merged_by_the_command(tmp_path: Path, safe: bool) -> None:
    program = Program(tmp_path)
    program.train(2)
    place, out = tmp_path / "checkpoints" / "checkpoint_0", tmp_path / "merged"
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "merge-weights"]
    more = [] if safe else ["--unsafe_serialization"]
    there = os.environ | {"HOLDFAST_INSTALL": "accelerate"}
    subprocess.run([*command, str(place), str(out), *more], check=True, env=there)
    if safe:
        from safetensors.torch import load_file

        found = load_file(out / "model.safetensors")
    else:
        found = torch.load(out / "pytorch_model.bin")
    own = program.net.state_dict()
    assert found.keys() == own.keys() and all(torch.equal(found[n], own[n]) for n in own)
    assert place.exists()


def test_a_scaler_is_saved_and_loaded(tmp_path: Path) -> None:
    program = Program(tmp_path)
    program.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    program.train(2)
    later = Program(tmp_path)
    with pytest.raises(MismatchError, match="scaler"):
        later.accelerator.load_state()
    later.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    later.accelerator.load_state()
    assert later.accelerator.scaler.state_dict()["scale"] == 8.0
