"""The public surface, whole: a new name here is a decision, not an accident."""

import pickle
import subprocess
import sys

import holdfast

NAMES = [
    "Alert",
    "Alerts",
    "Checkpoint",
    "Checkpointer",
    "Conversion",
    "Copied",
    "Damage",
    "DataState",
    "Event",
    "Keep",
    "LoadReport",
    "Loss",
    "Lost",
    "Options",
    "Pass",
    "Progress",
    "Pruned",
    "RandomState",
    "Repair",
    "SaveHandle",
    "Shard",
    "StoreSettings",
    "TensorInfo",
    "Trial",
    "Trials",
    "Value",
    "Verified",
    "__version__",
    "check_run",
    "codecs",
    "copy_checkpoint",
    "errors",
    "export_checkpoint",
    "import_checkpoint",
    "load",
    "load_model",
    "prune",
    "rebase",
    "recompress",
    "redacted",
    "repair",
    "save",
    "save_async",
    "scrub",
    "sign",
    "signer",
    "try_codecs",
    "verify",
]
ERRORS = {
    "HoldfastError": "Exception",
    "StateError": "HoldfastError",
    "MismatchError": "HoldfastError",
    "StoreError": "HoldfastError",
    "NoSpaceError": "StoreError",
    "NotCommittedError": "HoldfastError",
    "ReplacedError": "NotCommittedError",
    "AlreadyCommittedError": "HoldfastError",
    "FencedError": "HoldfastError",
    "OptionError": "HoldfastError",
    "CorruptError": "HoldfastError",
    "TrustError": "CorruptError",
    "VersionError": "HoldfastError",
    "BusyError": "HoldfastError",
    "CancelledError": "HoldfastError",
    "PeerError": "HoldfastError",
}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_names() -> None:
    assert holdfast.__all__ == NAMES
    assert dir(holdfast) == sorted([*NAMES, "open"]), "open is public, but shadows no builtin"
    for name in dir(holdfast):
        if name != "__version__":
            assert getattr(holdfast, name).__doc__, f"{name} has no docstring"


def test_what_is_public_says_that_it_is_of_holdfast() -> None:
    homes = {name: getattr(getattr(holdfast, name), "__module__", "") for name in dir(holdfast)}
    assert set(homes.values()) == {"holdfast", ""}, homes
    assert {name for name, home in homes.items() if not home} == {"__version__", "codecs", "errors"}
    code = "from holdfast import save_async; print(save_async.__globals__['SaveHandle'].__module__)"
    assert run(code) == "holdfast", "of a class too that nobody has asked for by name"


def test_a_star_import_shadows_no_builtin() -> None:
    code = """
import builtins
before = set(dir()) & set(dir(builtins))
from holdfast import *
print("open" in dir(), set(dir()) & set(dir(builtins)) == before)
"""
    assert run(code) == "False True"


def test_the_error_tree() -> None:
    found = {
        name: value.__base__.__name__
        for name, value in vars(holdfast.errors).items()
        if isinstance(value, type)
    }
    assert found == ERRORS


def test_every_error_can_be_sent_to_another_process() -> None:
    for name in ERRORS:
        kind = getattr(holdfast.errors, name)
        error = kind("text", rank=2, cause="theirs") if name == "PeerError" else kind("text")
        error.add_note("a note")
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (kind, "text", vars(error))


def test_the_package_and_its_format_do_not_load_torch() -> None:
    code = "import sys, holdfast.format.manifest; print('torch' in sys.modules)"
    assert run(code) == "False"


def test_the_format_costs_little_more_than_numpy() -> None:
    """The bound is of imports counted, not of time: a loaded machine must not fail it."""
    code = """
import sys, numpy
before = set(sys.modules)
import holdfast.format.manifest
print(len([m for m in set(sys.modules) - before if not m.startswith("holdfast")]))
"""
    assert int(run(code)) <= 20
