"""Checkpoints one step of Adam apart: what the step makes of the one before takes next to nothing.

Exact whatever the optimizer was, and whatever it is called: what the step misses is stored.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from format import reader
from format.forge import Forgery
from format.simulated_ranks import run_ranks
from holdfast._core import replay_decode, replay_encode
from holdfast.codecs import Delta
from holdfast.engine.basis import forget_bases
from holdfast.errors import CorruptError, OptionError
from holdfast.options import Options

from .test_chains import at, manifest
from .test_lossless import same

NewPath = Callable[[], Path]
CODEC = Delta(every=8, replay=True)
OPTIONS = Options(chunk_elements=20_000)
MOMENT, WEIGHT = 9, 16
BITS_MAX = 1.5


class Run:
    """A model under AdamW, on numbers that depend on each other."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        self.draw = torch.Generator().manual_seed(1)
        layers = [torch.nn.Linear(60, 300), torch.nn.GELU(), torch.nn.Linear(300, 60)]
        self.model = torch.nn.Sequential(*layers)
        settings = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1} | settings
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **settings)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            x = torch.randn(32, 60, generator=self.draw)
            loss = (self.model(x) - x.roll(1, 1).tanh()).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def kept(self) -> dict[str, torch.Tensor]:
        found = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name}.{key}"] = value.clone()
        return found


def check(path: Path, expected: dict[str, torch.Tensor]) -> None:
    """Compare with what both readers find."""
    with holdfast.open(path) as checkpoint:
        assert not checkpoint.verify(deep=True)
        state = checkpoint.state()
        found = dict(state["model"])
        for name, values in state["optimizer"]["state"].items():
            found |= {f"{name}.{key}": value for key, value in values.items()}
        assert same(found, expected)
    reader.read(path)


def modes(path: Path) -> set[int]:
    return set((manifest(path).table.chunk_size_mode >> 24).tolist())


def bits(path: Path) -> float:
    """Of a second moment and a weight together, which have 64."""
    with holdfast.open(path) as checkpoint:
        infos = [
            checkpoint.info(name) for name in checkpoint.names() if not name.endswith(".exp_avg")
        ]
    stored = sum(info.stored_bytes for info in infos)
    return 64 * stored / sum(info.size_bytes for info in infos)


@pytest.mark.parametrize("again", ["kept", "read back"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"betas": (0.95, 0.999), "weight_decay": 0.0, "eps": 1e-6},
        {"fused": True},
        {"foreach": True, "lr": 3e-3},
    ],
)
def test_steps_one_after_the_other(new_path: NewPath, settings: dict[str, Any], again: str) -> None:
    root, run = new_path(), Run(**settings)
    run.step(40)
    for step in range(4):
        run.step()
        holdfast.save(run.state, at(root, step), codec=CODEC, options=OPTIONS)
        check(at(root, step), run.kept())
        if again == "read back":
            forget_bases()
        if step:
            assert {MOMENT, WEIGHT} <= modes(at(root, step))
            assert bits(at(root, step)) <= BITS_MAX


@pytest.mark.parametrize("count", [0, 2, 30])
def test_other_steps_are_stored_as_well(new_path: NewPath, count: int) -> None:
    root, run = new_path(), Run()
    run.step(20)
    for step in range(2):
        holdfast.save(run.state, at(root, step), codec=CODEC, options=OPTIONS)
        check(at(root, step), run.kept())
        run.step(count)
    assert not {MOMENT, WEIGHT} & modes(at(root, 1))


def test_any_part_is_read_alone(new_path: NewPath) -> None:
    root, run = new_path(), Run()
    run.step(20)
    for step in range(3):
        run.step()
        holdfast.save(run.state, at(root, step), codec=CODEC, options=OPTIONS)
    expected = run.kept()
    box = ((17, 5), (100, 31))
    with holdfast.open(at(root, 2)) as checkpoint:
        for name, key in (
            ("model.0.weight", "0.weight"),
            ("optimizer.state.0.weight.exp_avg_sq", "0.weight.exp_avg_sq"),
        ):
            name = next(n for n in checkpoint.names() if n.replace("\\", "") == name)
            part = checkpoint.tensor(name, box)
            assert torch.equal(part, expected[key][17:117, 5:36])


