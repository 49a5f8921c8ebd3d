"""Models of transformers: saved, exported, loaded by `from_pretrained`, imported, compared.

``python tests/convert/transformers_models.py``, by the Python of `make export-transformers`. The
models are made from configurations, with random weights: nothing is downloaded.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import peft
import safetensors.torch
import torch
import transformers as hf

import holdfast

SMALL = {"vocab_size": 16_000, "hidden_size": 256, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 4, "intermediate_size": 512}
EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
MODELS = {
    "Llama, tied": hf.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "Llama, not tied": hf.LlamaConfig(**SMALL),
    "GPT-NeoX": hf.GPTNeoXConfig(**SMALL),
    "Mixtral": hf.MixtralConfig(**SMALL, **EXPERTS, num_local_experts=4),
    "Qwen2-MoE": hf.Qwen2MoeConfig(
        **SMALL,
        **EXPERTS,
        num_experts=4,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=128,
    ),
}
SHARD_SIZE = "10MB"
States = dict[str, torch.Tensor]


def weights_in(directory: Path) -> States:
    """All tensors of a directory."""
    found: States = {}
    for path in directory.glob("*.safetensors"):
        found |= safetensors.torch.load_file(path)
    return found


def check_same(found: States, expected: States, what: str) -> None:
    """Compare names, dtypes and bits."""
    assert found.keys() == expected.keys(), (what, found.keys() ^ expected.keys())
    for name, tensor in expected.items():
        mine = found[name]
        assert mine.dtype == tensor.dtype and mine.shape == tensor.shape, (what, name)
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (mine, tensor)]
        assert torch.equal(*bits), (what, name)


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    """What a model says of some tokens."""
    tokens = torch.arange(64).reshape(2, 32) * 251 % SMALL["vocab_size"]
    with torch.no_grad():
        result: torch.Tensor = model.eval()(tokens).logits
    return result


def play(name: str, config: hf.PretrainedConfig, root: Path) -> str:
    """Take one model there and back; return what was seen."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    theirs, ours = root / "theirs", root / "ours"
    model.save_pretrained(theirs, max_shard_size=SHARD_SIZE)
    holdfast.save({"model": model}, root / "saved")
    report = holdfast.export_checkpoint(
        root / "saved",
        ours,
        include="model",
        strip="model.",
        files_from=theirs,
        shard_size=SHARD_SIZE,
    )
    check_same(weights_in(ours), weights_in(theirs), name)
    shards = len([*ours.glob("*.safetensors")])
    assert shards > 1, "the model is too small to be cut"
    index = json.loads((ours / "model.safetensors.index.json").read_text())
    assert (
        index["metadata"]
        == json.loads((theirs / "model.safetensors.index.json").read_text())["metadata"]
    )
    for same in ("config.json", "generation_config.json"):
        assert (ours / same).read_bytes() == (theirs / same).read_bytes(), same
    loaded, info = hf.AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        info
    )
    assert torch.equal(logits_of(loaded), logits_of(model)), f"{name}: other logits"
    holdfast.import_checkpoint(ours, root / "imported")
    with holdfast.open(root / "imported") as imported:
        check_same(
            {n: imported[n] for n in imported.names() if not imported.info(n).tied_to},
            weights_in(theirs),
            f"{name}, imported",
        )
    return f"{report.tensors} tensors in {shards} shards, {report.ties} tied"


def play_adapter(root: Path) -> str:
    """Take an adapter of PEFT there, and load it; return what was seen."""

    def base() -> torch.nn.Module:
        torch.manual_seed(0)
        model: torch.nn.Module = hf.AutoModelForCausalLM.from_config(MODELS["Llama, tied"])
        return model

    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base(), settings)
    adapted.save_pretrained(root / "theirs")
    holdfast.save({"model": adapted}, root / "saved")
    report = holdfast.export_checkpoint(
        root / "saved",
        root / "ours",
        include="*lora_*",
        strip="model.",
        files_from=root / "theirs",
    )
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        mine, expected = (root / place / name for place in ("ours", "theirs"))
        assert mine.read_bytes() == expected.read_bytes(), name
    loaded = peft.PeftModel.from_pretrained(base(), root / "ours")
    assert torch.equal(logits_of(loaded), logits_of(adapted)), "the adapter gives other logits"
    return f"{report.tensors} tensors, the same bytes"


def main() -> int:
    """Play all models."""
    hf.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as directory:
            print(f"{name}: {play(name, config, Path(directory))}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        print(f"PEFT, LoRA: {play_adapter(Path(directory))}", flush=True)
    print(f"{len(MODELS) + 1} passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
