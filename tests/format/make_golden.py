"""Write the golden files: checkpoints that must load for ever, and damaged ones that never may.

Run as ``python -m format.make_golden`` in tests/ after a change of the format, into a new version's
directory; those of released versions are kept as they are. Everything is fixed: the bytes come out
the same on every machine.
"""

import hashlib
import json
import math
import shutil
import struct
import tempfile
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path as FilePath
from pathlib import PosixPath
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from attacks import file_lies, header_lies, row_lies, value_lies
from attacks.lies import LIES, save_truth
from format.forge import Forgery
from format.simulated_ranks import Piece, pieces, save_pieces
from holdfast import Options
from holdfast.codecs import Compact, Delta, Excp
from holdfast.codecs.base import Codec
from holdfast.engine.basis import forget_bases
from holdfast.layout import Path, Shape
from holdfast.state.tensors import DTYPE_NAMES

assert file_lies and header_lies and row_lies and value_lies  # they add to LIES

HERE = FilePath(__file__).parent
GOLDEN, ERRORS = HERE / "golden" / "v1", HERE / "golden-errors" / "v1"
WRITTEN_BY = "0.1.0"  # the holdfast that froze version 1

WHOLE_CHUNKS = Options(pool_bytes=32 << 20)
SHORT_CHUNKS = Options(pool_bytes=32 << 20, chunk_elements=7)

State = Mapping[Path, Any]


@dataclass(frozen=True)
class Case:
    """What a golden checkpoint is made of: one state for each rank.

    Each box is on one rank alone, so that no file depends on how writing is shared out.
    """

    states: Sequence[State]
    ties: Mapping[Path, Path] = field(default_factory=dict)
    mesh: dict[str, Any] | None = None
    step: int | None = None
    metrics: Mapping[str, float] | None = None
    options: Options = WHOLE_CHUNKS
    codec: "str | Codec" = "raw"
    base: str | None = None  # name of the case that it is made from, and stands beside


