"""The examples of DCP and FSDP2 run as they stand."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def torchrun(ranks: int, example: str, directory: Path) -> str:
    """Run an example on so many ranks; return what it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(ranks), str(Path(__file__).with_name("run_example.py"))]
    command += [str(ROOT / "examples" / example), "runs/a"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_the_fsdp_example_trains_resumes_and_loads_on_another_layout(tmp_path: Path) -> None:
    assert "steps 1 to 60 on 2 ranks" in torchrun(2, "03_fsdp.py", tmp_path)
    last = tmp_path / "runs" / "a" / "step-00000060"
    assert "4 ranks: this one read" in torchrun(4, "04_reshard.py", tmp_path)
    shutil.rmtree(last)
    assert "steps 41 to 60 on 3 ranks" in torchrun(3, "03_fsdp.py", tmp_path)
    assert (last / "MANIFEST").exists()


def test_the_dcp_example_saves_and_resumes_on_two_ranks(tmp_path: Path) -> None:
    assert "runs/a/world-2: " in torchrun(2, "05_dcp.py", tmp_path)
    assert (tmp_path / "runs" / "a" / "world-2" / "MANIFEST").exists()
