"""Settings beside the environment: what they are, that they hold, and that secrets stay secret."""

import base64
import copy
import io
import logging
import math
import pickle
import subprocess
import threading
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Options, StoreSettings
from holdfast.errors import HoldfastError, OptionError, StoreError
from holdfast.stores.objects_client import forget_clients
from holdfast.stores.url import open_store
from holdfast.tools.inspect import inspect
from stores import doubles, gcs_double, servers

pytestmark = pytest.mark.usefixtures("bare")

SECRET = "secret-that-nobody-may-see"
KEY = base64.b64encode(SECRET.encode().ljust(32)).decode()  # of 32 bytes


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    with servers.serving("gcs") as one, servers.serving("gcs") as other:
        yield one.port, other.port


def settings(port: int, url: str = "gs://bucket", **more: Any) -> StoreSettings:
    given = {"endpoint": f"http://127.0.0.1:{port}", "allow_http": True}
    return StoreSettings(url, **(given | {"bearer_token": gcs_double.TOKEN} | more))


def test_unknown_settings_are_refused_with_a_list_of_the_known() -> None:
    with pytest.raises(OptionError, match=r"no setting acces_key; expected some of access_key_id"):
        StoreSettings("s3://bucket", acces_key="x")
    with pytest.raises(OptionError, match="no setting region"):
        StoreSettings("gs://bucket", region="eu-west-1")


@pytest.mark.parametrize(
    ("url", "given", "said"),
    [
        ("s3://bucket/runs", {}, "the URL of a bucket"),
        ("memory://bucket", {}, "the URL of a bucket"),
        ("/runs", {}, "the URL of a bucket"),
        ("s3://b", {"endpoint": "http://host"}, "allow_http=True"),
        ("s3://b", {"endpoint": f"https://user:{SECRET}@host"}, "without user"),
        ("s3://b", {"endpoint": f"https://host?sig={SECRET}"}, "without user"),
        ("s3://b", {"endpoint": "host:9000"}, "no URL of a server"),
        ("s3://b", {"access_key_id": SECRET}, "no secret_access_key"),
        ("s3://b", {"secret_access_key": SECRET}, "no access_key_id"),
        ("s3://b", {"secret_access_key": 5, "access_key_id": "x"}, "expected a text"),
        ("s3://b", {"region": ""}, "empty"),
        ("gs://b", {"bearer_token": f"{SECRET}\n"}, "without space around it"),
        ("s3://b", {"timeout_s": 0}, "above 0"),
        ("s3://b", {"allow_http": "yes"}, "True or False"),
        ("s3://b", {"server_side_encryption": "rot13"}, "AES256"),
        ("az://b", {"account_key": SECRET, "sas_key": SECRET}, "one of them"),
        ("s3://b", {"endpoint": "https://host:99999"}, "no URL of a server"),
        ("s3://b", {"endpoint": "https://host:port"}, "no URL of a server"),
        ("s3://b", {"checksum_algorithm": "md5"}, "is 'md5'; expected one of sha256, crc64nvme"),
        ("s3://b", {"checksum_algorithm": "crc32"}, "checksum_algorithm is 'crc32'"),
        ("s3://b", {"server_side_encryption": "sse-c"}, "no sse_customer_key_base64; give both"),
        ("s3://b", {"sse_customer_key_base64": KEY}, "encryption is None; expected 'sse-c'"),
        (
            "s3://b",
            {"sse_customer_key_base64": KEY, "server_side_encryption": "AES256"},
            "encryption is 'AES256'; expected 'sse-c'",
        ),
        (
            "s3://b",
            {"sse_customer_key_base64": "c2hvcnQ=", "server_side_encryption": "sse-c"},
            "sse_customer_key_base64 is a str; expected a key of 32 bytes in base64",
        ),
        (
            "s3://b",
            {"sse_customer_key_base64": f"{SECRET}!", "server_side_encryption": "sse-c"},
            "sse_customer_key_base64 is a str; expected a key of 32 bytes in base64",
        ),
        ("az://b", {"encryption_key": "c2hvcnQ="}, "encryption_key is a str; expected a key of 32"),
        ("s3://b", {"sse_kms_key_id": "k"}, "sse_kms_key_id, .* expected 'aws:kms' or"),
        (
            "s3://b",
            {"sse_kms_key_id": "k", "server_side_encryption": "sse-c"},
            "sse_kms_key_id, .* is 'sse-c'; expected 'aws:kms' or 'aws:kms:dsse', or no",
        ),
        (
            "s3://b",
            {"sse_bucket_key_enabled": True, "server_side_encryption": "aws:kms:dsse"},
            "sse_bucket_key_enabled, .*; expected 'aws:kms', or no",
        ),
        (
            "s3://b",
            {"skip_signature": True, "access_key_id": SECRET, "secret_access_key": SECRET},
            "access_key_id and skip_signature=True",
        ),
        ("s3://b", {"region": "eu west"}, "region is 'eu west'; expected a text without space"),
        ("gs://b", {"bearer_token": f"{SECRET}\nx"}, "bearer_token is a str; .* or in it"),
        ("gs://b", {"bearer_token": f"{SECRET}é"}, "of ASCII characters"),
        ("gs://b", {"service_account": f'{{"private_key": "{SECRET}"}}'}, "is the text of a key"),
        ("s3://b", {"timeout_s": math.inf}, "timeout_s is inf; .*to 86400"),
        ("s3://b", {"timeout_s": 1e12}, "timeout_s is 1000000000000.0; .*to 86400"),
    ],
)
def test_invalid_settings_are_refused(url: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        StoreSettings(url, **given)
    assert SECRET not in str(caught.value) and KEY not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"server_side_encryption": "sse-c", "sse_customer_key_base64": KEY},
        {"server_side_encryption": "aws:kms"},  # with the store's own key
        {"server_side_encryption": "aws:kms:dsse", "sse_kms_key_id": "k"},
        {"server_side_encryption": "aws:kms", "sse_bucket_key_enabled": True},
        {"checksum_algorithm": "SHA256"},
        {"checksum_algorithm": "crc64nvme"},
    ],
)
def test_settings_that_go_together_are_taken_by_the_client(given: dict[str, Any]) -> None:
    StoreSettings("s3://bucket", access_key_id="x", secret_access_key=SECRET, **given).use()
    open_store("s3://bucket/a")


