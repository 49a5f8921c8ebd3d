"""Small files of JSON beside checkpoints, such as indexes. Knows nothing of their content."""

import json
from typing import Any

from ..errors import CorruptError
from .archive import region_of
from .files import Files

JSON_BYTES_MAX = 100_000_000


def read_json(files: Files, path: str) -> Any:
    """Read a file.

    Raises:
        CorruptError: it is no JSON, has a key twice, or is too large.
        StoreError: it cannot be read.
    """
    region = region_of(files, path)
    if region.size_bytes > JSON_BYTES_MAX:
        raise CorruptError(
            f"{path} has {region.size_bytes:,} bytes; expected at most {JSON_BYTES_MAX:,}"
        )

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Make an object, which may name nothing twice: readers differ in which one counts."""
        made = dict(pairs)
        if len(made) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in made if names.count(name) > 1)
            raise CorruptError(f"{path} has the key {twice!r:.80} in one object twice")
        return made

    try:
        return json.loads(region.read(0, region.size_bytes), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path} is no JSON: {error}") from error
