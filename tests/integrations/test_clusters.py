"""The scripts of examples/cluster under schedulers that are played: signals, limits, restarts.

There is no Slurm and no Kubernetes here. What is played is what they do to a job: the signals that
they send, to whom and when, and what they start again. Everything else is real.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import holdfast

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LIMIT_S, POLL_S, PAUSE_S = 100, 0.02, 0.05
AGAIN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}  # for ranks that are started again
NewPath = Callable[[], Path]

TOOLS = {
    # It starts what follows on each node, and passes signals on to it.
    "srun": '#!/bin/bash\nexec "$@"\n',
    "scontrol": '#!/bin/bash\n[ "$1" = show ] && echo localhost || echo "$*" >> scontrol.log\n',
    "torchrun": f'#!/bin/bash\nexec {" ".join(TORCHRUN)} "$@"\n',
}


@pytest.fixture
def place(new_path: NewPath) -> Path:
    """Return a directory with the program, and the commands of a cluster."""
    path = new_path()
    (path / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "examples" / "08_cluster.py", path / "program.py")
    lines = [f"import sys; sys.argv.append('{PAUSE_S}')", (path / "program.py").read_text()]
    (path / "train.py").write_text("\n".join(lines))
    for name, text in TOOLS.items():
        (path / "bin" / name).write_text(text)
        (path / "bin" / name).chmod(0o755)
    return path


def environment(place: Path, **more: object) -> dict[str, str]:
    own = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": 1, "STEPS": 60}
    return os.environ | {name: str(value) for name, value in (own | more).items()}


def free_port(first: int = 0, last: int = 0) -> int:
    """Return a port that nobody uses; of a range, where one is given."""
    for port in range(first, last + 1):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            found: int = free.getsockname()[1]
            return found
    raise AssertionError("all ports are in use")


class Job:
    """A job under way: a command, and what it prints."""

    def __init__(self, place: Path, command: list[str], **more: object) -> None:
        self.log = place / f"log.{time.time_ns()}"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=place,
                env=environment(place, **more),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def steps(self) -> list[int]:
        """Return the steps that it has printed."""
        return [int(n) for n in re.findall(r"^step (\d+) on", self.log.read_text(), re.MULTILINE)]

    def wait_for(self, what: Callable[[], Any]) -> None:
        """Wait until something holds; the job must not end before."""
        deadline = time.monotonic() + LIMIT_S
        while not what():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(POLL_S)

    def end(self, grace_s: float = LIMIT_S) -> int:
        """Wait for the end; after the grace, kill all of it, as schedulers do."""
        try:
            return self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"killed after {grace_s} s: {self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        """Kill all of it, the ranks of torchrun too, which have sessions of their own."""
        for pid in [*descendants(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes below one."""
    with contextlib.suppress(OSError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            yield child
            yield from descendants(child)


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        job.kill()


def torchrun(place: Path, example: str, *arguments: str, ranks: int) -> None:
    """Run an example to its end, unbroken."""
    shutil.copy(ROOT / "examples" / example, place / example)
    head = [*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks)]
    job = Job(place, [*head, example, *arguments])
    assert job.end() == 0, job.log.read_text()[-3000:]


def weights(root: Path) -> torch.Tensor:
    return holdfast.open(root).tensor("model.weight")


def assert_each_step_once(jobs: list[Job], steps: int) -> None:
    assert [step for job in jobs for step in job.steps()] == [*range(1, steps + 1)]


def submit(place: Path, jobs: list[Job], **more: object) -> Job:
    """Start slurm.sbatch as Slurm does on a node with two devices."""
    ours = {"SLURM_JOB_NAME": "train", "SLURM_JOB_NODELIST": "n1", "SLURM_NNODES": 1}
    port = free_port(first := 29500 + os.getpid() % 900, first + 99)  # other tests run beside
    ours |= {"SLURM_GPUS_ON_NODE": 2, "SLURM_JOB_ID": port - 29500}
    jobs.append(Job(place, ["bash", str(CLUSTER / "slurm.sbatch")], **ours, **more))
    return jobs[-1]


def grace_s() -> float:
    """Return how long before the time limit the script asks for its signal."""
    text = (CLUSTER / "slurm.sbatch").read_text()
    signalled, lead_s = re.findall(r"^#SBATCH .*--signal=B:(\w+)@(\d+)", text, re.MULTILINE)[0]
    assert signalled == "USR1" and "--requeue" in text and "--open-mode=append" in text
    return float(lead_s)


