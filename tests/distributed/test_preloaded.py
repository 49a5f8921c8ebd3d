"""Ranks are forked with all that they need: one that has to import it starts a second later."""

import sys

from .ranks import run_ranks


def _loaded(rank: int) -> bool:
    return "distributed.preloaded" in sys.modules


def test_a_rank_starts_with_everything_loaded() -> None:
    assert run_ranks(2, _loaded) == [True, True]
