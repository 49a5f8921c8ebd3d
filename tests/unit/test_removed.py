"""A checkpoint that another process removes while it is read is gone, and is not damaged.

It is removed before the first call of the store, the second, and so on: at every place where a
reader looks at the disk.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
from holdfast import Options, cli
from holdfast.errors import CorruptError, NotCommittedError, StoreError
from holdfast.integrations.dcp import HoldfastReader
from holdfast.stores.local import LocalStore

NewPath = Callable[[], Path]
Remove = Callable[[], object]

CALLS_MAX = 400  # of the store, by any verb here


def state(step: int = 0) -> dict[str, Any]:
    """One element of many differs from step to step: the others stand in what is below a link."""
    torch.manual_seed(0)
    a = torch.randn(3000)
    a[7] = step
    return {"a": a, "b": torch.randn(40, 30), "step": step}


def empty() -> dict[str, Any]:
    return {"a": torch.zeros(3000), "b": torch.zeros(40, 30), "step": 0}


@contextmanager
def before_call(number: int, remove: Remove) -> Iterator[list[str]]:
    """Have something removed before the n-th call of a store; give the calls there were."""
    calls: list[str] = []

    def counted(name: str, method: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls.append(name)
            if len(calls) == number:
                remove()
            return method(*arguments, **keywords)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "list", "get", "exists"):
            patch.setattr(LocalStore, name, counted(name, getattr(LocalStore, name)))
        yield calls


def removals(make: Callable[[], Remove], use: Callable[[], Any]) -> Iterator[tuple[int, Any]]:
    """Use something while it is removed at each of its calls; yield what came of it.

    Args:
        make: makes it anew, and returns what removes it.
    """
    for number in range(1, CALLS_MAX):
        remove = make()
        with before_call(number, remove) as calls:
            try:
                came: Any = use()
            except Exception as error:  # which ones may come is for the test to say
                came = error
        yield number, came
        if len(calls) < number:
            return
    raise AssertionError("it never ends")


def checked(came: Iterator[tuple[int, Any]], kind: type[Exception], text: str = "") -> int:
    """Check that it works, or fails in one way; return how often it failed."""
    failed = 0
    for number, result in came:
        if isinstance(result, BaseException):
            assert type(result) is kind, f"call {number}: {result!r}"
            assert text in str(result), f"call {number}: {result}"
            failed += 1
    assert failed
    return failed


VERBS: dict[str, Callable[[Path], Any]] = {
    "load": lambda path: holdfast.load(path, into=empty()),
    "load a part": lambda path: holdfast.load(path, into={"b": torch.zeros(40, 30)}, partial=True),
    "open": lambda path: holdfast.open(path).tensor("b", ((3, 0), (5, 30))),
    "open all": lambda path: holdfast.open(path).state(),
    "verify an open one": lambda path: holdfast.open(path).verify(deep=True),
    "verify": lambda path: holdfast.verify(path),
    "verify deep": lambda path: holdfast.verify(path, deep=True),
    "try_codecs": lambda path: holdfast.try_codecs(path, codecs=["lossless"]),
    "dcp": lambda path: through_dcp(path),
}


def through_dcp(path: Path) -> None:
    try:
        dcp.load(empty(), storage_reader=HoldfastReader(path), no_dist=True)
    except CheckpointException as error:  # which holds the error of each rank
        cause = error.failures[0][0]
        if isinstance(cause, AssertionError):  # of who reads the metadata DCP keeps the text alone
            raise NotCommittedError(str(cause)) from None
        raise cause from None


def damage_of(came: Any) -> Any:
    return came if isinstance(came, list) else getattr(came, "damage", ())


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("verb", VERBS)
def test_what_is_removed_while_it_is_read_is_gone(new_path: NewPath, verb: str, codec: str) -> None:
    path = new_path()

    def make() -> Remove:
        shutil.rmtree(path, ignore_errors=True)
        holdfast.save(state(), path, codec=codec)
        return lambda: shutil.rmtree(path)

    came = list(removals(make, lambda: VERBS[verb](path)))
    checked(iter(came), NotCommittedError, str(path))
    assert not any(damage_of(result) for _, result in came)


@pytest.mark.parametrize("verb", ["load", "open all", "verify", "verify deep"])
def test_a_chain_that_is_removed_while_it_is_read_is_gone(new_path: NewPath, verb: str) -> None:
    run = new_path()
    top = run / "step-00000002"

    def make() -> Remove:
        shutil.rmtree(run, ignore_errors=True)
        for step in (1, 2):
            holdfast.save(state(step), run / f"step-{step:08d}", step=step, codec="delta")
        assert holdfast.open(top).base == "step-00000001"
        return lambda: shutil.rmtree(run)

    came = list(removals(make, lambda: VERBS[verb](top)))
    checked(iter(came), NotCommittedError, str(run))
    assert not any(damage_of(result) for _, result in came)


@pytest.mark.parametrize("verb", ["load", "open all", "verify", "verify deep"])
def test_a_link_whose_base_is_removed_while_it_is_read_is_damaged(
    new_path: NewPath, verb: str
) -> None:
    """Nobody who keeps the rules removes a base before what needs it."""
    run = new_path()
    base, top = run / "step-00000001", run / "step-00000002"

    def make() -> Remove:
        shutil.rmtree(run, ignore_errors=True)
        for step in (1, 2):
            holdfast.save(state(step), run / f"step-{step:08d}", step=step, codec="delta")
        return lambda: shutil.rmtree(base)

    found = 0
    for number, result in removals(make, lambda: VERBS[verb](top)):
        if isinstance(result, BaseException):
            assert isinstance(result, CorruptError), f"call {number}: {result!r}"
            assert "step-00000001" in str(result)
        found += isinstance(result, BaseException) or bool(damage_of(result))
    assert found


def test_a_data_file_that_is_missing_is_damage_while_the_manifest_stands(
    new_path: NewPath,
) -> None:
    path = new_path()

    def make() -> Remove:
        shutil.rmtree(path, ignore_errors=True)
        holdfast.save(state(), path)
        return lambda: shutil.rmtree(path / "data")

    for verb in ("load", "open all", "dcp"):
        checked(removals(make, lambda verb=verb: VERBS[verb](path)), CorruptError, "missing")  # type: ignore[misc]
    results = [result for _, result in removals(make, lambda: VERBS["verify"](path))]
    assert all(isinstance(result, holdfast.integrity.verify.Verified) for result in results)
    assert any(result.damage for result in results)


def test_a_restore_takes_the_newer_step_when_one_goes_while_it_is_read(
    new_path: NewPath,
) -> None:
    run, newer = new_path(), new_path()

    def make() -> Remove:
        shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(newer, ignore_errors=True)
        with holdfast.Checkpointer(run) as checkpointer:
            checkpointer.save(1, state(1))
        holdfast.save(state(2), newer, step=2)

        def replace() -> None:
            newer.rename(run / "step-00000002")
            shutil.rmtree(run / "step-00000001")

        return replace

    def restore() -> int | None:
        into = empty()
        step = holdfast.Checkpointer(run).restore(into, partial=True)
        assert into["step"] == step and torch.equal(into["a"], state(step or 0)["a"])
        return step

    came = dict(removals(make, restore))
    assert set(came.values()) == {1, 2}, came


@pytest.mark.parametrize("partial", [True, False])
def test_a_restore_of_a_run_that_goes_says_that_it_is_gone(
    new_path: NewPath, partial: bool
) -> None:
    run = new_path()

    def make() -> Remove:
        shutil.rmtree(run, ignore_errors=True)
        with holdfast.Checkpointer(run) as checkpointer:
            checkpointer.save(1, state(1))
        return lambda: shutil.rmtree(run)

    def restore(step: int | None) -> int | None:
        return holdfast.Checkpointer(run).restore(empty(), step=step, partial=partial)

    checked(removals(make, lambda: restore(1)), NotCommittedError, "step-00000001")
    assert {came for _, came in removals(make, lambda: restore(None))} == {1, None}


def test_a_signed_checkpoint_that_goes_is_not_called_unsigned(
    new_path: NewPath, tmp_path: Path
) -> None:
    form, key = serialization, Ed25519PrivateKey.generate()
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    (tmp_path / "key").write_bytes(private)
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    path, options = new_path(), Options(trust=public.decode())

    def make() -> Remove:
        shutil.rmtree(path, ignore_errors=True)
        holdfast.save(state(), path)
        holdfast.sign(path, key=tmp_path / "key")
        return lambda: shutil.rmtree(path)

    came = removals(make, lambda: holdfast.load(path, into=empty(), options=options))
    checked(came, NotCommittedError, str(path))
    came = removals(make, lambda: holdfast.sign(path, key=tmp_path / "key"))
    for number, result in came:
        assert isinstance(result, (list, NotCommittedError, StoreError)), f"{number}: {result!r}"


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_the_commands_say_that_it_is_gone(
    new_path: NewPath, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = new_path()

    def make() -> Remove:
        shutil.rmtree(path, ignore_errors=True)
        holdfast.save(state(), path)
        return lambda: shutil.rmtree(path)

    codes = [code for _, code in removals(make, lambda: cli.main([verb, str(path)]))]
    assert set(codes) == {0, 2}
    assert "Traceback" not in capsys.readouterr().err


def test_a_checkpoint_that_is_committed_between_two_looks_is_read(new_path: NewPath) -> None:
    """MANIFEST was not there when it was opened, and was when its absence was looked at."""
    path, aside = new_path(), new_path()
    holdfast.save(state(), path)
    (path / "MANIFEST").rename(aside)

    def commit() -> None:
        if aside.exists():
            aside.rename(path / "MANIFEST")

    target = empty()
    with before_call(2, commit):
        report = holdfast.load(path, into=target)
    assert report.tensors > 0 and report.missing == ()
    assert not aside.exists(), "it was committed between the two looks"


@pytest.mark.parametrize("number", [1, 2])
def test_a_run_that_another_makes_between_two_looks_has_its_steps(
    new_path: NewPath, number: int
) -> None:
    """It was not there when it was listed, and was when its absence was looked at."""
    run, aside = new_path(), new_path()
    with holdfast.Checkpointer(aside) as checkpointer:
        checkpointer.save(1, state(1))
    waits = holdfast.Checkpointer(run)
    with before_call(number, lambda: aside.rename(run)):
        assert waits.steps() == [1]


def test_a_run_that_is_a_link_to_nothing_is_no_new_run(new_path: NewPath) -> None:
    run = new_path()
    run.symlink_to(new_path())
    with pytest.raises(StoreError, match="No such file"):
        holdfast.Checkpointer(run).steps()
