"""What integrations of frameworks have in common: versions, hooks, marks, deletion."""

import logging
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import holdfast
from holdfast.codecs import Delta
from holdfast.errors import (
    AlreadyCommittedError,
    MismatchError,
    NotCommittedError,
    OptionError,
)
from holdfast.integrations import adapter

NewPath = Callable[[], Path]
STATE = {"w": torch.arange(6.0)}


class Stock:
    """What a framework has."""

    def save(self) -> str:
        return "stock"


class Derived(Stock):
    pass


def ours(self: Stock) -> str:
    return "ours"


@pytest.mark.parametrize(
    ("found", "is_known"),
    [
        *(("5.20.0", True), ("5.23.7", True), ("5.23.0.dev0", True), ("5.24.0", False)),
        *(("5.19.9", False), ("4.57.1", False), ("6.0", False), ("unknown", False)),
    ],
)
def test_versions_between_the_oldest_and_the_newest_tested_are_known(
    found: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: found)
    if is_known:
        assert adapter.known_version("transformers", "5.20.0", "5.23.0") == found
        return
    with pytest.raises(OptionError) as error:
        adapter.known_version("transformers", "5.20.0", "5.23.0")
    text = str(error.value)
    assert f"transformers {found} is installed" in text and "5.20.0 to 5.23.0" in text
    assert "pip install 'transformers==5.23.0'" in text and "Nothing was changed" in text


def test_a_missing_framework_names_the_extra() -> None:
    command = r"pip install 'holdfast-checkpoint\[hf\]'"
    with pytest.raises(ImportError, match=command):
        adapter.known_version("no-such-framework", "1.0", "2.0", "hf")
    with pytest.raises(ImportError, match=command):
        adapter.module("no_such_framework.trainer", "hf")
    assert adapter.module("torch.nn", "hf") is torch.nn


def test_a_hook_replaces_and_restores(caplog: pytest.LogCaptureFixture) -> None:
    framework = SimpleNamespace(save=lambda: "stock")
    with caplog.at_level(logging.INFO, "holdfast"):
        hook = adapter.Hook(
            "one", "1.2", "save in one commit", [(Derived, "save", ours), (framework, "save", ours)]
        )
    assert caplog.messages == ["holdfast is active for one 1.2: save in one commit"]
    assert Derived().save() == "ours" and Stock().save() == "stock" and framework.save is ours
    hook.remove()
    hook.remove()
    assert Derived().save() == "stock" and "save" not in vars(Derived)
    assert framework.save() == "stock"


def test_two_integrations_in_one_place_are_refused_by_both_names() -> None:
    with adapter.Hook("one", "1.2", "save", [(Stock, "save", ours)], ["Stock's loads"]):
        for replacements, places in (([(Stock, "save", ours)], ()), ((), ["Stock's loads"])):
            with pytest.raises(OptionError, match=r"one, which is active, and other"):
                adapter.Hook("other", "3", "save", replacements, places)
        with pytest.raises(OptionError, match=r"one has holdfast installed already\. To change"):
            adapter.Hook("one", "1.2", "save", [(Stock, "save", ours)])
        with pytest.raises(OptionError):
            more = [(Derived, "save", ours), (Stock, "save", ours)]
            adapter.Hook("other", "3", "save", more)
        assert "save" not in vars(Derived)  # nothing half replaced
    with adapter.Hook("other", "3", "save", [(Stock, "save", ours)]):
        assert Stock().save() == "ours"


def test_an_unknown_integration_is_refused() -> None:
    with pytest.raises(OptionError, match="no integration 'keras' to install; expected one of"):
        adapter.install("keras")


def test_a_checkpoint_of_another_framework_is_refused_by_name(new_path: NewPath) -> None:
    path = new_path()
    holdfast.save({"model": STATE, **adapter.mark("lightning", "2.6.6", order=3)}, path)
    found = adapter.check_mark(path, "lightning")
    assert found == {"name": "lightning", "version": "2.6.6", "order": 3}
    with pytest.raises(MismatchError) as error:
        adapter.check_mark(path, "transformers")
    assert "was saved by lightning 2.6.6; transformers cannot resume" in str(error.value)
    # What it says to do works.
    into = {"model": {"w": torch.zeros(6)}}
    holdfast.load(path, into=into, include="model")
    assert torch.equal(into["model"]["w"], STATE["w"])
    plain = new_path()
    holdfast.save(STATE, plain)
    assert adapter.marked(plain) == {}
    with pytest.raises(MismatchError, match="by a program without a framework"):
        adapter.check_mark(plain, "transformers")


def test_what_is_deleted_is_retired(new_path: NewPath) -> None:
    root = new_path()
    for step, codec in enumerate((Delta(every=3), Delta(every=3))):
        holdfast.save({"w": torch.arange(6.0) + step}, root / f"checkpoint-{step}", codec=codec)
        (root / f"checkpoint-{step}" / "config.json").write_text("{}")
    with pytest.raises(AlreadyCommittedError, match="base of the delta checkpoint checkpoint-1"):
        adapter.delete(root / "checkpoint-0")
    assert (root / "checkpoint-0" / "config.json").exists()
    assert adapter.is_committed(root / "checkpoint-0")
    adapter.delete(root / "checkpoint-1")
    adapter.delete(root / "checkpoint-0")
    assert list(root.iterdir()) == []


def test_what_is_no_checkpoint_is_not_deleted(new_path: NewPath) -> None:
    path = new_path()
    path.mkdir()
    (path / "model.safetensors").write_text("")
    with pytest.raises(NotCommittedError, match="is not deleted"):
        adapter.delete(path)
    assert (path / "model.safetensors").exists()


@pytest.mark.parametrize("name", adapter.OTHERS)
def test_a_framework_that_is_not_installed_so_says_what_to_do(name: str) -> None:
    with pytest.raises(OptionError, match=rf"{name} needs no install\(\): (give|see)"):
        adapter.install(name)