def elements(shape: Shape, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Fixed bytes that repeat nowhere, as elements of any dtype."""
    size = math.prod(shape) * dtype.itemsize
    blocks = [hashlib.sha256(f"{seed} {i}".encode()).digest() for i in range(size // 32 + 1)]
    content = bytearray(b"".join(blocks)[:size])
    if dtype == torch.bool:
        content = bytearray(byte & 1 for byte in content)
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(shape)


def sqrt(values: torch.Tensor) -> torch.Tensor:
    """The nearest f32 of each root, on every machine: torch's may be off by an ulp (MKL)."""
    return values.double().sqrt().float()


def exp2(values: torch.Tensor) -> torch.Tensor:
    """As `sqrt`."""
    return values.double().exp2().float()


def nothing_of(tensor: torch.Tensor) -> Piece:
    """The empty part of a tensor, all of which is on another rank."""
    return Piece(tuple(tensor.shape), (0,) * tensor.ndim, tensor[:0])


def _dtypes() -> Case:
    state: dict[Path, Any] = {}
    for number, (dtype, name) in enumerate(DTYPE_NAMES.items()):
        state[name, "matrix"] = elements((3, 5), dtype, number)
        state[name, "scalar"] = elements((), dtype, 100 + number)
    return Case([state])


def _boxes() -> Case:
    wide = elements((5, 12), torch.float32, 1)
    deep = elements((2, 3, 4, 3), torch.bfloat16, 2)
    flat = elements((23,), torch.int64, 3)
    three = pieces(wide, [((0, 0), (5, 5)), ((0, 5), (2, 7)), ((2, 5), (3, 7))])
    two = pieces(deep, [((0, 0, 1, 0), (2, 3, 3, 3)), ((0, 0, 0, 0), (2, 3, 1, 3))])
    halves = pieces(flat, [((0,), (11,)), ((11,), (12,))])
    last = elements((7,), torch.uint8, 4)
    no_flat, no_last = nothing_of(flat), nothing_of(last)
    states: list[State] = [
        {("wide",): three[0], ("deep",): two[0], ("flat",): halves[1], ("same",): no_last},
        {("wide",): three[1], ("deep",): two[1], ("flat",): no_flat, ("same",): no_last},
        {("wide",): three[2], ("deep",): nothing_of(deep), ("flat",): halves[0]},
        {("flat",): no_flat, ("same",): last},
    ]
    mesh = {"shape": [2, 2], "names": ["dp", "tp"]}
    return Case(states, mesh=mesh, step=1200, options=SHORT_CHUNKS)


def _ties() -> Case:
    weight = elements((4, 3), torch.float16, 5)
    halves = pieces(weight, [((0, 0), (2, 3)), ((2, 0), (2, 3))])
    names: list[Path] = [("model", "embedding.weight"), ("model", "head.weight"), ("copies", 1)]
    other = elements((2,), torch.float64, 6)
    states: list[State] = [{names[0]: halves[0], ("z",): other}, {names[0]: halves[1]}]
    return Case(states, ties={names[1]: names[0], names[2]: names[0], ("y",): ("z",)})


def _objects() -> Case:
    quiet = struct.unpack(">d", bytes.fromhex("fff8000000000abc"))[0]
    values: dict[Path, Any] = {
        ("plain",): [None, True, False, 0, -1, 2**53 - 1, 1.5, -0.0, 5e-324, "text", {"a": [1]}],
        ("large",): [2**53, -(2**53), 10**300],
        ("special",): [math.inf, -math.inf, math.nan, quiet],
        ("bytes",): [b"", b"\x00\xff", b"abc"],
        ("complex",): [1j, complex(math.nan, -0.0), complex(-math.inf, 2.5)],
        ("tuple",): ((), (1, (2,)), [(3,)]),
        ("dict",): {1.5: "a", None: "b", (1, "c"): "d", b"e": "f", True: "g", "$int": "h"},
        ("dollar",): [{"$": 1, "a": 2}],
        ("empty",): [{}, [], "", ()],
        ("floats",): [1e16, 1e22, 0.1, 1 / 3, 1.7976931348623157e308],
        ("é\U0001f600\u202e", "a.b", 'q"', "\n"): "odd keys",
        (1,): "an integer key",
        ("1",): "a text key",
        (-(2**63), ("list", 0), ("tuple", 2)): "positions",
        ("",): "an empty key",
    }
    metrics = {"loss": 0.25, "best": math.inf, "odd": math.nan, "count": 2**60}
    return Case([values], metrics=metrics, step=0)


def _further() -> Case:
    """Each of the further values, which `torch`'s are left out of: they need torch to be read."""
    zone = timezone(timedelta(hours=5, minutes=30))
    values: dict[Path, Any] = {
        ("bytes",): [bytearray(b"\0\xff"), bytearray()],
        ("dicts",): [OrderedDict([("b", 1), (2, "a")]), defaultdict(list, {"a": [1]})],
        ("defaults",): [defaultdict(None, {1: 2}), defaultdict(set)],
        ("sets",): [{1, 2.5, "x", None, b"y"}, frozenset([(1, 2), "z"]), set()],
        ("lines",): [range(5), range(10, -3, -4), deque([1, [2]], 5), deque()],
        ("path",): [PosixPath("a/../b"), PosixPath("/"), PosixPath(".")],
        ("moments",): [
            *(datetime(2024, 2, 29, 23, 59, 58, 7), datetime(1, 1, 1, tzinfo=UTC)),
            *(
                datetime(9999, 12, 31, tzinfo=zone),
                date(2024, 2, 29),
                time(1, 2),
                time(tzinfo=zone),
            ),
            *(timedelta(days=-1, microseconds=5), timedelta.max, zone, UTC),
        ],
        ("numbers",): [Decimal("1.50"), Decimal("-Infinity"), Fraction(-7, 3), Fraction(2**70)],
        ("namespace",): Namespace(lr=0.1, betas=(0.9, 0.95), inner=Namespace()),
        ("numpy",): [np.float64(0.1), np.int8(-3), np.bool_(True), np.complex64(1 + 2j)],
    }
    return Case([values])


def _chunks() -> Case:
    state: dict[Path, Any] = {
        ("odd",): elements((5, 9), torch.float32, 7),
        ("wide",): elements((17,), torch.complex128, 8),
        ("exact",): elements((14,), torch.int8, 9),
        ("one",): elements((1,), torch.bfloat16, 10),
    }
    return Case([state], options=SHORT_CHUNKS)


def _aligned() -> Case:
    state: dict[Path, Any] = {
        ("small",): elements((3,), torch.uint8, 11),
        ("large",): torch.arange(1 << 16, dtype=torch.int32).to(torch.uint8),
    }
    return Case([state])


def _files() -> Case:
    tensors = {(f"t{i}",): elements((9, i), torch.int16, 20 + i) for i in (1, 2, 3)}
    writers = {("t1",): 1, ("t2",): 1, ("t3",): 0}
    states: list[State] = [
        {path: x if writers[path] == rank else nothing_of(x) for path, x in tensors.items()}
        for rank in (0, 1)
    ]
    return Case(states, options=Options(file_bytes=1 << 16, pool_bytes=32 << 20))


def _lossless() -> Case:
    """Every mode; in chunks that cut rows."""
    noise = elements((2, 24, 25), torch.uint8, 40).float()
    scale = exp2(torch.arange(24.0)[:, None] % 7 + torch.arange(25.0) % 5 - 30)
    second = scale * exp2((noise[0] - 128) / 32)
    second[3, 4], second[7] = 0, 0
    first = sqrt(second) * (1 + noise[1] / 256)
    first[::2] *= -1
    master = (elements((24, 25), torch.uint8, 41).float() - 128) / 512
    state: dict[Path, Any] = {
        ("model", "a"): master.to(torch.bfloat16),
        ("master", "a"): master,
        ("optimizer", "state", "a", "exp_avg"): first,
        ("optimizer", "state", "a", "exp_avg_sq"): second,
        ("optimizer", "state", "a", "step"): torch.tensor(3.0),
        ("alone", "square"): scale * (1.2345 + noise[0] / 256 + noise[1] / 77777),
        ("alone", "half"): master.to(torch.float16),
        ("alone", "complex"): torch.complex(master, first),
        ("ones",): torch.ones(300),
        ("counts",): torch.arange(200),
        ("noise",): elements((100,), torch.uint8, 43),
    }
    return Case([state], options=Options(chunk_elements=310), codec="lossless")


def _key() -> Case:
    """What a link is made from: each dtype that differences are taken of, and others."""
    master = (elements((8, 31), torch.uint8, 50).float() - 128) / 512
    state: dict[Path, Any] = {
        ("master",): master,
        ("half",): master[1:4].to(torch.float16),
        ("brain",): master[:4].to(torch.bfloat16),
        ("complex",): torch.complex(master[2:5], -master[2:5]),
        ("same",): torch.arange(40),
    }
    return Case([state], options=Options(chunk_elements=130), codec=Delta())


def _link() -> Case:
    (state,) = _key().states
    steps = (elements((8, 31), torch.uint8, 52).float() - 128) ** 3 / 2**34
    master = state["master",] + steps
    master[0, :9] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3e38, 1])
    changed: dict[Path, Any] = {
        ("master",): master,
        ("half",): master[1:4].to(torch.float16),
        ("brain",): master[:4].to(torch.bfloat16),
        ("complex",): torch.complex(master[2:5], -master[2:5]),
        ("new",): torch.ones(9),
    }
    return Case(
        [dict(state) | changed], options=Options(chunk_elements=130), codec=Delta(), base="key"
    )


