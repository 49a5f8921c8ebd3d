"""The memory that copies pass through: pinned where CUDA is in use, grown, used again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.engine import pool

from .gpu import DEVICE, needs_cuda, same

pytestmark = needs_cuda
PYTHON = [sys.executable, "-c"]


def staging_memory() -> torch.Tensor:
    held = pool._staging[os.getpid()]
    return torch.frombuffer(held.pool.memory(), dtype=torch.uint8)


def test_the_copy_of_a_background_save_is_pinned_and_used_again(tmp_path: Path) -> None:
    state = {"x": torch.randn(1 << 22, device=DEVICE)}
    holdfast.save_async(state, tmp_path / "a").result()
    first = staging_memory()
    assert first.is_pinned()
    holdfast.save_async(state, tmp_path / "b").result()
    assert staging_memory().data_ptr() == first.data_ptr()
    state["y"] = torch.randn(pool._staging[os.getpid()].pool.slots << 22, device=DEVICE)
    holdfast.save_async(state, tmp_path / "c").result()
    grown = staging_memory()
    assert grown.is_pinned() and len(grown) > len(first)
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    holdfast.load(tmp_path / "c", into=target)
    assert all(same(target[name], value) for name, value in state.items())


def test_what_streams_is_pinned(tmp_path: Path) -> None:
    state = {"x": torch.randn(1 << 20, device=DEVICE)}
    holdfast.save(state, tmp_path / "a")
    holdfast.load(tmp_path / "a", into=state)
    held = [shared for key, shared in pool._pools.items() if key[0] == os.getpid()]
    assert held
    for shared in held:
        assert torch.frombuffer(shared.pool.memory(), dtype=torch.uint8).is_pinned()


def test_memory_from_before_cuda_was_used_is_pinned_later(tmp_path: Path) -> None:
    script = f"""
import os, torch, holdfast
from holdfast.engine import pool
def pinned(held): return torch.frombuffer(held.pool.memory(), dtype=torch.uint8).is_pinned()
state = {{"x": torch.ones(1000)}}
holdfast.save(state, {str(tmp_path / "a")!r})
holdfast.save_async(state, {str(tmp_path / "b")!r}).result()
assert not torch.cuda.is_initialized()
state["y"] = torch.ones(1000, device="cuda")
holdfast.save(state, {str(tmp_path / "c")!r})
holdfast.save_async(state, {str(tmp_path / "d")!r}).result()
assert pinned(pool._staging[os.getpid()]) and all(map(pinned, pool._pools.values()))
"""
    subprocess.run([*PYTHON, script], check=True, timeout=120)


def test_where_memory_cannot_be_pinned_saves_are_slower_and_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error that CUDA keeps of it for a thread's next kernel reaches no later call."""
    model = torch.nn.Linear(300, 300, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"x": torch.randn(1 << 20, device=DEVICE)}
    monkeypatch.setattr(pool, "_staging", {})
    monkeypatch.setattr(pool, "_PORTABLE", 1 << 20)  # a flag that CUDA refuses
    holdfast.save_async(state, tmp_path / "a").result()
    assert not staging_memory().is_pinned() and "pinned" in caplog.text
    lazy = {"model": model, "optimizer": optimizer}  # kernels in a thread of holdfast's
    holdfast.save_async(lazy, tmp_path / "b", stage="lazy").result()
    assert float((torch.ones(10, device=DEVICE) + 1).sum()) == 20
    target = {"x": torch.zeros_like(state["x"])}
    holdfast.load(tmp_path / "a", into=target)
    assert same(target["x"], state["x"])


def test_expandable_segments(tmp_path: Path) -> None:
    script = f"""
import torch, holdfast
state = {{f"x{{n}}": torch.randn(1 << (n % 22), device="cuda") for n in range(60)}}
del state["x7"]
torch.cuda.empty_cache()
for way in ("eager", "lazy"):
    holdfast.save_async(state, {str(tmp_path)!r} + "/" + way, stage=way).result()
    target = {{name: torch.zeros_like(value) for name, value in state.items()}}
    holdfast.load({str(tmp_path)!r} + "/" + way, into=target)
    assert all(torch.equal(target[name], value) for name, value in state.items())
"""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environment = os.environ | {name: "expandable_segments:True"}
        subprocess.run([*PYTHON, script], check=True, timeout=120, env=environment)
        break


def test_a_child_of_fork_saves_what_is_in_host_memory(tmp_path: Path) -> None:
    """CUDA does not work in it, and nothing of the pinned memory is there."""
    script = f"""
import os, torch, holdfast
state = {{"x": torch.ones(1000, device="cuda")}}
holdfast.save(state, {str(tmp_path / "a")!r})
holdfast.save_async(state, {str(tmp_path / "b")!r}).result()
child = os.fork()
if not child:
    host = {{"x": torch.full((1000,), 2.0)}}
    holdfast.save(host, {str(tmp_path / "c")!r})
    holdfast.load({str(tmp_path / "c")!r}, into=host)
    os._exit(0 if bool((host["x"] == 2).all()) else 1)
assert os.waitpid(child, 0)[1] == 0
holdfast.save_async(state, {str(tmp_path / "d")!r}).result()
"""
    subprocess.run([*PYTHON, script], check=True, timeout=120)
