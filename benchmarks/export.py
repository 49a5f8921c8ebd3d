"""Export and import beside a cold `cp` with fsync of the same bytes, and what others do instead.

Every contender reads from the disk (caches dropped) and ends durable. All run once a round, in
another order each time; figures are medians, and ratios those of one round. The state is a Llama in
bf16; transformers takes part where it is installed. `cp` copies the very bytes that its rival
reads: a checkpoint before exports, a file before imports.
"""

import argparse
import contextlib
import json
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import durable
import machine
import quiet
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import holdfast

OUT = Path(__file__).parent / "out"
MODEL = "model.safetensors"
Contenders = dict[str, Callable[[Path], object]]  # each is given the path that it makes


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=OUT, help="on the disk to write to")
    parser.add_argument("--json", type=Path, default=OUT / "export.json", help="result file")
    parser.add_argument("--gib", type=float, default=2.0, help="GiB of elements")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the contenders")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        sources = _prepare(Path(scratch), int(options.gib * 2**30))
        rounds = _run(_contenders(sources), Path(scratch), options)
    result = {
        "command": shlex.join(["python", "benchmarks/export.py", *sys.argv[1:]]),
        "machine": machine.describe(options.directory),
        "size_bytes": sources["bytes"],
        "rounds": rounds,
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))


def _config(size_bytes: int) -> dict[str, Any]:
    """A Llama of so many bytes in bf16, with layers of 45 million parameters; as `config.json`."""
    hidden, inner, words = 2048, 5632, 8192
    layer_bytes = 2 * (hidden * (2 * hidden + 2 * hidden // 4 + 3 * inner) + 2 * hidden)
    layers = max(1, (size_bytes - 4 * words * hidden) // layer_bytes)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    config |= {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": words}
    return config | {"tie_word_embeddings": False}


def _state(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The parameters of that Llama, by their names."""
    torch.manual_seed(0)
    hidden, inner, words = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    shapes: dict[str, tuple[int, ...]] = {"self_attn.k_proj": (hidden // 4, hidden)}
    shapes |= {"self_attn.v_proj": (hidden // 4, hidden), "mlp.down_proj": (hidden, inner)}
    shapes |= {f"self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
    shapes |= {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    shapes |= {f"{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    every = {
        f"model.layers.{number}.{name}": shape
        for number in range(config["num_hidden_layers"])
        for name, shape in shapes.items()
    }
    every |= {"model.embed_tokens": (words, hidden), "lm_head": (words, hidden)}
    every["model.norm"] = (hidden,)
    return {f"{name}.weight": torch.randn(shape).bfloat16() for name, shape in every.items()}


def _prepare(scratch: Path, size_bytes: int) -> dict[str, Any]:
    """Save the state in every form that is read."""
    config = _config(size_bytes)
    state, model = _state(config), scratch / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    holdfast.save(state, scratch / "own")
    safetensors.torch.save_file(state, model / MODEL, metadata={"format": "pt"})
    dcp.save(state, checkpoint_id=str(scratch / "dcp"), no_dist=True)
    durable.sync_all(scratch)
    stored = sum(tensor.nbytes for tensor in state.values())
    return {
        "own": scratch / "own",
        "file": model / MODEL,
        "model": model,
        "dcp": scratch / "dcp",
        "bytes": stored,
    }


def _contenders(sources: dict[str, Any]) -> Contenders:
    """Say who is measured; each returns when what it makes is durable."""
    own, file, theirs = sources["own"], sources["file"], sources["dcp"]
    transformers = None
    with contextlib.suppress(ImportError):
        import transformers  # type: ignore[no-redef]

    def copy(source: Path) -> Callable[[Path], object]:
        def run(target: Path) -> None:
            subprocess.run(["cp", "-r", source, target], check=True)
            durable.sync_all(target)

        return run

    def of_transformers(target: Path) -> None:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(sources["model"])
        loaded.save_pretrained(target)
        durable.sync_all(target)

    def in_memory(target: Path) -> None:
        state = safetensors.torch.load_file(file)
        safetensors.torch.save_file(state, target, metadata={"format": "pt"})
        durable.sync_all(target)

    def of_dcp(target: Path) -> None:
        dcp_to_torch_save(theirs, target)
        durable.sync_all(target)

    def with_suffix(suffix: str) -> Callable[[Path], object]:
        return lambda target: holdfast.export_checkpoint(own, f"{target}{suffix}")

    contenders: Contenders = {
        "cp of the checkpoint": copy(own),
        "holdfast, export to safetensors": with_suffix(".safetensors"),
        "holdfast, export to torch.save": with_suffix(".pt"),
        "cp of the file": copy(file),
        "holdfast, import of safetensors": lambda target: holdfast.import_checkpoint(file, target),
        "safetensors, load and save": in_memory,
        "DCP, dcp_to_torch_save": of_dcp,
    }
    if transformers is not None:
        contenders["transformers, from_pretrained and save_pretrained"] = of_transformers
    return contenders


def _run(
    contenders: Contenders, scratch: Path, options: argparse.Namespace
) -> list[dict[str, float]]:
    """Measure everyone in every round; return the seconds of each."""
    order, rounds = random.Random(options.seed), list[dict[str, float]]()
    for number in range(options.rounds + 1):
        names, seconds = list(contenders), dict[str, float]()
        order.shuffle(names)
        for name in names:
            quiet.prepare(scratch, int(1.5 * options.gib * 2**30))
            target = scratch / "target"
            started = time.perf_counter()
            contenders[name](target)
            seconds[name] = time.perf_counter() - started
            for made in scratch.glob("target*"):
                shutil.rmtree(made) if made.is_dir() else made.unlink()
        if number:  # the first one warms up
            rounds.append({name: seconds[name] for name in contenders})
    return rounds


BESIDE = {
    "holdfast, export to safetensors": "cp of the checkpoint",
    "holdfast, export to torch.save": "cp of the checkpoint",
    "holdfast, import of safetensors": "cp of the file",
    "safetensors, load and save": "cp of the file",
    "DCP, dcp_to_torch_save": "cp of the checkpoint",
    "transformers, from_pretrained and save_pretrained": "cp of the file",
}


def report(result: dict[str, Any]) -> str:
    """Return the table of the medians."""
    rounds, gigabytes = result["rounds"], result["size_bytes"] / 1e9
    lines = ["| | GB/s | of cp |", "|---|---|---|"]
    for name in rounds[0]:
        speed = statistics.median(gigabytes / seconds[name] for seconds in rounds)
        beside = BESIDE.get(name)
        share = "1" if beside is None else f"{_share(rounds, name, beside):.2f}"
        lines.append(f"| {name} | {speed:.2f} | {share} |")
    lines.append(f"\n{gigabytes:.2f} GB, {len(rounds)} rounds. {result['machine']['processor']}")
    return "\n".join(lines)


def _share(rounds: list[dict[str, float]], name: str, beside: str) -> float:
    return statistics.median(seconds[beside] / seconds[name] for seconds in rounds)


if __name__ == "__main__":
    main()
