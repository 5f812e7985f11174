"""Whether a failed call can have been billed, read from its exception. Exceptions are recognised by name: no client
library is imported.

A call was not billed in two cases: the provider answered with an error status, or no connection was ever made. After a
reset, a read error, or a retry inside the client, the provider may have done the work, so the call counts as billed.
"""

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final

from runguard.core.outcomes import provider_status

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
# Wrap what really happened, or report a status: they do not say whether the request was sent.
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
# LiteLLM invents a status for these: nothing, or an answer that was paid, came back.
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
    """Whether the provider certainly billed nothing for a call that failed with this exception, before any piece of its
    answer came.
    """
    if not isinstance(error, Exception):
        return False
    try:
        return _never_connected(error) or (provider_status(error) is not None and not _is_invented(error))
    except Exception:  # an exception class may run its own code: without an answer the call counts as billed
        return False


def _never_connected(error: Exception) -> bool:
    """Whether a connection could not be made, and nothing suggests that an earlier attempt got further."""
    unsent = False
    for one in _chain(error):
        if _was_sent(one) or _was_retried(one):
            return False
        unsent = unsent or _is_in(_UNSENT, one)
    return unsent


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and all that led to it.

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
    """Whether it is an exception of a connection that existed: the request may have arrived."""
    if isinstance(error, _RESETS):
        return True
    return _package(type(error)) in _TRANSPORTS and not _is_in(_UNSENT, error) and not _is_in(_WRAPPERS, error)


def _was_retried(error: BaseException) -> bool:
    """Whether the client had tried before: how those attempts ended is not known."""
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
    """Whether the exception passed through tenacity, which google-genai retries with, and not in the first attempt."""
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
    """Whether an error status is LiteLLM's own: it gives one to every lost connection."""
    kind = type(error)
    if _package(kind) != "litellm":
        return False
    return kind.__name__ in _INVENTED or any(_was_sent(one) or _is_in(_UNSENT, one) for one in _chain(error))
