"""A path means what it meant when it was given: `~`, what is relative, and a lost directory."""

import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import holdfast
from holdfast import Options, cli
from holdfast.errors import OptionError, StoreError
from holdfast.integrations.dcp import HoldfastReader, HoldfastWriter, install
from holdfast.integrations.dcp.convert import plan_conversion
from holdfast.tools.demo import _plan

NewPath = Callable[[], Path]

WEIGHT = torch.arange(6.0)


def state() -> dict[str, Any]:
    return {"w": WEIGHT.clone(), "step": 3}


def empty() -> dict[str, Any]:
    return {"w": torch.zeros(6), "step": 0}


@pytest.fixture
def home(new_path: NewPath, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory, of a process that works elsewhere."""
    home, here = new_path(), new_path()
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    return home


@pytest.fixture
def deleted(new_path: NewPath, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that this process works in, and that is gone."""
    here = new_path()
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    return here


def test_every_verb_finds_the_home_directory(home: Path) -> None:
    holdfast.save(state(), "~/a")
    handle = holdfast.save_async(state(), Path("~/b"))
    assert handle.path == handle.result() == f"{home}/b"
    assert holdfast.load("~/a", into=empty()).path == f"{home}/a"
    assert holdfast.open("~/x/../b").location == f"{home}/b"
    assert holdfast.verify("~/a").location == f"{home}/a"
    assert holdfast.repair("~/a", to="~/repaired").written == f"{home}/repaired"
    holdfast.recompress("~/a", "~/small", codec="lossless")
    assert not holdfast.rebase("~/a")
    assert holdfast.try_codecs("~/a", "~/b", codecs=["delta"]).base == "b"
    with holdfast.Checkpointer("~/run") as checkpointer:
        assert checkpointer.root == f"{home}/run"
        checkpointer.save(1, state())
    assert holdfast.scrub("~/run").location == f"{home}/run"
    plan_conversion("~/a", "~/dcp").run(lambda _: None)
    expected = ["a", "b", "dcp", "repaired", "run", "small"]
    assert sorted(os.listdir(home)) == expected
    assert os.listdir() == []


def test_the_commands_find_it_too(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shell expands no `~` behind an equals sign, nor within quotes."""
    holdfast.save(state(), home / "a")
    for arguments in (
        ["inspect", "~/a"],
        ["verify", "~/a"],
        ["diff", "~/a", "~/a"],
        ["recompress", "~/a", "~/small"],
        ["repair", "~/a", "--to=~/repaired"],
    ):
        assert cli.main(arguments) == 0, capsys.readouterr()
    with holdfast.Checkpointer(home / "run") as checkpointer:
        checkpointer.save(1, state())
    assert cli.main(["recompress", "~/run", "~/small-run"]) == 0
    assert cli.main(["scrub", "~/run", "--mb-per-s=0"]) == 0
    assert sorted(os.listdir(home)) == ["a", "repaired", "run", "small", "small-run"]
    assert os.listdir() == []


def test_the_demo_finds_it_too(home: Path) -> None:
    assert _plan(["--quick", "--out=~/demo"]).out == home / "demo"
    assert os.listdir() == []


def test_keys_are_found_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form, key = serialization, Ed25519PrivateKey.generate()
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    public = key.public_key()
    (home / "key").write_bytes(private)
    (home / "key.pub").write_bytes(
        public.public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    )
    holdfast.save(state(), home / "a")
    assert holdfast.sign("~/a", key="~/key") == [f"{home}/a"]
    assert holdfast.signer("~/a")
    holdfast.load("~/a", into=empty(), options=Options(trust=("~/key.pub",)))
    assert cli.main(["verify", "~/a", "--signature", "--public-key=~/key.pub"]) == 0


def test_dcp_finds_it_too(home: Path) -> None:
    here = empty()
    dcp.save(state(), storage_writer=HoldfastWriter("~/a"), no_dist=True)
    dcp.load(here, storage_reader=HoldfastReader("holdfast://~/a"), no_dist=True)
    with install(every=True):
        dcp.save(state(), checkpoint_id="~/b", no_dist=True)
        dcp.load(here, checkpoint_id="~/b", no_dist=True)
    assert torch.equal(here["w"], WEIGHT)
    assert os.listdir(home) == ["a"]
    assert os.listdir() == ["~"]  # every call of DCP's takes a name as DCP does
    assert os.path.exists("~/b/MANIFEST")


def test_the_home_of_another_user_is_found_and_a_name_with_a_tilde_is_kept(home: Path) -> None:
    me = pwd.getpwuid(os.getuid())
    assert holdfast.Checkpointer(f"~{me.pw_name}/a//b").root == f"{me.pw_dir.rstrip('/')}/a/b"
    assert holdfast.Checkpointer("~").root == str(home)
    assert holdfast.Checkpointer("~//etc").root == f"{home}/etc"
    assert holdfast.Checkpointer("a/~").root == f"{os.getcwd()}/a/~"
    assert holdfast.Checkpointer("./~").root == f"{os.getcwd()}/~"


@pytest.mark.parametrize("value", [None, "", "home/me"])
def test_a_home_that_is_not_known_is_not_guessed(
    home: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    """HOME="" would make `~/runs` the directory `/runs`."""
    monkeypatch.setenv("HOME", value) if value is not None else monkeypatch.delenv("HOME")
    with pytest.raises(OptionError, match=r"path is '~/a', but HOME is not an absolute path"):
        holdfast.save(state(), "~/a")
    with pytest.raises(OptionError, match=r"no user has the name ~no-such-user; .* './~no-such"):
        holdfast.save(state(), "~no-such-user/a")


def test_a_relative_path_in_a_deleted_directory_says_so(deleted: Path) -> None:
    for use in (
        lambda: holdfast.save(state(), "a"),
        lambda: holdfast.save_async(state(), "a"),
        lambda: holdfast.load("a", into=empty()),
        lambda: holdfast.open("a"),
        lambda: holdfast.verify("a"),
        lambda: holdfast.scrub("a"),
        lambda: holdfast.repair("a"),
        lambda: holdfast.rebase("a"),
        lambda: holdfast.signer("a"),
        lambda: HoldfastWriter("a"),
    ):
        with pytest.raises(StoreError, match=r"path is 'a', .*was deleted\. Give an absolute path"):
            use()
    with pytest.raises(StoreError, match="root is 'run', relative to the working directory"):
        holdfast.Checkpointer("run")


def test_absolute_paths_work_in_a_deleted_directory(new_path: NewPath, deleted: Path) -> None:
    a, b, run = new_path(), new_path(), new_path()
    holdfast.save(state(), a)
    holdfast.save_async(state(), b, stage="lazy").result()
    holdfast.load(a, into=empty())
    with holdfast.open(a) as checkpoint:
        assert torch.equal(checkpoint.tensor("w"), WEIGHT)
    assert not holdfast.verify(a, deep=True).damage
    assert not holdfast.repair(a).damage
    holdfast.recompress(a, new_path(), codec="lossless")
    for stage in ("eager", "lazy", "sync"):
        with holdfast.Checkpointer(run / stage, every=1, stage=stage) as checkpointer:  # type: ignore[arg-type]
            assert checkpointer.restore(empty()) is None
            checkpointer.step(1, state())
            checkpointer.wait()
            assert checkpointer.restore(empty()) == 1
    assert holdfast.scrub(run / "eager").verified == 1
    dcp.save(state(), storage_writer=HoldfastWriter(new_path()), no_dist=True)
    for verb in ("inspect", "verify"):
        assert cli.main([verb, str(a)]) == 0


def test_a_process_that_starts_in_a_deleted_directory_can_look(
    new_path: NewPath, deleted: Path
) -> None:
    path = new_path()
    holdfast.save(state(), path)

    def look(place: object) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "holdfast", "inspect", str(place), "--json"]
        return subprocess.run(command, text=True, capture_output=True, timeout=60)

    done = look(path)
    assert (done.returncode, json.loads(done.stdout)["path"]) == (0, str(path)), done.stderr
    done = look("a")
    assert done.returncode == 2
    assert "was deleted. Give an absolute path" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("stage", ["eager", "lazy"])
def test_a_process_that_goes_elsewhere_saves_where_it_was_told(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch, stage: Any
) -> None:
    here, there = new_path(), new_path()
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    handle = holdfast.save_async(state(), "a", stage=stage)
    os.chdir(there)
    assert handle.result() == f"{here}/a"
    os.chdir(here)
    with holdfast.Checkpointer("run", every=1, stage=stage) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.step(step, state())
            os.chdir(there)
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2, 3]
        assert checkpointer.path(1) == f"{here}/run/step-00000001"
        assert checkpointer.restore(empty()) == 3
    os.chdir(here)
    writer = HoldfastWriter("dcp")
    os.chdir(there)
    dcp.save(state(), storage_writer=writer, no_dist=True)
    assert sorted(os.listdir(here)) == ["a", "dcp", "run"]
    assert os.listdir(there) == []


def test_a_run_goes_on_when_its_process_loses_its_directory(
    new_path: NewPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, here = new_path(), new_path()
    here.mkdir()
    monkeypatch.chdir(here)
    relative = os.path.relpath(run)
    with holdfast.Checkpointer(relative, every=1, keep=holdfast.Keep.latest(2)) as checkpointer:
        for step in range(1, 5):
            checkpointer.step(step, state())
            shutil.rmtree(here, ignore_errors=True)
    assert checkpointer.root == str(run)
    assert checkpointer.steps() == [3, 4]
