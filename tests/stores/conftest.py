"""The stores that the tests of this folder run against, one after the other."""

import os
from collections.abc import Iterator

import pytest

from holdfast.stores.objects_client import forget_clients
from stores.jobs import end_uploads, next_job
from stores.places import HERE, KINDS, Place, place_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "new_place" in metafunc.fixturenames:
        kinds = metafunc.config.getoption("--store") or HERE
        # With `--dist loadgroup`, one process plays all of a kind: it starts the server once.
        each = [pytest.param(kind, marks=pytest.mark.xdist_group(kind)) for kind in kinds]
        metafunc.parametrize("new_place", each, indirect=True, scope="session")


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    next_job()
    yield
    end_uploads()


@pytest.fixture(scope="session")
def new_place(request: pytest.FixtureRequest) -> Iterator[Place]:
    assert request.param in KINDS
    with place_of(request.param) as place:
        yield place


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave neither keys nor proxies in the environment, and no client of another test."""
    for name in [*os.environ]:
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    forget_clients()
    yield
    forget_clients()