def _before() -> Case:
    """An optimizer's state that a step is to be taken from."""
    noise = (elements((3, 12, 25), torch.uint8, 60).float() - 127.5) / 128
    state: dict[Path, Any] = {
        ("model", "a"): (noise[0] / 16).to(torch.bfloat16),
        ("master", "a"): noise[0] / 16,
        ("optimizer", "a", "exp_avg"): noise[1] * (1 + noise[2] / 7777) / 2048,
        ("optimizer", "a", "exp_avg_sq"): noise[2].square() / 2**20,
    }
    return Case([state], codec=Delta(replay=True))


def _after(odd: torch.Tensor) -> State:
    """Adam's step later, but for some elements that are anything."""
    (state,) = _before().states
    gradient = (elements((12, 25), torch.uint8, 61).float() - 127.5) / 2**20
    weight, first, second = (x.clone() for x in state.values() if x.dtype == torch.float32)
    first += 0.1 * (gradient - first)
    second = 0.95 * second + 0.05 * gradient * gradient
    weight = 0.9999 * weight + -0.001 * first / (sqrt(second) + 1e-8)
    numbers = odd[~odd.isnan()]
    weight[3, 2 : 2 + len(numbers)], second[7, 5 : 5 + len(odd)] = numbers, odd
    return {
        ("model", "a"): weight.to(torch.bfloat16),
        ("master", "a"): weight,
        ("optimizer", "a", "exp_avg"): first,
        ("optimizer", "a", "exp_avg_sq"): second,
    }


def _step() -> Case:
    odd = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3e38])
    return Case([_after(odd)], codec=Delta(replay=True), base="before")


def _lossy(codec: Codec) -> Callable[[], Case]:
    return lambda: Case([_after(torch.zeros(0))], codec=codec, base="before")


def _coded_symbols() -> Case:
    """Each form of coded symbols: 1, 8 and 64 lanes, repeated and stored."""
    noise = elements((24_000,), torch.uint8, 42)
    state: dict[Path, Any] = {
        ("short",): noise[:900] // 16,
        ("middle",): noise[:5_001] // 16,
        ("long",): noise // 4 % 48,
        ("planes",): noise[:1_000].to(torch.int16) // 3,
        ("stored",): noise[:64].to(torch.int16),
    }
    return Case([state], codec="lossless")


