"""Which exceptions prove that a failed call was not billed."""

import errno
import socket
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, formatdate
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from google.genai.errors import ClientError, ServerError
from hypothesis import given
from hypothesis import strategies as st

from runguard.providers.errors import retry_after, was_unbilled
from tests.kit.examples import each_row
from tests.kit.gemini_server import refusal

REQUEST = httpx.Request("POST", "http://127.0.0.1/")


def caused(*errors: BaseException) -> BaseException:
    """The first exception, raised ``from`` the second, and so on."""
    for error, cause in pairwise(errors):
        error.__cause__ = cause
    return errors[0]


def handling(*errors: BaseException) -> BaseException:
    """The first exception, raised while the second was handled, and so on."""
    for error, context in pairwise(errors):
        error.__context__ = context
    return errors[0]


def library(package: str, name: str, *bases: type[BaseException], **attributes: Any) -> BaseException:
    """An exception of a library that need not be installed."""
    error: BaseException = type(name, bases or (Exception,), {"__module__": f"{package}.exceptions"})("it failed")
    for attribute, value in attributes.items():
        setattr(error, attribute, value)
    return error


class Headers:
    def __init__(self, **headers: str) -> None:
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def tried(times: int) -> Headers:
    return Headers(x_stainless_retry_count=str(times))


def refused() -> OSError:
    return ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


@each_row(
    "error",
    [
        refused(),
        OSError(errno.ECONNREFUSED, "Connection refused"),
        socket.gaierror(-2, "Name or service not known"),
        httpx.ConnectError("All connection attempts failed"),
        httpx.ConnectTimeout("timed out"),
        httpx.PoolTimeout("no connection was free"),
        library("httpx2", "ConnectError"),
        library(
            "aiohttp",
            "ClientConnectorDNSError",
            type("ClientConnectorError", (OSError,), {"__module__": "aiohttp.client_exceptions"}),
        ),
        library("aiohttp", "ConnectionTimeoutError"),
        library("urllib3", "NewConnectionError"),
        caused(library("urllib3", "MaxRetryError"), library("urllib3", "ConnectTimeoutError")),
        handling(
            library("requests", "ConnectionError", OSError),
            caused(library("urllib3", "MaxRetryError"), library("urllib3", "NewConnectionError")),
        ),
        caused(library("openai", "APIConnectionError"), httpx.ConnectError("refused")),
        caused(library("openai", "APIConnectionError", request=tried(0)), httpx.ConnectError("refused")),
        caused(library("anthropic", "APITimeoutError", request=tried(0)), library("httpx2", "ConnectTimeout")),
        handling(library("litellm", "APIConnectionError", status_code=500), httpx.ConnectError("refused")),
        handling(
            library("litellm", "InternalServerError", status_code=500),
            library("litellm.llms", "OpenAIError"),
            refused(),
        ),
        caused(ValueError("the model could not be asked"), httpx.ConnectError("refused")),
        caused(RuntimeError("one"), RuntimeError("two"), RuntimeError("three"), refused()),
    ],
)
def test_a_connection_that_was_never_made_is_not_billed(error: Any) -> None:
    assert was_unbilled(error)


@each_row(
    "error",
    [
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        BrokenPipeError(),
        ConnectionAbortedError(),
        TimeoutError(),
        OSError(errno.ENETUNREACH, "Network is unreachable"),  # an open connection can end so, too
        httpx.ReadError("reset"),
        httpx.ReadTimeout("timed out"),
        httpx.WriteError("reset"),
        httpx.RemoteProtocolError("Server disconnected without sending a response."),
        library("aiohttp", "ServerDisconnectedError"),
        library("aiohttp", "ClientOSError", OSError),
        library("aiohttp", "SocketTimeoutError"),
        handling(library("requests", "ConnectionError", OSError), library("urllib3", "ProtocolError")),
        library("requests", "ReadTimeout"),
        library("http", "RemoteDisconnected", ConnectionResetError),
        caused(library("openai", "APIConnectionError"), httpx.ReadError("reset")),
        caused(library("openai", "APITimeoutError"), httpx.ReadTimeout("timed out")),
        # the last attempt could not connect, but an earlier one may have arrived
        caused(library("openai", "APIConnectionError", request=tried(1)), httpx.ConnectError("refused")),
        caused(library("anthropic", "APIConnectionError", request=tried(2)), httpx.ConnectError("refused")),
        handling(
            library("litellm", "InternalServerError", status_code=500, num_retries=1), httpx.ConnectError("refused")
        ),
        handling(library("aiohttp", "ClientConnectorError", OSError), library("aiohttp", "ServerDisconnectedError")),
        # LiteLLM calls a lost connection a failed connect, and gives it a status
        caused(httpx.ConnectError("reset"), library("aiohttp", "ClientOSError", OSError)),
        library("litellm", "APIConnectionError", status_code=500),
        library("litellm", "Timeout", status_code=408),
        library("litellm", "APIResponseValidationError", status_code=500),
        handling(library("litellm", "InternalServerError", status_code=500), httpx.ReadError("reset")),
        # handled when it was raised, by code that is no client's: it says nothing about the call
        handling(ValueError("the answer is no JSON"), refused()),
        handling(FileNotFoundError("cache"), refused()),
        KeyError("x"),
        KeyboardInterrupt(),
        None,
    ],
)
def test_what_may_have_reached_the_provider_counts_as_billed(error: Any) -> None:
    assert not was_unbilled(error)


