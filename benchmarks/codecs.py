"""What codecs make of a training run, and what the run makes of what they lose.

    python benchmarks/codecs.py

Trains a model of `neox.py` on English text, and at each restore point has a chain: one checkpoint
and the links after it. Writes the chain again under each codec, and from its last link restores the
model (distance to the exact one, loss and two tasks on held-out text), then trains on with the same
batches as the exact run does, and compares the losses. "cold" is the exact weights with a new
optimizer. Sizes are those of the files on disk. Needs `pip install tokenizers matplotlib`;
`--device cuda --layers 24 --width 1024 --vocabulary 50304` is the shape of Pythia-410M.
"""

import argparse
import copy
import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import codecs_report
import torch
from judge import Grades, Test, grade, make_test
from machine import describe
from neox import Recipe, Shape, Training, make_optimizer, read_text, start, tokenize
from save_load import OUT

import holdfast
from holdfast.codecs import Compact, Delta, Excp
from holdfast.codecs.base import Codec

HELD_OUT = 0.05  # of the text
LOSSLESS = ("lossless", "delta")
EXACT, COLD = "exact", "cold"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained and restored."""

    shape: Shape
    steps: int
    points: tuple[int, ...]
    links: int
    between: int
    after: int
    device: str
    room: Path
    only: tuple[str, ...]


def codecs(links: int) -> dict[str, str | Codec]:
    """Return those that are compared; "at the cap" is as small as the paper's are."""
    every = links + 1
    cap = {"alpha": 1.0, "every": every}
    return {
        "lossless": "lossless",
        "delta": Delta(every=every),
        "excp": Excp(every=every),
        "excp, at the cap": Excp(**cap),
        "excp, at the cap, f16 centres": Excp(**cap, codebook="f16"),
        **{
            f"compact:{quality}": Compact(quality, every=every)
            for quality in ("tiny", "small", "balanced", "high")
        },
    }


