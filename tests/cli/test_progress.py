"""The progress bar: late, only on a terminal, and gone in the end."""

import io
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.testing import Fault, faulty
from holdfast.tools import progress as progress_module
from holdfast.tools.progress import Progress, watch

ERASED = "\x1b[2K"  # the line of the bar


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that stands until it is set."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def test_nothing_is_shown_before_two_seconds() -> None:
    stream, clock = Terminal(), Clock()
    with Progress("verify", 4_000_000, stream=stream, clock=clock) as progress:
        clock.now_s += 1.99
        progress.advance(1_000_000)
        assert stream.getvalue() == ""
        clock.now_s += 0.02
        progress.advance(1_000_000)
        assert "verify" in stream.getvalue()
        clock.now_s += 1
        progress.advance(9_000_000)
    assert "4.0/4.0 MB" in stream.getvalue(), "never more than there is"
    assert stream.getvalue().endswith(ERASED)


def test_nothing_is_shown_where_there_is_no_terminal() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress("verify", 100, stream=stream, clock=clock) as progress:
        clock.now_s += 60
        progress.advance(50)
    assert stream.getvalue() == ""


def test_a_bar_is_erased_after_an_error() -> None:
    stream, clock = Terminal(), Clock()
    with (
        pytest.raises(KeyboardInterrupt),
        Progress("verify", 100, stream=stream, clock=clock) as progress,
    ):
        clock.now_s += 3
        progress.advance(50)
        raise KeyboardInterrupt
    assert stream.getvalue().endswith(ERASED)


def test_a_save_in_the_background_is_shown_while_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "PATIENCE_S", 0.0)
    stream = Terminal()
    slow = Fault("write", persistent=True, action="delay", argument=400)
    with faulty(slow):
        handle = holdfast.save_async({"w": torch.zeros(1000)}, tmp_path / "a")
        with watch(handle, stream=stream):
            handle.result()
    assert "save" in stream.getvalue() and "kB" in stream.getvalue()
    assert stream.getvalue().endswith(ERASED)
