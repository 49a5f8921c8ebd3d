"""Integrations without their framework, and beside a version that nobody has tested."""

import sys
from importlib import import_module, metadata

import pytest

from holdfast.errors import OptionError
from holdfast.integrations.adapter import INSTALLABLE, install

EXTRAS = {"lightning": "lightning", "fabric": "lightning", "torchtitan": "torchtitan"}


@pytest.fixture(autouse=True)
def imported_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EXTRAS:
        monkeypatch.delitem(sys.modules, f"holdfast.integrations.{name}", raising=False)


@pytest.mark.parametrize("name", EXTRAS)
def test_a_missing_framework_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ImportError, match=rf"holdfast-checkpoint\[{EXTRAS[name]}\]"):
        import_module(f"holdfast.integrations.{name}")


@pytest.mark.parametrize("name", EXTRAS)
@pytest.mark.parametrize("found", ["0.0.9", "99.1.0"])
def test_an_untested_version_is_refused(
    name: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: found)
    with pytest.raises(OptionError, match=rf"{EXTRAS[name]} {found} is installed; .* works with"):
        import_module(f"holdfast.integrations.{name}")


def gone(package: str) -> str:
    raise metadata.PackageNotFoundError(package)


@pytest.mark.parametrize("name", INSTALLABLE)
def test_to_install_a_missing_framework_names_the_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", gone)
    command = rf"pip install 'holdfast-checkpoint\[{name}\]'"
    with pytest.raises(ImportError, match=command):
        install(name)


@pytest.mark.parametrize("name", INSTALLABLE)
@pytest.mark.parametrize("found", ["0.0.9", "99.1.0"])
def test_to_install_beside_an_untested_version_is_refused(
    name: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: found)
    text = rf"{found} is installed; holdfast\.integrations\.{name} works with .*Nothing was changed"
    with pytest.raises(OptionError, match=text):
        install(name)
