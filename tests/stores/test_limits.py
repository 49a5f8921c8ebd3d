"""Requests end by their limit, whatever a server does; redirects to other hosts are refused."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Options, StoreSettings
from holdfast.errors import HoldfastError, StoreError
from holdfast.stores.objects_settings import ENDPOINTS, arguments_of
from holdfast.stores.url import open_store
from stores import doubles, servers

pytestmark = pytest.mark.usefixtures("bare")

LIMIT_S, SLACK_S = 1.5, 1.5
KEYS = {"access_key_id": "test", "secret_access_key": "test12345678", "region": "us-east-1"}


@pytest.fixture(scope="module")
def gcs() -> Iterator[servers.Up]:
    with servers.serving("gcs") as up:
        yield up


def s3(endpoint: str, **more: Any) -> StoreSettings:
    return StoreSettings("s3://bucket", endpoint=endpoint, allow_http=True, **KEYS, **more)


def gs(endpoint: str, **more: Any) -> StoreSettings:
    given = {"bearer_token": servers.gcs_double.TOKEN, "allow_http": True}
    return StoreSettings("gs://bucket", endpoint=endpoint, **given, **more)


def freeze(process: int) -> None:
    """Stop a process; return when it has stopped."""
    os.kill(process, signal.SIGSTOP)
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        os.sched_yield()


@pytest.mark.parametrize("kind", ["gcs", "moto"])
def test_a_frozen_server_holds_no_call_beyond_the_limit(
    kind: str, request: pytest.FixtureRequest
) -> None:
    if kind != "gcs" and kind not in request.config.getoption("--store"):
        pytest.skip("make stores has the server")
    with servers.serving(kind) as up:
        url = f"http://127.0.0.1:{up.port}"
        given = (s3 if kind == "moto" else gs)(url, timeout_s=LIMIT_S)
        options, path = Options(store=given), f"{given.url}/a"
        holdfast.save({"w": torch.ones(5)}, path, options=options)
        store = open_store(path)
        freeze(up.process.pid)
        try:
            for call in (
                lambda: store.get("MANIFEST", 1 << 20),
                lambda: store.list(),
                lambda: store.claim("b", b"c"),
                lambda: store.remove("MANIFEST"),
                lambda: holdfast.load(path, into={"w": torch.zeros(5)}),
                lambda: holdfast.save({"w": torch.ones(5)}, f"{path}b"),
            ):
                began = time.monotonic()
                with pytest.raises(StoreError, match="did not answer in time"):
                    call()
                assert time.monotonic() - began < LIMIT_S + SLACK_S
        finally:
            up.process.send_signal(signal.SIGCONT)
        target = {"w": torch.zeros(5)}
        holdfast.load(path, into=target)
        assert target["w"].sum() == 5


def test_the_deadline_of_a_save_bounds_its_requests(gcs: servers.Up) -> None:
    frozen = []

    def decide(request: doubles.Request) -> doubles.Reply | None:
        if request.method == "PUT" and "MANIFEST" in request.path:
            frozen.append(request)
            time.sleep(20)
        return None

    with doubles.before(gcs.port, decide) as url:
        options = Options(deadline_s=LIMIT_S, store=gs(url))
        handle = holdfast.save_async({"w": torch.ones(5)}, "gs://bucket/deadline", options=options)
        began = time.monotonic()
        with pytest.raises(HoldfastError):
            handle.result()
        assert frozen and time.monotonic() - began < LIMIT_S + SLACK_S


def test_a_server_that_is_too_busy_is_asked_again(gcs: servers.Up) -> None:
    refused: dict[tuple[str, str], int] = {}

    def decide(request: doubles.Request) -> doubles.Reply | None:
        key = (request.method, request.path)
        refused[key] = refused.get(key, 0) + 1
        return doubles.error(503, "SlowDown") if refused[key] <= 2 else None

    with doubles.before(gcs.port, decide) as url:
        options = Options(store=gs(url, timeout_s=20))
        holdfast.save({"w": torch.arange(5)}, "gs://bucket/busy", options=options)
        target = {"w": torch.zeros(5, dtype=torch.int64)}
        holdfast.load("gs://bucket/busy", into=target)
    assert target["w"].tolist() == [*range(5)] and min(refused.values()) >= 3


def test_a_server_that_stays_too_busy_is_given_up() -> None:
    with doubles.answering(lambda _: doubles.error(503, "SlowDown")) as url:
        gs(url, timeout_s=LIMIT_S).use()
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"SlowDown: .*fewer writers"):
            open_store("gs://bucket/a").list()
        assert time.monotonic() - began < LIMIT_S + SLACK_S


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_to_another_host_is_refused(status: int) -> None:
    seen: list[doubles.Request] = []

    def elsewhere(request: doubles.Request) -> doubles.Reply:
        seen.append(request)
        return doubles.Reply(200, b"hello", {"ETag": '"1"'})

    with doubles.answering(elsewhere) as other:
        host = other.replace("127.0.0.1", "localhost")

        def answer(request: doubles.Request) -> doubles.Reply:
            return doubles.Reply(status, headers={"Location": host + request.path})

        with doubles.answering(answer) as url:
            s3(url, timeout_s=LIMIT_S, session_token="session").use()
            store = open_store("s3://bucket/a")
            for call in (
                lambda: store.list(),
                lambda: store.exists("b"),
                lambda: store.claim("b", b"c"),
                lambda: store.remove("b"),
            ):
                said = "a redirect to another host|Redirect|Moved|Found"
                with pytest.raises(StoreError, match=said):
                    call()
    assert not seen


def test_hosts_that_the_environment_names_are_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Credentials come from elsewhere: that is no redirect."""
    asked = []

    def answer(request: doubles.Request) -> doubles.Reply:
        asked.append(request.path)
        return doubles.Reply(
            200,
            b'{"AccessKeyId":"a","SecretAccessKey":"b","Token":"c",'
            b'"Expiration":"2099-01-01T00:00:00Z"}',
        )

    with (
        doubles.answering(answer) as url,
        doubles.answering(lambda _: doubles.Reply(200)) as s3_url,
    ):
        at = url.replace("127.0.0.1", "localhost") + "/credentials"
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", at)
        (tmp_path / "token").write_text("token")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
        StoreSettings("s3://bucket", endpoint=s3_url, allow_http=True, region="x").use()
        with pytest.raises(StoreError):
            open_store("s3://bucket/a").list()
    assert asked == ["/credentials"]


