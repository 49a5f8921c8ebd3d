"""Serves checkpoints of holdfast with vLLM itself, on the CPU, and compares with safetensors.

``python tests/integrations/frameworks/vllm_play.py [WORD ...]``, by a Python with vLLM
(`make vllm`). Small models with random weights are saved twice: by ``save_pretrained``, and with
their optimizer by ``holdfast.save``. vLLM serves both. Tokens and their probabilities are the same
to the bit. Ranks of tensor parallelism say how much they have read.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import holdfast

HERE = Path(__file__).parent
LIMIT_S = 240
READ = re.compile(r"(\d+) bytes of weights taken of")
SIZES = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "intermediate_size": 256}


def llama() -> Any:
    """Three weights become one parameter; the output layer is its own."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def experts() -> Any:
    """Experts are one tensor in memory, and one by one in files; the output layer is tied."""
    more = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
    config = transformers.Qwen3MoeConfig(**SIZES, **more, tie_word_embeddings=True)
    return transformers.Qwen3MoeForCausalLM(config)


def transposed() -> Any:
    """Weights lie transposed, and vLLM turns them before it cuts them."""
    sizes = {"vocab_size": 512, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 128}
    config = transformers.GPT2Config(**sizes)
    return transformers.GPT2LMHeadModel(config)


class Served:
    """A model in both forms, below a directory: ``stock``, ``base`` with no weights, a step."""

    def __init__(self, place: Path, model: Any) -> None:
        self.stock, self.base, self.step = place / "stock", place / "base", place / "step"
        model.save_pretrained(self.stock)
        shutil.copytree(self.stock, self.base, ignore=shutil.ignore_patterns("*.safetensors"))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.step()  # which makes its moments
        model.load_state_dict(before)
        holdfast.save({"model": model, "optimizer": optimizer}, self.step)
        self.size_bytes = sum(file.stat().st_size for file in self.stock.glob("*.safetensors"))


def serve(place: Path, how: dict[str, Any], ranks: int = 1, **more: Any) -> tuple[Any, list[int]]:
    """Return what a model says, and how many bytes its ranks have read through holdfast."""
    spec, result = place / "spec.json", place / "result.json"
    result.unlink(missing_ok=True)
    given = {"how": how, "ranks": ranks, "result": str(result)} | more
    spec.write_text(json.dumps(given))
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    own |= {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))}
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, str(HERE / "vllm_native.py"), str(spec)]
    ended = subprocess.run(command, env=os.environ | own, timeout=LIMIT_S, **pipe)
    if ended.returncode or not result.exists():
        sys.exit(f"vLLM failed\n{ended.stdout[-6000:]}")
    return json.loads(result.read_text()), [int(n) for n in READ.findall(ended.stdout)]


def ours(base: Path, checkpoint: Path) -> dict[str, Any]:
    """Return what makes vLLM read a checkpoint."""
    extra = {"checkpoint": str(checkpoint)}
    return {"model": str(base), "load_format": "holdfast", "model_loader_extra_config": extra}


def run_is_served_and_loaded_again(place: Path) -> list[str]:
    """The newest step of a run; then a newer one, in the running engine."""
    torch.manual_seed(0)
    steps = [Served(place / str(number), llama()) for number in (1, 2)]
    stock = [serve(place, {"model": str(step.stock)})[0][0] for step in steps]
    run = place / "run"
    shutil.copytree(steps[0].step, run / "step-00000001")
    then = (str(steps[1].step), str(run / "step-00000002"))
    found, read = serve(place, ours(steps[0].base, run), then=then)
    faults = [] if stock[0] != stock[1] else ["both steps say the same"]
    faults += [f"step {n} differs" for n in (1, 2) if found[n - 1] != stock[n - 1]]
    if len(read) != 2 or max(read) > steps[0].size_bytes:
        faults.append(f"read {read}; expected twice at most {steps[0].size_bytes} bytes")
    return faults


def ranks_read_their_parts(place: Path, make: Any) -> list[str]:
    """Two ranks of tensor parallelism; configuration and weights lie in one directory."""
    torch.manual_seed(1)
    model = Served(place, make())
    stock, _ = serve(place, {"model": str(model.stock)}, ranks=2)
    for file in model.base.iterdir():
        shutil.copy(file, model.step)
    how = {"model": str(model.step), "load_format": "holdfast"}
    found, read = serve(place, how, ranks=2)
    print(f"    ranks read {read} of {model.size_bytes} bytes", flush=True)
    faults = [] if found == stock else ["tokens or their probabilities differ"]
    if len(read) != 2 or max(read) > 0.6 * model.size_bytes:
        faults.append(f"two ranks read {read} of {model.size_bytes} bytes")
    return faults


def main(words: list[str]) -> None:
    """Play all, or what has one of the words in its name; fail when something differs."""
    place = Path(tempfile.mkdtemp(prefix="holdfast-vllm-"))
    plays = {
        "a run, and a newer step": run_is_served_and_loaded_again,
        "experts on two ranks": lambda at: ranks_read_their_parts(at, experts),
        "transposed weights on two ranks": lambda at: ranks_read_their_parts(at, transposed),
    }
    plays = {what: play for what, play in plays.items() if not words or {*words} & {*what.split()}}
    faults = []
    try:
        for number, (what, play) in enumerate(plays.items()):
            begun, here = time.monotonic(), place / str(number)
            here.mkdir()
            faults += (found := play(here))
            seconds = time.monotonic() - begun
            print(f"vllm, {what}: {'; '.join(found) or 'good'} ({seconds:.0f} s)", flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main(sys.argv[1:])