def run(plan: Plan, recipe: Recipe, tokens: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Train one run; yield what each codec makes of it at each restore point."""
    held_out = int(HELD_OUT * len(tokens))
    test = make_test(tokens[-held_out:], plan.shape)
    training = start(tokens[:-held_out], plan.shape, recipe, plan.device)
    for point in plan.points:
        training.run(point - plan.links * plan.between - training.step, shown_every=100)
        source = plan.room / "exact"
        for number in range(plan.links + 1):
            if number:
                training.run(plan.between, shown_every=100)
            holdfast.save(state_of(training), source / step_name(training.step))
        label = {"seed": recipe.seed, "beta2": recipe.beta2, "point": point}
        for result in at_point(plan, training, test, source):
            print(json.dumps({**label, **codecs_report.short(result)}), flush=True)
            yield {**label, **result}
        shutil.rmtree(source)


def at_point(plan: Plan, training: Training, test: Test, source: Path) -> Iterator[dict[str, Any]]:
    """Yield what becomes of the exact run, of a cold optimizer, and of each codec's last link."""
    exact = training.model
    first = grade(exact, test, exact)
    raw = stored(source)
    yield {"codec": EXACT, "stored": raw, **go_on(plan, copy_of(training), test, first)}
    cold = copy_of(training)
    cold.optimizer = make_optimizer(cold.model, training.recipe)
    yield {"codec": COLD, "stored": [], **go_on(plan, cold, test, first)}
    every = codecs(plan.links)
    for name in plan.only or every:
        codec, target = every[name], plan.room / "coded"
        for path in sorted(source.iterdir()):
            holdfast.recompress(path, target / path.name, codec=codec)
        sizes = stored(target)
        restored = start(training.tokens, plan.shape, training.recipe, plan.device)
        holdfast.load(target / step_name(training.step), into=state_of(restored))
        restored.step = training.step
        shutil.rmtree(target)
        if name in LOSSLESS:
            check_same(restored, training)
            yield {"codec": name, "stored": sizes}
        else:
            before = grade(restored.model, test, exact)
            yield {"codec": name, "stored": sizes, **go_on(plan, restored, test, before)}


def go_on(plan: Plan, training: Training, test: Test, before: Grades) -> dict[str, Any]:
    """Train on, and return what the model did on the test before and after, and all losses."""
    losses = training.run(plan.after)
    return {
        "before": asdict(before),
        "after": asdict(grade(training.model, test)),
        "losses": losses,
    }


def state_of(training: Training) -> dict[str, Any]:
    """Return what is saved of a training run."""
    return {"model": training.model, "optimizer": training.optimizer}


def copy_of(training: Training) -> Training:
    """Return the same, to be trained on apart."""
    model = copy.deepcopy(training.model)
    optimizer = make_optimizer(model, training.recipe)
    optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    return replace(training, model=model, optimizer=optimizer)


def check_same(restored: Training, exact: Training) -> None:
    """Check that a restored state is equal to the bit."""
    for one, other in zip(restored.model.parameters(), exact.model.parameters(), strict=True):
        moments, others = restored.optimizer.state[one], exact.optimizer.state[other]
        pairs = [(one, other), *((moments[key], others[key]) for key in others)]
        if not all(torch.equal(a, b) for a, b in pairs):
            raise RuntimeError("a lossless codec has lost something")


def step_name(step: int) -> str:
    """Return the directory of a step."""
    return f"step-{step:08d}"


def stored(run: Path) -> list[int]:
    """Return the bytes of all files of each step of a run."""
    steps = [path for path in sorted(run.iterdir()) if path.is_dir()]
    return [sum(f.stat().st_size for f in s.rglob("*") if f.is_file()) for s in steps]


def main() -> None:
    """Train all runs, and report."""
    options = parse()
    shape = Shape(
        options.layers, options.width, options.width // 64, options.vocabulary, options.context
    )
    plan = Plan(
        shape,
        options.steps or max(options.points) + options.after,
        tuple(sorted(options.points)),
        options.links,
        options.between,
        options.after,
        options.device,
        options.room / "codecs",
        tuple(options.only),
    )
    machine = describe(OUT.parent)
    if options.device == "cuda":
        machine["device"] = torch.cuda.get_device_name()
        torch.set_float32_matmul_precision("high")
    if options.tokens is not None and options.tokens.exists():
        tokens = torch.load(options.tokens).long()
    else:
        tokens = tokenize(read_text(), shape.vocabulary)
    if options.tokens is not None and not options.tokens.exists():
        torch.save(tokens.int(), options.tokens)
    shutil.rmtree(plan.room, ignore_errors=True)
    results: list[dict[str, Any]] = []
    for beta2, seed in itertools.product(options.beta2, options.seeds):
        recipe = Recipe(plan.steps, seed=seed, beta2=beta2, rate=options.rate, batch=options.batch)
        for result in run(plan, recipe, tokens):
            results.append(result)
            options.json.parent.mkdir(parents=True, exist_ok=True)
            told = {key: str(value) for key, value in vars(options).items()}
            document = {"machine": machine, "options": told, "results": results}
            options.json.write_text(json.dumps(document))
    print(codecs_report.report(json.loads(options.json.read_text())))


def parse() -> argparse.Namespace:
    """Read the options; the defaults take half an hour on 2 cores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rate", type=float, default=1e-3, help="the largest, of learning")
    parser.add_argument("--steps", type=int, help="of the schedule; default: those that are done")
    parser.add_argument("--points", type=int, nargs="+", default=[500, 900], help="steps")
    parser.add_argument("--links", type=int, default=8)
    parser.add_argument("--between", type=int, default=50, help="steps from link to link")
    parser.add_argument("--after", type=int, default=100, help="steps after a restore")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--beta2", type=float, nargs="+", default=[0.95, 0.999])
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", default=[], help="these codecs; default: all")
    parser.add_argument("--tokens", type=Path, help="file of the text in tokens; made if absent")
    parser.add_argument("--room", type=Path, default=OUT, help="for the checkpoints")
    parser.add_argument("--json", type=Path, default=OUT / "codecs.json", help="result file")
    options = parser.parse_args()
    if min(b - a for a, b in itertools.pairwise([0, *sorted(options.points)])) < (
        options.links * options.between
    ):
        parser.error("a chain has to fit between two restore points")
    return options


if __name__ == "__main__":
    main()
