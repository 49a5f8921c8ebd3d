"""Lossless codecs of others, for `lossless.py`: bytes of elements ⇄ bytes, in one thread."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Peer:
    """A codec for elements of one size: 4 bytes (f32) or 2 (bf16)."""

    name: str
    encode: Callable[[Bytes], Bytes]
    decode: Callable[[Bytes], Bytes]


def peers(item_bytes: int) -> Iterator[Peer | str]:
    """Yield those that are installed, at the settings that suit floats best; names of the rest."""
    for make in (_zstd, _blosc2, _openzl, _zipnn):
        try:
            yield make(item_bytes)
        except ImportError as error:
            yield f"{make.__name__[1:]}: {error}"


def _zstd(item_bytes: int) -> Peer:
    zstd: Any = import_module("zstandard")
    coder, decoder = zstd.ZstdCompressor(level=3), zstd.ZstdDecompressor()
    return Peer("zstd -3", coder.compress, decoder.decompress)


def _blosc2(item_bytes: int) -> Peer:
    blosc2: Any = import_module("blosc2")
    settings = {
        "codec": blosc2.Codec.ZSTD,
        "clevel": 1,
        "typesize": item_bytes,
        "filters": [blosc2.Filter.SHUFFLE],
        "filters_meta": [0],
        "nthreads": 1,
    }
    return Peer(
        "blosc2 shuffle + zstd 1",
        lambda data: bytes(blosc2.compress2(data, **settings)),
        lambda data: blosc2.decompress2(data, nthreads=1),
    )


def _openzl(item_bytes: int) -> Peer:
    zl: Any = import_module("openzl.ext")
    split = zl.nodes.Float32Deconstruct() if item_bytes == 4 else zl.nodes.BFloat16Deconstruct()
    convert = zl.nodes.ConvertSerialToNumLE32() if item_bytes == 4 else None
    convert = convert or zl.nodes.ConvertSerialToNumLE16()
    coder = zl.Compressor()
    parts = split(coder, sign_frac=zl.graphs.Store()(coder), exponent=zl.graphs.Entropy()(coder))
    coder.select_starting_graph(convert(coder, parts))
    numpy: Any = import_module("numpy")

    def encode(data: Bytes) -> bytes:
        context = zl.CCtx()
        context.ref_compressor(coder)
        context.set_parameter(zl.CParam.FormatVersion, zl.MAX_FORMAT_VERSION)
        found: bytes = context.compress([zl.Input(zl.Type.Serial, numpy.frombuffer(data, "u1"))])
        return found

    def decode(data: Bytes) -> bytes:
        (output,) = zl.DCtx().decompress(data)
        return bytes(output.content.as_bytes())

    return Peer("OpenZL deconstruct + entropy", encode, decode)


def _zipnn(item_bytes: int) -> Peer:
    zipnn: Any = import_module("zipnn")
    dtype = "float32" if item_bytes == 4 else "bfloat16"
    coder = zipnn.ZipNN(input_format="byte", bytearray_dtype=dtype, threads=1)
    return Peer(
        "ZipNN",
        lambda data: bytes(coder.compress(bytearray(data))),
        lambda data: coder.decompress(bytearray(data)),
    )
