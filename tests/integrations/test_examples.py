"""The examples run as they stand, and so do the blocks of docs/dcp.md."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_dcp_example_saves_and_resumes_on_two_ranks(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", str(ROOT / "examples" / "05_dcp.py"), "runs/a"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "runs/a/world-2: " in done.stdout
    assert (tmp_path / "runs" / "a" / "world-2" / "MANIFEST").exists()


def test_the_page_on_dcp_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "dcp.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, check=True)
    assert (tmp_path / "runs" / "d" / "second" / "MANIFEST").exists()
