"""What users and their buckets get wrong: each a clear error with the store's code, nothing lost.

Where a real server shows it, it does: those of `make stores`. Else a double answers as the store's
documentation says.
"""

import errno
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Options, StoreSettings
from holdfast.errors import CorruptError, HoldfastError, NoSpaceError, OptionError, StoreError
from holdfast.stores.objects_client import forget_clients
from holdfast.stores.objects_errors import failure
from holdfast.stores.objects_settings import ENDPOINTS
from holdfast.stores.url import open_store
from stores import doubles, gcs_double, servers

pytestmark = pytest.mark.usefixtures("bare")

STATE = {"w": torch.arange(300_000)}
RIGHTS = ("s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload")
Serve = Callable[..., servers.Up]


@pytest.fixture(scope="session")
def serve(request: pytest.FixtureRequest) -> Iterator[Serve]:
    """Start a server once; skip where it is not there."""
    up: dict[str, Any] = {}

    def start(kind: str) -> servers.Up:
        if kind != "gcs" and kind not in (request.config.getoption("--store") or ()):
            pytest.skip("make stores has the server")
        if kind not in up:
            up[kind] = (server := servers.serving(kind)).__enter__(), server
        running: servers.Up = up[kind][0]
        return running

    yield start
    for _, server in up.values():
        server.__exit__(None, None, None)


def of(kind: str, port: int, **more: Any) -> StoreSettings:
    """Return settings for a server of a kind."""
    known: dict[str, tuple[str, dict[str, Any]]] = {
        "gcs": ("gs://bucket", {"bearer_token": gcs_double.TOKEN}),
        "azurite": (
            "az://bucket",
            {"account_name": "devstoreaccount1", "account_key": servers.AZURE_KEY},
        ),
    }
    keys = {"access_key_id": "test", "secret_access_key": "test12345678", "region": "us-east-1"}
    url, given = known.get(kind, ("s3://bucket", keys))
    above = "/devstoreaccount1" if kind == "azurite" else ""
    given |= {"endpoint": f"http://127.0.0.1:{port}{above}", "allow_http": True, "timeout_s": 6}
    return StoreSettings(more.pop("url", url), **(given | more))


def at(url: str, **more: Any) -> StoreSettings:
    """Return settings for a double of S3."""
    return of("s3", 0, endpoint=url, timeout_s=1.5, **more)


def both(settings: StoreSettings, said: str) -> None:
    """Check what a save and a load say."""
    path = f"{settings.url}/run"
    for call in (
        lambda: holdfast.save(STATE, path, options=Options(store=settings)),
        lambda: holdfast.load(path, into={"w": torch.zeros(300_000, dtype=torch.int64)}),
        lambda: holdfast.verify(path),
        lambda: holdfast.Checkpointer(path, every=1).step(1, STATE),
    ):
        with pytest.raises(HoldfastError, match=said):
            call()


