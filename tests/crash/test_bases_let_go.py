"""A link that is saved while its base is let go is whole, or is not there: in every interleaving.

The link is made by `holdfast.save` itself, so that no epoch keeps it out of the run.
"""

import contextlib
import shutil
from pathlib import Path

import pytest
from crash_content import OPTIONS, load_number, make_near_state
from test_barred import Actor, stops

import holdfast
from holdfast import Keep
from holdfast.codecs import Delta
from holdfast.engine.basis import forget_bases
from holdfast.errors import CorruptError
from holdfast.format.names import step_name
from holdfast.runs.directory import Run

BASE, OTHER, LINK = 1, 5, 9  # the other job saves its step after the link has chosen its base


def save(root: Path, step: int) -> None:
    """Save a step: a link, where there is one before it."""
    path = root / step_name(step)
    state, codec = make_near_state(step), Delta(every=2)
    holdfast.save(state, path, step=step, codec=codec, options=OPTIONS)


def is_whole(path: Path, step: int) -> bool:
    """Whether a checkpoint holds what was saved, to the last chunk."""
    with holdfast.open(path) as checkpoint:
        return load_number(path, OPTIONS, make_near_state) == step and checkpoint.verify() == []


def interleave(root: Path, made: Path, first: int, second: int) -> tuple[int, int, set[int]]:
    """Stop a link before a call, retention before one; let the link end, then retention.

    Returns:
        how many calls the two made, and the steps that are there then.
    """
    shutil.copytree(made / step_name(BASE), root / step_name(BASE))
    run = Run(root, Keep.latest(1))
    run.fence.hold()  # the other job has begun long ago
    forget_bases()
    link = Actor(lambda: save(root, LINK), first, "create")
    link.start()
    shutil.copytree(made / step_name(OTHER), root / step_name(OTHER))
    retention = Actor(lambda: run.make_room(), second)
    retention.start()
    link.finish()
    retention.finish()
    where = f"the link stopped before call {first}, retention before call {second}"
    steps = set(run.steps())
    assert retention.error is None, where
    assert (LINK in steps) == (link.error is None), where
    assert steps & {LINK, OTHER}, where
    assert LINK not in steps or is_whole(root / step_name(LINK), LINK), where
    assert not list(root.glob("*/.manifest-*")), where
    return link.calls, retention.calls, steps


# One of five stops in `make test`, each of them in `make test-all`.
@pytest.mark.parametrize("stride", [5, 1])
def test_a_link_whose_base_is_let_go_is_whole_or_not_there(scratch: Path, stride: int) -> None:
    for step in BASE, OTHER:
        save(scratch / f"made-{step}", step)
        (scratch / f"made-{step}" / step_name(step)).rename(scratch / step_name(step))
    ends: list[set[int]] = []
    first = calls = 1
    with stops():
        while first <= calls + 1:
            second = removals = 1 + first % stride
            while second <= removals + 1:
                root = scratch / f"{first}-{second}"
                calls, removals, steps = interleave(root, scratch, first, second)
                shutil.rmtree(root)
                ends.append(steps)
                second += stride
            first += 1
    # Either may have come first.
    assert {OTHER} in ends and any({LINK, BASE} <= steps for steps in ends)


def test_without_the_mark_a_link_loses_its_base(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.runs.directory.leaving", contextlib.nullcontext)
    with pytest.raises(CorruptError, match="is a delta of step-00000001"):
        test_a_link_whose_base_is_let_go_is_whole_or_not_there(scratch, 1)
