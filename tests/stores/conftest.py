"""The stores that the tests of this folder run against, one after the other."""

from collections.abc import Iterator

import pytest

from stores.places import HERE, KINDS, Place, place_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "new_place" in metafunc.fixturenames:
        kinds = metafunc.config.getoption("--store") or HERE
        metafunc.parametrize("new_place", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def new_place(request: pytest.FixtureRequest) -> Iterator[Place]:
    assert request.param in KINDS
    with place_of(request.param) as place:
        yield place
