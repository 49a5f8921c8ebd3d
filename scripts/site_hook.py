"""What the site adds to the pages of docs/: pages of files elsewhere, and the text of --help.

mkdocs calls the functions named `on_…`. Links that leave docs/ lead to the added pages. A page that
loads something from another host is a warning, which fails a strict build.
"""

import contextlib
import io
import logging
import os
import posixpath
import re
from pathlib import Path
from unittest import mock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from holdfast.cli import main

logger = logging.getLogger("mkdocs.plugins.site_hook")

ROOT = Path(__file__).parent.parent
ADDED = {"SECURITY.md": "project/security.md", "CHANGELOG.md": "project/changelog.md"} | {
    f"examples/{path.name}": f"examples/{path.stem}.md"
    for path in sorted((ROOT / "examples").glob("*.py"))
}
SOURCES = {page: source for source, page in ADDED.items()}
LINK = re.compile(r"(?<=\]\()([\w./-]+)(?=[#)])")
HELP = re.compile(r"^<!-- help: ([\w -]*) -->$", re.MULTILINE)
LOADED = re.compile(r"""<(?:script|img|iframe|source|link)\b[^>]*(?:src|href)=["']?https?:[^>]*>""")
HELP_COLUMNS = 78  # as wide as a phone on its side shows


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each file that lies elsewhere."""
    for source, page in ADDED.items():
        text = (ROOT / source).read_text()
        if source.endswith(".py"):
            text = f"# {source}\n\n```python\n{text}```\n"
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to the pages that were added, and put help texts in."""
    here = page.file.src_uri
    directory = posixpath.dirname(SOURCES.get(here, f"docs/{here}"))

    def lead(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(directory, link[1]))
        there = ADDED.get(target) or posixpath.relpath(target, "docs")
        return posixpath.relpath(there, posixpath.dirname(here) or ".")

    return HELP.sub(lambda verb: help_of(verb[1].split()), LINK.sub(lead, markdown))


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the double colon that docstrings put before code be one."""
    return html.replace("::</p>", ":</p>")


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Warn of each resource that the page loads from another host."""
    for tag in LOADED.findall(output):
        if "canonical" not in tag:
            logger.warning("%s loads from another host: %s", page.file.src_uri, tag)
    return output


def help_of(verb: list[str]) -> str:
    """Return what `holdfast VERB --help` prints, as a block of text."""
    text = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": str(HELP_COLUMNS)}),
        contextlib.redirect_stdout(text),
        contextlib.suppress(SystemExit),
    ):
        main([*verb, "--help"])
    return f"```text\n{text.getvalue().rstrip()}\n```"
