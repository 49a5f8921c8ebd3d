"""The docstrings of the public API name each argument, result and error; their examples run.

Public is what the reference shows, `holdfast.integrations.dcp` and `holdfast.testing`.
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.staging import AsyncStager

import holdfast
import holdfast.integrations.dcp as dcp_front
from holdfast import testing

from .blocks import ROOT, Block
from .run import run_blocks

SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Example")
HEADING = re.compile(rf"^({'|'.join(SECTIONS)})(?:::?)$", re.MULTILINE)
PLACES = {"integrations.dcp": dcp_front, "testing": testing}  # besides holdfast itself
# These raise nothing. Most are results, which a call returns.
RAISE_NOTHING = {
    "Conversion",
    "Copied",
    "Damage",
    "Loss",
    "Lost",
    "Pass",
    "Repair",
    "TensorInfo",
    "Verified",
}
RAISE_NOTHING |= {"LoadReport", "Progress", "Trial", "Trials", "SaveHandle", "testing.Fault"}
RAISE_NOTHING |= {
    "Alert",
    "Event",
    "Pruned",
    "Event.as_dict",
    "redacted",
    "Value",
    "Checkpointer.report",
    "Checkpoint.names",
    "Checkpoint.objects",
    "DataState.sampler",
    "Keep.all",
}
RAISE_NOTHING |= {"testing.recording", "integrations.dcp.install", "integrations.dcp.Routing"}
RAISE_NOTHING |= {"integrations.dcp.Routing.remove"}
# What DCP calls: its own documentation says when.
OF_DCP = (StorageReader, StorageWriter, AsyncStager)

# What examples take for granted; each runs in a directory of its own.
BEFORE = """
import errno, itertools, os, pathlib
import torch, holdfast
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch.utils.data import DataLoader
from holdfast import Keep
from holdfast.testing import Fault, faulty, recording
import torch.distributed.checkpoint as dcp
from holdfast.integrations.dcp import HoldfastReader, HoldfastWriter, install
numbers = itertools.count()
def run(code, where):
    here = pathlib.Path(f"example-{next(numbers)}").absolute()
    here.mkdir()
    os.chdir(here)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    def train():
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    train()
    state = {"model": model, "optimizer": optimizer}
    for step in (1000, 2000):
        holdfast.save(state, f"runs/a/step-{step:08d}", step=step)
    only = {"include": "model", "strip": "model."}
    holdfast.export_checkpoint("runs/a/step-00001000", "llama.safetensors", **only)
    key = Ed25519PrivateKey.generate()
    pem = (form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    pathlib.Path("release.pem").write_bytes(key.private_bytes(*pem))
    names = {"torch": torch, "holdfast": holdfast, "DataLoader": DataLoader, "Keep": Keep}
    names |= {"model": model, "optimizer": optimizer, "state": state, "train": train}
    names |= {"errno": errno, "Fault": Fault, "faulty": faulty, "recording": recording}
    names |= {"dcp": dcp, "HoldfastReader": HoldfastReader, "HoldfastWriter": HoldfastWriter}
    names |= {"install": install, "state_dict": {"model": model.state_dict()}}
    exec(compile(code, where, "exec"), names | {"dataset": list(range(16)), "steps": 2002})
    os.chdir(here.parent)
"""


def public() -> dict[str, Any]:
    """Return every public function and class, by its name below holdfast."""
    named = {name: getattr(holdfast, name) for name in [*holdfast.__all__, "open"]}
    named |= {f"codecs.{name}": getattr(holdfast.codecs, name) for name in holdfast.codecs.__all__}
    kinds = vars(holdfast.errors).items()
    named |= {f"errors.{name}": kind for name, kind in kinds if isinstance(kind, type)}
    for place, module in PLACES.items():
        named |= {f"{place}.{name}": getattr(module, name) for name in module.__all__}
    return {name: thing for name, thing in named.items() if callable(thing)}


def members_shown() -> dict[str, list[str]]:
    """Return which members of a class the reference shows, where it does not show all."""
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    shown = re.findall(r"^::: holdfast\.(\S+)\n    options: {members: (.+)}$", page, re.MULTILINE)
    return {name: re.findall(r"\w+", members) for name, members in shown}


def own_members(kind: type) -> dict[str, Any]:
    """Return the members of a class, and of those of holdfast that it is made from."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] == "holdfast":
            found |= vars(base)
    return found


def methods() -> dict[str, Callable[..., Any]]:
    """Return the public methods of the public classes."""
    found: dict[str, Callable[..., Any]] = {}
    shown = members_shown()
    for name, kind in public().items():
        for key, value in own_members(kind).items() if isinstance(kind, type) else ():
            method = getattr(value, "__func__", value)  # a static one
            if not inspect.isfunction(method) or key.startswith("_"):
                continue
            is_of_dcp = name.startswith("integrations.") and any(hasattr(k, key) for k in OF_DCP)
            if key in shown.get(name, [key]) and not is_of_dcp:
                found[f"{name}.{key}"] = method
    return found


THINGS = public()
CALLED = THINGS | methods()
ERRORS = [name for name in THINGS if name.startswith("errors.")]


def sections_of(text: str) -> dict[str, str]:
    """Return the sections of a docstring by their heading; "" is what stands before them."""
    parts = HEADING.split(inspect.cleandoc(text))
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def parameters_of(thing: Callable[..., Any]) -> list[str]:
    """Return the public parameters of a call; none of a class that users do not make."""
    own = vars(thing).get("__init__") if isinstance(thing, type) else thing
    if own is None or thing is holdfast.SaveHandle:  # which `save_async` makes
        return []
    names = [name for name in inspect.signature(own).parameters if not name.startswith("_")]
    return [name for name in names if name != "self"]


def owner_of(name: str) -> type | None:
    """Return the class that a method is of; None for anything else."""
    owner = THINGS.get(name.rpartition(".")[0])
    return owner if isinstance(owner, type) else None


def arguments_in(sections: dict[str, str]) -> set[str]:
    """Return the names that the docstring says something of."""
    told = "\n".join(sections.get(name, "") for name in ("Args", "Attributes"))
    rows = re.findall(r"^    (\w+(?:, \w+)*): \S", told, re.MULTILINE)
    marked = re.findall(r"``(\w+)``", sections[""])
    return {name for row in rows for name in row.split(", ")} | set(marked)


def faults_of(name: str, thing: Callable[..., Any]) -> Iterator[str]:
    """Yield what a docstring lacks."""
    if not thing.__doc__:
        yield "no docstring"
        return
    sections = sections_of(thing.__doc__)
    lacking = set(parameters_of(thing)) - arguments_in(sections)
    yield from (f"the argument {argument} is not described" for argument in sorted(lacking))
    is_called = not isinstance(thing, type)
    result = inspect.signature(thing).return_annotation if is_called else None
    says = re.match(r"[^.]*\b([Rr]eturns?|Yield)\b", sections[""])
    if result not in (None, "None") and "Returns" not in sections and not says:
        yield "what it returns is not said"
    if name in ERRORS:
        return
    if (name in RAISE_NOTHING) == ("Raises" in sections):
        yield "what it raises is not said" if name not in RAISE_NOTHING else "it raises something"
    shown = example_of((owner_of(name) or thing).__doc__ or "")
    if not shown or (owner_of(name) and f".{name.rpartition('.')[2]}(" not in shown):
        yield "no example"


def example_of(text: str) -> str:
    """Return the code of a docstring's example; "" if there is none."""
    example = sections_of(text).get("Example", "")
    inline = re.search(r"``(.+?)``", example, re.DOTALL)
    is_block = re.search(r"^Example::$", inspect.cleandoc(text), re.MULTILINE)
    return textwrap.dedent(example) if is_block else inline[1] if inline else ""


@pytest.mark.parametrize("name", CALLED)
def test_a_docstring_names_arguments_results_errors_and_an_example(name: str) -> None:
    assert [*faults_of(name, CALLED[name])] == []


def test_a_docstring_that_lacks_something_is_found() -> None:
    def bare(path: str, codec: str) -> int:
        """Do it.

        Args:
            path: directory.
        """
        return len(path + codec)

    assert [*faults_of("save", bare)] == [
        "the argument codec is not described",
        "what it returns is not said",
        "what it raises is not said",
        "no example",
    ]
    found = [*faults_of("Checkpoint.absent", bare)]
    assert found[-1] == "no example", "its class has one, which does not call it"
    bare.__doc__ = "Return it.\n\nRaises:\n    OptionError: never.\n"
    assert [*faults_of("Keep.all", bare)][-1] == "it raises something"
    bare.__doc__ = None
    assert [*faults_of("save", bare)] == ["no docstring"]


def test_the_examples_of_docstrings_run(tmp_path: Path) -> None:
    found = {name: example_of(thing.__doc__ or "") for name, thing in THINGS.items()}
    codes = {name: code for name, code in found.items() if code}
    assert codes.keys() >= THINGS.keys() - set(ERRORS)
    blocks = [Block(name, 1, "python", f"run({c!r}, {name!r})") for name, c in codes.items()]
    run_blocks(tmp_path, blocks, before=BEFORE)


def test_an_example_that_fails_is_found(tmp_path: Path) -> None:
    code = example_of("Do it.\n\nExample:\n    ``holdfast.load('nowhere', into=state)``\n")
    with pytest.raises(AssertionError, match="NotCommittedError"):
        block = Block("load", 1, "python", f"run({code!r}, 'load')")
        run_blocks(tmp_path, [block], before=BEFORE)
