"""What calls return, as people see it: never more than a screen, however much it holds."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Options
from holdfast.errors import OptionError

NewPath = Callable[[], Path]
REPR_MAX = 2000
LONG = "a.very.long.name." * 200
NAMES = tuple(f"{LONG}{n}" for n in range(3000))
BOXES = ((tuple(range(60)), tuple(range(60))),) * 3000
LOST = holdfast.Lost(LONG, BOXES)
DAMAGE = holdfast.Damage(LONG, LONG, LONG, (LOST,) * 3000)
INFO = holdfast.TensorInfo(LONG, "f32", (1,) * 60, 1, 1, LONG, BOXES, LONG, holdfast.Loss())
RESULTS: list[Any] = [
    holdfast.LoadReport(LONG, 1, 2, NAMES, NAMES, 3, 4, 5, skipped=dict.fromkeys(NAMES, LONG)),
    LOST,
    DAMAGE,
    holdfast.Damage(LONG, LONG, below=DAMAGE),
    INFO,
    holdfast.Verified(LONG, None, (DAMAGE,) * 3000, 3, (DAMAGE,) * 3000, NAMES, 9),
    holdfast.Repair(LONG, (DAMAGE,) * 99, NAMES, dict.fromkeys(NAMES, BOXES), not_recovered=NAMES),
    holdfast.Pass(LONG, LONG, list(NAMES), damage=[(LONG, DAMAGE)] * 3000),
    holdfast.Trial(LONG, roles=dict.fromkeys(NAMES, (1, 2))),
    holdfast.Trials(LONG, 1, (holdfast.Trial(LONG, roles=dict.fromkeys(NAMES, (1, 2))),) * 3000),
    holdfast.Shard(torch.ones(9, 9, 9, 9, 9), (9, 9, 9, 9, 9), start=0),
    Options(trust=NAMES),
]


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: type(result).__name__)
def test_no_result_is_shown_on_more_than_a_screen(result: Any) -> None:
    text = repr(result)
    assert text.startswith(f"{type(result).__name__}(")
    assert len(text) <= REPR_MAX


def test_a_short_result_is_shown_whole() -> None:
    report = holdfast.LoadReport("runs/a", 1, 2, ("b",), (), 3, 4, 5, 0.5, {"c": "why"})
    assert repr(report) == (
        "LoadReport(path='runs/a', step=1, tensors=2, missing=('b',), unexpected=(), "
        "bytes_needed=3, bytes_read=4, bytes_sent=5, seconds=0.5, skipped={'c': 'why'})"
    )
    shard = holdfast.Shard(torch.ones(2, 3), (4, 3), offset=(2, 0))
    assert "data=<Tensor torch.float32 [2, 3]>, shape=(4, 3)" in repr(shard)


def test_results_are_of_public_types(new_path: NewPath) -> None:
    path = new_path() / "step-00000001"
    holdfast.save({"w": torch.ones(3)}, path)
    assert type(holdfast.open(path).info("w")) is holdfast.TensorInfo
    assert type(holdfast.verify(path)) is holdfast.Verified
    assert type(holdfast.repair(path)) is holdfast.Repair
    assert type(holdfast.scrub(path.parent)) is holdfast.Pass


def test_the_deadline_of_a_save_is_an_option(new_path: NewPath) -> None:
    state = {"w": torch.ones(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = holdfast.save_async(state, new_path(), options=Options(deadline_s=60.0))
    assert handle.result()
    with pytest.warns(DeprecationWarning, match=r"Options\(deadline_s=") as warned:
        old = holdfast.save_async(state, new_path(), deadline_s=60.0)
    assert warned[0].filename == __file__
    assert old.result()
    assert abs(old.deadline - handle.deadline) < 30
    with pytest.raises(OptionError, match="no argument stages; expected one of step"):
        holdfast.save_async(state, new_path(), stages="lazy")
    for wrong in (0, -1, True, "1", None):
        with pytest.raises(OptionError, match="deadline_s is"):
            Options(deadline_s=wrong)  # type: ignore[arg-type]