WRONG = {
    "gcs": ({"bearer_token": "wrong"}, r"AuthenticationRequired|401"),
    "azurite": ({"account_key": "d3Jvbmc="}, "AuthorizationFailure"),
    "rclone": ({"secret_access_key": "wrong"}, "SignatureDoesNotMatch|403"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_credentials(kind: str, serve: Serve) -> None:
    given, said = WRONG[kind]
    both(of(kind, serve(kind).port, **given), f"({said}).*check the credentials")


def test_an_expired_token() -> None:
    with doubles.answering(lambda _: doubles.error(400, "ExpiredToken")) as url:
        settings = at(url, session_token="old")
        with pytest.raises(StoreError, match=r"ExpiredToken.*give new ones"):
            holdfast.save(STATE, "s3://bucket/run", options=Options(store=settings))


@pytest.mark.parametrize("url", ["s3://bucket", "az://bucket", "gs://bucket"])
def test_no_credentials(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")  # no file of Google's
    account = {"account_name": "account"} if url.startswith("az") else {}
    both(StoreSettings(url, timeout_s=1, **account), "no credentials were found.*What to do: set")


@pytest.mark.parametrize("kind", ["gcs", "azurite", "moto", "seaweedfs"])
def test_no_bucket(kind: str, serve: Serve) -> None:
    settings = of(kind, serve(kind).port)
    absent = of(kind, serve(kind).port, url=f"{settings.url[:5]}nowhere-at-all")
    both(absent, r"(NoSuchBucket|ContainerNotFound).*make the")


@pytest.mark.parametrize(
    "reply",
    [
        doubles.error(301, "PermanentRedirect"),
        doubles.error(400, "AuthorizationHeaderMalformed", "the region 'x' is wrong"),
        doubles.Reply(301),
    ],
)
def test_another_region(reply: doubles.Reply) -> None:
    def answer(request: doubles.Request) -> doubles.Reply:
        return reply._replace(headers=reply.headers | {"x-amz-bucket-region": "eu-west-3"})

    with doubles.answering(answer) as url:
        both(at(url), "the bucket is elsewhere: set its region")


@pytest.mark.parametrize(
    "url",
    [
        "s3a://bucket/run",
        "S3://bucket/run",
        "https://bucket.s3.amazonaws.com/run",
        "ftp://host/run",
        "s3://",
        "s3:///run",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "s3://bucket/a?versionId=3",
        "s3://key:secret@bucket/run",
        Path("s3://bucket/run"),
        Path("hdfs://host/run"),
    ],
)
def test_a_url_that_is_none_of_ours(url: str | Path) -> None:
    for call in (
        lambda: holdfast.save(STATE, url),
        lambda: holdfast.load(url, into={"w": torch.zeros(3)}),
        lambda: holdfast.Checkpointer(url),
        lambda: holdfast.verify(url),
    ):
        with pytest.raises(OptionError, match=r"expected|no store for|no settings hold"):
            call()


def test_the_number_of_a_request_says_nothing() -> None:
    """One of Azure's that ended in 507 was taken for a full store."""

    def answer(request: doubles.Request) -> doubles.Reply:
        code, number = "BlobNotFound", "3567c1c0-15f5-4c31-8252-0aab0ff18507"
        return doubles.error(404, code, f"It does not exist.\nRequestId:{number}\nTime:2026")

    with doubles.answering(answer) as url:
        at(url).use()
        with pytest.raises(StoreError, match="BlobNotFound") as caught:
            open_store("s3://bucket/run").get("x", 9)
        assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("code", ["XMinioStorageFull", "QuotaExceeded", ""])
def test_a_bucket_that_is_full(code: str) -> None:
    reply = doubles.error(507, code) if code else doubles.Reply(507)
    with doubles.answering(lambda _: reply) as url:
        at(url).use()
        with pytest.raises(NoSpaceError, match=code or "507"):
            open_store("s3://bucket/run").get("x", 9)


DENIED = 'not authorized to perform: s3:GetObject on resource: "arn:aws:s3:::b/%s/x" because'


@pytest.mark.parametrize(
    ("status", "code", "message", "advice"),
    [
        # Names in a message say nothing.
        (
            403,
            "AccessDenied",
            f"User: arn:aws:iam::1:user/Lease is {DENIED % 'retention'}",
            "the right",
        ),
        (
            403,
            "AccessDenied",
            f"User: arn:aws:iam::1:user/a is {DENIED % 'QuotaExceeded'}",
            "the right",
        ),
        (403, "InvalidObjectState", "The operation is not valid", "from the archive"),
        (409, "BlobArchived", "This operation is not permitted", "from the archive"),
        (403, "AllAccessDisabled", "All access is disabled", "closed or suspended"),
        (400, "InvalidResourceName", "It contains invalid characters", "name of the bucket"),
        (400, "OutOfRangeInput", "The length is not permissible", "name of the bucket"),
        (400, "InvalidBucketName", "The bucket is not valid", "name of the bucket"),
        (400, "NotImplemented", "A header you provided implies functionality", "another store"),
    ],
)
def test_what_the_code_of_a_store_means(status: int, code: str, message: str, advice: str) -> None:
    with doubles.answering(lambda _: doubles.error(status, code, message)) as url:
        at(url).use()
        with pytest.raises(StoreError, match=f"{code}.*What to do: .*{advice}") as caught:
            open_store("s3://bucket/run").get("x", 9)
    assert type(caught.value) is StoreError
    assert caught.value.errno == (errno.EPERM if code == "AccessDenied" else errno.EREMOTEIO)


def test_a_page_of_a_proxy_that_takes_no_large_request() -> None:
    page = doubles.Reply(413, b"<html><h1>413 Request Entity Too Large</h1></html>")
    with doubles.answering(lambda _: page) as url:
        at(url).use()
        with pytest.raises(StoreError, match=r"a proxy in front of the store limits.*part_bytes"):
            open_store("s3://bucket/run").claim("x", b"9")


def test_a_lock_or_a_right_in_the_answer_to_a_deletion_of_many() -> None:
    for said, advice in (
        (
            "key a: b/c: This operation is not permitted as the blob is immutable. (code: 409)",
            "lock",
        ),
        ("key x: There is currently a lease on the blob. (code: 412)", "lock"),
        ("key Lease: This request is not authorized. (code: 403)", "the right"),
    ):
        error = failure("delete", "az://b/x", OSError(f"Bulk delete request failed for {said}"))
        assert f"{advice}" in str(error).partition("What to do")[2]


def test_an_object_whose_name_is_no_path_is_named(serve: Serve) -> None:
    settings = of("moto", serve("moto").port)
    path = f"{settings.url}/odd"
    holdfast.save(STATE, f"{path}/step-00000001", options=Options(store=settings))
    put = {"Bucket": "bucket", "Key": "odd//x", "Body": "x"}
    servers.boto(serve("moto").port, "s3", ("put_object", put))
    with pytest.raises(StoreError, match=r"name is an invalid path: .*odd//x.*delete or"):
        holdfast.load(path, into={"w": torch.zeros(300_000, dtype=torch.int64)})


def test_a_run_that_is_listed_as_empty_and_is_not(serve: Serve) -> None:
    """A job would begin at step 0, silently."""
    lies = False

    def decide(request: doubles.Request) -> doubles.Reply | None:
        is_list = request.method == "GET" and "list-type" in request.path
        return doubles.error(200, "InternalError") if lies and is_list else None

    with doubles.before(serve("gcs").port, decide) as url:
        settings = of("gcs", serve("gcs").port, endpoint=url)
        path = f"{settings.url}/listed"
        with holdfast.Checkpointer(path, every=1, options=Options(store=settings)) as checkpointer:
            checkpointer.step(1, STATE)
        lies = True
        with (
            holdfast.Checkpointer(path, every=1) as checkpointer,
            pytest.raises(StoreError, match="LATEST names step-00000001, which exists"),
        ):
            checkpointer.restore(dict(STATE))


@pytest.mark.parametrize("status", [200, 403, 404, 502])
def test_an_endpoint_that_answers_with_pages(status: int) -> None:
    page = b"<!DOCTYPE html><html><body>Welcome, please log in</body></html>"

    def answer(request: doubles.Request) -> doubles.Reply:
        return doubles.Reply(status, page, {"Content-Type": "text/html"})

    with doubles.answering(answer) as url:
        settings = at(url)
        for call in (
            lambda: holdfast.save(STATE, "s3://bucket/run", options=Options(store=settings)),
            lambda: holdfast.load("s3://bucket/run", into={"w": torch.zeros(3)}),
        ):
            with pytest.raises(HoldfastError) as caught:
                call()
            assert "Welcome" not in str(caught.value)
        of_whom = (
            "a proxy in front" if status == 502 else r"no store's answer(:|\.) [Cc]orrect the end"
        )
        with pytest.raises(StoreError, match=of_whom):
            open_store("s3://bucket/run").list()


@pytest.mark.parametrize("body", [b"<html>Welcome</html>", b'{"ok": true}', b""])
def test_an_endpoint_that_says_yes_to_everything(body: bytes) -> None:
    said = r"not a store's.*: correct the endpoint"
    with (
        doubles.answering(lambda _: doubles.Reply(200, body)) as url,
        pytest.raises(StoreError, match=said),
    ):
        holdfast.save(STATE, "s3://bucket/run", options=Options(store=at(url)))


def test_a_server_without_tls_that_is_asked_with_it() -> None:
    with doubles.answering(lambda _: doubles.Reply(200)) as url:
        at(url.replace("http:", "https:")).use()
        with pytest.raises(StoreError, match=r"does not use TLS.*http://HOST:PORT with allow_http"):
            open_store("s3://bucket/run").list()


def test_an_object_for_a_directory_is_no_file_of_a_checkpoint() -> None:
    """Amazon's console makes one for a folder, and seaweedfs when the last file below is gone."""
    entry = "<Contents><Key>run/{}</Key><Size>{}</Size><ETag>e</ETag>{}</Contents>"
    when = "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    found = entry.format("", 0, when) + entry.format("a", 1, when)
    page = f"<ListBucketResult><KeyCount>2</KeyCount>{found}</ListBucketResult>"

    with doubles.answering(lambda request: doubles.Reply(200, page.encode())) as url:
        at(url).use()
        assert [entry.name for entry in open_store("s3://bucket/run").list()] == ["a"]


def test_a_clock_that_is_wrong() -> None:
    def answer(request: doubles.Request) -> doubles.Reply:
        said = "The difference between the request time and the current time is too large."
        return doubles.error(403, "RequestTimeTooSkewed", said)

    with doubles.answering(answer) as url:
        both(at(url), "RequestTimeTooSkewed.*set the clock")


@pytest.mark.parametrize("kind", ["gcs", "moto", "azurite"])
@pytest.mark.parametrize("change", ["deleted", "shorter", "other"])
def test_an_object_that_another_tool_changed(kind: str, change: str, serve: Serve) -> None:
    settings = of(kind, serve(kind).port)
    path, target = f"{settings.url}/{change}", {"w": torch.zeros(300_000, dtype=torch.int64)}
    holdfast.save(STATE, path, options=Options(store=settings))
    store = open_store(path)
    (save_id,) = [entry.name for entry in store.list("data")]
    (name,) = [f"data/{save_id}/{entry.name}" for entry in store.list(f"data/{save_id}")]
    data = store.get(name, 1 << 30)
    store.remove(name)
    if change != "deleted":
        store.prepare("x", data[:-9] if change == "shorter" else bytes(len(data)))
        assert store.publish("x", name)
    with pytest.raises((CorruptError, StoreError)) as caught:
        holdfast.load(path, into=target)
    named = "data is missing" if change == "deleted" else name.rpartition("/")[2]
    assert named in str(caught.value), str(caught.value)
    assert not target["w"].any()
    assert holdfast.verify(path).damage


def test_a_run_in_a_locked_bucket_loses_nothing(serve: Serve) -> None:
    port = serve("moto").port
    rule = {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}
    servers.boto(
        port,
        "s3",
        ("create_bucket", {"Bucket": "locked", "ObjectLockEnabledForBucket": True}),
        (
            "put_object_lock_configuration",
            {
                "Bucket": "locked",
                "ObjectLockConfiguration": {"ObjectLockEnabled": "Enabled", "Rule": rule},
            },
        ),
    )
    plain = Options(store=of("moto", port, url="s3://plain@locked"))
    with pytest.raises(StoreError, match=r"Content-MD5.*give checksum_algorithm="):
        holdfast.save(STATE, "s3://plain@locked/run", options=plain)

    def decide(request: doubles.Request) -> doubles.Reply | None:
        if "x-amz-checksum-sha256" in request.headers:  # moto asks for the name beside it
            request.headers["x-amz-sdk-checksum-algorithm"] = "SHA256"
        return None

    keep = holdfast.Keep.latest(1)
    with doubles.before(port, decide) as endpoint:
        settings = of(
            "moto", port, url="s3://locked", checksum_algorithm="sha256", endpoint=endpoint
        )
        with holdfast.Checkpointer(
            "s3://locked/run", every=1, keep=keep, options=Options(store=settings)
        ) as checkpointer:
            for step in range(1, 4):
                checkpointer.step(step, {"w": torch.full((9,), step)})
        with holdfast.Checkpointer("s3://locked/run") as checkpointer:
            assert checkpointer.steps() == [3]
        assert holdfast.open("s3://locked/run")["w"].tolist() == [3] * 9
    (listed,) = servers.boto(port, "s3", ("list_object_versions", {"Bucket": "locked"}))
    kept = [found["Key"] for found in listed["Versions"] if "/data/" in found["Key"]]
    assert {key.split("/")[1] for key in kept} == {f"step-{step:08}" for step in range(1, 4)}


@pytest.mark.parametrize(
    ("code", "status"),
    [("RetentionPolicyNotMet", 403), ("BlobImmutableDueToPolicy", 409), ("AccessDenied", 403)],
)
def test_a_store_that_lets_nothing_be_replaced_or_deleted(
    code: str, status: int, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """As GCS, Azure and others do while a retention policy holds."""

    def decide(request: doubles.Request) -> doubles.Reply | None:
        is_replaced = request.headers.get("x-goog-if-generation-match", "0") != "0"
        if request.method == "DELETE" or is_replaced:
            return doubles.error(status, code, "object is subject to the retention policy")
        return None

    with doubles.before(serve("gcs").port, decide) as url:
        run = f"gs://bucket/locked-{code}"
        options = Options(store=of("gcs", 0, endpoint=url))
        said = ""
        with caplog.at_level(logging.WARNING):
            try:
                with holdfast.Checkpointer(
                    run, every=1, keep=holdfast.Keep.latest(1), options=options
                ) as checkpointer:
                    for step in range(1, 4):
                        checkpointer.step(step, {"w": torch.full((9,), step)})
            except HoldfastError as error:
                said = str(error)
        said += caplog.text
        assert code in said and "a lock of the" in said, said
        with holdfast.Checkpointer(run) as checkpointer:
            steps = checkpointer.steps()
        for step in steps:
            assert holdfast.open(f"{run}/step-{step:08}")["w"].tolist() == [step] * 9
        assert steps == [1, 2, 3]


def test_a_credential_that_may_not_delete_still_saves(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    serve("moto")  # is it there
    with servers.serving("moto", {"INITIAL_NO_AUTH_ACTION_COUNT": "5"}) as up:
        allowed = {"Effect": "Allow", "Action": list(RIGHTS), "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
        *_, made = servers.boto(
            up.port,
            "iam",
            ("create_user", {"UserName": "u"}),
            ("put_user_policy", {"UserName": "u", "PolicyName": "p", "PolicyDocument": policy}),
            ("create_access_key", {"UserName": "u"}),
        )
        keys = {
            "access_key_id": made["AccessKey"]["AccessKeyId"],
            "secret_access_key": made["AccessKey"]["SecretAccessKey"],
        }
        options = Options(store=of("moto", up.port, **keys))
        holdfast.save(STATE, "s3://bucket/one", options=options)
        assert holdfast.open("s3://bucket/one")["w"].equal(STATE["w"])
        assert not holdfast.verify("s3://bucket/one").damage
        with pytest.raises(StoreError, match="AccessDenied"):
            open_store("s3://bucket/one").remove("MANIFEST")
        keep = holdfast.Keep.latest(1)
        with (
            caplog.at_level(logging.WARNING),
            holdfast.Checkpointer("s3://bucket/run", every=1, keep=keep) as checkpointer,
        ):
            for step in range(1, 4):
                checkpointer.step(step, {"w": torch.full((9,), step)})
        assert "AccessDenied" in caplog.text and "the right" in caplog.text
        assert holdfast.open("s3://bucket/run")["w"].tolist() == [3] * 9
        forget_clients()
        both(of("moto", up.port, access_key_id="AKIAWRONG"), "InvalidAccessKeyId|403")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("minio", "no URL of a server; expected https://HOST"),
        ("localhost:9000", "no URL of a server"),
        ("https://host:99999", "no URL of a server"),
        ("https://host:port", "no URL of a server"),
        ("http://127.0.0.1:9", "begins with http:.*set AWS_ALLOW_HTTP=true"),
    ],
)
@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_a_server_of_the_environment_that_cannot_be_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, url: str, said: str
) -> None:
    for known in (*ENDPOINTS["s3"], "AWS_ALLOW_HTTP"):
        monkeypatch.delenv(known, raising=False)
    monkeypatch.setenv(name, url)
    with pytest.raises(OptionError, match=f"{name} .*{said}"):
        holdfast.open("s3://bucket/run")
