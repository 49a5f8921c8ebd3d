"""Lets DeepSpeed train on CPUs over gloo; as a program, runs the blocks of its page."""

import contextlib
import os
import sys
import tempfile
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed


def prepare() -> None:
    """Compile nothing, and take fp16 for a dtype of CPUs."""
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


def run_page(page: str) -> None:
    """Run the blocks of a page that need DeepSpeed, as one reader would type them."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from pages.blocks import blocks_of

    blocks = [block for block in blocks_of(page) if block.mark == "frameworks"]
    assert blocks, f"{page} has no block for frameworks"
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile("\n" * block.line + block.code, page, "exec"), names)
    print(f"{page}: {len(blocks)} blocks run")


if __name__ == "__main__":
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    prepare()
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        run_page("docs/frameworks/deepspeed.md")
