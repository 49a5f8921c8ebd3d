"""Every code block of every page runs as it stands, or says why not; links lead somewhere."""

import ast
import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.integrations import dcp

from .blocks import PAGES, ROOT, RUN, SHOWN, Block, blocks_of
from .prepared import AFTER, BEFORE
from .run import run_blocks

# Blocks marked as not run, of all pages together. It only falls.
NOT_RUN_MAX = 5
WORDS_MAX = 900  # what is read in five minutes
README_WORDS_MAX, README_LINES_MAX = 700, 10
USERS = (
    "index|start|choose|understand|faq|saving|replace|saving-rules|loading|checkpointer|schedule|"
    "compression|data|repair|repair-manifest|scrub|dcp"
)
USERS_PAGES = [page for page in PAGES if re.match(rf"docs/(howto/|({USERS})\.md)", page)]
BLOCKS = {page: blocks_of(page) for page in PAGES}
LINK = re.compile(r"\]\(([^)\s]+)\)")
SHOWN_NAME = re.compile(r"^::: (\S+)$", re.MULTILINE)  # the site shows its docstring there
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.is_run for b in BLOCKS[p])])
def test_the_code_of_a_page_runs(page: str, new_path: Callable[[], Path]) -> None:
    blocks = [block for block in BLOCKS[page] if block.is_run]
    run_blocks(new_path(), blocks, BEFORE.get(page, ""), AFTER.get(page, ""))


def faults_of(block: Block) -> Iterator[str]:
    if block.mark == "framework" and not block.page.startswith("docs/frameworks/"):
        yield "only pages in docs/frameworks/ have blocks that make frameworks runs"
    if block.mark not in ("", "not run", "framework", "file", "ranks", "exit"):
        yield f"there is no mark {block.mark}"
    if block.mark == "file":
        if (ROOT / block.value).read_text() != block.code:
            yield f"it is not {block.value}"
    elif block.mark != "not run" and block.language not in (*RUN, *SHOWN):
        yield f"nobody runs {block.language}; say <!-- not run: why -->"
    if block.language in SHOWN and re.match(r"(import|from) \w|holdfast ", block.code):
        yield "code without a language"


def test_every_block_is_run_or_says_why_not() -> None:
    every = [block for blocks in BLOCKS.values() for block in blocks]
    for block in every:
        assert not [*faults_of(block)], (block.page, block.line)
    assert len([block for block in every if block.mark == "not run"]) <= NOT_RUN_MAX
    # What no block matches would be passed over: a fence that is indented, or never closed.
    for page in PAGES:
        text = (ROOT / page).read_text()
        assert len(re.findall(r"^\s*```", text, re.MULTILINE)) == 2 * len(BLOCKS[page]), page


def test_a_block_that_nobody_runs_is_found() -> None:
    (block,) = blocks_of("a.md", "# A\n\n```yaml\na: 1\n```\n")
    assert (block.line, [*faults_of(block)]) == (3, ["nobody runs yaml; say <!-- not run: why -->"])
    (block,) = blocks_of("a.md", "<!-- not run: needs a cluster -->\n```yaml\na: 1\n```\n")
    assert not block.is_run and block.value == "needs a cluster" and not [*faults_of(block)]
    (block,) = blocks_of("a.md", "<!-- file: .gitignore -->\n```yaml\na: 1\n```\n")
    assert not block.is_run and [*faults_of(block)] == ["it is not .gitignore"]
    (block,) = blocks_of("a.md", "```\nimport holdfast\n```\n")
    assert [*faults_of(block)] == ["code without a language"]


def test_code_that_fails_fails_its_page(tmp_path: Path) -> None:
    def run(text: str, after: str = "") -> None:
        run_blocks(tmp_path, blocks_of("a.md", text), after=after)

    run("```python\nx = 1\n```\n\n```python\nx += 1\n```\n", "assert x == 2")
    with pytest.raises(AssertionError, match="what the page promises"):
        run("```python\nx = 1\n```\n", "assert x == 2")
    with pytest.raises(AssertionError, match=r'a\.md:1(.|\n)*"a\.md", line 3'):
        run("```python\nx = 1\nassert x == 2\n```\n")
    with pytest.raises(AssertionError, match="holdfast inspect nothing"):
        run("```bash\nholdfast inspect nothing\n```\n")
    with pytest.raises(AssertionError, match=r"\[0, 3\]"):
        run('<!-- ranks: 2 -->\n```python\nimport os\nassert os.environ["RANK"] == "0"\n```\n')


