"""A run of holdfast's that one rank or two save on a logged disk, step after step."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from crash_content import WrongContentError, load_number, make_near_state
from crash_oracle import FoundRun, restore_number, verdict_of
from forked_ranks import OPTIONS, fork, join

import holdfast
from holdfast.codecs.base import Codec
from holdfast.codecs.lossless import Delta
from holdfast.errors import CorruptError, HoldfastError, NotCommittedError
from holdfast.format.names import step_name, step_of

WORLD_SIZE = 2
NOISE_FILES, NOISE_WRITES = 40, 300
STAGING_BYTES = 8 << 20  # more than a save in the background copies here
SAVED_S = 100.0  # by then the ranks are done
CODECS: dict[str, str | Codec] = {"raw": "raw", "lossless": "lossless", "delta": Delta(every=3)}
STAGES = ("sync", "eager", "lazy")
IO = ("auto", "buffered", "direct", "io_uring")


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run is saved: ``steps`` steps, of which ``keep`` are kept.

    Attributes:
        rebased: after every so many steps the newest is rebased; 0: never.
        pause_s: after each step, so that the file system writes of its own accord between.
        noise: whether another process writes beside the run meanwhile, and now and then syncs what
            is its own: then the file system makes durable what else it holds.
    """

    codec: str
    stage: str
    io: str
    steps: int = 6
    keep: int = 2
    rebased: int = 0
    pause_s: float = 0.0
    noise: bool = False
    ranks: int = WORLD_SIZE

    @staticmethod
    def choose(rng: random.Random) -> "Plan":
        """Choose at random."""
        codec = rng.choice(tuple(CODECS))
        return Plan(
            codec,
            rng.choice(STAGES),
            rng.choice(IO),
            rebased=2 if codec == "delta" else 0,
            pause_s=rng.choice((0.0, 0.0, 0.3)),
            noise=rng.random() < 0.5,
            ranks=rng.choice((1, WORLD_SIZE)),
        )


Told = tuple[int, int]  # a step, and the length of the log when it was acknowledged
Prepare = Callable[[int], None]  # called in each rank before it saves


def save_run(
    root: Path, log: Path, plan: Plan, prepare: Prepare = lambda rank: None
) -> tuple[list[Told], dict[int, int]]:
    """Save a run; return what they acknowledged, and how each rank ended."""
    reading, writing = os.pipe()
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank_main(rank: int) -> None:
        os.close(reading)
        signal.alarm(int(SAVED_S))
        join(f"save-{log}", meeting.port, rank, plan.ranks)
        prepare(rank)

        def tell(step: int) -> None:
            os.write(writing, f"{step} {os.path.getsize(log)}\n".encode())

        save_steps(root, rank, plan, tell)

    noise = fork(lambda rank: write_noise(root.parent, writing), 0) if plan.noise else 0
    children = [fork(rank_main, rank) for rank in range(plan.ranks)]
    os.close(writing)
    with open(reading) as lines:
        told = [(int(step), int(end)) for step, end in map(str.split, lines)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if noise:
        os.kill(noise, signal.SIGKILL)
        os.waitpid(noise, 0)
    return told, dict(enumerate(statuses))


def write_noise(where: Path, pipe: int) -> None:
    """Write and rename beside the run, as logs and caches do; sync some of it."""
    os.close(pipe)  # whose end says that the ranks are done
    signal.alarm(int(SAVED_S))
    rng = random.Random(1)
    where.mkdir(parents=True, exist_ok=True)
    for number in range(NOISE_WRITES):
        new, old = (
            where / f"noise-{n % NOISE_FILES}" for n in (number, rng.randrange(NOISE_FILES))
        )
        with open(where / "noise.log", "a") as log:
            log.write(f"{number}\n" * rng.randrange(1000))
            if rng.random() < 0.3:
                os.fsync(log.fileno())
        new.write_bytes(rng.randbytes(rng.randrange(20_000)))
        if rng.random() < 0.5 and old.exists():
            old.rename(where / "noise-renamed")
        time.sleep(0.01)


def save_steps(
    root: Path,
    rank: int,
    plan: Plan,
    tell: Callable[[int], None],
    first: int = 1,
    deadline_s: float = OPTIONS.deadline_s,
) -> None:
    """Save as planned, from a step on; tell each step when it is durable."""
    with holdfast.Checkpointer(
        root,
        every=1,
        keep=holdfast.Keep.latest(plan.keep),
        codec=CODECS[plan.codec],
        stage=plan.stage,
        options=replace(OPTIONS, io=plan.io, pool_bytes=STAGING_BYTES, deadline_s=deadline_s),
    ) as run:
        for step in range(first, first + plan.steps):
            state = make_near_state(step)
            if plan.stage == "sync":
                run.save(step, state)
            else:
                run.step(step, state)
                run.wait()
            tell(step)
            if plan.rebased and step % plan.rebased == 0:
                if rank == 0:
                    holdfast.rebase(run.path(step), options=OPTIONS)
                dist.barrier()
            time.sleep(plan.pause_s)


@dataclass(frozen=True, slots=True)
class Looked:
    """What is on a disk: a run, and what `holdfast verify` says of its steps."""

    run: FoundRun
    verified: dict[int, bool | None]


def look(root: Path) -> Looked:
    """Load every step that is there, restore the run, and verify it."""
    verdicts = {
        step: verdict_of(place, _load)
        for place in (root.glob("step-*") if root.exists() else ())
        if (step := step_of(place.name)) is not None
    }
    hint = root / "LATEST"
    found = FoundRun(
        verdicts,
        verdict_of(root, lambda root: restore_number(root, make_near_state)),
        hint.read_bytes() if hint.exists() else None,
    )
    return Looked(found, {step: _verified(root / step_name(step)) for step in verdicts})


def _load(place: Path) -> int:
    return load_number(place, OPTIONS, make_near_state)


def _verified(place: Path) -> bool | None:
    """Do as `holdfast verify`; None: there is no checkpoint."""
    try:
        with holdfast.open(place, options=OPTIONS) as checkpoint:
            return not checkpoint.verify()
    except NotCommittedError:
        return None
    except CorruptError:
        return False


def disagreements(looked: Looked) -> Iterable[str]:
    """Say where `holdfast verify` and a load differ."""
    for step, verdict in looked.run.verdicts.items():
        good = looked.verified[step]
        if good != (None if verdict is None else verdict == step):
            yield f"verify says {good} of step {step}, and a load {verdict!r}"


def save_again(root: Path) -> str:
    """Go on with what a crash has left: restore, save the next step, load it; return what fails."""
    keep = holdfast.Keep.latest(2)
    try:
        run = holdfast.Checkpointer(root, keep=keep, stage="sync", options=OPTIONS)
        step = (run.restore(make_near_state(-1)) or 0) + 1
        run.save(step, make_near_state(step))
        found = _load(Path(run.path(step)))
    except (HoldfastError, WrongContentError) as error:
        return f"what the crash left cannot be gone on with: {type(error).__name__}: {error}"
    return "" if found == step else f"step {step}, saved after the crash, is {found}"
