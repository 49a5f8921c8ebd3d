"""Saves to and loads from an S3 server on this machine, beside obstore alone and other programs.

    .venv/bin/python -m pip install -r benchmarks/stores-requirements.txt    # the others
    python benchmarks/stores.py --mib 512 --rounds 9

In one run, for each server: first a sweep for obstore's fastest parts; then shuffled rounds, each
contender once a round in each direction, warm; a first round is thrown away. What a load gave is
compared bit by bit, outside the clock. Prints tables, and writes a JSON file.

One server is seaweedfs. Another (`discard_server.cpp`) is a double: it throws uploads away, and
sends loads from memory, so that it leaves the cores to its callers. "10gbit" is the same behind a
wire of 10 Gbit/s, which is slower than two cores are.
"""

import argparse
import gc
import json
import random
import resource
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import machine
import obstore
from obstore.store import S3Store
from store_contenders import (
    LIGHT,
    PEERS,
    Contender,
    best_of_obstore,
    holdfast_contender,
    remove_files,
    track_of,
)
from store_servers import BUCKET, SERVERS, Up
from training_state import State, empty_like, make_state, state_bytes

OUT = Path(__file__).parent / "out"
VERBS = ("save", "load")
SETTLE_S = 0.1


def main() -> None:
    """Run, print the tables, write the JSON."""
    options = _arguments()
    state = make_state(options.mib << 20, options.seed)
    target = empty_like(state)
    results = []
    try:
        for name in options.servers.split(","):
            with SERVERS[name]() as up:
                results.append(_measured(up, state, target, options))
                print(report(results[-1]), flush=True)
    finally:
        remove_files()
    written = {
        "command": shlex.join(["python", "benchmarks/stores.py", *sys.argv[1:]]),
        "machine": machine.describe(OUT.parent),
        "results": results,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(written, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count")
    parser.add_argument("--servers", default=",".join(SERVERS), help="by comma")
    parser.add_argument("--peers", default=",".join(PEERS), help="who runs beside, by comma")
    parser.add_argument("--json", type=Path, default=OUT / "stores.json", help="result file")
    parser.add_argument("--seed", type=int, default=20251125, help="of the values and the order")
    return parser.parse_args()


def _measured(up: Up, state: State, target: State, options: argparse.Namespace) -> dict[str, Any]:
    track = track_of(up, state, target)
    contenders = [
        best_of_obstore(track),
        holdfast_contender(track),
        best_of_obstore(track, **LIGHT),
        holdfast_contender(track, f"holdfast {', '.join(LIGHT)}", **LIGHT),
    ]
    skipped = {}
    for name in filter(None, options.peers.split(",")):
        try:
            contenders.append(PEERS[name](track))
        except ImportError as error:
            skipped[name] = str(error)
    order, taken = random.Random(options.seed), {c.name: _empty() for c in contenders}
    for contender in contenders:  # fills pools, makes what is loaded, and does not count
        contender.save(f"{up.kept}{_key(contender)}")
        contender.load(f"{up.kept}{_key(contender)}")
        contender.check()
    tasks = [(contender, verb) for contender in contenders for verb in VERBS]
    for number in range(options.rounds):
        for contender, verb in order.sample(tasks, len(tasks)):
            place = f"gone/{number}" if verb == "save" else f"{up.kept}{_key(contender)}"
            _measure(up, contender, verb, place, taken[contender.name])
        print(f"{up.name}: round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    return {
        "server": up.name,
        "bytes": state_bytes(state),
        "rounds": options.rounds,
        "skipped": skipped,
        "contenders": {c.name: {"settings": c.settings} | taken[c.name] for c in contenders},
    }


def _empty() -> dict[str, list[float]]:
    return {f"{verb}_{what}": [] for verb in VERBS for what in ("s", "cpu_s", "server_cpu_s")}


def _measure(up: Up, contender: Contender, verb: str, place: str, into: dict[str, Any]) -> None:
    who = resource.RUSAGE_CHILDREN if contender.has_children else resource.RUSAGE_SELF
    gc.collect()
    time.sleep(SETTLE_S)
    server_cpu_s, used = up.cpu_s(), resource.getrusage(who)
    started = time.perf_counter()
    (contender.save if verb == "save" else contender.load)(place)
    seconds, now = time.perf_counter() - started, resource.getrusage(who)
    into[f"{verb}_s"].append(seconds)
    into[f"{verb}_cpu_s"].append(now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime)
    into[f"{verb}_server_cpu_s"].append(up.cpu_s() - server_cpu_s)
    if verb == "load":
        contender.check()
        return
    store = S3Store(BUCKET, client_options={"allow_http": True})
    keys = [item["path"] for part in obstore.list(store, place) for item in part]
    with suppress(FileNotFoundError):
        obstore.delete(store, keys)


def _key(contender: Contender) -> str:
    return "".join(letter for letter in contender.name if letter.isalnum())


def report(result: dict[str, Any]) -> str:
    """Return two tables of one server, in Markdown."""
    gigabytes = result["bytes"] / 1e9
    lines = [f"\n{result['server']}, {gigabytes:.3f} GB, {result['rounds']} rounds"]
    bases = {light: _base(result, light) for light in (False, True)}
    for verb in VERBS:
        lines += [
            "",
            f"| {verb} | settings | median s (quartiles) | GB/s | of obstore (quartiles) | "
            "CPU s/GB | server's CPU s/GB |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, found in result["contenders"].items():
            seconds, base = found[f"{verb}_s"], bases["unsigned" in name][f"{verb}_s"]
            ratios = [b / s for b, s in zip(base, seconds, strict=True)]
            cpu, server = (
                median(found[f"{verb}_{what}"]) / gigabytes for what in ("cpu_s", "server_cpu_s")
            )
            lines.append(
                f"| {name} | {found['settings']} | {_spread(seconds, 3)} | "
                f"{gigabytes / median(seconds):.2f} | {_spread(ratios, 2)} | {cpu:.2f} | "
                f"{server:.2f} |"
            )
    return "\n".join([*lines, *(f"\n{n}: skipped, {why}" for n, why in result["skipped"].items())])


def _base(result: dict[str, Any], light: bool) -> dict[str, Any]:
    some = {n: f for n, f in result["contenders"].items() if n.startswith("obstore")}
    found: dict[str, Any] = next(f for n, f in some.items() if ("unsigned" in n) == light)
    return found


def _spread(values: list[float], digits: int) -> str:
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return f"{median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


if __name__ == "__main__":
    main()
