"""Pickles that would run code, take endless memory or time, or lie: read as data, or refused."""

import builtins
import collections
import contextlib
import functools
import io
import os
import pickle
import random
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.convert.inert import DEPTH_MAX, Global, Inert
from holdfast.convert.pickles import read_pickle
from holdfast.convert.rebuild import PLAIN, TENSORS
from holdfast.errors import CorruptError

MEMORY_BYTES = 4 << 20


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def named(dotted: str) -> bytes:
    module, _, name = dotted.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def call(dotted: str, *arguments: bytes) -> bytes:
    return named(dotted) + b"(" + b"".join(arguments) + b"tR"


def whole(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


class Calls:
    """Pickles as a call of anything."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.reduced = (function, arguments, state) if state else (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


def runs_code() -> Iterator[tuple[str, bytes]]:
    """Pickles that run something in Python's own unpickler, at every protocol."""
    hostile = {
        "os.system": Calls(os.system, "touch x"),
        "eval": Calls(eval, "open('x', 'w')"),
        "exec": Calls(exec, "open('x', 'w')"),
        "subprocess": Calls(subprocess.Popen, ["touch", "x"]),
        "open": Calls(open, "x", "w"),
        "torch.load": Calls(torch.load, "x"),
        "a state for a code object": Calls(type, "A", (), {}, state={"__reduce__": 1}),
        "map in a list": Calls(list, Calls(map, Calls(getattr, builtins, "eval"), ["1"])),
        "an allowed name with a call in its arguments": Calls(
            collections.OrderedDict, Calls(os.system, "touch x")
        ),
        "a partial": functools.partial(os.system, "touch x"),
        "numpy's unpickler": Calls(np.load, "x"),
        "a class": type("Local", (), {}) and os._Environ,
    }
    for name, value in hostile.items():
        for protocol in (2, 4, 5):
            try:
                yield f"{name}, protocol {protocol}", pickle.dumps(value, protocol)
            except (TypeError, AttributeError, pickle.PicklingError):  # builtins cannot be pickled
                continue
    yield "STACK_GLOBAL", b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x07touch x\x85R."
    yield "NEWOBJ_EX", b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x07touch x\x85}\x92."
    system = call("builtins.getattr", call("builtins.__import__", text("os")), text("system"))
    yield "a chain of getattr", whole(system + text("touch x") + b"\x85R")
    yield "an unknown module", whole(call("not_there.at_all", b"K\x01"))
    yield "a module with code at its import", whole(named("antigravity.x"))
    yield "dots in a name", b"\x80\x04\x8c\x08builtins\x8c\x0fdict.__init__.__x\x93."


