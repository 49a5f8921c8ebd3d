"""Credentials that are incomplete, or cannot be read → an error that says what to set.

Knows no requests: whether a store takes them is found out by the first one.
"""

import base64
import json
import os
import re
from typing import Any

from ..errors import OptionError

PREFIXES = {"s3": "AWS_", "az": "AZURE_", "gs": "GOOGLE_"}  # of the environment
ACCOUNT = "AZURE_STORAGE_ACCOUNT_NAME"
TO_SET = {  # where none were found
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give access_key_id and "
    "secret_access_key in a StoreSettings. AWS_PROFILE and the files in ~/.aws are not read",
    "az": "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY, or give account_key, sas_key or "
    "token in a StoreSettings",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the path of a key file, or give service_account, "
    "service_account_key or bearer_token in a StoreSettings",
}
_PAIR = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_AZURE_KEY = "AZURE_STORAGE_ACCOUNT_KEY"
_AZURE_SAS = "AZURE_STORAGE_SAS_KEY"
_GOOGLE_FILES = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH")
_GOOGLE_KEY = "GOOGLE_SERVICE_ACCOUNT_KEY"
_GOOGLE_DEFAULT = "GOOGLE_APPLICATION_CREDENTIALS"
_GIVEN = {  # any of these in the settings: those of the environment are not used
    "s3": ("access_key_id",),
    "az": ("account_key", "sas_key", "token"),
    "gs": ("service_account", "service_account_key", "bearer_token"),
}
_NOT_USED = {
    "s3": (*_PAIR, "AWS_SESSION_TOKEN"),
    "az": (_AZURE_KEY, _AZURE_SAS, "AZURE_STORAGE_TOKEN"),
    "gs": (*_GOOGLE_FILES, _GOOGLE_KEY, "GOOGLE_BEARER_TOKEN"),
}
_ALWAYS_USED = {"s3": (), "az": (ACCOUNT,), "gs": (_GOOGLE_DEFAULT,)}
_FREE_TEXTS = (*_GOOGLE_FILES, _GOOGLE_KEY, _GOOGLE_DEFAULT)  # paths, and JSON
_HEADER = re.compile("[!-~]+")  # what a header of a request may have
_OF_REQUESTS = ("timeout_s", "part_bytes", "parts_in_flight")
_KEY_FILE_BYTES_MAX = 1 << 20


def check_credentials(url: str, scheme: str, given: dict[str, Any]) -> None:
    """Check what can be known of the credentials of a bucket before the first request.

    Args:
        given: the settings of the bucket; the environment has the others.

    Raises:
        OptionError: some are missing, or cannot be read. It has no secret.
    """
    names = _ALWAYS_USED[scheme]
    if not given.keys() & {*_GIVEN[scheme]}:
        names += _NOT_USED[scheme]
    own = {name: os.environ[name] for name in names if name in os.environ}
    for name, value in own.items():
        if not value:
            raise OptionError(f"{url}: {name} is empty; set it to its value, or unset it")
        if name not in _FREE_TEXTS and not _HEADER.fullmatch(value):
            raise OptionError(
                f"{url}: {name} has a space, a line's end or a sign that is not ASCII; set it to "
                "its value alone"
            )
    {"s3": _check_pair, "az": _check_azure, "gs": _check_google}[scheme](url, given, own)


def unusable(url: str, scheme: str, given: dict[str, Any], words: str) -> OptionError:
    """Return the error for settings that obstore refuses for a reason of its own.

    Args:
        words: what obstore says, without secrets.
    """
    own = [name for name in os.environ if name.startswith(PREFIXES[scheme])]
    given = {name: value for name, value in given.items() if name not in _OF_REQUESTS}
    parts = [
        f"{', '.join(sorted(names))} {where}"
        for names, where in ((own, "in the environment"), (given, "in its StoreSettings"))
        if names
    ]
    return OptionError(
        f"{url}: the settings of this store cannot be used ({words}). What to do: check "
        + (" and ".join(parts) or f"its settings, all of which are missing: {TO_SET[scheme]}")
    )


def _check_pair(url: str, given: dict[str, Any], own: dict[str, str]) -> None:
    """Check that both halves of a key of S3 are there, or none."""
    there = [name for name in _PAIR if name in own]
    if len(there) == 1:
        (missing,) = {*_PAIR} - {*there}
        raise OptionError(
            f"{url}: {there[0]} is set, but {missing} is not; set both, or give access_key_id and "
            "secret_access_key in a StoreSettings"
        )


def _check_azure(url: str, given: dict[str, Any], own: dict[str, str]) -> None:
    """Check that an account is named, and that its key may be one."""
    if not (
        "account_name" in given or ACCOUNT in own or "AZURE_STORAGE_USE_EMULATOR" in os.environ
    ):
        raise OptionError(
            f"{url}: no account is named; set {ACCOUNT}, or give account_name in a StoreSettings. "
            f"Then name its credentials: {TO_SET['az']}"
        )
    name, key = _AZURE_KEY, own.get(_AZURE_KEY, "")
    if "account_key" in given:
        name, key = "account_key", given["account_key"]
    try:
        base64.b64decode(key, validate=True)
    except ValueError:
        raise OptionError(
            f"{url}: {name} is not base64; expected a key of the account, copied whole"
        ) from None
    name, key = _AZURE_SAS, own.get(_AZURE_SAS, "sig=")
    if "sas_key" in given:
        name, key = "sas_key", given["sas_key"]
    if "sig=" not in key:
        raise OptionError(
            f"{url}: {name} is no shared access signature; expected what follows the '?' of its "
            "URL, with sig= in it"
        )


def _check_google(url: str, given: dict[str, Any], own: dict[str, str]) -> None:
    """Check the files that have a key, and a key that is given as text."""
    known = {**given, **own}
    for name in ("service_account", *_GOOGLE_FILES, _GOOGLE_DEFAULT):
        if name in known:
            _check_key_file(url, name, known[name])
    for name in ("service_account_key", _GOOGLE_KEY):
        if name in known:
            _check_key(f"{url}: {name}", known[name].encode(errors="replace"))


def _check_key_file(url: str, name: str, path: str) -> None:
    if "{" in path:  # a secret is in no error
        raise OptionError(
            f"{url}: {name} is the text of a key, or another one with '{{' in it; expected the "
            f"path of a key file. Give a text as {_GOOGLE_KEY}"
        )
    try:
        with open(path, "rb") as file:
            text = file.read(_KEY_FILE_BYTES_MAX)
    except (OSError, ValueError) as error:  # ValueError: it has a zero byte
        raise OptionError(
            f"{url}: {name} is {path!r}, which cannot be read: "
            f"{getattr(error, 'strerror', 'no path')}; expected the path of a key file in JSON"
        ) from error
    _check_key(f"{url}: {name} is {path!r}, which", text)


def _check_key(what: str, text: bytes) -> None:
    try:
        is_key = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_key = False
    if not is_key:
        raise OptionError(
            f"{what} is not a key of Google; expected JSON, such as of a service account. Download "
            "the key again"
        )
