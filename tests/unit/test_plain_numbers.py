"""A step and metrics may be NumPy's scalars or 0-d tensors; what is no number is refused."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import holdfast
from holdfast.errors import OptionError
from holdfast.format.manifest import decode_manifest, encode_manifest

STATE = {"w": torch.ones(2)}
METRICS = {"half": np.float32(0.5), "quarter": torch.tensor(0.25), "two": np.int16(2), "one": 1.0}
PLAIN = {"half": 0.5, "quarter": 0.25, "two": 2, "one": 1.0}


@pytest.mark.parametrize(
    "step", [7, np.int64(7), np.uint8(7), torch.tensor(7), np.array(7)], ids=repr
)
def test_a_save_takes_them(tmp_path: Path, step: Any) -> None:
    holdfast.save(STATE, tmp_path / "a", step=step, metrics=METRICS)
    holdfast.save_async(STATE, tmp_path / "b", step=step, metrics=METRICS).result()
    for name in "ab":
        checkpoint = holdfast.open(tmp_path / name)
        assert (checkpoint.step, type(checkpoint.step)) == (7, int)
        assert checkpoint.metrics == PLAIN
        assert [*map(type, checkpoint.metrics.values())] == [*map(type, PLAIN.values())]


@pytest.mark.parametrize("step", [np.int64(3), torch.tensor(3)], ids=repr)
def test_a_checkpointer_takes_them(tmp_path: Path, step: Any) -> None:
    with holdfast.Checkpointer(tmp_path, every=1) as checkpointer:
        assert checkpointer.step(step, STATE, metrics=METRICS)
        checkpointer.save(step + 1, STATE)
        assert checkpointer.steps() == [3, 4]
        assert checkpointer.path(step).endswith("step-00000003")
        assert checkpointer.restore({"w": torch.zeros(2)}, step=step) == 3
        assert checkpointer.retire_after(step) == [4]


@pytest.mark.parametrize(
    "step",
    [
        *(True, 7.0, "7", np.float64(7), np.bool_(1), torch.tensor(True), torch.tensor(7.0)),
        *(torch.tensor([7]), np.array([7]), torch.empty((), dtype=torch.int64, device="meta")),
        *(-1, np.int64(-1), 1 << 53),
    ],
    ids=repr,
)
def test_what_is_no_step_is_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(OptionError, match=r"step is .*; expected an integer"):
        holdfast.save(STATE, tmp_path / "a", step=step)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "metric",
    [True, np.bool_(0), "1", None, 1j, np.complex64(1), torch.ones(1), np.ones(2), STATE],
    ids=repr,
)
def test_what_is_no_metric_is_refused(tmp_path: Path, metric: Any) -> None:
    with pytest.raises(OptionError, match=r"metrics\['loss'\] is a .*; expected a number"):
        holdfast.save(STATE, tmp_path / "a", metrics={"loss": metric})


def test_a_tensor_that_has_no_value_is_refused(tmp_path: Path) -> None:
    with FakeTensorMode():
        fake = torch.ones(())
        with pytest.raises(OptionError, match="metrics"):
            holdfast.save(STATE, tmp_path / "a", metrics={"loss": fake})


@pytest.mark.parametrize("metric", [10**400, -(10**400), 2**1024], ids=["10^400", "-", "2^1024"])
def test_an_integer_that_no_float_holds_is_no_metric(tmp_path: Path, metric: int) -> None:
    text = r"metrics\['loss'\] is an integer that no float holds; expected a number from -1.8e308"
    with holdfast.Checkpointer(tmp_path / "run", every=1) as checkpointer:
        for save in (
            lambda: holdfast.save(STATE, tmp_path / "a", metrics={"loss": metric}),
            lambda: holdfast.save_async(STATE, tmp_path / "a", metrics={"loss": metric}).result(),
            lambda: checkpointer.save(1, STATE, metrics={"loss": metric}),
            lambda: checkpointer.step(1, STATE, metrics={"loss": metric}),
        ):
            with pytest.raises(OptionError, match=text):
                save()
        assert checkpointer.steps() == []
        checkpointer.save(1, STATE, metrics={"loss": 2**1023})
        assert checkpointer.metrics(1) == {"loss": 2**1023}
    assert not (tmp_path / "a").exists()


def give_metric(path: Path, metric: float) -> None:
    """Write a number into a MANIFEST, as others may."""
    manifest = decode_manifest((path / "MANIFEST").read_bytes(), str(path))
    table = replace(manifest.table, header=replace(manifest.table.header, metrics={"loss": metric}))
    (path / "MANIFEST").write_bytes(encode_manifest(table))


def test_an_integer_of_a_file_that_no_float_holds_is_infinite(tmp_path: Path) -> None:
    for step, metric in ((1, 10**400), (2, 5.0), (3, -(10**400)), (4, 10**400), (5, 1)):
        path = tmp_path / f"step-{step:08d}"
        holdfast.save(STATE, path, step=step)
        give_metric(path, metric)
    infinite = {"loss": math.inf}
    with holdfast.Checkpointer(tmp_path, keep=holdfast.Keep.best("loss", 3)) as checkpointer:
        assert holdfast.open(checkpointer.path(1)).metrics == checkpointer.metrics(1) == infinite
        assert (checkpointer.best(), checkpointer.best(mode="max")) == (3, 4)
        checkpointer.save(6, STATE, metrics={"loss": 9.0})
        assert checkpointer.steps() == [2, 3, 5, 6]