def test_options_take_settings_and_nothing_else() -> None:
    with pytest.raises(OptionError, match="StoreSettings") as caught:
        Options(store={"secret_access_key": SECRET})  # type: ignore[arg-type]
    assert SECRET not in str(caught.value)
    assert Options(store=(StoreSettings("s3://a"), StoreSettings("s3://b")))


def test_settings_are_values() -> None:
    one = StoreSettings("s3://b", region="x", timeout_s=5)
    other = StoreSettings("s3://b/", timeout_s=5, region="x")
    assert one == other and hash(one) == hash(other) and one != StoreSettings("s3://b")
    assert copy.deepcopy(one) is one and hash(Options(store=one)) == hash(Options(store=other))
    with pytest.raises(OptionError, match="cannot be changed"):
        one.url = "s3://c"
    with pytest.raises(OptionError, match="not pickled"):
        pickle.dumps(Options(store=one))


def test_a_run_uses_the_server_of_its_settings(ports: tuple[int, int]) -> None:
    paths = ("gs://bucket/settings/run", "gs://other@bucket/settings/run")
    for number, (path, port) in enumerate(zip(paths, ports, strict=True)):
        options = Options(store=settings(port, path.removesuffix("/settings/run")))
        with holdfast.Checkpointer(path, every=1, options=options) as checkpointer:
            checkpointer.step(1, {"w": torch.full((5,), number)})
    for number, path in enumerate(paths):  # calls without options find it
        target = {"w": torch.zeros(5, dtype=torch.int64)}
        assert holdfast.load(path, into=target).path == f"{path}/step-00000001"
        assert target["w"].tolist() == [number] * 5
        assert holdfast.open(path)["w"].tolist() == [number] * 5
        assert not holdfast.verify(f"{path}/step-00000001").damage
        assert inspect(f"{path}/step-00000001")
        with holdfast.Checkpointer(path) as checkpointer:
            assert checkpointer.restore({"w": torch.zeros(5, dtype=torch.int64)}) == 1


