"""A browser for the tests of reports, where one is installed: `make report` does that."""

import os
from collections.abc import Iterator

import pytest

from .browser import Page, browser, find_browser


@pytest.fixture(scope="session")
def page() -> Iterator[Page]:
    if find_browser() is None:
        if os.environ.get("HOLDFAST_BROWSER") == "needed":
            pytest.fail("chromium is not installed: make report")
        pytest.skip("chromium is not installed: make report")
    with browser() as found:
        yield found