def _empty_tensors() -> Case:
    state: dict[Path, Any] = {
        ("none",): elements((0,), torch.float32),
        ("flat",): elements((3, 0, 2), torch.int64),
        ("scalar",): elements((), torch.float32, 30),
    }
    return Case([state])


CASES: dict[str, Callable[[], Case]] = {
    "dtypes": _dtypes,
    "boxes": _boxes,
    "ties": _ties,
    "objects": _objects,
    "further-values": _further,
    "chunks": _chunks,
    "aligned": _aligned,
    "files": _files,
    "empty-tensors": _empty_tensors,
    "lossless": _lossless,
    "coded-symbols": _coded_symbols,
    "key": _key,
    "link": _link,
    "before": _before,
    "step": _step,
    "empty": lambda: Case([{}]),
}
# What comes back is not what was saved; but always the same.
LOSSY_CASES: dict[str, Callable[[], Case]] = {
    "high": _lossy(Compact("high")),
    "bound": _lossy(Compact(abs=1e-4)),
    "rounding": _lossy(Compact(bf16_exact=True)),
    "pruned": _lossy(Excp()),
}
ALL_CASES = CASES | LOSSY_CASES
# A golden error for each place where a reader can be lied to; what repeats another is left to
# tests/attacks.
ERROR_CASES = [
    *("another magic", "a newer version", "more bytes than the file", "a byte behind the table"),
    *("2^60 chunks, whose bytes wrap around", "JSON that is not UTF-8", "a repeated key", "NaN"),
    *("nesting of 65 levels", "an unknown key", "a save_id that is a way out"),
    *("an unknown feature", "an unknown codec", "an unknown dtype", "a shape of 2^64 bytes"),
    *("a key that is true", "an unknown tag"),
    *("a large integer without its tag", "ranks out of order", "a file shorter than its payloads"),
    *("another footer checksum", "another shard digest", "another chunk checksum"),
    *("a shard whose rows overlap", "a box that leaves its tensor", "a box that overlaps another"),
    *("boxes that leave a hole", "a payload of another mode", "a payload too short"),
    *("a payload on another", "a gap of 4,096 bytes, in both tables"),
    *("a bit that is not zero in a gap", "a bit that is not zero before the footer"),
    *("a header of another save", "a trailer of another magic", "a footer of another step"),
]


def write(name: str, case: Case, path: FilePath) -> None:
    """Save a case, and beside it what it is made from; its save_id is made of its name."""
    forget_bases()
    if case.base:
        shutil.rmtree(path.with_name(case.base), ignore_errors=True)
        write(case.base, CASES[case.base](), path.with_name(case.base))
    save_id = hashlib.sha256(name.encode()).hexdigest()[:32]
    with (
        patch("holdfast.saving.save.secrets.token_hex", lambda size: save_id),
        patch("holdfast.saving.request.__version__", WRITTEN_BY),
    ):
        save_pieces(
            path,
            case.states,
            ties=case.ties,
            mesh=case.mesh,
            step=case.step,
            metrics=case.metrics,
            options=case.options,
            codec=case.codec,
        )


def write_error(name: str, path: FilePath) -> None:
    """Tell a lie of tests/attacks; beside the checkpoint stands what a reader has to say to it."""
    lie, save_id = LIES[name], hashlib.sha256(b"truth").hexdigest()[:32]
    with (
        tempfile.TemporaryDirectory() as scratch,
        patch("holdfast.saving.save.secrets.token_hex", lambda size: save_id),
        patch("holdfast.saving.request.__version__", WRITTEN_BY),
    ):
        save_truth(truth := FilePath(scratch) / "truth")
        forgery = Forgery.read(truth)
    lie.tell(forgery)
    forgery.write(path / "checkpoint")
    expected = {"lie": name, "error": lie.error, "text": lie.text}
    (path / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def directory_of(name: str) -> str:
    """Name the directory of a golden error."""
    return name.replace(" ", "-").replace(",", "").replace("^", "-")


def main() -> None:
    """Write all of them anew."""
    for place in (GOLDEN, ERRORS):
        shutil.rmtree(place, ignore_errors=True)
    for name, make in ALL_CASES.items():
        write(name, make(), GOLDEN / name)
    for name in ERROR_CASES:
        write_error(name, ERRORS / directory_of(name))


if __name__ == "__main__":
    main()
