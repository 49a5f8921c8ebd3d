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


def test_code_tables_and_questions_are_no_sentences(tmp_path: Path) -> None:
    long = "word " * 40
    assert not faults_of(tmp_path, f"```text\n{long}\n```\n\n| {long} |\n|---|\n")
    assert not faults_of(tmp_path, f"What is there?\n\n`{'x' * 60}`\n")
    assert not faults_of(tmp_path, "- " + "\n- ".join(["one two three"] * 20) + "\n")
