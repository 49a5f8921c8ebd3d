"""Tensors → one file of NumPy, which `numpy.load` reads: an array each. Pure; knows no numpy."""

from collections.abc import Sequence

from ..errors import OptionError
from .cast import CAST_FROM
from .emit import PlannedFile
from .names import Chosen
from .to_safetensors import Written
from .zipped import Archive

DTYPES = {
    **{"bool": "|b1", "u8": "|u1", "i8": "|i1", "u16": "<u2", "i16": "<i2", "u32": "<u4"},
    **{"i32": "<i4", "u64": "<u8", "i64": "<i8", "f16": "<f2", "f32": "<f4", "f64": "<f8"},
    **{"c64": "<c8", "c128": "<c16"},
}
HEADER_ALIGN_BYTES = 64


def plan_file(
    name: str, tensors: Sequence[Written], taken: Chosen
) -> tuple[PlannedFile, tuple[str, ...]]:
    """Plan a file; return it, and the names of what it has no place for.

    Raises:
        OptionError: NumPy has no such dtype.
    """
    archive = Archive()
    for written in tensors:
        archive.add(f"{written.piece.name}.npy", _header(written), written.piece)
    return PlannedFile(name, archive.finish()), (*taken.ties, *taken.values)


def _header(written: Written) -> bytes:
    """Return the header of format version 1.0 (numpy.lib.format)."""
    piece = written.piece
    if piece.dtype not in DTYPES:
        casts = "convert it with --dtype f32 (dtype=), " if piece.dtype in CAST_FROM else ""
        raise OptionError(
            f"{piece.name} is {piece.dtype}, which NumPy does not have; {casts}leave it out, or "
            "export to a .pt file"
        )
    shape = "".join(f"{count}, " for count in written.shape).rstrip(" ")
    shape = shape if len(written.shape) == 1 else shape.rstrip(",")
    text = f"{{'descr': '{DTYPES[piece.dtype]}', 'fortran_order': False, 'shape': ({shape}), }}"
    rest = -(10 + len(text) + 1) % HEADER_ALIGN_BYTES
    text = f"{text}{' ' * rest}\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
