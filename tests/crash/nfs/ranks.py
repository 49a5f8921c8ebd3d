"""Ranks, jobs and savers on two machines: kills, a server that goes away, and races."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist
from blocks.saved_runs import Plan, look, save_steps
from crash_content import make_near_state
from crash_oracle import promises_broken
from forked_ranks import OPTIONS, join

import holdfast
from holdfast.errors import AlreadyCommittedError, FencedError, HoldfastError

from .lab import Lab, Turn, load, save
from .machine import Running, start_server, stop_server

KEEP = 2  # steps, by every `Plan`
JOINED_S = 3.0  # about when two ranks have begun to save
DEADLINE_S = 60.0  # of a save: a rank waits so long for one that was killed


def check_run(lab: Lab, run: Path, acknowledged: Sequence[int]) -> None:
    """Check, from both clients, that a run has what was acknowledged, and nothing torn."""
    for client in (lab.a, lab.b):
        found = client.do(lambda: look(run).run)
        if faults := promises_broken(found, acknowledged, KEEP):
            raise AssertionError(f"seen from {client.name}: {faults}")


@contextlib.contextmanager
def two_ranks(
    lab: Lab, run: Path, plans: Sequence[Plan], told: list[int]
) -> Iterator[list[Running]]:
    """Let a rank on each client save a run; in the end wait for both, and add what they told."""
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reading, writing = os.pipe()

    def tell(step: int) -> None:
        os.write(writing, f"{step}\n".encode())

    def rank_main(rank: int) -> None:
        join(str(run), meeting.port, rank, 2)
        for number, plan in enumerate(plans):
            save_steps(run, rank, plan, tell, 1 + number * plan.steps, DEADLINE_S)

    clients = enumerate((lab.a, lab.b))
    ranks = [client.begin(lambda rank=rank: rank_main(rank)) for rank, client in clients]
    os.close(writing)
    yield ranks
    # Each has the pipe until it ends.
    with open(reading) as lines:
        told += sorted({int(line) for line in lines})


def two_ranks_save(lab: Lab) -> str:
    """Each on a client of its own, in any way of saving."""
    told, ways = list[int](), lab.times(6)
    with two_ranks(lab, lab.root, [Plan.choose(lab.rng) for _ in range(ways)], told) as ranks:
        pass
    for rank in ranks:
        rank.result()
    check_run(lab, lab.root, told)
    return f"{len(told)} steps in {ways} ways, bit-exact from both clients"


def a_server_that_restarts(lab: Lab) -> str:
    """It forgets what is open, and has not synced what it has not promised; saves only wait."""
    told, restarts = list[int](), lab.times(4)
    with two_ranks(lab, lab.root, [Plan.choose(lab.rng) for _ in range(restarts)], told) as ranks:
        time.sleep(JOINED_S)
        for _ in range(restarts):
            time.sleep(lab.rng.uniform(0.2, 2))
            stop_server()
            time.sleep(lab.rng.uniform(0, 1))
            start_server()
    for rank in ranks:
        rank.result()
    check_run(lab, lab.root, told)
    return f"{restarts} restarts, {len(told)} steps acknowledged, no save failed, none lost"


def killed_ranks(lab: Lab) -> str:
    """SIGKILL to one rank or both."""
    kills = saved = 0
    for number in range(lab.times(40)):
        run, told = lab.root / str(number), list[int]()
        with two_ranks(lab, run, [Plan.choose(lab.rng)], told) as ranks:
            time.sleep(lab.rng.uniform(0.5, JOINED_S))
            for rank in ranks if lab.rng.random() < 0.5 else [lab.rng.choice(ranks)]:
                rank.kill(signal.SIGKILL)
                kills += 1
        for rank in ranks:
            try:
                rank.result()
            except (ChildProcessError, HoldfastError):
                pass
            except RuntimeError as error:  # a barrier of this program, behind a rebase
                if "Connection closed by peer" not in str(error):
                    raise
        check_run(lab, run, told)
        saved += len(told)
        print(f"{kills} ranks killed", flush=True)
    return f"{kills} ranks killed, {saved} steps acknowledged, none lost, none torn"


def a_race_for_one_step(lab: Lab) -> str:
    """Both save to one path at once."""
    rounds = lab.times(50)
    for number in range(rounds):
        path, at = lab.root / str(number), time.time() + 0.3

        def race(which: int, path: Path = path, at: float = at) -> bool:
            time.sleep(max(0, at - time.time()))
            try:
                save(path, which)
            except AlreadyCommittedError:
                return False
            return True

        first, second = (
            lab.a.begin(lambda race=race: race(1)),
            lab.b.begin(lambda race=race: race(2)),
        )
        results = [first.result(), second.result()]
        assert sorted(results) == [False, True], results
        for client in (lab.a, lab.b):
            assert client.do(lambda path=path: load(path)) == 1 + results.index(True)
            files = client.do(lambda path=path: sum(p.is_file() for p in path.rglob("*")))
            assert files == 2, f"{files} files"
    return f"{rounds} races, one commit each"


def a_race_for_a_run(lab: Lab) -> str:
    """Two jobs restore a run, and go on with it at once."""
    rounds = lab.times(20)
    for number in range(rounds):
        run = lab.root / str(number)
        lab.a.do(lambda run=run: save(run / "step-00000001", 1, make_near_state))
        turns = (Turn(), Turn(), Turn())

        def race(rank: int, run: Path = run, turns: tuple[Turn, ...] = turns) -> bool:
            with holdfast.Checkpointer(run, options=OPTIONS, stage="sync") as job:
                assert job.restore(make_near_state(-1)) == 1
                turns[2].give()
                turns[rank].take()
                try:
                    job.save(2 + rank, make_near_state(2 + rank))
                except FencedError:
                    return False
            return True

        clients = enumerate((lab.a, lab.b))
        jobs = [client.begin(lambda rank=rank, race=race: race(rank)) for rank, client in clients]
        for _ in jobs:
            turns[2].take()
        for turn in turns[:2]:
            turn.give()
        results = [job.result() for job in jobs]
        assert sorted(results) == [False, True], results
        check_run(lab, run, [1, 2 + results.index(True)])
    return f"{rounds} races, one job each time"


def an_older_job(lab: Lab) -> str:
    """It is refused at its very next save, though its client knows an older directory."""
    rounds = lab.times(10)
    for number in range(rounds):
        run, turns = lab.root / str(number), (Turn(), Turn())

        def older(run: Path = run, turns: tuple[Turn, Turn] = turns) -> bool:
            with holdfast.Checkpointer(run, options=OPTIONS, stage="sync") as job:
                job.save(1, make_near_state(1))
                turns[0].give()
                turns[1].take()
                try:
                    job.save(3, make_near_state(3))
                except FencedError:
                    return False
            return True

        def newer(run: Path = run) -> None:
            with holdfast.Checkpointer(run, options=OPTIONS, stage="sync") as job:
                assert job.restore(make_near_state(-1)) == 1
                job.save(2, make_near_state(2))

        running = lab.a.begin(older)
        turns[0].take()
        lab.b.do(newer)
        turns[1].give()
        assert not running.result(), "an older job has saved"
        check_run(lab, run, [1, 2])
    return f"{rounds} older jobs, each refused at its next save"