@pytest.mark.parametrize("verb", ["save", "load", "open", "verify", "repair", "sign", "recompress"])
def test_each_verb_takes_its_settings_first(
    verb: str, ports: tuple[int, int], tmp_path: Path
) -> None:
    options, path = Options(store=settings(ports[0])), f"gs://bucket/verbs/{verb}"
    holdfast.save({"w": torch.ones(5)}, path, options=options)
    forget_clients()  # now nothing holds for the bucket
    if verb == "save":
        holdfast.save({"w": torch.ones(5)}, f"{path}-again", options=options)
    elif verb == "load":
        holdfast.load(path, into={"w": torch.zeros(5)}, options=options)
    elif verb == "open":
        assert holdfast.open(path, options=options)["w"].sum() == 5
    elif verb == "sign":
        key = tmp_path / "key.pem"
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
        assert holdfast.sign(path, key=key, options=options) == [path]
    elif verb == "recompress":
        holdfast.recompress(path, f"{path}-small", codec="lossless", options=options)
    else:
        getattr(holdfast, verb)(path, options=options)


def test_a_bucket_stays_on_its_server(ports: tuple[int, int]) -> None:
    settings(ports[0]).use()
    settings(ports[0], timeout_s=7, bearer_token="renewed").use()  # credentials may change
    with pytest.raises(OptionError, match=r"in use in this process at .*'gs://NAME@bucket'"):
        settings(ports[1]).use()
    open_store("s3://bucket/a")  # from the environment
    with pytest.raises(OptionError, match="in use"):
        StoreSettings("s3://bucket", endpoint="https://elsewhere").use()
    with pytest.raises(OptionError, match="no settings hold for s3://unknown@bucket"):
        open_store("s3://unknown@bucket/a")


def test_credentials_are_not_mixed_with_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[doubles.Request] = []

    def answer(request: doubles.Request) -> doubles.Reply:
        seen.append(request)
        return doubles.error(404, "NoSuchKey")

    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"):
        monkeypatch.setenv(f"AWS_{name}", f"environment-{name}")
    with doubles.answering(answer) as url:
        given = {"access_key_id": "GIVEN", "secret_access_key": SECRET, "region": "us-east-1"}
        StoreSettings("s3://bucket", endpoint=url, allow_http=True, **given).use()
        with pytest.raises(StoreError, match="NoSuchKey"):
            open_store("s3://bucket/a").list()
    assert seen and all("Credential=GIVEN/" in request.headers["authorization"] for request in seen)
    assert not any("x-amz-security-token" in request.headers for request in seen)


def test_encryption_is_asked_for() -> None:
    seen: list[doubles.Request] = []

    def decide(request: doubles.Request) -> doubles.Reply:
        seen.append(request)
        return doubles.Reply(200, headers={"ETag": '"1"'})

    with doubles.answering(decide) as url:
        StoreSettings(
            "s3://bucket",
            endpoint=url,
            allow_http=True,
            access_key_id="x",
            secret_access_key=SECRET,
            server_side_encryption="aws:kms",
            sse_kms_key_id="key-1",
        ).use()
        assert open_store("s3://bucket/a").claim("b", b"c")
    headers = next(request.headers for request in seen if request.method == "PUT")
    assert headers["x-amz-server-side-encryption"] == "aws:kms"
    assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "key-1"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("certificates")
    (root / "names").write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    new = "openssl req -newkey rsa:2048 -nodes -subj /CN="
    for command in (
        f"{new}holdfast-tests -x509 -days 2 -keyout ca.key -out ca.pem",
        f"{new}server -keyout server.key -out server.csr",
        "openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 "
        "-extfile names -out server.pem",
    ):
        subprocess.run(command.split(), cwd=root, check=True, capture_output=True)
    return root


