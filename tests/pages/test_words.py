"""`make words`: which sentences it refuses, and that bounds only fall."""

import subprocess
import sys
from pathlib import Path

import pytest

from .blocks import ROOT

SCRIPT = ROOT / "scripts" / "check-words"


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def faults_of(place: Path, text: str) -> list[str]:
    page = place / "page.md"
    page.write_text(text)
    done = check(str(page))
    assert (done.returncode == 0) == done.stdout.startswith("1 pages keep")
    return done.stdout.splitlines() if done.returncode else []


def test_every_page_keeps_the_rules_or_its_bound() -> None:
    done = check()
    assert done.returncode == 0, done.stdout


REFUSED = {
    "a long sentence": "It is short.\nThis\n" + "word\n" * 35 + "ends.",
    "a long mean": "\n".join(["This", *["word"] * 20, "ends."] * 3),
    "a clause as a subject": "What nine ranks need is read by one.",
    "a clause behind of": "The size of what is read.",
    "that cannot be": "An option that cannot be.",
    "let go": "Then the step is let go of.",
    "nobody": "Bytes that nobody believes.",
    "of three times": "The end of the deadline of the save of this rank.",
    "a colon and a semicolon": "Two kinds: one is read; the other is not.",
    "a long line": "word, " * 17,
}


@pytest.mark.parametrize("what", REFUSED)
def test_each_rule_of_words_fails_when_it_is_broken(what: str, tmp_path: Path) -> None:
    assert len(faults_of(tmp_path, f"# A page\n\n{REFUSED[what]}\n")) == 1


REFUSED_ERRORS = {
    "there are": 'OptionError(f"io is {io}; there are {known}")',
    "let go": 'StoreError("step 3 is being let go of")',
    "nobody": 'StateError(f"nobody holds {gap}")',
    "made from": 'errors.CorruptError(f"{path} was made from {base}")',
    "what is": 'CorruptError(f"{path} is not "\n    "what is in MANIFEST")',
    "that cannot be": 'OptionError("an option that cannot be")',
    "a word of ours": 'damaged(path, "a segment is missing")',
    "anew": 'MismatchError("begin anew")',
    "a question": 'PeerError(f"rank {rank} is gone. Did it die?", rank=rank)',
}


@pytest.mark.parametrize("what", REFUSED_ERRORS)
def test_a_private_word_in_an_error_is_refused(what: str, tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    (room / "good.py").write_text('raise OptionError(f"io is {io}; expected one of {known}")\n')
    assert check(str(room)).stdout == "0 pages and 1 rooms keep the rules or their bounds\n"
    (room / "bad.py").write_text(f"error = {REFUSED_ERRORS[what]}\n")
    done = check(str(room))
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1 and "bad.py:1: " in done.stdout


def test_words_outside_of_errors_are_free(tmp_path: Path) -> None:
    (tmp_path / "free.py").write_text('"""Nobody."""\nx = note("segment")  # made from\n')
    assert check(str(tmp_path)).returncode == 0


def test_code_tables_and_questions_are_no_sentences(tmp_path: Path) -> None:
    long = "word " * 40
    assert not faults_of(tmp_path, f"```text\n{long}\n```\n\n| {long} |\n|---|\n")
    assert not faults_of(tmp_path, f"What is there?\n\n`{'x' * 60}`\n")
    assert not faults_of(tmp_path, "- " + "\n- ".join(["one two three"] * 20) + "\n")
