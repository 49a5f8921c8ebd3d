"""The style guide, as far as a machine can hold it. Each rule names the line that breaks it.

`faults_of` is a function of source text, so that each rule is also shown to fail when it is broken.
"""

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "holdfast"
FILES = sorted(SOURCE.rglob("*.py"))
NATIVE = sorted([*(ROOT / "core").rglob("*.[ch]*"), *(ROOT / "bindings").rglob("*.[ch]*")])

# The same in C++: each room of core/src, and which others it may include.
CORE = ROOT / "core" / "src"
NATIVE_ROOMS: dict[str, set[str]] = {"hash": set(), "io": {"hash"}, "codec": {"hash"}}
NATIVE_DEFINED_IN = {"kernel": "codec_kernel"}  # public headers whose source has another name

# A room may import rooms of lower layers and itself: never sideways, never up.
LAYERS = [
    {"brief", "cached", "errors", "processes", "streams", "threads", "version", "_core"},
    {"store_settings"},
    {"layout", "boxes", "options", "worker", "arguments"},
    {"format", "codecs", "stores", "group"},
    {"state", "plan"},
    {"engine"},
    {"faults", "chains", "data"},
    {"convert"},
    {"saving", "loading"},
    {"integrity", "runs"},
    {"__init__"},
    {"integrations", "tools", "report", "cli", "testing", "__main__"},
]
LAYER_OF = {room: depth for depth, rooms in enumerate(LAYERS) for room in rooms}
PUBLIC = 10

# Who may import torch, and which engine modules may know the group.
TORCH_ROOMS = {"state", "integrations", "tools"}
TORCH_FILES = {"engine/stage.py", "engine/place.py", "engine/pool.py", "engine/origin.py"}
TORCH_FILES |= {"engine/ahead.py", "engine/basis.py", "engine/read_pipeline.py", "faults/deep.py"}
TORCH_FILES |= {"engine/workspace.py", "engine/samples.py", "engine/staging.py"}
TORCH_FILES |= {"engine/device_copies.py"}
TORCH_FILES |= {"group/torch.py", "saving/save.py", "loading/load.py", "loading/checkpoint.py"}
TORCH_FILES |= {"loading/foreign.py", "loading/model.py"}
TORCH_FILES |= {"runs/checkpointer.py", "data/random_state.py", "data/data_state.py"}
TORCH_FILES |= {"chains/recompress.py", "chains/trial.py", "convert/own.py"}
TORCH_FILES |= {"convert/cast.py", "convert/export.py", "convert/as_transformers.py"}
TORCH_FILES |= {"convert/rebuild.py", "convert/dcp_metadata.py"}
GROUP_FILES = {"engine/exchange.py"}
EDGE_MAY_IMPORT = {
    "tools": {
        "brief",
        "convert",
        "format",
        "stores",
        "errors",
        "options",
        "layout",
        "integrations",
        "processes",
        "version",
        "_core",
    },
    "testing": {"format", "stores", "errors", "layout", "_core"},
    "report": {"tools", "format", "stores", "errors"},
    "cli": {"tools", "report", "errors", "version"},
    "__main__": {"cli"},
}

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
LINE_COLUMNS_MAX = 100
BUILTIN_ERRORS = {"Exception", "BaseException", "RuntimeError", "ValueError", "KeyError"}
BUILTIN_ERRORS |= {"TypeError", "OSError", "IndexError", "NotImplementedError"}
PICKLERS = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
DCP = "torch.distributed.checkpoint"  # its import costs every program that does not use it
DCP_ROOMS = {"integrations", "tools"}
# What makes tensors where, and of the dtype, that the program has set for its own: `torch.` these.
FACTORIES = {"arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye"}
FACTORIES |= {"full", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm"}
FACTORIES |= {"range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"}
VAGUE = re.compile(r"\b(utils?|helpers?|manager|misc|ckpt|blob)\b", re.IGNORECASE)
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


def room_of(name: str) -> str:
    """The folder under holdfast/, or the module's own name at the top level."""
    parts = Path(name).parts
    return parts[0] if len(parts) > 1 else Path(name).stem


def imports_of(name: str, tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """(line, room, whether it is ours) for each import; foreign ones by their top package."""
    depth = len(Path(name).parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            modules = [node.module] if node.module else [alias.name for alias in node.names]
            for module in modules:
                first = (module or "").split(".")[0]
                yield node.lineno, room_of(name) if node.level < depth else first, True
        elif isinstance(node, ast.ImportFrom):
            package, _, rest = (node.module or "").partition(".")
            ours = package == "holdfast"
            yield node.lineno, (rest.split(".")[0] or "__init__") if ours else package, ours
        elif isinstance(node, ast.Import):
            for alias in node.names:
                package, _, rest = alias.name.partition(".")
                ours = package == "holdfast"
                yield node.lineno, (rest.split(".")[0] or "__init__") if ours else package, ours


def import_faults(name: str, tree: ast.Module) -> Iterator[str]:
    here = room_of(name)
    for line, room, ours in imports_of(name, tree):
        if not ours:
            torch_allowed = here in TORCH_ROOMS or name in TORCH_FILES
            if room == "torch" and not torch_allowed:
                yield f"{name}:{line}: torch is imported outside its rooms"
            if room in PICKLERS:
                yield f"{name}:{line}: {room} runs code from a file"
            continue
        if room == here or room not in LAYER_OF:
            continue
        allowed = LAYER_OF[room] < LAYER_OF[here]
        if here in EDGE_MAY_IMPORT:
            allowed = room in EDGE_MAY_IMPORT[here] or LAYER_OF[room] == PUBLIC
        if here == "engine" and room == "group":
            allowed = name in GROUP_FILES
        if not allowed:
            yield f"{name}:{line}: {here} imports {room}"
    # What a store is behind its name is the affair of stores, and of those who test them.
    if here not in ("stores", "testing") and "LocalStore" in ast.dump(tree):
        yield f"{name}: LocalStore is named outside of stores"


def modules_of(name: str, tree: ast.Module, known: Collection[str]) -> Iterator[str]:
    """Every module of ours that one imports, at once, lazily or for its types."""
    package = name.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) + 1 - node.level], *(node.module or "").split(".")]
            for alias in node.names:
                first = "/".join(part for part in base if part)
                paths = (f"{first}/{alias.name}.py", f"{first}.py", f"{first}/__init__.py")
                found = (path.removeprefix("/") for path in paths)
                yield next((path for path in found if path in known), name)


