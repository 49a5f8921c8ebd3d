"""A rank struck in the middle of a save in the background, a few times; `make strike`: 100 each."""

from pathlib import Path

from background_loop import FAULTS, run


def test_every_rank_learns_of_a_struck_one_and_the_next_save_succeeds(tmp_path: Path) -> None:
    assert run(2, 11, tmp_path, FAULTS) == []
