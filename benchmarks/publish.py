"""Results of `save_load.py` → docs/benchmarks.md and its picture: nothing is copied by hand.

python benchmarks/publish.py benchmarks/out/{1,2,4}-gib.json
"""

import argparse
from pathlib import Path

from picture import draw, read
from report import report
from save_load import OUT

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def main() -> None:
    """Replace the figures of the page and draw the picture anew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, nargs="*", default=[OUT / "save_load.json"])
    parser.add_argument("--page", type=Path, default=DOCS / "benchmarks.md")
    parser.add_argument("--picture", type=Path, default=DOCS / "pictures" / "save_load.png")
    options = parser.parse_args()
    results = read(options.result)
    commands = ", ".join(f"`{result['command']}`" for result in results)
    figures = f"{commands}\n\n{report(results)}"
    options.page.write_text(with_figures(options.page.read_text(), figures))
    draw(results, options.picture)


def with_figures(page: str, figures: str) -> str:
    """Return the page with the text between its two marks replaced."""
    before, mark, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"the page lacks the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{figures}\n{END}{after}"


if __name__ == "__main__":
    main()
