"""How many requests an object store gets for a save, a restore and what is let go, by ranks.

    python benchmarks/store_requests.py --ranks 1 8 1000

Plays jobs in the simulation (`tests/simulation`), whose protocol is the code that ships. Each rank
has one data file of one part: of a larger one, each further 16 MiB is a request more. Prints a
table.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from simulation.requests import KINDS, counted


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 1000])
    given = parser.parse_args()
    print("| ranks | what |", " | ".join(KINDS), "|")
    print("|---" * (2 + len(KINDS)) + "|")
    for ranks in given.ranks:
        few, many = counted(ranks, ["save"] * 2, 0), counted(ranks, ["save"] * 3, 0)
        _print(ranks, "a save of a run", many - few)
        few, many = counted(ranks, ["save"] * 3, 1), counted(ranks, ["save"] * 4, 1)
        _print(ranks, "the same, with a step let go", many - few)
        few, many = (
            counted(ranks, ["save", "replace"], 0),
            counted(ranks, ["save", "replace"] * 1 + ["replace"], 0),
        )
        _print(ranks, "a save in the place of another", many - few)
        _print(ranks, "a restore", counted(ranks, ["save"], 0, True) - counted(ranks, ["save"], 0))


def _print(ranks: int, what: str, found: Counter[str]) -> None:
    print(
        f"| {ranks:,} | {what} |", " | ".join(str(found[kind]) for kind in KINDS), "|", flush=True
    )


if __name__ == "__main__":
    main()
