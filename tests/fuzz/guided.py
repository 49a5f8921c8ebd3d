"""Fuzz a parser in Python, guided by what it reaches: ``python -m fuzz.guided header CORPUS``.

Arguments behind the name of the target are libFuzzer's, as atheris takes them; the last names the
directory of inputs, which gets those that the golden files give.
"""

import hashlib
import sys
from pathlib import Path
from types import FunctionType

import atheris

from . import parsers

WATCHED = ("holdfast.format.", "holdfast.boxes", "holdfast.layout")


def watch() -> None:
    """Let atheris see what runs. Its own way of importing passes an editable install by."""
    modules = [module for name, module in sys.modules.items() if name.startswith(WATCHED)]
    for module in modules:
        for thing in [*vars(module).values()]:
            inner = [*vars(thing).values()] if isinstance(thing, type) else [thing]
            for function in inner:
                if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                    atheris.instrument_func(function)


def main() -> None:
    """Run until libFuzzer's limits."""
    watch()
    name = sys.argv.pop(1)
    for data in parsers.seeds(name):
        Path(sys.argv[-1], hashlib.sha1(data).hexdigest()).write_bytes(data)
    target = parsers.Directory() if name == "checkpoint" else getattr(parsers, name)
    atheris.Setup(sys.argv, target)
    try:
        atheris.Fuzz()
    finally:
        if name == "checkpoint":
            target.close()


if __name__ == "__main__":
    main()
