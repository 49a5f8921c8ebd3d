"""Runs the blocks of pages that need a framework, by the Python of `make frameworks`.

``pages.py [PAGE ...]``; default: all that have such blocks. A page's blocks share one namespace and
one directory, as one reader would type them. They are marked ``<!-- frameworks: NAME -->``.
"""

import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS)] if str(TESTS) not in sys.path else []

from pages.blocks import PAGES, blocks_of  # noqa: E402

MARK = "frameworks"


def run(page: str) -> None:
    """Run the blocks of a page, one after the other."""
    blocks = [block for block in blocks_of(page) if block.mark == MARK]
    assert blocks, f"{page} has no block with the mark {MARK}"
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        code = compile("\n" * block.line + block.code, page, "exec")
        exec(code, names)
    print(f"{page}: {len(blocks)} blocks run", flush=True)


def main() -> None:
    """Run the pages that are given, each in a process and a directory of its own."""
    failed = False
    marked = [page for page in PAGES if any(block.mark == MARK for block in blocks_of(page))]
    for page in sys.argv[1:] or marked:
        if (child := os.fork()) == 0:
            place = tempfile.mkdtemp(prefix="holdfast-page-")
            os.chdir(place)
            code = 0
            try:
                run(page)
            except BaseException:
                traceback.print_exc()
                code = 1
            shutil.rmtree(place, ignore_errors=True)
            sys.stdout.flush()
            os._exit(code)
        failed |= os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
