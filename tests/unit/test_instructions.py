"""HOLDFAST_CPU names the widest instructions that are used, of those that the processor has."""

import os
import subprocess
import sys

LEVELS = ["baseline", "AVX2", "AVX-512"]


def level_under(widest: str) -> int:
    """Return which of `LEVELS` a process uses under a value of HOLDFAST_CPU."""
    command = [sys.executable, "-c", "import holdfast._core as core; print(core.instruction_set())"]
    env = os.environ | {"HOLDFAST_CPU": widest}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    return LEVELS.index(done.stdout.strip())


def test_the_environment_names_the_widest_instructions() -> None:
    own = level_under("")
    assert level_under("baseline") == 0
    assert level_under("avx2") == min(own, 1)
    assert level_under("avx512") == own
    assert level_under("unknown") == own
