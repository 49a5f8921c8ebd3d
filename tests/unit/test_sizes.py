"""benchmarks/sizes.csv: what codecs make of the shipped samples, to the byte."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_table_is_what_codecs_do() -> None:
    """Where a change of size is meant: python benchmarks/sizes.py, and look at the diff."""
    sys.path.append(str(BENCHMARKS))
    try:
        import sizes  # found above
    finally:
        sys.path.remove(str(BENCHMARKS))
    assert sizes.table() == (BENCHMARKS / "sizes.csv").read_text()
