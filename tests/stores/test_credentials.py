"""Credentials that are missing in the environment, incomplete or no credentials at all.

Each is a plain error that names the variable, or the field of `StoreSettings`, and has no secret.
"""

import re
import socket
import time
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Options, StoreSettings
from holdfast.errors import HoldfastError, OptionError, StoreError
from holdfast.stores.url import open_store
from stores import doubles

pytestmark = pytest.mark.usefixtures("bare")

SECRET = "secretThatNobodyMaySee"
KEY_FILE = f'{{"type": "service_account", "private_key": "{SECRET}", "client_email": "a@b"}}'
STATE = {"w": torch.ones(3)}


def refusals(url: str) -> list[str]:
    """Return what a save, a load and a look say."""
    said = []
    for call in (
        lambda: holdfast.save(STATE, f"{url}/run"),
        lambda: holdfast.load(f"{url}/run", into=dict(STATE)),
        lambda: open_store(f"{url}/run").list(),
    ):
        with pytest.raises(HoldfastError) as caught:
            call()
        assert type(caught.value) is OptionError
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize(
    ("url", "environment", "expected"),
    [
        (
            "s3://bucket",
            {"AWS_ACCESS_KEY_ID": SECRET},
            "AWS_ACCESS_KEY_ID is set, but AWS_SECRET_ACCESS_KEY is not; set both",
        ),
        (
            "s3://bucket",
            {"AWS_SECRET_ACCESS_KEY": SECRET},
            "AWS_SECRET_ACCESS_KEY is set, but AWS_ACCESS_KEY_ID is not; set both",
        ),
        (
            "s3://bucket",
            {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": ""},
            "AWS_SECRET_ACCESS_KEY is empty",
        ),
        (
            "s3://bucket",
            {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": f"{SECRET}\n"},
            "AWS_SECRET_ACCESS_KEY has a space, a line's end or a sign",
        ),
        ("az://bucket", {}, "no account is named; set AZURE_STORAGE_ACCOUNT_NAME, or give account"),
        (
            "az://bucket",
            {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": f"{SECRET}!"},
            "AZURE_STORAGE_ACCOUNT_KEY is not base64",
        ),
        (
            "az://bucket",
            {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_SAS_KEY": SECRET},
            "AZURE_STORAGE_SAS_KEY is no shared access signature; .* sig=",
        ),
        (
            "az://bucket",
            {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_SAS_KEY": f"sig=&{SECRET}"},
            "cannot be used .* check AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_SAS_KEY in the env",
        ),
        ("gs://bucket", {"GOOGLE_SERVICE_ACCOUNT_KEY": SECRET}, "SERVICE_ACCOUNT_KEY is not a key"),
    ],
)
def test_credentials_of_the_environment_that_cannot_be_are_named(
    url: str, environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for said in refusals(url):
        assert SECRET not in said and "Generic" not in said
        assert re.search(expected, said), said


@pytest.mark.parametrize("name", ["GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "which cannot be read: No such file"),
        (SECRET, "which is not a key of Google; expected JSON"),
        (f'"{SECRET}"', "which is not a key of Google; expected JSON"),
        (KEY_FILE, "missing field `private_key_id`"),
    ],
)
def test_a_file_of_google_that_is_no_key_is_named(
    name: str, text: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv(name, str(path))
    for said in refusals("gs://bucket"):
        assert name in said and expected in said and SECRET not in said, said


def test_the_text_of_a_key_that_is_given_as_a_path_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", KEY_FILE)
    for said in refusals("gs://bucket"):
        assert "is the text of a key" in said and SECRET not in said


def test_a_file_that_the_settings_name_is_named_as_theirs(tmp_path: Path) -> None:
    StoreSettings("gs://bucket", service_account=str(tmp_path / "gone.json")).use()
    for said in refusals("gs://bucket"):
        assert "service_account is " in said and "gone.json" in said


def test_the_environment_is_not_looked_at_where_the_settings_have_credentials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")
    with doubles.answering(lambda _: doubles.error(404, "NoSuchKey")) as url:
        given = {"access_key_id": "x", "secret_access_key": SECRET, "region": "us-east-1"}
        settings = StoreSettings("s3://bucket", endpoint=url, allow_http=True, **given)
        with pytest.raises(StoreError, match="NoSuchKey"):
            holdfast.load("s3://bucket/run", into=dict(STATE), options=Options(store=settings))


@pytest.mark.parametrize(
    ("url", "variable", "remedy"),
    [
        ("s3://bucket", "AWS_METADATA_ENDPOINT", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("az://bucket", "", "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY"),
        ("gs://bucket", "", "set GOOGLE_APPLICATION_CREDENTIALS to the path"),
    ],
)
def test_nothing_set_ends_in_time_and_names_what_to_set(
    url: str, variable: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")  # no file of Google's
    with socket.socket() as silent:  # a service of roles that takes a connection, and hangs
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        if variable:
            monkeypatch.setenv(variable, f"http://127.0.0.1:{silent.getsockname()[1]}")
        account = {"account_name": "a"} if url.startswith("az") else {}
        StoreSettings(url, timeout_s=3, **account).use()
        began = time.monotonic()
        with pytest.raises(StoreError, match=f"no credentials were found.*What to do: {remedy}"):
            open_store(f"{url}/run").list()
        assert time.monotonic() - began < 20
