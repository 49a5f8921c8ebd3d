"""Plain checkpoint_ids of DCP go to holdfast: where `install` or the environment says so."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import holdfast
from holdfast.errors import OptionError
from holdfast.integrations.autoload import autoload
from holdfast.integrations.dcp import HoldfastWriter, install, routing

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not routing._is_known(), reason="DCP of this torch is not routed"),
]
NewPath = Callable[[], Path]


@pytest.fixture(autouse=True)
def _stock_again() -> Iterator[None]:
    before = state_dict_saver._storage_setup
    yield
    assert state_dict_saver._storage_setup is before, "a test has left DCP changed"


def is_ours(path: Path) -> bool:
    return (path / "MANIFEST").exists()


def loaded(checkpoint_id: Any, **given: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"w": torch.zeros(3), "n": 0}
    dcp.load(state, checkpoint_id=checkpoint_id, **given)
    return {"w": state["w"].tolist(), "n": state["n"]}


STATE = {"w": torch.arange(3.0), "n": 5}
EXPECTED = {"w": [0.0, 1.0, 2.0], "n": 5}


def test_a_url_of_ours_is_saved_and_loaded(new_path: NewPath) -> None:
    path = new_path()
    with install():
        dcp.save(STATE, checkpoint_id=f"holdfast://{path}")
        assert loaded(f"holdfast://{path}") == EXPECTED
    assert is_ours(path)
    with pytest.raises(CheckpointException, match="only saves write"):
        dcp.save(STATE, checkpoint_id=f"holdfast://{path}")


def test_a_relative_url_begins_here(new_path: NewPath, monkeypatch: pytest.MonkeyPatch) -> None:
    here = new_path()
    here.mkdir()
    monkeypatch.chdir(here)
    with install():
        dcp.save(STATE, checkpoint_id="holdfast://runs/first")
    assert is_ours(here / "runs" / "first")


def test_paths_are_ours_only_when_that_was_asked_for(new_path: NewPath) -> None:
    theirs, ours = new_path(), new_path()
    with install():
        dcp.save(STATE, checkpoint_id=theirs)
    assert not is_ours(theirs)
    with install(every=True):
        dcp.save(STATE, checkpoint_id=ours)
        assert is_ours(ours) and loaded(ours) == EXPECTED
        assert loaded(theirs) == EXPECTED, "what DCP saved before is still read"


def test_writers_of_dcp_that_a_program_names_are_routed_too(new_path: NewPath) -> None:
    path, other = new_path(), new_path()
    with install(every=True):
        dcp.save(STATE, storage_writer=FileSystemWriter(path), planner=DefaultSavePlanner())
        assert is_ours(path)
        assert loaded(None, storage_reader=FileSystemReader(path)) == EXPECTED

        class Own(FileSystemWriter):
            """Does more than to write."""

            def finish(self, *given: Any, **more: Any) -> None:
                super().finish(*given, **more)

        dcp.save(STATE, storage_writer=Own(other))
    assert not is_ours(other)


def test_blocks_within_each_other_end_in_any_order(new_path: NewPath) -> None:
    outer = install()
    inner = install(every=True)
    outer.remove()
    path = new_path()
    dcp.save(STATE, checkpoint_id=path)
    assert is_ours(path)
    inner.remove()
    path = new_path()
    dcp.save(STATE, checkpoint_id=path)
    assert not is_ours(path)
    inner.remove()  # twice does no harm


def test_a_second_block_of_one_routing_routes_again(new_path: NewPath) -> None:
    routing, paths = install(every=True), [new_path() for _ in range(3)]
    for path in paths[:2]:
        with routing:
            dcp.save(STATE, checkpoint_id=path)
    dcp.save(STATE, checkpoint_id=paths[2])
    assert [*map(is_ours, paths)] == [True, True, False]


@pytest.fixture
def alone(new_path: NewPath) -> Iterator[None]:
    """A process group of one, which async_save wants."""
    store = f"file://{new_path()}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_save_in_the_background_outlives_the_block(new_path: NewPath) -> None:
    path, left = new_path(), threading.Event()

    class Late(DefaultSavePlanner):
        """Plans when the block has been left."""

        def set_up_planner(self, *given: Any, **more: Any) -> None:
            assert left.wait(10)
            super().set_up_planner(*given, **more)

    with install():
        saving = dcp.async_save(STATE, checkpoint_id=f"holdfast://{path}", planner=Late())
    left.set()
    saving.result()
    assert is_ours(path)


@pytest.mark.usefixtures("alone")
def test_the_writer_stages_what_it_saves(new_path: NewPath) -> None:
    path, state = new_path(), {"w": torch.ones(4), "list": [1]}
    begun = threading.Event()

    class Late(DefaultSavePlanner):
        """Plans when the state has changed."""

        def set_up_planner(self, *given: Any, **more: Any) -> None:
            assert begun.wait(10)
            super().set_up_planner(*given, **more)

    writer = HoldfastWriter(path)
    assert isinstance(writer, dcp.staging.AsyncStager)
    saving = dcp.async_save(state, storage_writer=writer, planner=Late())
    state["w"].zero_()
    state["list"].append(2)  # type: ignore[attr-defined]
    begun.set()
    saving.result()
    with holdfast.open(path) as checkpoint:
        assert checkpoint.tensor("w").tolist() == [1.0] * 4
        assert checkpoint.objects() == {"list": [1]}


PROGRAM = """
import sys, torch, torch.distributed.checkpoint as dcp
dcp.save({"w": torch.ones(3)}, checkpoint_id=sys.argv[1])
"""


def run(program: str, asked: str, path: Any) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "HOLDFAST_DCP": asked}
    command = [sys.executable, "-W", "ignore", "-c", program, str(path)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("asked", "url", "ours"), [("1", True, True), ("1", False, False), ("every", False, True)]
)
def test_the_environment_routes_a_program_that_knows_nothing_of_us(
    new_path: NewPath, asked: str, url: bool, ours: bool
) -> None:
    path = new_path()
    done = run(PROGRAM, asked, f"holdfast://{path}" if url else path)
    assert done.returncode == 0, done.stderr
    assert is_ours(path) == ours


def test_the_environment_does_no_harm_to_programs_that_import_us_first(new_path: NewPath) -> None:
    path = new_path()
    program = "import holdfast; holdfast.save; holdfast.load; import holdfast.integrations.dcp\n"
    done = run(program + PROGRAM, "every", path)
    assert done.returncode == 0, done.stderr
    assert is_ours(path)


@pytest.mark.parametrize("asked", ["all", "every,", "every,casts", "1,every"])
def test_an_environment_that_asks_for_what_there_is_not_says_so(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setenv("HOLDFAST_DCP", asked)
    with pytest.raises(OptionError, match=r"expected '1', or of 'every', 'cast'"):
        autoload()


OPTIONS = """
import argparse, sys, torch, torch.distributed.checkpoint as dcp
dcp.save({"w": torch.ones(3), "o": argparse.Namespace(a=object)}, checkpoint_id=sys.argv[1])
state = {"w": torch.zeros(3, dtype=torch.float64), "o": None}
dcp.load(state, checkpoint_id=sys.argv[1])
assert state["w"].tolist() == [1.0] * 3 and state["o"].a is object
"""


def test_the_environment_sets_the_options_of_install(new_path: NewPath) -> None:
    path = new_path()
    done = run(OPTIONS, "every,cast, pickled", path)
    assert done.returncode == 0, done.stderr
    assert is_ours(path)
    refused = run(OPTIONS, "every", new_path())
    assert "HoldfastWriter(pickled=True)" in refused.stderr


def test_an_environment_that_installs_an_unknown_integration_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_INSTALL", "accelerate, keras")
    with pytest.raises(OptionError, match="'keras'; expected some of accelerate, transformers"):
        autoload()
