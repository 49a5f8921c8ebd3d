"""Replies that are lost, a server that does not answer, and what NFS has not."""

import contextlib
import dataclasses
import os
import time
from pathlib import Path

from crash_content import load_number, make_state
from forked_ranks import OPTIONS

import holdfast
from holdfast._core import probe
from holdfast.errors import HoldfastError, NotCommittedError, StoreError

from .lab import Lab, Turn, load, save
from .machine import RUN, start_server, stop_server
from .proxy import Orders

# Each changes something on the server, once; the client asks again, and is told EEXIST or ENOENT.
PUBLISHING = {
    "the link to MANIFEST": Orders("link", "MANIFEST"),
    "the link to .over": Orders("link", "", skip=1),
    "the link to the mark": Orders("link", "", skip=2),
    "the rename over MANIFEST": Orders("rename", "MANIFEST"),
    "the rename of LATEST": Orders("rename", "LATEST"),
}
RESTARTED = 0.25  # of the trials: the server forgets which replies it has given


def lost_replies_of_a_commit(lab: Lab) -> str:
    """Of each step of a commit and a replace, without and with a restart of the server."""
    count = 0
    for what, orders in PUBLISHING.items():
        for restart in (False, True):
            root = lab.root / f"{what} {restart}"
            lab.a.proxy.lose(dataclasses.replace(orders, restart=restart))
            failed = lab.a.do(lambda root=root: _save_all(root))
            lost = lab.a.proxy.state()[1]
            lab.a.proxy.lose(Orders())
            assert lost == 1, f"{what}: {lost} replies were lost"
            _check_all(lab, root, f"{what}, restart {restart}", failed)
            count += 1
    return f"{count} replies lost, every save succeeded"


def any_lost_reply(lab: Lab) -> str:
    """Of a run with retention and a replace, the reply to each request is lost in turn."""
    lab.a.proxy.lose(Orders())
    assert not lab.a.do(lambda: _save_all(lab.root / "counted"))
    requests, step, lost = lab.a.proxy.state()[0], max(1, round(1 / lab.scale)), 0
    for number in range(lab.rng.randrange(step), requests, step):
        root, restart = lab.root / str(number), lab.rng.random() < RESTARTED
        lab.a.proxy.lose(Orders("any", "", number, restart))
        failed = lab.a.do(lambda root=root: _save_all(root))
        lost += lab.a.proxy.state()[1]
        lab.a.proxy.lose(Orders())
        _check_all(lab, root, f"request {number}, restart {restart}", failed)
        print(f"the reply to request {number} of {requests} was lost", flush=True)
    return f"{lost} replies lost, one in each trial ({requests} requests); every save succeeded"


def _save_all(root: Path) -> str:
    """Replace a checkpoint, and save a run with retention; return what failed."""
    try:
        save(root / "best", 1)
        save(root / "best", 2, replace=True)
        keep = holdfast.Keep.latest(1)
        with holdfast.Checkpointer(root / "run", options=OPTIONS, stage="sync", keep=keep) as run:
            for step in (1, 2):
                run.save(step, make_state(step))
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _check_all(lab: Lab, root: Path, what: str, failed: str) -> None:
    assert not failed, f"{what}: {failed}"

    def found() -> tuple[list[str], int, int, str]:
        run = root / "run"
        steps = sorted(name for name in os.listdir(run) if name.startswith("step-"))
        hint = (run / "LATEST").read_text().strip()
        return steps, load(run / "step-00000002"), load(root / "best"), hint

    for client in (lab.a, lab.b):
        seen = client.do(found)
        assert seen == (["step-00000002"], 2, 2, "step-00000002"), f"{what}: {seen}"
        left = client.do(lambda: sorted(os.listdir(root / "best")))
        assert left == ["MANIFEST", "data"], f"{what}: {left}"


def ways_of_writing(lab: Lab) -> str:
    """Every backend; the one that finds the fastest has no O_TMPFILE, and leaves nothing."""

    def play() -> str:
        try:
            os.close(os.open(RUN, os.O_TMPFILE | os.O_RDWR))
            unnamed = "O_TMPFILE"
        except OSError as error:
            unnamed = f"no O_TMPFILE ({error.strerror})"
        for io in ("io_uring", "direct", "buffered", "auto"):
            options = dataclasses.replace(OPTIONS, io=io)
            holdfast.save(make_state(1), lab.root / io, options=options)
            assert load_number(lab.root / io, options) == 1
        left = [name for name in os.listdir(lab.root) if name.startswith(".")]
        assert not left, left
        return f"{unnamed}; the fastest that works is {probe(str(lab.root))}"

    return lab.a.do(play)


def a_soft_mount(lab: Lab) -> str:
    """With ``soft`` a save fails while the server is away, and nothing is acknowledged."""
    where, turns = Path("/mnt/soft"), (Turn(), Turn())
    lab.a.mount_at(where, "soft,timeo=10,retrans=1")

    def saver() -> str:
        save(lab.root / "before", 1)
        turns[0].give()
        turns[1].take()
        begun = time.monotonic()
        try:
            save(lab.root / "meanwhile", 2)
        except StoreError as error:
            return f"{os.strerror(error.errno or 0)} after {time.monotonic() - begun:.0f} s"
        return "saved"

    saving = lab.a.begin(saver, where)
    turns[0].take()
    stop_server()
    turns[1].give()
    try:
        found = saving.result()
    finally:
        start_server()
    assert found != "saved", "a save was acknowledged without a server"
    assert lab.b.do(lambda: load(lab.root / "before")) == 1
    with contextlib.suppress(NotCommittedError):
        raise AssertionError(f"loaded {lab.b.do(lambda: load(lab.root / 'meanwhile'))}")
    lab.a.do(lambda: save(lab.root / "after", 3))
    return f"StoreError, {found}"
