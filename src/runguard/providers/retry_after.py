"""How long a provider asks its callers to wait, read from the exception of a refused call. No client library is
imported.

Three ways to say it are understood, on answers with status 429 or 503: the header ``Retry-After`` in seconds or as an
HTTP date, OpenAI's ``retry-after-ms``, and ``google.rpc.RetryInfo`` in the body of the error.
"""

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final

from runguard.core.outcomes import provider_status

_STATUSES: Final = frozenset({429, 503})
_LONGEST_S: Final = 86_400.0
_DELAY: Final = re.compile(r"(\d{1,6}(?:\.\d{1,9})?)s")
# LiteLLM and others put the body into the text of the exception
_IN_TEXT: Final = re.compile(r"""["']retryDelay["']\s*:\s*["'](\d{1,6}(?:\.\d{1,9})?)s["']""")
_TEXT_READ: Final = 20_000  # characters of a message
_DEEPEST: Final = 8


def retry_after(error: BaseException | None) -> float | None:
    """Seconds to wait; None where the provider did not say so, or refused for another reason."""
    if not isinstance(error, Exception):
        return None
    try:
        if provider_status(error) not in _STATUSES:
            return None
        found = _in_headers(error)
        if found is None:
            found = _in_details(getattr(error, "details", None), _DEEPEST)
        if found is None and (match := _IN_TEXT.search(str(error)[:_TEXT_READ])) is not None:
            found = float(match[1])
    except Exception:  # exception classes may run their own code
        return None
    return None if found is None else min(max(found, 0.0), _LONGEST_S)


def _in_headers(error: Exception) -> float | None:
    for holder in (error, getattr(error, "response", None)):
        for name in ("headers", "litellm_response_headers"):
            headers: Any = getattr(holder, name, None)
            get = getattr(headers, "get", None)
            if not callable(get):
                continue
            exact = get("retry-after-ms") or get("Retry-After-Ms")
            if isinstance(exact, str) and _is_number(exact):
                return float(exact) / 1_000
            found = _seconds(get("retry-after") or get("Retry-After"))
            if found is not None:
                return found
    return None


def _seconds(value: object) -> float | None:
    if not isinstance(value, str):
        return None
    value = value.strip()
    if _is_number(value):
        return float(value)
    try:
        return parsedate_to_datetime(value).timestamp() - time.time()  # noqa: TID251 - a date refers to the wall clock
    except (ValueError, OverflowError, TypeError):
        return None


def _is_number(text: str) -> bool:
    return len(text) < 20 and text.isascii() and text.replace(".", "", 1).isdigit()


def _in_details(details: Any, depth: int) -> float | None:
    """Find a ``RetryInfo`` in the body of an error, as JSON or as the objects of google-api-core."""
    if depth == 0 or callable(details):
        return None
    if isinstance(details, Mapping):
        delay = details.get("retryDelay")
        if isinstance(delay, str) and (match := _DELAY.fullmatch(delay)) is not None:
            return float(match[1])
        details = [details.get("error"), details.get("details")]
    if isinstance(details, list | tuple):
        found = (_in_details(entry, depth - 1) for entry in details[:100])
        return next((seconds for seconds in found if seconds is not None), None)
    delay = getattr(details, "retry_delay", None)
    seconds, nanos = getattr(delay, "seconds", None), getattr(delay, "nanos", 0)
    return seconds + nanos / 1e9 if type(seconds) is int and type(nanos) is int else None
