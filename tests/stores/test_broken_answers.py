"""Answers that are lost or break off on their way: the client sends the request again, or we do.

The store is the real one of this process. Its client is made to do what obstore does when a
connection breaks: `make stores-chaos` breaks real ones.
"""

import itertools
from collections.abc import Callable
from typing import Any

import obstore
import pytest
import torch

import holdfast
from holdfast.stores import objects, objects_client, objects_files
from holdfast.stores.objects import ObjectStore

STATE = {"w": torch.arange(5000.0), "n": 1}
BROKEN = (
    "Generic S3 error: Error getting list response body: HTTP error: request or response body error"
)
_numbers = itertools.count()


class Client:
    """obstore, whose answer to some call of a verb does not arrive.

    Attributes:
        hits: how often that was the case.
    """

    def __init__(
        self,
        verb: str,
        number: int,
        after: Callable[[Callable[[], Any]], Any],
        counts: Callable[[dict[str, Any]], bool] = lambda named: True,
    ) -> None:
        self._verb, self._number, self._after, self._counts = verb, number, after, counts
        self.calls = self.hits = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(obstore, name)
        if name != self._verb:
            return found

        def call(*given: Any, **named: Any) -> Any:
            self.calls += self._counts(named)
            if not self._counts(named) or self.calls != self._number:
                return found(*given, **named)
            self.hits += 1
            return self._after(lambda: found(*given, **named))

        return call


def has_condition(named: dict[str, Any]) -> bool:
    """Whether a put has one."""
    return bool(named.get("mode", "overwrite") != "overwrite")


def is_sent_again(request: Callable[[], Any]) -> Any:
    """Do it, lose the answer, and do it again, as obstore does where nothing was answered."""
    request()
    return request()


def breaks_off(request: Callable[[], Any]) -> Any:
    """Do it, and get half of the answer, which obstore makes an error."""
    request()
    raise obstore.exceptions.GenericError(BROKEN)


def meets_another(request: Callable[[], Any]) -> Any:
    """Do nothing, since another request to the same object is not over; as S3 says it."""
    text = "<Error><Code>ConditionalRequestConflict</Code><Message>Retry.</Message></Error>"
    raise obstore.exceptions.AlreadyExistsError(text)


def is_late(request: Callable[[], Any]) -> Any:
    """Do it, and have no answer in time, as a request on a condition; others are sent again."""
    request()
    raise obstore.exceptions.GenericError("Generic S3 error: HttpError { kind: Timeout, source")


def is_lost(request: Callable[[], Any]) -> Any:
    """Have no answer in time, and nothing done."""
    raise obstore.exceptions.GenericError("Generic S3 error: HttpError { kind: Timeout, source")


@pytest.fixture
def url() -> str:
    return f"memory://answers-{next(_numbers)}/a"  # a bucket that no client has checked


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Client], None]:
    def put(client: Client) -> None:
        for module in (objects, objects_client, objects_files):
            monkeypatch.setattr(module, "api", lambda: client)
        monkeypatch.setattr(objects_client, "_PAUSES_S", (0.0,) * 3)

    return put


def counted(use: Callable[[Client], None], url: str, verb: str) -> int:
    use(client := Client(verb, 0, breaks_off))
    holdfast.save(STATE, url.replace("answers", "counted"))
    return client.calls


@pytest.mark.parametrize("after", [is_sent_again, breaks_off])
@pytest.mark.parametrize("verb", ["put", "head", "list", "list_with_delimiter", "get_range"])
def test_a_save_needs_no_answer_to_its_first_request(
    use: Callable[[Client], None], url: str, verb: str, after: Callable[..., Any]
) -> None:
    for number in range(1, counted(use, url, verb) + 1):
        here = f"memory://answers-{next(_numbers)}/a"
        use(client := Client(verb, number, after))
        holdfast.save(STATE, here)
        assert client.hits == 1
        assert holdfast.open(here)["w"].equal(STATE["w"])


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("after", [meets_another, is_late, is_lost])
def test_a_save_goes_on_where_a_request_on_a_condition_was_not_decided(
    use: Callable[[Client], None], url: str, after: Callable[..., Any], replace: bool
) -> None:
    number, hits = 0, 1
    while hits:
        number += 1
        here = f"memory://answers-{next(_numbers)}/a"
        if replace:
            use(Client("put", 0, after))
            holdfast.save({"w": torch.zeros(3)}, here)
        use(client := Client("put", number, after, has_condition))
        holdfast.save(STATE, here, replace=replace)
        assert holdfast.open(here)["w"].equal(STATE["w"])
        hits = client.hits
    assert number > 3


@pytest.mark.parametrize("after", [is_sent_again, breaks_off])
def test_a_lost_answer_does_not_make_a_store_one_that_replaces_nothing(
    use: Callable[[Client], None], url: str, after: Callable[..., Any]
) -> None:
    for number in range(1, 4):  # the three puts of the check
        store = ObjectStore(f"memory://answers-{next(_numbers)}/a")
        use(client := Client("put", number, after))
        assert objects_client.check_conditions(store._client, "here", "probe")
        assert client.hits == 1


def test_a_refusal_that_passes_does_not_make_a_store_one_that_replaces_nothing(
    use: Callable[[Client], None], url: str
) -> None:
    """Saves of this process would then put no bar before what they publish."""

    def skewed(request: Callable[[], Any]) -> Any:
        text = "<Error><Code>RequestTimeTooSkewed</Code><Message>Too late.</Message></Error>"
        raise obstore.exceptions.PermissionDeniedError(text)

    store = ObjectStore(url)
    use(client := Client("put", 3, skewed))
    with pytest.raises(holdfast.errors.StoreError, match="set the clock"):
        objects_client.check_conditions(store._client, "here", "probe")
    assert client.hits == 1
    assert objects_client.check_conditions(store._client, "here", "probe")


@pytest.mark.parametrize("after", [is_sent_again, breaks_off])
def test_a_line_whose_answer_is_lost_is_there_once(
    use: Callable[[Client], None], url: str, after: Callable[..., Any]
) -> None:
    store = ObjectStore(url)
    store.append("lines", b"one\n")
    use(client := Client("put", 1, after))
    store.append("lines", b"two\n")
    assert client.hits == 1
    store.append("lines", b"two\n")  # the same line, by another call
    assert store.get("lines", 100) == b"one\ntwo\ntwo\n"


def test_files_are_removed_one_by_one_where_obstore_panics(
    use: Callable[[Client], None], url: str
) -> None:
    """It does where a store answers that it could not delete a key which nobody has named."""

    def panic(request: Callable[[], Any]) -> Any:
        raise type("PanicException", (BaseException,), {})("entity not found")

    store = ObjectStore(url)
    for name in ("a", "b"):
        store.claim(name, b"1")
    use(client := Client("delete", 1, panic))
    store.remove_all(["a", "b"])
    assert client.hits == 1
    assert [store.exists(name) for name in ("a", "b")] == [False, False]


def test_a_request_that_is_refused_is_not_sent_again(
    use: Callable[[Client], None], url: str
) -> None:
    def refused(request: Callable[[], Any]) -> Any:
        raise obstore.exceptions.PermissionDeniedError("status code: 403 Forbidden")

    use(client := Client("put", 1, refused))
    with pytest.raises(holdfast.errors.StoreError, match="403"):
        ObjectStore(url).claim("x", b"1")
    assert client.calls == 1
