"""Which ranks gave what, as errors say it; and that ranks which gave the same meet only once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from format.simulated_ranks import ThreadGroup, run_ranks
from holdfast import Checkpointer, codecs
from holdfast.arguments import camps, check_alike
from holdfast.engine.registry import find_codec, show_codec
from holdfast.errors import OptionError

NewPath = Callable[[], Path]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ("ab", "a on rank 0; b on rank 1"),
        ("baab", "b on 2 ranks (0, 3); a on 2 ranks (1-2)"),
        ("a" * 8 + "b" + "a" * 3, "a on 11 ranks (0-7, 9-11); b on rank 8"),
        ("ab" * 6, "a on 6 ranks (0, 2, 4, 6, …); b on 6 ranks (1, 3, 5, 7, …)"),
        ("abcdef", "a on rank 0; b on rank 1; c on rank 2; d on rank 3; and 2 others"),
    ],
)
def test_a_text_says_which_ranks_gave_what(texts: str, expected: str) -> None:
    assert camps(texts) == expected


def test_only_what_differs_is_named() -> None:
    same = {"step": 1, "path": "/a"}
    check_alike("the save", [same, dict(same), same])
    with pytest.raises(
        OptionError, match=r"^the save was refused: .* step: 1 on rank 0; 2 on rank 1\. G"
    ):
        check_alike("the save", [same, same | {"step": 2}])


def test_equal_codecs_are_shown_alike() -> None:
    assert show_codec(find_codec("delta")) == show_codec(codecs.Delta()) == "delta"
    assert show_codec(codecs.Delta(every=3)) == "Delta(every=3, replay=False)"
    assert show_codec(find_codec("raw")) == "raw"


def test_a_step_of_training_meets_nobody_but_the_first(new_path: NewPath) -> None:
    run = new_path()

    class Counting(ThreadGroup):
        def __init__(self, inner: ThreadGroup) -> None:
            self.__dict__ |= inner.__dict__
            self.meetings = 0

        def all_gather(self, data: bytes) -> list[bytes]:
            self.meetings += 1
            return super().all_gather(data)

    def train(group: Any) -> list[int]:
        counting: Any = Counting(group)
        with Checkpointer(run, every=100, stage="sync", signals=(), group=counting) as made:
            met = []
            for step in range(1, 4):
                made.step(step, {"w": torch.ones(8)})
                met.append(counting.meetings)
            return met

    assert run_ranks(2, train) == [[1, 1, 1]] * 2
