"""Foreign checkpoints with anything in the place of anything: read, or a typed error.

What was read of a pickle is changed before it is understood, so that each check is met.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from convert.unpacked import unpacked
from holdfast.convert import dcp as dcp_source
from holdfast.convert import dcp_metadata, deepspeed, megatron, torch_file
from holdfast.convert.inert import Global, Inert
from holdfast.convert.kinds import open_source
from holdfast.convert.plain_calls import Array
from holdfast.convert.rebuild import Storage, StoredTensor
from holdfast.errors import HoldfastError
from holdfast.layout import whole

NewPath = Callable[[], Path]
CHANGES = 400  # of each checkpoint


def junk() -> list[Any]:
    held = Storage("0", torch.float32, 16)
    return [
        *(None, True, 3, -1, 1 << 70, 2.5, float("nan"), "", "x", "../x", "a\0b", b"x", [], {}, ()),
        *([[]], [None], {"x": 1}, {3: 4}, {None: 1}, ("a",), (1 << 62,), (-1,), {1, 2}, [1] * 9),
        *(Global("os", "system"), Inert(Global("a", "B"), ()), Array(), torch.Size((1 << 40,))),
        *(torch.int8, torch.device("cpu"), held),
        *(StoredTensor(held, 0, (4,), (1,), torch.float32), torch.Size((2, 2))),
        StoredTensor(Storage("99", torch.float32, 16), 0, (), (), torch.float32),
        StoredTensor(held, 0, (2, 2), (1, 2), torch.float32),
    ]


def places(value: Any) -> Iterator[Callable[[Any], None]]:
    """Ways to put something else in the place of each part of a value."""
    waiting = [value]
    while waiting:
        held = waiting.pop()
        fields: Any = held.state if type(held) is Inert else held
        if isinstance(fields, (dict, list)):
            keys = list(fields) if isinstance(fields, dict) else range(len(fields))
            for key in keys:
                yield lambda new, fields=fields, key=key: fields.__setitem__(key, new)
                waiting.append(fields[key])
        if type(held) is Inert:
            yield lambda new, held=held: setattr(held, "state", new)
        if isinstance(fields, dict):
            waiting += [key for key in fields if type(key) is Inert]


def change(value: Any, chance: random.Random) -> Any:
    """Change one part of what was read."""
    ways = list(places(value))
    if not ways or not chance.randrange(30):
        return chance.choice(junk())
    chance.choice(ways)(chance.choice(junk()))
    return value


def read_all(path: Path) -> None:
    with open_source(path) as source:
        for tensor in source.tensors:
            if tensor.size_bytes < 1 << 20:
                source.read(tensor, whole(tensor.shape), memoryview(bytearray(tensor.size_bytes)))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("foreign")
    for name in ("deepspeed", "megatron"):
        unpacked(name, directory / name)
    state = {"w": torch.ones(4, 3), "l": [torch.ones(2), {"x": 1}], "v": [1, 2], "n": {"m": "t"}}
    torch.save(state, directory / "state.pt")
    dcp.save(state, checkpoint_id=directory / "dcp")
    return directory


CASES = [
    *("deepspeed/stage-1/global_step2", "deepspeed/stage-2/global_step2_universal"),
    *("deepspeed/stage-3-parts/global_step2", "megatron", "dcp", "state.pt"),
]


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_anything_in_a_pickle_is_read_or_a_typed_error(
    written: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, opened = random.Random(case), 0
    read_archive, read_root = torch_file.read_torch_archive, dcp_metadata.read_root
    read_all(written / case)
    turn = -1  # which pickle is changed

    def archive(*given: Any) -> Any:
        nonlocal opened
        found = read_archive(*given)
        opened += 1
        return found._replace(root=change(found.root, chance)) if opened == turn else found

    def root(path: str) -> Any:
        nonlocal opened
        found = read_root(path)
        opened += 1
        return change(found, chance) if opened == turn else found

    for module in (deepspeed, megatron, dcp_source, torch_file):
        monkeypatch.setattr(module, "read_torch_archive", archive)
    monkeypatch.setattr(dcp_metadata, "read_root", root)
    read_all(written / case)
    pickles, refused = opened, 0
    for number in range(CHANGES):
        opened, turn = 0, 1 + number % min(pickles, 4)
        try:
            read_all(written / case)
        except HoldfastError:
            refused += 1
    assert refused > CHANGES // 20
