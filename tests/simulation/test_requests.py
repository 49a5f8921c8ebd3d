"""What a save costs in requests: not more with each step that is kept."""

import pytest

from .requests import counted


@pytest.mark.parametrize("keep", [0, 1, 3])  # 0: all
@pytest.mark.parametrize("ranks", [1, 8])
def test_requests_of_a_save_do_not_grow_with_the_steps_that_are_or_were_there(
    ranks: int, keep: int
) -> None:
    early = counted(ranks, ["save"] * 6, keep) - counted(ranks, ["save"] * 5, keep)
    late = counted(ranks, ["save"] * 16, keep) - counted(ranks, ["save"] * 15, keep)
    assert early == late


def test_the_data_of_a_step_that_goes_takes_as_many_requests_as_that_of_one_rank() -> None:
    def deletes(ranks: int) -> int:
        more, fewer = counted(ranks, ["save"] * 4, 1), counted(ranks, ["save"] * 3, 1)
        return (more - fewer)["DELETE"]

    assert deletes(8) == deletes(1)
