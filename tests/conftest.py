"""What tests of all folders start from: new paths that cost no disk, and one thread for torch.

``pytest --ambient meta tests/unit/test_shards.py`` runs tests with the public verbs called under a
setting of torch that the program might have: `ambients`.
"""

import gc
import itertools
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ambients import AMBIENTS, put_under
from holdfast.engine.basis import forget_bases
from holdfast.runs import progress_file
from long import is_slow, reason_of

HERE = Path(__file__).parent
MEMORY = Path("/dev/shm")  # where it exists, an fsync takes no time


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "call the public verbs under this setting; several times: under each"
    parser.addoption("--ambient", action="append", default=[], choices=AMBIENTS, help=text)
    text = "run tests/stores against this server; several times: against each"
    parser.addoption("--store", action="append", default=[], help=text)
    text = "run the tests of tests/stores with servers that are to be refused"
    parser.addoption("--refused", action="store_true", help=text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if ambients := metafunc.config.getoption("--ambient"):
        metafunc.parametrize("_ambient", ambients, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: set[str] = set()
    for item in items:
        test = node_of(item).split("[")[0]
        if reason := reason_of(node_of(item), test not in seen):
            item.add_marker(pytest.mark.long(reason))
        seen.add(test)
    items.sort(key=lambda item: not is_slow(node_of(item)))


def node_of(item: pytest.Item) -> str:
    return item.path.relative_to(HERE).as_posix() + "::" + item.name


@pytest.fixture(autouse=True)
def _ambient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(request, "param"):
        put_under(request.param, monkeypatch.setattr)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # The tensors of tests are small; a second thread only waits for the first.
    torch.set_num_threads(1)
    gc.freeze()  # torch's modules, which each collection would look through
    # Each test goes through all that do not, several times.
    for logger in logging.getLogger().manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> None:
    forget_bases()
    progress_file._end_all()  # a run that a test left would open its file within a second


@pytest.fixture
def new_path() -> Iterator[Callable[[], Path]]:
    """Give a path that does not exist yet at every call; all are removed after the test."""
    root = Path(tempfile.mkdtemp(prefix="holdfast-", dir=MEMORY if MEMORY.is_dir() else None))
    numbers = itertools.count()
    yield lambda: root / f"checkpoint-{next(numbers)}"
    shutil.rmtree(root)