def test_ranks_share_the_writing(new_path: NewPath) -> None:
    root, run = new_path(), Run()
    run.step(20)
    for step in range(3):
        run.step()

        def save(group: Any, step: int = step) -> None:
            holdfast.save(run.state, at(root, step), codec=CODEC, group=group, options=OPTIONS)

        run_ranks(2 + step % 2, save)
        check(at(root, step), run.kept())
    assert MOMENT in modes(at(root, 1))


def test_a_run_is_written_again(new_path: NewPath) -> None:
    raw, coded, run = new_path(), new_path(), Run()
    run.step(20)
    for step in range(3):
        run.step()
        holdfast.save(run.state, at(raw, step))
        holdfast.recompress(at(raw, step), at(coded, step), codec="delta:replay")
    check(at(coded, 2), run.kept())
    assert {MOMENT, WEIGHT} <= modes(at(coded, 2))


@pytest.mark.parametrize(("of", "mode"), [(6, 2), (6, 7), (MOMENT, 6), (MOMENT, 2)])
def test_a_mode_that_lacks_what_it_needs_is_refused(new_path: NewPath, of: int, mode: int) -> None:
    """Of a first moment, of a second, of a weight: both readers say so, and nothing crashes."""
    root, run = new_path(), Run()
    run.step(20)
    for step in range(2):
        run.step()
        holdfast.save(run.state, at(root, step), codec=CODEC, options=OPTIONS)
    forgery = Forgery.read(at(root, 1))
    for table in (forgery.manifest, forgery.files[0].footer):
        column = table.columns["chunk.size_mode"]
        row = max(range(len(column)), key=lambda n: (column[n] >> 24 == of) * column[n])
        column[row] = column[row] & 0xFFFFFF | mode << 24
    forgery.write(at(root, 9))
    with pytest.raises(CorruptError), holdfast.open(at(root, 9)) as checkpoint:
        checkpoint.state()
    with pytest.raises(reader.Corrupt):
        reader.read(at(root, 9))


def test_replay_is_a_yes_or_a_no() -> None:
    with pytest.raises(OptionError, match="replay is 1; expected True or False"):
        Delta(replay=1)  # type: ignore[arg-type]


def test_denormals_are_kept_whatever_the_process_has_set() -> None:
    """A moment that nothing is added to any more becomes one, and is repeated as such."""
    count, draw = 4096, torch.Generator().manual_seed(2)
    before = {"exp_avg": torch.randn(count, generator=draw) * 1e-3}
    before["exp_avg_sq"] = torch.rand(count, generator=draw) * 1e-6
    gradient = torch.randn(count, generator=draw) * 1e-3
    for moment in before.values():
        moment[::2] *= 2.0**-130
    gradient[::2] = 0
    first = before["exp_avg"] + 0.1 * (gradient - before["exp_avg"])
    second = 0.95 * before["exp_avg_sq"] + 0.05 * gradient * gradient
    base, moment_base = before["exp_avg_sq"].data_ptr(), before["exp_avg"].data_ptr()
    near = (base, first.data_ptr(), moment_base, 0)
    made = []
    for flushes in (False, True):
        assert torch.set_flush_denormal(flushes)
        try:
            out, back = torch.zeros(4 * count, dtype=torch.uint8), torch.zeros_like(second)
            size = replay_encode(MOMENT, second.data_ptr(), count, *near, out.data_ptr())
            good = replay_decode(MOMENT, out.data_ptr(), size, count, *near, back.data_ptr())
        finally:
            torch.set_flush_denormal(False)
        assert good and torch.equal(back.view(torch.int32), second.view(torch.int32))
        made.append(out[:size].clone())
    assert torch.equal(made[0], made[1]) and len(made[0]) < count
