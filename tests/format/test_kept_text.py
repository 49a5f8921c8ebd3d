"""The text of a header's tensors is kept for the next header with the very same tensors."""

from dataclasses import replace

import pytest

from holdfast.format import header as headers
from holdfast.format.coding import RAW, Coding
from holdfast.format.header import Header, encode_header
from holdfast.layout import Tensor


def header_of(*names: str) -> Header:
    tensors = tuple(Tensor((name,), "f32", (3, len(name))) for name in names)
    return Header("ab" * 16, 1, 1, None, {}, "holdfast 0", 1 << 20, tensors, (), ())


def anew(header: Header) -> bytes:
    """Write a header with equal tensors that are not the same ones."""
    return encode_header(replace(header, tensors=tuple(list(header.tensors))))


def test_headers_in_any_order_are_written_as_if_each_were_the_first() -> None:
    one, other = header_of("a", "bb"), header_of("c")
    coded = replace(one, codecs=(RAW, Coding("lossless")), codec_of=(0, 1))
    swapped = replace(coded, codec_of=(1, 0))
    for header in (one, other, one, coded, swapped, coded, one, other, swapped, one):
        assert encode_header(header) == anew(header)


def test_the_text_of_a_plan_stays_beside_those_of_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, written = header_of("a", "bb", "ccc"), list[Header]()
    texts = headers._tensor_texts

    def counted(header: Header) -> list[str]:
        written.append(header)
        return texts(header)

    monkeypatch.setattr(headers, "_tensor_texts", counted)
    for _ in range(3):  # saves: the footer of one rank, and the manifest
        encode_header(whole.part([0, 2]))
        encode_header(whole)
    assert sum(header is whole for header in written) == 1


def test_a_long_text_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = header_of("a", "bb")
    monkeypatch.setattr(headers, "KEPT_TEXT_MAX", 10)
    encode_header(whole)
    assert all(kept[0] is not whole.tensors for kept in headers._written)
