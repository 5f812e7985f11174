"""How long a provider asks to wait, from the exceptions of its clients."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, formatdate
from types import SimpleNamespace
from typing import Any

import httpx
from google.genai.errors import ClientError, ServerError
from hypothesis import given
from hypothesis import strategies as st

from runguard.providers.errors import retry_after
from tests.kit.examples import each_row
from tests.kit.gemini_server import refusal


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