HOSTILE = dict(runs_code())


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pickle_runs_nothing(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []
    modules = set(sys.modules)
    _watched.append(seen)
    try:
        found = read_pickle(HOSTILE[name], TENSORS)
    except CorruptError:
        pass
    else:
        assert type(found.root) in (Inert, Global, dict, list)
    finally:
        _watched.remove(seen)
    assert seen == []
    assert set(sys.modules) == modules
    assert os.listdir(tmp_path) == []


_watched: list[list[str]] = []
_WATCHED = ("pickle.", "exec", "compile", "import", "subprocess.", "os.", "open", "ctypes.")


def _watch(event: str, _: tuple[Any, ...]) -> None:
    if _watched and event.startswith(_WATCHED):
        _watched[-1].append(event)


sys.addaudithook(_watch)


def test_python_would_have_run_them(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []
    _watched.append(seen)
    pickle.loads(HOSTILE["os.system, protocol 4"])
    _watched.remove(seen)
    assert "os.system" in seen and os.listdir(tmp_path) == ["x"]


def test_what_is_unknown_is_named() -> None:
    found = read_pickle(HOSTILE["a chain of getattr"], TENSORS)
    assert {"builtins.__import__", "builtins.getattr"} == found.unknown
    found = read_pickle(HOSTILE["os.system, protocol 2"], PLAIN)
    assert found.unknown == {"posix.system"} and found.root.args == ("touch x",)


STORAGE = whole(
    b"(" + text("storage") + named("torch.FloatStorage") + text("0") + text("cpu") + b"K\x04tQ"
)[2:-1]
PAIR = b"K\x02K\x02\x86"
FALSE = b"\x89"


def tensor(offset: bytes, shape: bytes, strides: bytes, held: bytes = STORAGE) -> bytes:
    hooks = call("collections.OrderedDict")
    name = "torch._utils._rebuild_tensor_v2"
    return whole(call(name, held, offset, shape, strides, FALSE, hooks))


def number(value: int) -> bytes:
    raw = value.to_bytes(17, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


LIES = {
    "a tensor beyond its storage": tensor(b"K\x01", PAIR, PAIR),
    "a tensor at a negative offset": tensor(number(-1), PAIR, b"K\x02K\x01\x86"),
    "a negative side": tensor(b"K\x00", b"K\x02" + number(-2) + b"\x86", b"K\x02K\x01\x86"),
    "negative strides": tensor(b"K\x00", PAIR, number(-2) + b"K\x01\x86"),
    "sides that wrap around": tensor(b"K\x00", number(1 << 63) * 2 + b"\x86", PAIR),
    "strides of another length": tensor(b"K\x00", PAIR, b"K\x01\x85"),
    "a shape of text": tensor(b"K\x00", text("ab"), PAIR),
    "a shape of true": tensor(b"K\x00", b"\x88\x88\x86", PAIR),
    "65 sides": tensor(b"K\x00", b"(" + b"K\x01" * 65 + b"t", b"(" + b"K\x01" * 65 + b"t"),
    "an expanded giant": tensor(b"K\x00", number(1 << 62) + b"\x85", b"K\x00\x85"),
    "a storage that is none": tensor(b"K\x00", PAIR, PAIR, held=b"N"),
    "too few arguments": whole(call("torch._utils._rebuild_tensor_v2", STORAGE)),
    "a storage of negative size": whole(STORAGE.replace(b"K\x04t", number(-4) + b"t")),
    "a storage of no kind": whole(STORAGE.replace(named("torch.FloatStorage"), text("f"))),
    "a persistent id of text": whole(text("0") + b"Q"),
    "an array of a few bytes": whole(
        call("numpy._core.multiarray._reconstruct", named("numpy.ndarray"), b"K\x00\x85", b"C\x01b")
        + b"(K\x01K\x09\x85"
        + call("numpy.dtype", text("f8"), FALSE, b"\x88")
        + FALSE
        + b"C\x04aaaatb"
    ),
    "bytes above 255": whole(call("_codecs.encode", text("€"), text("latin1"))),
    "bytes in another code": whole(call("_codecs.encode", text("a"), text("rot13"))),
    "a dict of no pairs": whole(call("collections.OrderedDict", b"](K\x01K\x02e")),
    "a set of a list": whole(call("builtins.set", b"](](K\x01ee")),
    "a state for a list": whole(b"](K\x01e}b"),
    "a state for a dict": whole(b"}}b"),
    "a state for a namespace": whole(call("argparse.Namespace"), b"}K\x01K\x02sb"),
    "a state for an array": whole(
        call("numpy._core.multiarray._reconstruct", named("numpy.ndarray"), b"K\x00\x85", b"C\x01b")
        + b"](K\x01eb"
    ),
    "a call of a dtype": whole(named("torch.float32") + b")R"),
    "a call of a number": whole(b"K\x01)R"),
    "a call with a list": whole(named("torch.Size") + b"]R"),
    "a list as a key": whole(b"}]K\x01s"),
    "a tuple of tuples as a key": whole(b"}K\x01\x85\x85K\x01s"),
    "an item of a list": whole(b"]K\x01K\x01s"),
    "an append to a dict": whole(b"}K\x01a"),
    "a name of a number": b"\x80\x04K\x01K\x02\x93.",
    "an empty memo": whole(b"h\x05"),
    "a key without a value": whole(b"}(K\x01u"),
    "two values": whole(b"K\x01K\x01"),
    "no value": whole(),
    "a mark at the end": whole(b"K\x01("),
    "no mark": whole(b"K\x01t"),
    "protocol 6": b"\x80\x06K\x01.",
    "protocol 0": b"I1\n.",
    "an opcode that there is not": whole(b"\xff"),
    "an extension of copyreg": whole(b"\x82\x01"),
    "a buffer outside": b"\x80\x05\x97.",
    "an empty file": b"",
    "a frame that is longer": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
    "text that is longer": whole(b"X\xff\xff\xff\xffabc"),
    "bytes that are longer": b"\x80\x04\x8e" + b"\xff" * 8 + b"N.",
    "an integer of a negative size": whole(b"\x8b\xff\xff\xff\xff"),
    "an integer of many bytes": whole(b"\x8b\x00\x00\x01\x00" + b"\x01" * (1 << 16)),
    "text that is no UTF-8": whole(b"X\x01\x00\x00\x00\xff"),
    "a name that is no UTF-8": whole(b"c\xff\nx\n"),
    "a name without an end": whole(b"c" + b"a" * 5000),
    "a list in itself": whole(b"]q\x00h\x00a"),
    "a dict in itself, further down": whole(b"}q\x00K\x01]h\x00as"),
    "a deep list": whole(b"]" * 5000 + b"a" * 4999),
    "a deep tuple": whole(b")" + b"\x85" * 5000),
    "a shared bomb": whole(b"]" + b"q\x00(h\x00h\x00t" * 60),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_a_typed_error(name: str) -> None:
    with pytest.raises(CorruptError) as error:
        read_pickle(LIES[name], TENSORS)
    assert len(str(error.value)) < 400


def many(part: Callable[[int], bytes], count: int) -> bytes:
    return whole(b"(", *map(part, range(count)), b"t")


WIDE = ("a" * 50_000 + "\U0001f600").encode()
BOMBS: dict[str, Callable[[], bytes]] = {
    "lists": lambda: many(lambda _: b"]", 200_000),
    "lists of one": lambda: many(lambda _: b"]K\x01a", 100_000),
    "dicts": lambda: many(lambda _: b"}", 200_000),
    "dicts of one": lambda: many(lambda _: b"}K\x01K\x01s", 100_000),
    "sets": lambda: many(lambda _: b"\x8f", 100_000),
    "frozen sets": lambda: many(lambda _: b"(K\x01\x91", 100_000),
    "tuples of one": lambda: many(lambda _: b"N\x85", 200_000),
    "marks": lambda: whole(b"(" * 200_000, b"t" * 200_000),
    "marks that are dropped": lambda: whole(b"(" * 200_000, b"1" * 200_000, b"N"),
    "copies of the top": lambda: whole(b"(N", b"2" * 1_000_000, b"t"),
    "numbers": lambda: many(lambda i: b"J" + struct.pack("<i", 1000 + i), 200_000),
    "fractions": lambda: many(lambda i: b"G" + struct.pack(">d", i), 200_000),
    "long integers": lambda: many(lambda _: b"\x8a\xff" + b"\x01" * 255, 20_000),
    "wide text": lambda: many(lambda _: b"X" + struct.pack("<I", len(WIDE)) + WIDE, 40),
    "names": lambda: many(lambda i: b"cm%d\nx\n" % i, 50_000),
    "long names": lambda: many(lambda i: b"c%s%d\nx\n" % (b"m" * 900, i), 5_000),
    "unknown objects": lambda: many(lambda _: b"cm\nx\n)R", 50_000),
    "unknown objects of one kind": lambda: whole(b"cm\nx\nq\x000(", b"h\x00)R" * 100_000, b"t"),
    "unknown objects that call each other": lambda: whole(b"cm\nx\n", b")R" * 200_000),
    "items of an unknown object": lambda: whole(b"cm\nx\n)R(", b"N" * 500_000, b"e"),
    "pairs of an unknown object": lambda: whole(b"cm\nx\n)R(", b"NN" * 300_000, b"u"),
    "places of the memo": lambda: whole(
        b"N", *(b"r" + struct.pack("<I", (i * 2_654_435_761) % (1 << 32)) for i in range(100_000))
    ),
    "keys": lambda: whole(
        b"}(", *(b"J" + struct.pack("<i", i) + b"N" for i in range(100_000)), b"u"
    ),
    "storages": lambda: whole(
        STORAGE + b"0" + STORAGE * 1, *(b"0" + STORAGE for _ in range(10_000))
    ),
    "copies of a list as dicts": lambda: whole(
        b"](" + b"](NNe" * 2000 + b"eq\x000(",
        (named("collections.OrderedDict") + b"h\x00\x85R") * 2000,
        b"t",
    ),
    "copies of a list as sets": lambda: whole(
        b"](" + b"".join(b"J" + struct.pack("<i", i) for i in range(20_000)) + b"eq\x000(",
        (named("builtins.set") + b"h\x00\x85R") * 2000,
        b"t",
    ),
    "copies of a text as bytes": lambda: whole(
        text("a" * 100_000) + b"q\x00" + text("latin1") + b"q\x0100(",
        (named("_codecs.encode") + b"h\x00h\x01\x86R") * 2000,
        b"t",
    ),
    "attributes of a namespace": lambda: whole(
        call("argparse.Namespace"),
        b"}(" + b"".join(text(str(i)) + b"N" for i in range(100_000)) + b"ub",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_memory_is_bounded(name: str) -> None:
    data = BOMBS[name]()
    tracemalloc.start()
    begin = time.process_time()
    with contextlib.suppress(CorruptError):
        read_pickle(data, TENSORS, memory_max_bytes=MEMORY_BYTES)
    seconds = time.process_time() - begin
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * MEMORY_BYTES + len(data)
    assert seconds < 20


def test_a_bomb_is_refused_with_its_place() -> None:
    with pytest.raises(CorruptError, match=r"more than 4 MiB of memory at byte [\d,]+ of"):
        read_pickle(BOMBS["lists"](), TENSORS, memory_max_bytes=MEMORY_BYTES)


MODULUS = (1 << 61) - 1  # integers that differ by it hash alike
SLOW = {
    "integers that hash alike": lambda: whole(
        b"}(", *(number(i * MODULUS) + b"N" for i in range(50_000)), b"u"
    ),
    "tuples as keys": lambda: whole(
        b"}(", *(b"J" + struct.pack("<i", i) + b"\x85N" for i in range(50_000)), b"u"
    ),
    "a long tuple as a key": lambda: whole(b"}(", b"N" * 100_000, b"tNs"),
}


@pytest.mark.parametrize("name", SLOW)
def test_keys_that_may_hash_alike_are_refused(name: str) -> None:
    with pytest.raises(CorruptError, match="a key is"):
        read_pickle(SLOW[name](), TENSORS)


def honest() -> bytes:
    state = {
        "w": torch.ones(3, 4).t(),
        "p": torch.nn.Parameter(torch.ones(2)),
        "n": {"a": [1, (2.5, "x"), {3}, b"y"], "array": np.arange(4), "big": 1 << 200},
    }
    file = io.BytesIO()
    torch.save(state, file)
    data = file.getvalue()
    begin = data.index(b"\x80\x02}")
    return data[begin : data.index(b"PK", begin)]


def test_each_cut_is_a_typed_error() -> None:
    data = honest()[: read_pickle(honest(), TENSORS).end]
    for length in range(len(data)):
        with pytest.raises(CorruptError):
            read_pickle(data[:length], TENSORS)


def test_changed_bytes_are_read_or_a_typed_error() -> None:
    chance = random.Random(7)
    data, read = honest(), 0
    for _ in range(20_000):
        changed = bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 8))):
            changed[chance.randrange(len(data))] = chance.randrange(256)
        with contextlib.suppress(CorruptError):
            read_pickle(bytes(changed), TENSORS)
            read += 1
    assert 0 < read < 20_000


def test_depth_within_the_bound_is_read() -> None:
    depth = DEPTH_MAX - 1
    assert read_pickle(whole(b"]" * depth + b"K\x01" + b"a" * depth), TENSORS).root
