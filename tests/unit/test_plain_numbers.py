"""A step and metrics may be NumPy's scalars or 0-d tensors; what is no number is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import holdfast
from holdfast.errors import OptionError

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
