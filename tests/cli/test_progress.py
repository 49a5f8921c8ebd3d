"""The progress bar: late, only on a terminal, and gone in the end."""

import io
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.testing import Fault, faulty
from holdfast.tools import progress as progress_module
from holdfast.tools.progress import Progress, watch


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that stands until it is set."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rich", "rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, module, None)


def test_nothing_is_shown_before_two_seconds(no_rich: None) -> None:
    stream, clock = Terminal(), Clock()
    with Progress("verify", 4_000_000, stream=stream, clock=clock) as progress:
        clock.now_s += 1.99
        progress.advance(1_000_000)
        assert stream.getvalue() == ""
        clock.now_s += 0.02
        progress.advance(1_000_000)
        assert stream.getvalue() == "\rverify  50 %  2.00 MB of 4.00 MB"
        progress.advance(1_000_000)  # within a tenth of a second: not drawn again
        assert stream.getvalue().count("\r") == 1
        clock.now_s += 1
        progress.advance(9_000_000)
        assert stream.getvalue().endswith("\rverify 100 %  4.00 MB of 4.00 MB")
    assert stream.getvalue().endswith("\r" + " " * len("verify 100 %  4.00 MB of 4.00 MB") + "\r")


def test_nothing_is_shown_where_there_is_no_terminal() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress("verify", 100, stream=stream, clock=clock) as progress:
        clock.now_s += 60
        progress.advance(50)
    assert stream.getvalue() == ""


def test_rich_draws_it_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream, clock = Terminal(), Clock()
    with Progress("verify", 4_000_000, stream=stream, clock=clock) as progress:
        clock.now_s += 3
        progress.advance(2_000_000)
    assert "verify" in stream.getvalue() and "/4.0 MB" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K")  # erased


def test_a_bar_is_erased_after_an_error(no_rich: None) -> None:
    stream, clock = Terminal(), Clock()
    with (
        pytest.raises(KeyboardInterrupt),
        Progress("verify", 100, stream=stream, clock=clock) as progress,
    ):
        clock.now_s += 3
        progress.advance(50)
        raise KeyboardInterrupt
    assert stream.getvalue().endswith(" \r")


def test_a_save_in_the_background_is_shown_while_it_lasts(
    no_rich: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "PATIENCE_S", 0.0)
    stream = Terminal()
    slow = Fault("write", persistent=True, action="delay", argument=400)
    with faulty(slow):
        handle = holdfast.save_async({"w": torch.zeros(1000)}, tmp_path / "a")
        with watch(handle, stream=stream):
            handle.result()
    assert stream.getvalue().startswith("\rsave   0 %  0 B of 4.00 kB")
    assert stream.getvalue().endswith(" \r")
