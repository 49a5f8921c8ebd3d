"""Servers that holdfast does not write to: `make stores` runs this."""

import pytest
import torch

import holdfast
from holdfast.errors import OptionError
from holdfast.stores.url import open_store
from stores import servers


@pytest.mark.parametrize("kind", servers.REFUSED)
def test_a_server_without_conditional_writes_is_refused(
    kind: str, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--refused"):
        pytest.skip("make stores has the server")
    with servers.running(kind) as base:
        for path in (f"{base}/a", f"{base}/b"):
            with pytest.raises(OptionError, match="overwrites an object"):
                holdfast.save({"w": torch.ones(10)}, path)
            assert not open_store(path).exists("")
