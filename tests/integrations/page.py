"""A page of docs whose table is made by a program: the table is there, or is put there."""

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True, slots=True)
class Page:
    """A page, and the lines between which its table stands."""

    name: str
    begin: str
    end: str = "<!-- its end -->"

    def text(self) -> str:
        """Return what it says."""
        return (DOCS / self.name).read_text()

    def text_with(self, table: str) -> str:
        """Return what it says with this table."""
        pattern = re.compile(f"{re.escape(self.begin)}.*?{re.escape(self.end)}", re.DOTALL)
        return pattern.sub(lambda _: f"{self.begin}\n\n{table}\n\n{self.end}", self.text())

    def keep(self, table: str, *, write: bool) -> None:
        """Put the table there, or end the program if another one is there."""
        text = self.text_with(table)
        if write:
            (DOCS / self.name).write_text(text)
        elif text != self.text():
            raise SystemExit(f"docs/{self.name} has another table; run it with --write")