def test_a_certificate_of_ones_own_is_trusted_when_it_is_given(certificates: Path) -> None:
    bucket = gcs_double.BUCKETS.setdefault("bucket", gcs_double.Bucket())
    server = gcs_double.server_at(0, certificates / "server.pem", certificates / "server.key")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    given = {"endpoint": f"https://127.0.0.1:{server.server_port}", "timeout_s": 3}
    given["bearer_token"] = gcs_double.TOKEN
    try:
        StoreSettings("gs://bucket", **given).use()
        with pytest.raises(StoreError, match=r"is not trusted: UnknownIssuer.*ca_file"):
            open_store("gs://bucket/a").exists("b")
        StoreSettings("gs://bucket", **given, ca_file=str(certificates / "ca.pem")).use()
        assert open_store("gs://bucket/a").claim("b", b"c")
        assert "a/b" in bucket.objects
    finally:
        server.shutdown()
        server.server_close()
    for name, said in (("none.pem", "cannot be read"), ("names", "No certificates found")):
        StoreSettings("gs://bucket", **given, ca_file=str(certificates / name)).use()
        with pytest.raises(OptionError, match=said):
            open_store("gs://bucket/a")


def everything_said(error: BaseException) -> str:
    text = io.StringIO()
    traceback.print_exception(error, file=text)
    return text.getvalue() + repr(error) + str(error)


@pytest.mark.parametrize(
    ("url", "secrets"),
    [
        ("s3://bucket", {"access_key_id": SECRET, "secret_access_key": SECRET}),
        ("az://bucket", {"account_name": "a", "account_key": "c2VjcmV0" + SECRET.encode().hex()}),
        ("az://bucket", {"account_name": "a", "sas_key": f"sv=2021-01-01&sig={SECRET}"}),
        ("gs://bucket", {"bearer_token": SECRET}),
        ("gs://bucket", {"service_account_key": f'{{"private_key": "{SECRET}"}}'}),
    ],
)
def test_secrets_are_in_no_text(
    url: str, secrets: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    def answer(request: doubles.Request) -> doubles.Reply:
        echo = f"</Message><AWSAccessKeyId>{SECRET}</AWSAccessKeyId><StringToSign>{SECRET}"
        echo += f"</StringToSign><Token-0>{SECRET}</Token-0><Detail>x-ms-key:{SECRET}</Detail>"
        return doubles.error(403, "SignatureDoesNotMatch", f"{echo}<Message>")

    with doubles.answering(answer) as endpoint:
        given = StoreSettings(url, endpoint=endpoint, allow_http=True, timeout_s=2, **secrets)
        options = Options(store=given)
        texts = [repr(given), str(given), repr(options), repr(replace(options, io="direct"))]
        assert all("..." in text for text in texts)
        for path in (f"{url}/a", f"{url}/b"):
            with pytest.raises(HoldfastError) as caught:
                holdfast.save({"w": torch.ones(5)}, path, options=options)
            texts.append(everything_said(caught.value))
    texts.append(caplog.text)
    for secret in {SECRET, SECRET.encode().hex()}:
        assert not [text for text in texts if secret in text]


def test_secrets_are_in_no_stored_object(ports: tuple[int, int]) -> None:
    options = Options(store=settings(ports[0]))
    with holdfast.Checkpointer("gs://bucket/stored", every=1, options=options) as checkpointer:
        checkpointer.step(1, {"w": torch.ones(5)})
    store, stack, texts = open_store("gs://bucket/stored"), [""], []
    while stack:
        above = stack.pop()
        for entry in store.list(above):
            name = f"{above}/{entry.name}".strip("/")
            if entry.kind == "directory":
                stack.append(name)
            else:
                texts.append(store.get(name, 1 << 30))
    assert len(texts) > 3 and not [text for text in texts if gcs_double.TOKEN.encode() in text]