def anchors_of(text: str) -> set[str]:
    """The anchors that a page's headings get, on the site and in a repository's viewer alike."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()).strip() for title in titles]
    return {title.replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    for link in LINK.findall(FENCED.sub("", (ROOT / page).read_text())):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        # The anchors of the API's page are made when the site is built, which checks them.
        if anchor and target.suffix == ".md" and target.name != "api.md":
            text = target.read_text()
            assert anchor in {*anchors_of(text), *SHOWN_NAME.findall(text)}, f"{page}: {link}"


@pytest.mark.parametrize("page", USERS_PAGES)
def test_a_page_for_users_is_read_in_five_minutes(page: str) -> None:
    text = (ROOT / page).read_text()
    assert len(FENCED.sub("", text).split()) <= WORDS_MAX


TASKS_MIN, TASK_LINES_MAX = 60, 6


def test_each_small_task_is_one_block_that_runs() -> None:
    page = "docs/howto/tasks.md"
    text = (ROOT / page).read_text()
    titles = re.findall(r"^### (.+)$", text, re.MULTILINE)
    first, *tasks = BLOCKS[page]
    assert len(set(titles)) == len(titles) == len(tasks) >= TASKS_MIN
    assert text.startswith(f"# {len(tasks)} small tasks")
    assert "###" not in text.splitlines()[: first.line]
    for block in tasks:
        assert block.is_run, block.line
        assert len(block.code.splitlines()) <= TASK_LINES_MAX, block.line


def test_the_reference_has_every_public_name() -> None:
    api = (ROOT / "docs/reference/api.md").read_text()
    shown = set(re.findall(r"^::: holdfast\.(\w+)$", api, re.MULTILINE))
    assert shown == set(dir(holdfast)) - {"__version__", "codecs", "errors"}
    codecs = set(re.findall(r"^::: holdfast\.codecs\.(\w+)$", api, re.MULTILINE))
    assert codecs == set(holdfast.codecs.__all__)


def test_the_reference_has_every_name_for_dcp() -> None:
    shown = SHOWN_NAME.findall((ROOT / "docs/reference/dcp.md").read_text())
    assert set(shown) == {f"holdfast.integrations.dcp.{name}" for name in dcp.__all__}


def test_the_reference_has_every_error() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text()
    kinds = [k for k in vars(holdfast.errors).values() if isinstance(k, type)]
    assert set(re.findall(r"^## (\w+Error)$", page, re.MULTILINE)) == {k.__name__ for k in kinds}
    sections = re.split(r"^## \w+Error$", page, flags=re.MULTILINE)[1:]
    assert all("**Cause.**" in section and "**Cure.**" in section for section in sections)


SECTIONS: dict[str, tuple[Callable[..., object], ...]] = {
    "Arguments of save and save_async": (holdfast.save, holdfast.save_async),
    "Arguments of load": (holdfast.load,),
    "Arguments of Checkpointer": (holdfast.Checkpointer,),
    "holdfast.Options": (holdfast.Options,),
}


@pytest.mark.parametrize("title", SECTIONS)
def test_the_reference_has_every_option_with_its_default(title: str) -> None:
    page = (ROOT / "docs/reference/options.md").read_text()
    section = page.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \| (.*?) \|", section, re.MULTILINE)
    shown = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    given: dict[str, object] = {}
    for verb in reversed(SECTIONS[title]):
        parameters = inspect.signature(verb).parameters.values()
        # What takes arguments that have moved elsewhere is not one itself.
        named = [each for each in parameters if each.kind is not each.VAR_KEYWORD]
        given |= {each.name: each.default for each in named}
    assert set(shown) == set(given)
    for name, text in shown.items():
        with contextlib.suppress(ValueError, SyntaxError):  # a default in words
            assert ast.literal_eval(text.strip("`")) == given[name], name


def test_the_reference_has_every_verb_of_the_command_line() -> None:
    from holdfast.tools.parser import make_parser

    (verbs,) = (a.choices for a in make_parser()._actions if isinstance(a.choices, dict))
    page = (ROOT / "docs/reference/cli.md").read_text()
    assert re.findall(r"^<!-- help: ([\w-]+) -->$", page, re.MULTILINE) == [*verbs]


NAMED = re.compile(r"`((?:src|docs|tests|core|bindings|benchmarks|examples|scripts)/[\w./-]*)`")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_every_path_that_the_page_names_is_there(page: str) -> None:
    for path in NAMED.findall((ROOT / page).read_text()):
        assert (ROOT / path).exists(), path


def test_the_map_has_every_room_and_every_folder_of_tests() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().split("\n## The map\n")[1]
    named = {path.rstrip("/") for path in NAMED.findall(text)}
    source = ROOT / "src" / "holdfast"
    there = [path.parent for path in source.glob("*/__init__.py")]
    there += [path for path in source.glob("*.py") if path.name != "__init__.py"]
    there += [path.parent for path in ROOT.glob("tests/*/__init__.py")]
    assert {path.relative_to(ROOT).as_posix() for path in there} - named == set()


def words_of(page: str) -> int:
    """Count as `wc -w` does, but for blocks of code and for where links lead."""
    text = FENCED.sub("", (ROOT / page).read_text())
    return len(re.sub(r"\]\([^)]*\)", "]", text).split())


def test_the_readme_is_short_and_begins_with_ten_lines_of_code() -> None:
    assert words_of("README.md") <= README_WORDS_MAX
    first = next(block for block in BLOCKS["README.md"] if block.language == "python")
    assert len([line for line in first.code.splitlines() if line]) <= README_LINES_MAX


def test_the_chart_shows_as_many_others_as_the_readme_says() -> None:
    figures = (ROOT / "docs/benchmarks.md").read_text().split("<!-- figures: ")[1]
    save, load = figures.split("**load**")
    others = [
        [
            name  # of a row of figures, which has five columns
            for name in re.findall(r"^\| (\w.*?) \|(?:[^|\n]*\|){4}$", rows, re.MULTILINE)
            if name[:4] != "fio "
        ]
        for rows in (save, load)
    ]
    assert sorted(others[0]) == sorted(others[1]) and others[0].pop(0) == "holdfast"
    numbers = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert readme.count(f"beside {numbers[len(others[0])]} others") == 2
    assert "The red line is fio" in readme
