"""Python's garbage collector rests while a header is read, and is left as it was."""

import contextlib
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.errors import CorruptError
from holdfast.format.header import Header, decode_header, encode_header

TEXT = encode_header(Header("0" * 32, 1, 1, None, {}, "test", 4, (), (), ()))


@contextmanager
def collector(wanted: bool) -> Iterator[None]:
    before = gc.isenabled()
    (gc.enable if wanted else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("text", [TEXT, TEXT[:-20]], ids=["whole", "cut off"])
@pytest.mark.parametrize("wanted", [True, False])
def test_the_collector_is_left_as_it_was(wanted: bool, text: bytes) -> None:
    with collector(wanted):
        with contextlib.suppress(CorruptError):
            decode_header(text)
        assert gc.isenabled() == wanted


def test_the_collector_rests_meanwhile() -> None:
    begun: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        begun.append(info["generation"])

    tensors = ",".join(
        f'{{"path":["t","{n}"],"dtype":"f32","shape":[{n}],"codec":0}}' for n in range(3000)
    )
    text = TEXT.replace(b'"tensors":[]', b'"tensors":[' + tensors.encode() + b"]").rstrip()
    with collector(wanted=True):
        gc.collect()
        gc.callbacks.append(note)
        try:
            assert len(decode_header(text).tensors) == 3000
        finally:
            gc.callbacks.remove(note)
    assert len(begun) < 5  # before and behind it; 50 within it, otherwise