def test_a_job_at_its_time_limit_saves_and_is_queued_again(place: Path, jobs: list[Job]) -> None:
    for limit in (5, 25):
        job = submit(place, jobs, SLURM_ARRAY_TASK_ID=3)
        job.wait_for(lambda limit=limit, job=job: max(job.steps(), default=0) >= limit)
        os.kill(job.process.pid, signal.SIGUSR1)  # B: the shell alone
        job.end(min(grace_s(), LIMIT_S))
        requeued = (place / "scontrol.log").read_text().splitlines()
        assert [line.split()[0] for line in requeued] == ["requeue"] * len(jobs)
    submit(place, jobs, SLURM_ARRAY_TASK_ID=3).end()
    assert_each_step_once(jobs, 60)
    torchrun(place, "08_cluster.py", "runs/unbroken", "60", ranks=2)
    run = place / "runs" / "train-3"  # of this task of the array
    assert torch.equal(weights(run), weights(place / "runs" / "unbroken"))
    assert len((place / "scontrol.log").read_text().splitlines()) == 2  # not after the end


def test_a_preempted_job_saves_and_goes_on(place: Path, jobs: list[Job]) -> None:
    job = submit(place, jobs)
    job.wait_for(lambda: max(job.steps(), default=0) >= 5)
    (step,) = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    os.kill(int(step), signal.SIGTERM)  # GraceTime begins, for the steps of the job
    job.end(grace_s())
    assert not (place / "scontrol.log").exists()  # Slurm does it by itself
    assert submit(place, jobs).end() == 0
    assert_each_step_once(jobs, 60)


def test_a_job_that_fails_is_not_queued_again(place: Path, jobs: list[Job]) -> None:
    (place / "train.py").write_text("raise SystemExit(3)")
    assert submit(place, jobs).end() != 0
    assert not (place / "scontrol.log").exists()


def test_a_pod_that_is_evicted_saves_and_the_next_goes_on(place: Path, jobs: list[Job]) -> None:
    manifest = yaml.safe_load((CLUSTER / "kubernetes.yaml").read_text())
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (mount,) = container["volumeMounts"]
    changed = {"--nproc-per-node=8": "--nproc-per-node=2", "10000": "60"}
    command = [changed.get(word, word) for word in container["command"]]
    command = [word.replace(mount["mountPath"], str(place / "runs")) for word in command]
    jobs.append(Job(place, command))
    jobs[0].wait_for(lambda: max(jobs[0].steps(), default=0) >= 5)
    os.kill(jobs[0].process.pid, signal.SIGTERM)  # to the first process of the container
    assert jobs[0].end(pod["terminationGracePeriodSeconds"]) != 0  # so another pod is made
    assert pod["restartPolicy"] == "Never" and manifest["spec"]["backoffLimit"] > 0
    jobs.append(Job(place, command))
    assert jobs[1].end() == 0, jobs[1].log.read_text()[-3000:]
    assert_each_step_once(jobs, 60)


def test_torchrun_starts_all_ranks_again_when_one_is_killed(place: Path, jobs: list[Job]) -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    command += ["train.py", "runs/a", "60"]
    job = Job(place, command, **AGAIN)
    jobs.append(job)
    job.wait_for(lambda: max(job.steps(), default=0) >= 25)
    ranks = [pid for pid in descendants(job.process.pid) if is_rank(pid)]
    os.kill(ranks[-1], signal.SIGKILL)
    assert job.end() == 0, job.log.read_text()[-3000:]
    steps = job.steps()
    again = next(n for n, (a, b) in enumerate(itertools.pairwise(steps)) if b <= a)
    assert steps[again + 1] == 21 and steps[-1] == 60  # from the newest checkpoint
    torchrun(place, "08_cluster.py", "runs/unbroken", "60", ranks=2)
    assert torch.equal(weights(place / "runs" / "a"), weights(place / "runs" / "unbroken"))


def is_rank(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False


def test_a_lost_node_leaves_the_others_training(place: Path, jobs: list[Job]) -> None:
    port = free_port()
    head = [*TORCHRUN, "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
    head += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "e"]
    fast = "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=2"
    command = [*head, "--rdzv-conf", fast, "train.py", "runs/a", "120"]
    first = Job(place, [*command], **AGAIN)
    jobs.append(first)
    time.sleep(1)  # it is the one that has the rendezvous
    second = Job(place, [*command], **AGAIN)
    jobs.append(second)
    both = lambda: first.steps() + second.steps()  # noqa: E731
    first.wait_for(lambda: max(both(), default=0) >= 25)
    second.kill()
    assert first.end() == 0, first.log.read_text()[-3000:]
    text = first.log.read_text() + second.log.read_text()
    assert "step 25 on 2 ranks" in text and "step 120 on 1 ranks" in text
    run = place / "runs" / "a"
    torchrun(place, "08_cluster.py", "runs/unbroken", "120", ranks=2)
    assert torch.allclose(weights(run), weights(place / "runs" / "unbroken"), rtol=1e-4)
