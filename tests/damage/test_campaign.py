"""A slice of `make damage`, and that it notices when a check of the reader is left out."""

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from conftest import MEMORY
from holdfast.engine import chain, check, read
from holdfast.faults import survey
from holdfast.format import table
from holdfast.integrity import verify as verify_module
from holdfast.loading import load as load_module

from .campaign import Tally, flip_all, make_all, try_case, whole_manifests_parsed_once
from .generator import KINDS
from .subjects import CODECS, NAMES, Subject

CASES = 1000
FLIP_STEP = 509  # prime: no bit of a byte is left out
PLANTED_CASES_MAX = 2000


class Anything:
    """Equal to everything, so that a comparison with it checks nothing."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __format__(self, spec: str) -> str:
        return "anything"


def anything(*_: object) -> Any:
    return Anything()


def nothing(*_: object, **__: object) -> None:
    """Check nothing."""


def left_out(room: Any, name: str, instead: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: patch.object(room, name, instead, create=True)


# A check of the reader, each left out alone, and what then gets through.
PLANTED: dict[str, tuple[list[Callable[[], AbstractContextManager[object]]], str]] = {
    "the checksum of a chunk": ([left_out(read, "checksum", anything)], "WRONG DATA"),
    "the gap before a payload": ([left_out(read, "is_zero", lambda *_: True)], "saw nothing"),
    "the gap before the footer": (
        [left_out(check, "any", lambda _: False)],
        "saw nothing|sees nothing",
    ),
    "the header of a data file": ([left_out(check, "check_header", nothing)], "saw nothing"),
    # Each of these three finds what the others would.
    "the checksum, the digest and the rows of a footer": (
        [
            left_out(check, "xxh3_64", anything),
            left_out(check, "decode_table", nothing),
            left_out(check, "_check_footer", nothing),
        ],
        "saw nothing",
    ),
    "the digest of MANIFEST": ([left_out(table, "xxh3_128", anything)], "WRONG DATA|sees nothing"),
    "which base it is": ([left_out(chain, "content_digest", anything)], "WRONG DATA"),
    "unknown files": (
        [left_out(load_module, "check_names", nothing), left_out(survey, "check_names", nothing)],
        "sees nothing",
    ),
    "all around the payloads, by a load": (
        [left_out(load_module, "_check_around", nothing)],
        "a strict load saw nothing",
    ),
    "all around the payloads, by verify": (
        [left_out(survey, "check_files", nothing)],
        "verify sees nothing",
    ),
    "the base, by verify": (
        [left_out(verify_module, "len", lambda _: 0)],
        "verify sees nothing",
    ),
}


@pytest.fixture(scope="module")
def subjects() -> Iterator[list[Subject]]:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as scratch:
        made = make_all(NAMES, Path(scratch))
        with whole_manifests_parsed_once(made):
            yield made


def test_larger_damage_is_never_silent(subjects: list[Subject]) -> None:
    tally = Tally()
    for seed in range(CASES):
        try_case(subjects, seed, tally)
    assert tally.faults == []
    assert tally.kinds.keys() == KINDS.keys()
    assert tally.seen > 0.8 * CASES and 0 < tally.harmless < 0.2 * CASES


@pytest.mark.parametrize("codec", CODECS)
def test_a_flipped_bit_of_any_codec_is_never_silent(subjects: list[Subject], codec: str) -> None:
    (subject,) = (s for s in subjects if s.name == CODECS[codec])
    flip_all(subject, tally := Tally(), part=0, parts=1, step=FLIP_STEP)
    assert tally.faults == []
    assert tally.seen == tally.cases > 50


@pytest.mark.parametrize("what", PLANTED)
def test_a_check_that_is_left_out_is_noticed(subjects: list[Subject], what: str) -> None:
    planted, text = PLANTED[what]
    tally = Tally()
    with ExitStack() as stack:
        for one in planted:
            stack.enter_context(one())
        for seed in range(PLANTED_CASES_MAX):
            try_case(subjects, seed, tally)
            if any(re.search(text, fault) for fault in tally.faults):
                break
    assert any(re.search(text, fault) for fault in tally.faults), (tally.cases, tally.faults[:5])
    print(f"{what}: noticed by case {tally.cases}: {tally.faults[-1]}")


def test_another_save_in_its_place_is_judged_by_what_that_holds(subjects: list[Subject]) -> None:
    """The MANIFEST of another save, whose data were damaged then: bytes of that are right."""
    seed, (subject,) = 5016818, [s for s in subjects if s.name == "before"]
    try_case([subject], seed, tally := Tally())
    assert (tally.faults, tally.outcomes["refused"]) == ([], 1)
    try_case([replace(subject, others={})], seed, tally)
    assert len(tally.faults) == 1 and "wrong data in a target" in tally.faults[0]
