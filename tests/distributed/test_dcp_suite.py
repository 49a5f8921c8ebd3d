"""Behaviours of DCP, played with DCP alone and routed to holdfast: none differs without a word.

`make dcp-suite` plays them in all three ways; here they are played synchronously.
"""

import dataclasses

import pytest

from holdfast.integrations.dcp import routing
from integrations.dcp_suite import play
from integrations.dcp_suite.stage import LEFT, NAMED, REFUSED, THROUGH

pytestmark = pytest.mark.skipif(not routing._is_known(), reason="DCP of this torch is not routed")
SAME = play.Outcome(1, "", ours=True, stock=False, said=())


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_behaviour_differs_silently(ranks: int) -> None:
    assert play.faults({ranks: play.compare(ranks, ("sync",))}) == []


def test_the_page_has_the_table() -> None:
    assert play.PAGE.text_with(play.table()) == play.PAGE.text()


STOCK = dataclasses.replace(SAME, ours=False, stock=True)
VERDICTS = {
    "same": (SAME, THROUGH, THROUGH),
    "another value": (dataclasses.replace(SAME, value=2), THROUGH, "DIFFERENT"),
    "another value, as named": (dataclasses.replace(SAME, value=2), NAMED, NAMED),
    "an error of ours": (dataclasses.replace(SAME, value=2, refused="x"), THROUGH, REFUSED),
    "left without a word": (STOCK, LEFT, "DIFFERENT"),
    "left and said": (dataclasses.replace(STOCK, said=("x",)), LEFT, LEFT),
}


@pytest.mark.parametrize("how", VERDICTS)
def test_a_difference_is_seen(how: str) -> None:
    ours, expected, seen = VERDICTS[how]
    assert play.verdict(expected, STOCK, ours).startswith(seen)
