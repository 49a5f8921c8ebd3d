"""Lies that take a large payload: where it may start."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from format import reader
from format.forge import Forgery
from holdfast.errors import CorruptError

NewPath = Callable[[], Path]
OPTIONS = holdfast.Options(pool_bytes=32 << 20)
LARGE = 1 << 16  # bytes from which on a payload starts on a page


def test_a_large_payload_off_its_page_is_refused(new_path: NewPath) -> None:
    truth, path = new_path(), new_path()
    state = {"small": torch.ones(3), "t": torch.arange(LARGE // 8)}
    holdfast.save(state, truth, options=OPTIONS)
    forgery = Forgery.read(truth)
    assert forgery.columns["chunk.offset"] == [1, 64]
    # Moved 64 bytes on: the gap before it is short still, and zero, and no checksum is wrong.
    file = forgery.files[0]
    file.body = file.body[:128] + bytes(64) + file.body[128:]
    for table in (forgery.manifest, file.footer):
        table.columns["chunk.offset"][1] += 1
    forgery.write(path)
    with pytest.raises(CorruptError, match="a large payload is not aligned"):
        holdfast.load(path, into=state, options=OPTIONS)
    with pytest.raises(reader.Corrupt):
        reader.read(path)
