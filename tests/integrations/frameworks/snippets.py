"""Runs the code blocks of docs/frameworks/ that need a framework, each page in a directory.

``python tests/integrations/frameworks/snippets.py [NAME ...]``, by a Python with the frameworks.
"""

import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
sys.path[:0] = [str(TESTS)] if str(TESTS) not in sys.path else []

from pages.blocks import PAGES, blocks_of  # noqa: E402

LIMIT_S = 240
APART = {"vllm"}  # pages with an environment of their own: run by name alone
TRAINER = """
import sys
sys.path.insert(0, HERE)
from cases_transformers import Samples, new_model
from transformers import Trainer, TrainingArguments
model, dataset = new_model(), Samples()
args = TrainingArguments(
    "run", max_steps=8, save_steps=4, use_cpu=True, report_to=[], disable_tqdm=True
)
def unchanged_program():
    Trainer(model=new_model(), args=args, train_dataset=dataset).train()
"""
ACCELERATE = """
import sys
sys.path.insert(0, HERE)
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from cases_accelerate import Counter
project = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=2)
model, counter = torch.nn.Linear(4, 4), Counter()
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
def train(accelerator, model, optimizer, loader, schedule):
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        schedule.step()
"""
DEEPSPEED = """
import os
import sys
sys.path.insert(0, HERE)
import deepspeed_cpu
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
deepspeed_cpu.prepare()
"""
MEGATRON = """
import sys
sys.path.insert(0, HERE)
import megatron_cpu
import torch
megatron_cpu.prepare()
torch.distributed.init_process_group(
    "gloo", init_method="tcp://127.0.0.1:29534", rank=0, world_size=1
)
"""
RAY = """
import ray
ray.init(num_cpus=3, include_dashboard=False)
"""
VLLM = """
import os
import sys
from pathlib import Path
sys.path.insert(0, HERE)
import vllm_play
place = Path.cwd()
served = vllm_play.Served(place, vllm_play.llama())
served.base.rename("base-model")
(place / "run").mkdir()
served.step.rename(place / "run" / "step-00000001")
RUN = str(place / "run")
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
"""
BEFORE = {
    "transformers": TRAINER,
    "accelerate": ACCELERATE,
    "deepspeed": DEEPSPEED,
    "megatron": MEGATRON,
    "ray": RAY,
    "vllm": VLLM,
}  # what a page takes for granted, by its name


def run_page(name: str) -> None:
    """Run the blocks of a page in this process, in the directory that it is in."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    names: dict[str, Any] = {"__name__": "__main__", "HERE": str(HERE)}
    exec(compile(BEFORE.get(name, ""), "before", "exec"), names)
    for block in blocks_of(f"docs/frameworks/{name}.md"):
        if block.mark != "framework":
            continue
        print(f"{block.page}:{block.line}", flush=True)
        if block.language == "bash":
            for command in block.commands:
                subprocess.run(["bash", "-c", command], check=True)
        else:
            exec(compile("\n" * block.line + block.code, block.page, "exec"), names)


def main(names: list[str]) -> None:
    """Run pages, each in a process of its own; fail when one does."""
    failed = False
    every = {Path(p).stem for p in PAGES if p.startswith("docs/frameworks/")} - APART
    for name in names or sorted(every):
        command = [sys.executable, __file__, "--here", name]
        there = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with tempfile.TemporaryDirectory() as place:
            pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            ended = subprocess.run(command, cwd=place, env=there, timeout=LIMIT_S, **pipe)
        print(f"{name}: {'failed' if ended.returncode else 'its code runs'}", flush=True)
        if ended.returncode:
            print(ended.stdout.decode(errors="replace")[-6000:])
            failed = True
    sys.exit(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        try:
            run_page(sys.argv[2])
        except Exception:
            traceback.print_exc()
            sys.exit(1)
    else:
        main(sys.argv[1:])
