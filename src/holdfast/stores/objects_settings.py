"""Settings, given or of the environment → what obstore's clients are made with. Knows no requests.

Two rules:
  1. Every request ends. It may take a third of the limit, and is sent again in the rest of it.
  2. A redirect to another host is refused. obstore would follow it, and take a session's token
     along. It has no option against that, but one for proxies: every host but the store's, and
     those that give credentials, is asked through a proxy that is not there.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

from ..errors import OptionError
from ..store_settings import TIMEOUT_S, StoreSettings, is_server, values_of
from .objects_credentials import ACCOUNT, PREFIXES

ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL"),
    "gs": ("GOOGLE_BASE_URL",),
}
NO_PROXY = "http://127.0.0.1:0"  # a port that nothing can have
# Hosts of the stores themselves, where no other endpoint is named; and of what gives credentials.
# No more than these: below others of the same domain anybody can have a host.
_OWN = {
    "s3": "s3.{region}.amazonaws.com",
    "az": "{account}.blob.core.windows.net,{account}.blob.fabric.microsoft.com",
    "gs": "storage.googleapis.com",
}
_CREDENTIALS = {
    "s3": "sts.{region}.amazonaws.com,sts.amazonaws.com,169.254.0.0/16,fd00:ec2::/32",
    "az": "login.microsoftonline.com,169.254.0.0/16",
    "gs": "googleapis.com,accounts.google.com,metadata.google.internal,metadata,169.254.0.0/16",
}
# Options of a client that obstore reads from the environment, but not once it is given one.
_CLIENT = [
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "http1_only",
    "http2_only",
    "proxy_url",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_ca_certificate",
    "proxy_excludes",
    "user_agent",
]
_KEYS = {"gs": {"endpoint": "base_url"}}  # where obstore's name is another
_OURS = ("allow_http", "ca_file", "timeout_s", "part_bytes", "parts_in_flight")
_BACKOFF_S = (0.1, 5.0)  # before the first and the last of the requests that are sent again


PART_BYTES = 16 << 20
PARTS_IN_FLIGHT = 8


class Traffic(NamedTuple):
    """How bytes go to and fro; fields are named as the settings are.

    Attributes:
        part_bytes: of one part of an upload; larger where a file would have too many. A read of
            more is cut into such parts too.
        parts_in_flight: of one file that is written, or of all that one call reads.
    """

    part_bytes: int
    parts_in_flight: int


def traffic_of(settings: StoreSettings | None) -> Traffic:
    """Return how bytes go to and from a bucket."""
    given = {"part_bytes": PART_BYTES, "parts_in_flight": PARTS_IN_FLIGHT} | values_of(settings)
    return Traffic(*map(given.__getitem__, Traffic._fields))


def default_server(scheme: str) -> tuple[str | None, str | None]:
    """Return the endpoint and the account that the environment names."""
    endpoints = [os.environ[name] for name in ENDPOINTS[scheme] if os.environ.get(name)]
    account = os.environ.get(ACCOUNT) if scheme == "az" else None
    return (endpoints[0] if endpoints else None), account


def _check_server(given: dict[str, Any], options: dict[str, Any]) -> None:
    """Check the server of S3 that the environment names: the client says nothing of use."""
    name = next((name for name in ENDPOINTS["s3"] if os.environ.get(name)), None)
    if name is None or "endpoint" in given:
        return
    if not is_server(url := os.environ[name]):
        raise OptionError(
            f"{name} is no URL of a server; expected https://HOST or https://HOST:PORT"
        )
    if url.startswith("http:") and not options.get("allow_http"):
        raise OptionError(
            f"{name} begins with http:, where others can read and change requests; use https, or "
            "set AWS_ALLOW_HTTP=true"
        )


def limit_of(settings: StoreSettings | None, limit_s: float | None) -> float:
    """Return how long one request may take, with its retries.

    Args:
        limit_s: of the call that it is for, if that has one.
    """
    own: float = values_of(settings).get("timeout_s", TIMEOUT_S)
    return min(own, limit_s or own)


def arguments_of(scheme: str, settings: StoreSettings | None, limit_s: float) -> dict[str, Any]:
    """Return the keyword arguments for obstore's ``from_url``.

    Raises:
        OptionError: a file that settings name cannot be read; or the server that the environment
            names cannot be.
    """
    given = values_of(settings)
    renamed = _KEYS.get(scheme, {})
    credentials = _credentials(scheme, given)
    config = {
        renamed.get(name, name): value
        for name, value in given.items()
        if name not in _OURS and not (credentials and name in _GIVEN_BY_US)
    }
    options = _client_options(scheme, given, limit_s)
    if scheme == "s3":
        _check_server(given, options)
    made: dict[str, Any] = {
        "config": config,
        "client_options": options,
        "retry_config": {
            "max_retries": 1000,  # time is what ends them
            "retry_timeout": timedelta(seconds=limit_s * 2 / 3),
            "backoff": {
                "init_backoff": timedelta(seconds=min(_BACKOFF_S[0], limit_s / 20)),
                "max_backoff": timedelta(seconds=min(_BACKOFF_S[1], limit_s / 10)),
                "base": 2,
            },
        },
    }
    if credentials is not None:
        made["credential_provider"] = credentials
    return made


def _client_options(scheme: str, given: dict[str, Any], limit_s: float) -> dict[str, Any]:
    options: dict[str, Any] = {
        name: value
        for name in _CLIENT
        if (value := os.environ.get(f"{PREFIXES[scheme]}{name.upper()}")) is not None
    }
    for name in ("allow_http", "allow_invalid_certificates", "http1_only", "http2_only"):
        if name in options:
            options[name] = options[name].lower() in ("1", "true", "yes", "on", "y", "t")
    if "allow_http" in given:
        options["allow_http"] = given["allow_http"]
    if "ca_file" in given:
        try:
            with open(given["ca_file"], "rb") as file:
                options["root_certificate"] = file.read()
        except OSError as error:
            text = f"ca_file is {given['ca_file']!r}, which cannot be read: {error.strerror}"
            raise OptionError(text) from error
    options["timeout"] = timedelta(seconds=limit_s / 3)
    options.setdefault("connect_timeout", timedelta(seconds=min(5.0, limit_s / 3)))
    # Who has a proxy lets it decide where requests go.
    if "proxy_url" not in options and not {"http", "https", "all"} & getproxies().keys():
        options |= {"proxy_url": NO_PROXY, "proxy_excludes": _hosts(scheme, given)}
    return options


def _hosts(scheme: str, given: dict[str, Any]) -> str:
    """Return the hosts that may be asked: the store's, and those that give credentials."""
    prefixes = (PREFIXES[scheme], "IDENTITY_ENDPOINT", "MSI_ENDPOINT", "AZURITE_", "GCE_METADATA")
    urls = [value for name, value in os.environ.items() if name.startswith(prefixes)]
    endpoint, account = default_server(scheme)
    endpoint = given.get("endpoint") or endpoint
    urls.append(endpoint or "")
    hosts = {urlsplit(url).hostname for url in urls if url.startswith(("http://", "https://"))}
    if scheme == "az" and "AZURE_STORAGE_USE_EMULATOR" in os.environ:
        hosts |= {"127.0.0.1", "localhost"}
    known = [_CREDENTIALS[scheme], *([] if endpoint else [_OWN[scheme]])]
    if "AWS_S3_EXPRESS" in os.environ:  # hosts of its zones
        known.append("{region}.amazonaws.com")
    regions = [given.get("region"), *map(os.environ.get, ("AWS_REGION", "AWS_DEFAULT_REGION"))]
    region = next((region for region in regions if region), "us-east-1")
    account = given.get("account_name") or account or "none"
    filled = ",".join(known).format(region=region, account=account)
    return ",".join([filled, *sorted(host for host in hosts if host)])


# Those of settings go together: none of the environment is mixed with them.
_GIVEN_BY_US = [
    "access_key_id",
    "secret_access_key",
    "session_token",
    "account_key",
    "sas_key",
    "token",
    "bearer_token",
]


def _credentials(scheme: str, given: dict[str, Any]) -> Callable[[], dict[str, Any]] | None:
    found: dict[str, Any] = {}
    if "access_key_id" in given:
        found = {
            "access_key_id": given["access_key_id"],
            "secret_access_key": given["secret_access_key"],
            "token": given.get("session_token"),
        }
    elif "account_key" in given:
        found = {"access_key": given["account_key"]}
    elif "sas_key" in given:
        found = {"sas_token": given["sas_key"].removeprefix("?")}
    elif "token" in given or "bearer_token" in given:
        found = {"token": given.get("token") or given.get("bearer_token")}
    if not found:
        return None
    return lambda: found | {"expires_at": None}