def circles_of(texts: Mapping[str, str]) -> list[str]:
    """Say which modules import each other, however many lie between."""
    arrows = {
        name: set(modules_of(name, ast.parse(text), texts.keys())) - {name}
        for name, text in texts.items()
    }
    while leaves := {name for name, others in arrows.items() if not others & arrows.keys()}:
        arrows = {name: others for name, others in arrows.items() if name not in leaves}
    # What is left is in a circle, or leads to one.
    return [f"{name} → {', '.join(sorted(o & arrows.keys()))}" for name, o in arrows.items()]


def test_no_module_imports_itself_by_way_of_others() -> None:
    texts = {str(path.relative_to(SOURCE)): path.read_text() for path in FILES}
    assert circles_of(texts) == []


def test_a_circle_is_found() -> None:
    lazily = "def f():\n    from .b import x\n"
    assert circles_of({"a.py": lazily, "b.py": "from .c import y", "c.py": "from . import a"})
    assert (
        circles_of({"r/a.py": "from . import b", "r/b.py": "from ..s import c", "s/c.py": ""}) == []
    )
    assert circles_of({"r/__init__.py": "from .a import x", "r/a.py": "from . import y"})


def dcp_faults(name: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(module.startswith(DCP) for module in modules) and room_of(name) not in DCP_ROOMS:
            yield f"{name}:{node.lineno}: imports DCP"


def size_faults(name: str, text: str, tree: ast.Module) -> Iterator[str]:
    lines = text.splitlines()
    if len(lines) > FILE_LINES_MAX:
        yield f"{name}: {len(lines)} lines, at most {FILE_LINES_MAX}"
    for number, line in enumerate(lines, 1):
        if len(line) > LINE_COLUMNS_MAX:
            yield f"{name}:{number}: {len(line)} columns, at most {LINE_COLUMNS_MAX}"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines"


def word_faults(name: str, text: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            error = getattr(node.exc.func, "id", "")
            if error in BUILTIN_ERRORS:
                yield f"{name}:{node.lineno}: raises {error}; raise a HoldfastError"
    if text and not ast.get_docstring(tree):
        yield f"{name}: no module docstring"
    if VAGUE.search(Path(name).stem):
        yield f"{name}: a vague name"
    for number, line in enumerate(text.splitlines(), 1):
        if UNFINISHED.search(line):
            yield f"{name}:{number}: unfinished: {line.strip()}"


def factory_faults(name: str, tree: ast.Module) -> Iterator[str]:
    """A tensor follows torch.set_default_device and _dtype unless both are named.

    What is `_like` another has its device; frombuffer and from_numpy share memory of the host.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            for alias in node.names:
                if alias.name in FACTORIES or alias.name.endswith("_like"):
                    yield f"{name}:{node.lineno}: imports {alias.name}; call it as torch's"
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        factory, owner = node.func.attr, getattr(node.func.value, "id", "")
        wanted = {"device", "dtype"} if factory in FACTORIES else set()
        wanted |= {"dtype"} if factory.endswith("_like") else set()
        missing = wanted - {keyword.arg for keyword in node.keywords}
        if owner == "torch" and missing:
            names = " and ".join(f"{word}=" for word in sorted(missing))
            yield f"{name}:{node.lineno}: torch.{factory} without {names}"


def cached_faults(name: str, tree: ast.Module) -> Iterator[str]:
    """Before Python 3.12 `functools.cached_property` has a lock, which a forked child may need."""
    for node in ast.walk(tree):
        functools = isinstance(node, ast.ImportFrom) and node.module == "functools"
        if functools and "cached_property" in {alias.name for alias in node.names}:
            yield f"{name}:{node.lineno}: imports functools.cached_property; ours has no lock"


def faults_of(name: str, text: str) -> list[str]:
    """Every fault of one module; ``name`` is its path under src/holdfast/."""
    tree = ast.parse(text)
    return [
        *import_faults(name, tree),
        *dcp_faults(name, tree),
        *size_faults(name, text, tree),
        *word_faults(name, text, tree),
        *factory_faults(name, tree),
        *cached_faults(name, tree),
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_keeps_the_style(path: Path) -> None:
    assert faults_of(str(path.relative_to(SOURCE)), path.read_text()) == []


@pytest.mark.parametrize("path", NATIVE, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_native_file_keeps_the_style(path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines()
    assert len(lines) <= FILE_LINES_MAX
    assert [n for n, line in enumerate(lines, 1) if len(line) > LINE_COLUMNS_MAX] == []
    assert not UNFINISHED.search(text)
    if "core" in path.relative_to(ROOT).parts[0]:
        assert "Python.h" not in text and "nanobind" not in text


def native_arrows(name: str, text: str) -> list[str]:
    """Return the rooms of the core that a file of `core/src` includes and may not.

    ``name`` is its path there; a public header belongs to the room that defines its functions.
    """
    here = name.split("/")[0]
    wrong = []
    for public, path in re.findall(r'^#include "(holdfast/)?([\w/]+)\.h"', text, re.MULTILINE):
        stem = NATIVE_DEFINED_IN.get(path, path)
        sources = [f"{room}/{stem}" for room in NATIVE_ROOMS]
        there = [s for s in sources if (CORE / f"{s}.cpp").exists()] if public else [path]
        if not there or not {there[0].split("/")[0]} <= {here, *NATIVE_ROOMS[here]}:
            wrong.append(f"{name} includes {public}{path}.h")
    return wrong


def test_the_rooms_of_the_core_include_only_what_lies_below() -> None:
    files = sorted(CORE.rglob("*.[ch]*"))
    assert {path.relative_to(CORE).parts[0] for path in files} == set(NATIVE_ROOMS)
    for path in files:
        assert native_arrows(path.relative_to(CORE).as_posix(), path.read_text()) == []


def test_an_arrow_between_rooms_of_the_core_is_found() -> None:
    assert native_arrows("hash/a.cpp", '#include "io/beneath.h"')
    assert native_arrows("io/a.cpp", '#include "holdfast/lossless.h"')
    assert native_arrows("io/a.cpp", '#include "holdfast/kernel.h"')
    assert native_arrows("codec/a.cpp", '#include "scratch.h"')
    assert not native_arrows("codec/a.cpp", '#include "holdfast/checksum.h"\n#include <span>')


STATIC = re.compile(r"^\s+static (?!constexpr)[^()=;{]+[ &]\w+(\[\w*\])?\s*([={;]|\(\w+\);)")


def statics_of(text: str) -> list[str]:
    """Return statics of functions that are made when they are first met, under a hidden lock.

    A child that another thread forks right then waits for that lock for ever.
    """
    lines = text.splitlines()
    return [line.strip() for line in lines if STATIC.match(line) and "inline " not in line]


@pytest.mark.parametrize("path", NATIVE, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_native_is_made_when_it_is_first_met(path: Path) -> None:
    if "tests" not in path.parts:
        assert statics_of(path.read_text()) == []


def test_a_static_that_is_made_when_it_is_first_met_is_found() -> None:
    assert statics_of("  static const std::vector<int> all = make();")
    assert statics_of("  static std::mutex mutex;")
    assert statics_of("  static auto& held = *new std::vector<Held>;")
    assert not statics_of("  constinit static std::atomic<int> count = 0;")
    assert not statics_of("  static Status system(int error, const std::string& what);")


BROKEN = {
    "an import that points up": ("format/a.py", '"""A."""\nfrom ..engine.read import x\n'),
    "an import sideways": ("state/a.py", '"""A."""\nfrom ..plan.balance import assign\n'),
    "torch outside its rooms": ("format/a.py", '"""A."""\nimport torch\n'),
    "the group in a store": ("stores/a.py", '"""A."""\nfrom ..group.base import Group\n'),
    "the group in the writer": ("engine/write.py", '"""A."""\nfrom ..group.base import Group\n'),
    "the engine in a tool": ("tools/a.py", '"""A."""\nfrom ..engine.read import x\n'),
    "the engine in a tool, absolutely": ("tools/a.py", '"""A."""\nimport holdfast.engine.read\n'),
    "DCP outside its integration": (
        "state/a.py",
        '"""A."""\nfrom torch.distributed.checkpoint.metadata import Metadata\n',
    ),
    "one kind of store in a room": (
        "engine/a.py",
        '"""A."""\nfrom ..stores.local import LocalStore\n',
    ),
    "pickle": ("state/a.py", '"""A."""\nimport pickle\n'),
    "a long file": ("layout.py", '"""A."""\n' + "x = 1\n" * 400),
    "a long function": ("layout.py", '"""A."""\ndef f():\n' + "    x = 1\n" * 61),
    "a long line": ("layout.py", '"""A."""\nx = "' + "x" * 100 + '"\n'),
    "an error that is not ours": ("layout.py", '"""A."""\nraise ValueError("no")\n'),
    "a tensor on the default device": (
        "state/a.py",
        '"""A."""\nimport torch\nx = torch.empty(3, dtype=torch.uint8)\n',
    ),
    "a tensor of the default dtype": (
        "state/a.py",
        '"""A."""\nimport torch\nx = torch.zeros_like(y)\n',
    ),
    "a factory by its bare name": ("state/a.py", '"""A."""\nfrom torch import empty\n'),
    "a cached property with a lock": (
        "state/a.py",
        '"""A."""\nfrom functools import cached_property\n',
    ),
    "no docstring": ("layout.py", "x = 1\n"),
    "a vague name": ("format/utils.py", '"""A."""\n'),
    "unfinished work": ("layout.py", '"""A."""\nx = 1  # ' + "TO" + "DO: more\n"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_each_rule_fails_when_it_is_broken(what: str) -> None:
    name, text = BROKEN[what]
    assert len(faults_of(name, text)) == 1


def test_the_stub_and_the_native_module_have_the_same_names() -> None:
    import holdfast._core as core

    def public(names: object) -> set[str]:
        return {name for name in names if not name.startswith("_")}  # type: ignore[attr-defined]

    stub = ast.parse((SOURCE / "_core.pyi").read_text())
    functions = [n.name for n in stub.body if isinstance(n, ast.FunctionDef)]
    classes = {n.name: n for n in stub.body if isinstance(n, ast.ClassDef)}
    assert public(dir(core)) == public([*functions, *classes])
    for name, node in classes.items():
        members = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
        assert public(dir(getattr(core, name))) == public(members)