@each_row(
    "error",
    [
        library("openai", "RateLimitError", status_code=429),
        handling(
            library("openai", "RateLimitError", status_code=429),
            httpx.HTTPStatusError("429", request=REQUEST, response=httpx.Response(429)),
        ),
        handling(
            library("litellm", "RateLimitError", status_code=429),
            httpx.HTTPStatusError("429", request=REQUEST, response=httpx.Response(429)),
        ),
        library("google.genai", "ServerError", code=503),
        httpx.HTTPStatusError("500", request=REQUEST, response=httpx.Response(500)),
    ],
)
def test_a_call_that_the_provider_refused_is_not_billed(error: Any) -> None:
    assert was_unbilled(error)


def of_attempts(*fails: Exception) -> Exception:
    """The exception after so many attempts under tenacity."""
    tenacity = pytest.importorskip("tenacity")
    failing = iter(fails)

    @tenacity.retry(stop=tenacity.stop_after_attempt(len(fails)), reraise=True)  # type: ignore[untyped-decorator]
    def call() -> None:
        raise next(failing)

    with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever the last attempt raises
        call()
    return raised.value


def test_a_refused_connection_in_a_later_attempt_may_follow_one_that_arrived() -> None:
    assert was_unbilled(of_attempts(httpx.ConnectError("refused")))
    assert not was_unbilled(of_attempts(httpx.ReadError("reset"), httpx.ConnectError("refused")))


def test_an_exception_that_cannot_be_read_counts_as_billed() -> None:
    class StrangeError(Exception):
        @property
        def num_retries(self) -> int:
            raise ZeroDivisionError

    assert not was_unbilled(caused(StrangeError(), httpx.ConnectError("refused")))


def test_a_chain_that_goes_in_circles_or_has_no_end_is_left() -> None:
    one, two = RuntimeError("one"), RuntimeError("two")
    one.__cause__, two.__cause__ = two, one
    assert not was_unbilled(one)
    assert not was_unbilled(caused(*(RuntimeError(str(n)) for n in range(1_000)), refused()))


def test_a_group_of_failures_was_unbilled_when_each_of_them_was() -> None:
    unbilled: Any = library("openai", "RateLimitError", status_code=429)
    assert was_unbilled(ExceptionGroup("all models failed", [unbilled, refused()]))
    assert not was_unbilled(ExceptionGroup("all models failed", [unbilled, ConnectionResetError()]))


# ---- How long a provider asks to wait, from the exceptions of its clients


class RefusedError(Exception):
    """An error as OpenAI's and Anthropic's clients raise it."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__("refused")
        self.status_code = status
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        self.response = httpx.Response(status, headers=names)


def gemini(status: int, delay: str) -> Exception:
    kind = ClientError if status < 500 else ServerError
    return kind(status, refusal(status, "no", delay), httpx.Response(status))


class WordsError(Exception):
    status_code = 429


@each_row(
    ("error", "seconds"),
    [
        (RefusedError(429, retry_after="7"), 7.0),
        (RefusedError(503, Retry_After="0.5"), 0.5),
        (RefusedError(429, retry_after="9", retry_after_ms="250"), 0.25),
        (gemini(429, "17s"), 17.0),
        (gemini(503, "1.250s"), 1.25),
        (WordsError('{"details": [{"@type": "…RetryInfo", "retryDelay": "21s"}]}'), 21.0),
        (RefusedError(429), None),
        (RefusedError(500, retry_after="7"), None),
        (RefusedError(429, retry_after="soon"), None),
        (RefusedError(429, retry_after="-5"), None),
        (gemini(429, ""), None),
        (ValueError("429"), None),
        (None, None),
        (KeyboardInterrupt(), None),
    ],
)
def test_what_providers_say(error: BaseException | None, seconds: float | None) -> None:
    assert retry_after(error) == seconds


def test_a_date_counts_from_now() -> None:
    now = datetime.now(UTC)  # noqa: TID251 - a date refers to the wall clock
    later = format_datetime(now + timedelta(hours=1), usegmt=True)
    found = retry_after(RefusedError(429, retry_after=later))
    assert found is not None
    assert 3_500 < found <= 3_600
    assert retry_after(RefusedError(429, retry_after=formatdate(0, usegmt=True))) == 0


def test_the_objects_of_google_api_core() -> None:
    error: Any = WordsError("no")
    error.details = [SimpleNamespace(), SimpleNamespace(retry_delay=SimpleNamespace(seconds=3, nanos=500_000_000))]
    assert retry_after(error) == 3.5


def test_an_exception_that_fails_itself_says_nothing() -> None:
    class BrokenError(Exception):
        code = 429

        @property
        def details(self) -> Any:
            raise RuntimeError("broken")

    assert retry_after(BrokenError()) is None


@given(value=st.text(max_size=40))
def test_any_header_gives_seconds_or_nothing(value: str) -> None:
    error = RefusedError(429)
    error.response = SimpleNamespace(headers={"retry-after": value})  # type: ignore[assignment]
    found = retry_after(error)
    assert found is None or 0 <= found <= 86_400
