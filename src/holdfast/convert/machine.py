"""The stack machine behind `pickles.py`: what each opcode of a pickle does. Runs nothing.

It makes plain data of the names that its caller lists, and an `Inert` of every other name. Each
step is charged for the memory that it takes.
"""

import struct
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ..errors import CorruptError
from .inert import (
    RENAMED,
    Buildable,
    Global,
    Inert,
    Names,
    is_attributes,
    is_quick,
    kind_of,
)

INTEGER_BYTES_MAX = 256  # 2048 bits: a generator's state has 128
NAME_BYTES_MAX = 1000
KEY_TUPLES_MAX = 4096  # tuples hash alike where a file wants them to
U16, I32, U32, U64 = (struct.Struct(form) for form in ("<H", "<i", "<I", "<Q"))
_F64 = struct.Struct(">d")


class Machine:
    """The stack machine. Handlers are named by their opcodes in pickletools."""

    def __init__(self, data: "bytes | memoryview", names: Names, memory_max_bytes: int) -> None:
        self.data, self.names, self.at = memoryview(data).cast("B"), names, 0
        self.memory_max_bytes = self.room = memory_max_bytes
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under each mark
        self.memo: dict[int, Any] = {}
        self.unknown: set[str] = set()
        self.tuple_keys = 0

    def fault(self, what: str) -> CorruptError:
        return CorruptError(f"the pickle is damaged at byte {self.at:,}: {what}")

    def charge(self, cost: int) -> None:
        """Take memory out of what is left."""
        self.room -= cost
        if self.room < 0:
            raise CorruptError(
                f"the pickle needs more than {self.memory_max_bytes >> 20:,} MiB of memory at byte "
                f"{self.at:,} of {len(self.data):,}; expected a small one, since tensors are "
                "stored beside it"
            )

    # Bytes of the file.

    def take(self, count: int) -> memoryview:
        found = self.data[self.at : self.at + count]
        if len(found) != count:
            raise self.fault(f"{count:,} bytes are announced and {len(found):,} are left")
        self.at += count
        return found

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def number(self, form: struct.Struct) -> int:
        (found,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return int(found)

    def line(self) -> str:
        text = bytes(self.data[self.at : self.at + NAME_BYTES_MAX])
        end = text.find(b"\n")
        if end < 0:
            raise self.fault(f"a name has no end within {NAME_BYTES_MAX} bytes")
        self.at += end + 1
        return text[:end].decode()

    def text(self, count: int) -> None:
        raw = bytes(self.taken_after_charge(count))
        if not raw.isascii():
            self.charge(4 * count)  # one wide character makes all of them wide
        self.stack.append(raw.decode("utf-8", "surrogatepass"))

    def taken_after_charge(self, count: int) -> memoryview:
        if count > len(self.data):
            raise self.fault(f"{count:,} bytes are announced, of {len(self.data):,} in all")
        self.charge(2 * count)
        return self.take(count)

    # The stack.

    def marked(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def drop(self) -> None:
        self.stack = self.below.pop()

    def top(self) -> Any:
        return self.stack[-1]

    # Values.

    def long(self, count: int) -> None:
        if not 0 <= count <= INTEGER_BYTES_MAX:
            raise self.fault(
                f"an integer has {count:,} bytes; expected {INTEGER_BYTES_MAX} at most"
            )
        self.stack.append(int.from_bytes(self.take(count), "little", signed=True))

    def real(self) -> None:
        (found,) = _F64.unpack_from(self.data, self.at)
        self.at += 8
        self.stack.append(found)

    def binary(self, count: int, kind: Callable[[memoryview], Any] = bytes) -> None:
        self.stack.append(kind(self.taken_after_charge(count)))

    def group(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError
        items = tuple(self.stack[len(self.stack) - count :]) if count else ()
        del self.stack[len(self.stack) - len(items) :]
        self.stack.append(items)

    def marked_group(self) -> None:
        items = self.marked()
        self.charge(16 * len(items))
        self.stack.append(tuple(items))

    def append(self) -> None:
        item = self.stack.pop()
        self.extend([item])

    def extend(self, items: list[Any]) -> None:
        target = self.top()
        if type(target) is Inert:
            target.items = target.items or []
            target = target.items
        if type(target) is not list:
            raise self.fault(f"it appends to {kind_of(target)}")
        self.charge(16 * len(items))
        target.extend(items)

    def add(self, items: list[Any]) -> None:
        target = self.top()
        if type(target) is Inert:
            self.extend(items)
            return
        if type(target) is not set:
            raise self.fault(f"it adds to {kind_of(target)}")
        self.charge(112 * len(items))
        for item in items:
            self.check_key(item)
            target.add(item)

    def frozen(self) -> None:
        items = self.marked()
        self.charge(112 * len(items))
        for item in items:
            self.check_key(item)
        self.stack.append(frozenset(items))

    def set_item(self) -> None:
        value = self.stack.pop()
        self.set_items([self.stack.pop(), value])

    def set_items(self, items: list[Any]) -> None:
        target = self.top()
        pairs = list(zip(items[::2], items[1::2], strict=False))
        if len(items) % 2:
            raise self.fault("a key has no value")
        self.charge(144 * len(pairs))
        if type(target) is Inert:
            target.pairs = target.pairs or []
            target.pairs.extend(pairs)
        elif type(target) in (dict, OrderedDict):
            for key, value in pairs:
                self.check_key(key)
                target[key] = value
        else:
            raise self.fault(f"it sets items of {kind_of(target)}")

    def check_key(self, key: Any) -> None:
        """Check that a key is quickly hashed and compared, and that few can hash alike."""
        if type(key) is str:
            return
        self.tuple_keys += type(key) is tuple
        if not is_quick(key) or self.tuple_keys > KEY_TUPLES_MAX:
            raise self.fault(
                f"a key is {kind_of(key)}; expected text, a number below 2^60, or a short tuple of "
                f"these ({KEY_TUPLES_MAX:,} at most)"
            )

    # The memo.

    def put(self, place: int) -> None:
        self.memo[place] = self.top()

    def get(self, place: int) -> None:
        if place not in self.memo:
            raise self.fault(f"place {place:,} of its memo is empty")
        self.stack.append(self.memo[place])

    # Names and calls.

    def found(self, module: str, name: str) -> None:
        known = RENAMED.get(module, module)
        dotted = f"{known}.{name}"
        self.charge(4 * len(dotted))
        constants = self.names.constants
        self.stack.append(constants[dotted] if dotted in constants else Global(known, name))

    def named(self) -> None:
        module = self.line()
        self.found(module, self.line())

    def stack_named(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str or len(name + module) > NAME_BYTES_MAX:
            raise self.fault("a name is no short text")
        self.found(module, name)

    def reduce(self) -> None:
        args = self.stack.pop()
        self.stack.append(self.called(self.stack.pop(), args, {}))

    def new_with_keywords(self) -> None:
        kwargs, args = self.stack.pop(), self.stack.pop()
        self.stack.append(self.called(self.stack.pop(), args, kwargs))

    def called(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Make what a call stands for."""
        if type(args) is not tuple or type(kwargs) is not dict:
            raise self.fault(f"it calls with {kind_of(args)} and {kind_of(kwargs)}")
        if function == _NEW_WITH_KEYWORDS and len(args) == 3 and args[0] != function:
            return self.called(*args)
        if type(function) not in (Global, Inert):
            raise self.fault(f"it calls {kind_of(function)}")
        known = self.names.calls.get(str(function)) if isinstance(function, Global) else None
        try:
            made = known(self, *args) if known and not kwargs else Inert(function, args, kwargs)
        except TypeError:
            raise self.fault(f"{function} cannot take these {len(args)} arguments") from None
        if type(made) is Inert:
            self.unknown.add(made.name)
        return made

    def build(self) -> None:
        state = self.stack.pop()
        target = self.top()
        if type(target) is Inert:
            target.state = state
        elif isinstance(target, Buildable):
            target.build(state)
        elif type(target) is Namespace and is_attributes(state):
            self.charge(144 * len(state))
            vars(target).update(state)
        elif type(target) is not OrderedDict:  # whose attributes, as of state_dict(), are left out
            raise self.fault(f"it gives a state to {kind_of(target)}")

    def persistent(self) -> None:
        if self.names.persistent is None:
            raise self.fault("it refers to a part beside it, where there is none")
        self.stack.append(self.names.persistent(self.stack.pop()))


_NEW_WITH_KEYWORDS = Global("copyreg", "__newobj_ex__")