def test_only_hosts_of_the_store_and_of_its_credentials_are_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (*ENDPOINTS["s3"], *ENDPOINTS["az"]):  # of a server of another test
        monkeypatch.delenv(name, raising=False)

    def hosts(settings: StoreSettings) -> list[str]:
        made = arguments_of(settings.url[:2], settings, 10)["client_options"]
        assert made["proxy_url"] == "http://127.0.0.1:0"
        return sorted(host for host in made["proxy_excludes"].split(",") if "169.254" not in host)

    sts = ["sts.amazonaws.com", "sts.eu-west-1.amazonaws.com"]
    plain = StoreSettings("s3://b", region="eu-west-1")
    assert hosts(plain) == ["fd00:ec2::/32", "s3.eu-west-1.amazonaws.com", *sts]
    minio = StoreSettings("s3://b", region="eu-west-1", endpoint="https://minio.example.com:9000")
    assert hosts(minio) == ["fd00:ec2::/32", "minio.example.com", *sts]
    azure = ["a.blob.core.windows.net", "a.blob.fabric.microsoft.com", "login.microsoftonline.com"]
    assert hosts(StoreSettings("az://b", account_name="a")) == azure
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.com")
    assert "proxy_url" not in arguments_of("s3", plain, 10)["client_options"]
