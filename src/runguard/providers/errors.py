"""A provider's errors: which failed calls are not billed, and how long a provider asks to wait.

Exceptions are recognised by name: no client library is imported. ``adk/model_calls``, ``calls/function_calls`` and
``calls/model_calls`` ask ``was_unbilled``, ``engine/calls`` asks ``retry_after``.
"""

import re
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Final

from runguard.core.outcomes import is_number, provider_status, seconds_to_wait

# ---- Whether a failed call can have been billed.

_DEEPEST: Final = 32  # exceptions that are looked at
_FRAMES: Final = 512
_HTTPX: Final = frozenset({"httpx", "httpx2", "httpcore", "httpcore2"})  # one library under four names
# Raised before the request was sent, by the package of their class. Subclasses count too.
_UNSENT: Final = {
    **dict.fromkeys(_HTTPX, frozenset({"ConnectError", "ConnectTimeout", "PoolTimeout"})),
    "aiohttp": frozenset({"ClientConnectorError", "ConnectionTimeoutError"}),
    "urllib3": frozenset({"NewConnectionError", "ConnectTimeoutError"}),
    "requests": frozenset({"ConnectTimeout"}),
    "socket": frozenset({"gaierror"}),
    "builtins": frozenset({"ConnectionRefusedError"}),
}
# These wrap the real exception or report a status; they do not say whether the request was sent.
_WRAPPERS: Final = {
    **dict.fromkeys(_HTTPX, frozenset({"HTTPStatusError"})),
    "aiohttp": frozenset({"ClientResponseError"}),
    "urllib3": frozenset({"MaxRetryError"}),
    "requests": frozenset({"ConnectionError", "HTTPError"}),
}
_TRANSPORTS: Final = frozenset({*_HTTPX, "aiohttp", "urllib3", "requests", "http"})
_CLIENTS: Final = _TRANSPORTS | {"openai", "anthropic", "litellm", "google", "urllib"}
_RESETS: Final = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
_RETRY_HEADER: Final = "x-stainless-retry-count"  # how often OpenAI's and Anthropic's clients had tried before
# LiteLLM invents a status for these, although no answer came back, or one that was paid for.
_INVENTED: Final = frozenset(
    {
        "APIConnectionError",
        "APIResponseValidationError",
        "JSONSchemaValidationError",
        "MidStreamFallbackError",
        "Timeout",
    }
)


def was_unbilled(error: BaseException | None) -> bool:
    """Return whether the provider certainly billed nothing for a call that failed before any piece of its answer came.

    That is so in two cases: the provider answered with an error status, or no connection was ever made. After a reset,
    a read error, or a retry inside the client, the provider may have done the work, so the call counts as billed.
    """
    if not isinstance(error, Exception):
        return False
    if isinstance(error, ExceptionGroup):  # several models were tried
        return all(was_unbilled(one) for one in error.exceptions)
    try:
        return _never_connected(error) or (provider_status(error) is not None and not _is_invented(error))
    except Exception:  # an exception class may run its own code: without an answer the call counts as billed
        return False


def _never_connected(error: Exception) -> bool:
    """Return whether no connection could be made, and nothing suggests that an earlier attempt got further."""
    unsent = False
    for one in _chain(error):
        if _was_sent(one) or _was_retried(one):
            return False
        unsent = unsent or _is_in(_UNSENT, one)
    return unsent


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and all that led to it, up to ``_DEEPEST``.

    ``__context__`` is followed only from exceptions of client libraries: elsewhere it may be any exception that was
    being handled.
    """
    pending, seen = [error], {id(error)}
    while pending and len(seen) < _DEEPEST:
        one = pending.pop()
        yield one
        for led in (one.__cause__, one.__context__ if _package(type(one)) in _CLIENTS else None):
            if led is not None and id(led) not in seen:
                seen.add(id(led))
                pending.append(led)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_in(named: dict[str, frozenset[str]], error: BaseException) -> bool:
    return any(base.__name__ in named.get(_package(base), ()) for base in type(error).__mro__)


def _was_sent(error: BaseException) -> bool:
    """Return whether the exception comes from a connection that existed, so that the request may have arrived."""
    if isinstance(error, _RESETS):
        return True
    return _package(type(error)) in _TRANSPORTS and not _is_in(_UNSENT, error) and not _is_in(_WRAPPERS, error)


def _was_retried(error: BaseException) -> bool:
    """Return whether the client had tried before; how those attempts ended is not known."""
    attempts = getattr(error, "num_retries", None)  # LiteLLM
    if type(attempts) is int and attempts > 0:
        return True
    headers: Any = getattr(_request_of(error), "headers", None)
    retries = headers.get(_RETRY_HEADER) if headers is not None else None
    return (retries is not None and retries != "0") or _in_later_attempt(error.__traceback__)


def _request_of(error: BaseException) -> Any:
    try:
        return getattr(error, "request", None)
    except RuntimeError:  # httpx, where none was set
        return None


def _in_later_attempt(trace: TracebackType | None) -> bool:
    """Return whether the exception passed through a later attempt of tenacity, which google-genai retries with."""
    for _ in range(_FRAMES):
        if trace is None:
            return False
        frame, trace = trace.tb_frame, trace.tb_next
        if (
            str(frame.f_globals.get("__name__")).partition(".")[0] == "tenacity"
            and (state := frame.f_locals.get("retry_state")) is not None
        ):
            return getattr(state, "attempt_number", None) != 1
    return False


def _is_invented(error: Exception) -> bool:
    """Return whether an error status is LiteLLM's own, which it gives to every lost connection."""
    kind = type(error)
    if _package(kind) != "litellm":
        return False
    return kind.__name__ in _INVENTED or any(_was_sent(one) or _is_in(_UNSENT, one) for one in _chain(error))


# ---- How long a provider asks its callers to wait.

_STATUSES: Final = frozenset({429, 503})
_LONGEST_S: Final = 86_400.0
_DELAY: Final = re.compile(r"(\d{1,6}(?:\.\d{1,9})?)s")
# LiteLLM and others put the body into the text of the exception
_IN_TEXT: Final = re.compile(r"""["']retryDelay["']\s*:\s*["'](\d{1,6}(?:\.\d{1,9})?)s["']""")
_TEXT_READ: Final = 20_000  # characters of a message
_DETAIL_DEPTH: Final = 8


def retry_after(error: BaseException | None) -> float | None:
    """Return the seconds to wait; None where the provider did not say so, or refused for another reason.

    Three ways to say it are understood, on answers with status 429 or 503: the header ``Retry-After`` in seconds or as
    an HTTP date, OpenAI's ``retry-after-ms``, and ``google.rpc.RetryInfo`` in the body of the error.
    """
    if not isinstance(error, Exception):
        return None
    try:
        if provider_status(error) not in _STATUSES:
            return None
        found = _in_headers(error)
        if found is None:
            found = _in_details(getattr(error, "details", None), _DETAIL_DEPTH)
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
            if isinstance(exact, str) and is_number(exact):
                return float(exact) / 1_000
            now = time.time()  # noqa: TID251 - a date refers to the wall clock
            if (found := seconds_to_wait(get("retry-after") or get("Retry-After"), now)) is not None:
                return found
    return None


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
