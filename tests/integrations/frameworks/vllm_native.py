"""Serves a model with vLLM on the CPU, and writes down what it says and how likely that is.

``vllm_native.py SPEC``, a file of JSON: ``how`` is given to ``vllm.LLM``, ``ranks`` is the tensor
parallel size, ``result`` a file. With ``then``, (directory, place), the directory is put at that
place of the run, weights are loaded again by vLLM's ``reload_weights``, and it speaks again.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

PROMPT = [1, 2, 3, 4, 5]


def spoken(llm: Any) -> list[Any]:
    """Return the tokens that follow the prompt, and their logarithmic probabilities."""
    from vllm import SamplingParams

    how = SamplingParams(max_tokens=16, temperature=0, logprobs=0, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], how, use_tqdm=False)
    (output,) = answer.outputs
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    likely = [values[token].logprob for token, values in pairs]
    return [list(output.token_ids), [value.hex() for value in likely]]


def main(spec: dict[str, Any]) -> None:
    """Serve."""
    from vllm import LLM

    llm = LLM(
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        dtype="float32",
        tensor_parallel_size=spec["ranks"],
        **spec["how"],
    )
    found = [spoken(llm)]
    if "then" in spec:
        shutil.copytree(*spec["then"])
        llm.collective_rpc("reload_weights")
        llm.reset_prefix_cache()
        found.append(spoken(llm))
    Path(spec["result"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
