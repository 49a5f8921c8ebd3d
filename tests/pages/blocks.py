"""The code blocks of a page, with the marks on the line before each.

Marks are comments of HTML, which no reader sees:

- ``<!-- not run: why -->``: the tests leave the block out.
- ``<!-- file: examples/a.yaml -->``: the block is that file, which tests run.
- ``<!-- ranks: 2 -->``: a program that so many processes run together; "2, 3": first 2, then 3.
- ``<!-- framework: lightning -->``: `make frameworks-native` runs it.
- ``<!-- exit: 1 -->``: its commands may exit with 1, which is a verdict: damaged, or different.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs"
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*SITE.rglob("*.md"), *ROOT.glob("*.md")]
    if path.name != "CHANGELOG.md"
)
RUN = ("python", "bash")  # languages
SHOWN = ("", "text")  # what programs print, or a drawing
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[\w ]+): (?P<value>[^\n]+?) -->\n)?"
    r"```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """One block of code.

    Attributes:
        page: path of the page in the repository.
        line: number of the line that opens it.
        language: as the fence says it; "" if it does not.
        code: what stands between the fences.
        mark, value: the comment on the line before; "" if there is none.
    """

    page: str
    line: int
    language: str
    code: str
    mark: str = ""
    value: str = ""

    @property
    def is_run(self) -> bool:
        """Whether the tests run it."""
        return self.language in RUN and self.mark not in ("not run", "framework", "file")

    @property
    def commands(self) -> list[str]:
        """The commands of a block for a shell, one for each line of the user's."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def blocks_of(page: str, text: str | None = None) -> list[Block]:
    """Return all blocks of a page.

    Args:
        text: what stands on it; default: the page is read.
    """
    text = (ROOT / page).read_text() if text is None else text
    return [
        Block(
            page,
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            found["code"],
            found["mark"] or "",
            found["value"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]
