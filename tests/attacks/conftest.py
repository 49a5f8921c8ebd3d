"""What attacks are told to, and the bound on what they may cost."""

import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from .lies import save_truth

SECONDS_MAX = 2.0 if sys.gettrace() is None else 60.0  # of the processor; where coverage looks on
MEMORY_MAX = 8 << 20  # what 100,000 levels or digits take; a size that is believed takes far more


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("truth") / "checkpoint"
    save_truth(path)
    return path


@pytest.fixture
def bounded(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail when what follows takes long or allocates much (MEMORY_MAX of the module, if it has)."""
    tracemalloc.start()
    started = time.process_time()  # others may keep the machine busy
    yield
    seconds = time.process_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < SECONDS_MAX
    assert peak < getattr(request.module, "MEMORY_MAX", MEMORY_MAX)
