"""Pickles, read without Python's unpickler: no name in a file is imported, and no callable runs.

A pickle is a program for a stack machine. This one makes plain data, and an `Inert` of all else.

1. A name of the file is looked up in the caller's tables and nowhere else.
2. Each opcode is charged for the memory that it takes.
3. No step recurses, and each takes time in proportion to what it reads or makes.
4. The result is a tree of bounded depth, and takes no more steps to walk than to read.
"""

import struct
from collections.abc import Callable
from typing import Any

from .inert import Names, Pickled, check_tree
from .machine import I32, INTEGER_BYTES_MAX, U16, U32, U64, Machine

MEMORY_MAX_BYTES = 256 << 20  # what a pickle may take beyond its own bytes, as it is charged
PROTOCOL_MAX = 5


def read_pickle(
    data: "bytes | memoryview",
    names: Names,
    *,
    memory_max_bytes: int = MEMORY_MAX_BYTES,
) -> Pickled:
    """Read one pickle; run nothing.

    Raises:
        CorruptError: it is damaged, takes too much memory, or is none that a checkpoint needs.
    """
    machine = Machine(data, names, memory_max_bytes)
    root = _run(machine)
    check_tree(root)
    return Pickled(root, frozenset(machine.unknown), machine.at)


def _run(machine: Machine) -> Any:
    """Run until STOP; return what is on top."""
    data = machine.data
    try:
        while True:
            code = data[machine.at]
            machine.at += 1
            if code == _STOP:
                break
            machine.room -= _COSTS[code]
            if machine.room < 0:
                machine.charge(0)
            _HANDLERS[code](machine)
        root = machine.stack.pop()
    except IndexError:
        raise machine.fault("it ends, or its stack is empty, too early") from None
    except (struct.error, UnicodeDecodeError) as error:
        raise machine.fault(str(error)) from None
    if machine.stack or machine.below:
        raise machine.fault("it leaves more than one value")
    return root


def _protocol(machine: Machine) -> None:
    version = machine.byte()
    if version > PROTOCOL_MAX:
        raise machine.fault(f"its protocol is {version}; expected {PROTOCOL_MAX} at most")


def _frame(machine: Machine) -> None:
    count = machine.number(U64)
    if count > len(machine.data) - machine.at:
        raise machine.fault(f"a frame of {count:,} bytes is announced, and fewer are left")


def _unknown(machine: Machine) -> None:
    machine.at -= 1
    code = machine.data[machine.at]
    raise machine.fault(
        f"opcode {code:#04x} is unknown, or belongs to protocols 0 and 1; expected protocol 2 to 5"
    )


def _mark(machine: Machine) -> None:
    machine.below.append(machine.stack)
    machine.stack = []


def _pop(machine: Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.stack = machine.below.pop()


def _pushes(make: Callable[[], Any]) -> "Callable[[Machine], None]":
    return lambda machine: machine.stack.append(make())


# {opcode: (cost in bytes, handler)}. A reference on the stack, or in what is made of it, takes 16.
_TABLE: dict[int, tuple[int, Callable[[Machine], None]]] = {
    0x80: (0, _protocol),
    0x95: (0, _frame),
    ord("("): (88, _mark),
    ord("0"): (0, _pop),
    ord("1"): (0, lambda m: m.drop()),
    ord("2"): (16, lambda m: m.stack.append(m.top())),
    # Constants and numbers.
    ord("N"): (16, _pushes(lambda: None)),
    0x88: (16, _pushes(lambda: True)),
    0x89: (16, _pushes(lambda: False)),
    ord("J"): (48, lambda m: m.stack.append(m.number(I32))),
    ord("K"): (16, lambda m: m.stack.append(m.byte())),
    ord("M"): (48, lambda m: m.stack.append(m.number(U16))),
    0x8A: (48 + INTEGER_BYTES_MAX, lambda m: m.long(m.byte())),
    0x8B: (48 + INTEGER_BYTES_MAX, lambda m: m.long(m.number(I32))),
    ord("G"): (48, lambda m: m.real()),
    # Text and bytes.
    0x8C: (80, lambda m: m.text(m.byte())),
    ord("X"): (80, lambda m: m.text(m.number(U32))),
    0x8D: (80, lambda m: m.text(m.number(U64))),
    ord("C"): (64, lambda m: m.binary(m.byte())),
    ord("B"): (64, lambda m: m.binary(m.number(U32))),
    0x8E: (64, lambda m: m.binary(m.number(U64))),
    0x96: (80, lambda m: m.binary(m.number(U64), bytearray)),
    # Containers.
    ord(")"): (16, _pushes(tuple)),
    0x85: (80, lambda m: m.group(1)),
    0x86: (80, lambda m: m.group(2)),
    0x87: (80, lambda m: m.group(3)),
    ord("t"): (80, lambda m: m.marked_group()),
    ord("]"): (88, _pushes(list)),
    ord("a"): (40, lambda m: m.append()),
    ord("e"): (0, lambda m: m.extend(m.marked())),
    ord("}"): (88, _pushes(dict)),
    ord("s"): (80, lambda m: m.set_item()),
    ord("u"): (0, lambda m: m.set_items(m.marked())),
    0x8F: (240, _pushes(set)),
    0x90: (0, lambda m: m.add(m.marked())),
    0x91: (240, lambda m: m.frozen()),
    # The memo.
    ord("q"): (144, lambda m: m.put(m.byte())),
    ord("r"): (144, lambda m: m.put(m.number(U32))),
    0x94: (144, lambda m: m.put(len(m.memo))),
    ord("h"): (16, lambda m: m.get(m.byte())),
    ord("j"): (16, lambda m: m.get(m.number(U32))),
    # Names and calls.
    ord("c"): (256, lambda m: m.named()),
    0x93: (256, lambda m: m.stack_named()),
    ord("R"): (256, lambda m: m.reduce()),
    0x81: (256, lambda m: m.reduce()),
    0x92: (256, lambda m: m.new_with_keywords()),
    ord("b"): (0, lambda m: m.build()),
    ord("Q"): (256, lambda m: m.persistent()),
}
_STOP = ord(".")
_HANDLERS = [_TABLE[code][1] if code in _TABLE else _unknown for code in range(256)]
_COSTS = [_TABLE[code][0] if code in _TABLE else 0 for code in range(256)]
