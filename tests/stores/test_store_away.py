"""A store that is away while a job goes on with its local disk: when it is asked, what is said."""

import itertools
import logging
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Checkpointer, Options, StoreSettings
from holdfast.errors import StoreError
from holdfast.runs import uploader
from holdfast.tools import waiting
from stores import doubles, servers
from stores.test_tiers import until

pytestmark = pytest.mark.usefixtures("bare")

SOON_S = 30.0
KEY = {"access_key_id": "x", "secret_access_key": "y", "region": "us-east-1"}


@contextmanager
def job(
    endpoint: str, local: Path, url: str = "s3://bucket"
) -> Iterator[tuple[Checkpointer, uploader.Uploader]]:
    """Begin a job whose store is at an endpoint; it ends with what is left to upload."""
    settings = StoreSettings(url, endpoint=endpoint, allow_http=True, timeout_s=0.3, **KEY)
    options = Options(store=settings)
    checkpointer = Checkpointer(
        f"{url}/run", local=local, durable="local", drain_s=0.01, options=options
    )
    with pytest.raises(StoreError, match="lacks step"), checkpointer:
        assert checkpointer.restore({"w": torch.zeros(3)}) is None
        checkpointer.save(1, {"w": torch.ones(3)})
        tiers = checkpointer._tiers
        assert tiers is not None and tiers.uploader is not None
        yield checkpointer, tiers.uploader


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "tried again" in line]


def test_saves_do_not_shorten_the_pause_before_a_store_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def answer(request: doubles.Request) -> doubles.Reply:
        asked.append(request)
        return doubles.error(403, "AccessDenied")

    monkeypatch.setattr(uploader, "PAUSES_S", (0.0, 600.0))
    with doubles.answering(answer) as url, job(url, tmp_path) as (checkpointer, thread):
        until(lambda: thread._failures == 2 and thread._is_idle, SOON_S)
        before = len(asked)
        for step in range(2, 12):
            checkpointer.save(step, {"w": torch.ones(3)})
        assert len(asked) == before
        with thread.hurried():  # somebody waits for the store
            until(lambda: thread._failures == 3, SOON_S)


def test_failures_in_a_row_are_warned_of_once_and_then_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count = itertools.count()

    def answer(request: doubles.Request) -> doubles.Reply:
        return doubles.error(403, "AccessDenied", f"of request {next(count)}")

    monkeypatch.setattr(uploader, "PAUSES_S", (0.01,))
    for endless_s, least, most in ((600.0, 1, 1), (0.0, 4, 999)):
        caplog.clear()
        monkeypatch.setattr(uploader, "WORD_S", endless_s)
        with (
            caplog.at_level(logging.WARNING),
            doubles.answering(answer) as url,
            job(url, tmp_path / f"{least}", f"s3://bucket{least}") as (_, thread),
        ):
            until(lambda: thread._failures > 3, SOON_S)
        assert least <= len(warnings_of(caplog)) <= most
        assert "is tried again in at most 0.01 s: list" in warnings_of(caplog)[0]


def test_the_error_of_a_server_that_refuses_connections_is_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "PAUSES_S", (0.0,))
    said = set[str]()
    with job("http://127.0.0.1:1", tmp_path) as (_, thread):
        for failures in range(1, 4):
            until(lambda: thread._failures > failures, SOON_S)  # noqa: B023
            said.add(thread.said)
    assert len(said) == 1


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Shells start what runs in the background with SIGINT ignored, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_a_command_says_which_request_is_not_done_and_ctrl_c_ends_it() -> None:
    with socket.socket() as silent:  # it takes connections, and answers nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        setup = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "y",
            "AWS_REGION": "us-east-1",
        }
        command = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "ls", "s3://bucket/run"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **setup},
        )
        try:
            assert command.stderr is not None
            assert select.select([command.stderr], [], [], SOON_S)[0], "it said nothing"
            line = command.stderr.readline().decode()
            command.send_signal(signal.SIGINT)
            code = command.wait(SOON_S)
        finally:
            command.kill()
            rest = command.communicate()[1]
    assert line.startswith("holdfast: ")
    assert "s3://bucket/run: not done after " in line
    assert line.endswith(" s, still waiting\n")
    assert (code, rest) == (128 + signal.SIGINT, b"")


@pytest.mark.usefixtures("_interruptible")
def test_a_second_ctrl_c_ends_watch_at_once_and_gives_the_screen_back() -> None:
    with (
        servers.serving("gcs") as up,
        servers.environment(servers.SERVERS["gcs"].settings(up.port)),
    ):
        run = f"{servers.SERVERS['gcs'].url}/run"
        holdfast.save({"w": torch.ones(3)}, f"{run}/step-00000001")
        terminal, its = pty.openpty()
        command = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "watch", run], stdin=its, stdout=its, stderr=its
        )
        os.close(its)
        shown = b""

        def until_shown(what: bytes) -> None:
            nonlocal shown
            while what not in shown:
                assert select.select([terminal], [], [], SOON_S)[0], shown
                shown += os.read(terminal, 1 << 16)

        try:
            until_shown(b"\x1b[?1049h")
            os.killpg(up.process.pid, signal.SIGSTOP)
            until_shown(b"not done after")
            began_s = time.monotonic()
            command.send_signal(signal.SIGINT)
            time.sleep(0.5)
            assert command.poll() is None
            command.send_signal(signal.SIGINT)
            until_shown(b"\x1b[?1049l")
            assert command.wait(SOON_S) == 128 + signal.SIGINT
            assert time.monotonic() - began_s < waiting.PATIENCE_S
        finally:
            command.kill()
            command.wait()
            os.close(terminal)
            os.killpg(up.process.pid, signal.SIGCONT)
